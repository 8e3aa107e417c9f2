"""Runs programs that were written for torch's wrapper, unchanged, on this one.

Lives here: torch's names, private attributes and helpers rebound to ours, and adaptations of clients.
May import: everything else. Nothing else imports this folder: it can be deleted.
Must never know: more of a unit than the front-ends show.

`install()` makes the names of torch's wrapper resolve to ours. From the command line:
`python -m fsdp_wrap.compat [--fully-shard] [--cpu] script.py arguments...`, or `-m module`.
"""

from fsdp_wrap.compat import fully_shard_state as fully_shard_state
from fsdp_wrap.compat import internals as internals
from fsdp_wrap.compat.helpers import HELPERS as HELPERS
from fsdp_wrap.compat.names import Installation, install, main, missing, replacements, uninstall

__all__ = ["Installation", "install", "main", "missing", "replacements", "uninstall"]
