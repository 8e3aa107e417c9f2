"""`python -m fsdp_wrap.checkpoint inspect|convert|export`: as `fsdp-wrap checkpoint`."""

from __future__ import annotations

import sys

from fsdp_wrap.checkpoint._command import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
