"""`python -m fsdp_wrap`: as `fsdp-wrap`."""

import sys

from fsdp_wrap.tools.command import main

if __name__ == "__main__":
    sys.exit(main())
