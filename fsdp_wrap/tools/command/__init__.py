"""The command line: `fsdp-wrap`, or `python -m fsdp_wrap`."""

from fsdp_wrap.tools.command.main import main

__all__ = ["main"]
