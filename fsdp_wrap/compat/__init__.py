"""Runs programs that were written for torch's wrapper, unchanged, on this one.

Lives here: torch's names, private attributes and helpers rebound to ours, and adaptations of clients.
May import: everything else. Nothing else imports this folder: it can be deleted.
Must never know: more of a unit than the front-ends show.

`install()` makes the names of torch's wrapper resolve to ours. From the command line:
`python -m fsdp_wrap.compat [--fully-shard] [--cpu] script.py arguments...`, or `-m module`.
"""

from typing import TYPE_CHECKING

from fsdp_wrap._core import found_when_asked_for as _found_when_asked_for
from fsdp_wrap.compat import fully_shard_state as fully_shard_state
from fsdp_wrap.compat import internals as internals
from fsdp_wrap.compat import optim_state as optim_state

__all__ = ["Installation", "install", "main", "missing", "replacements", "uninstall"]

# Few programs install it; for the others, importing the above is enough.
if TYPE_CHECKING:
    from fsdp_wrap.compat.names import Installation, install, main, missing, replacements, uninstall
else:
    __getattr__, __dir__ = _found_when_asked_for(__name__, (), exporting=("names",))
