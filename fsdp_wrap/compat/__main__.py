"""The command line: runs a script in which torch's names stand for ours."""

from fsdp_wrap.compat.names import main

main()
