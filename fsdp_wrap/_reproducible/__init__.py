"""The same bits at any number of ranks.

Lives here: `reproducible`, the tree by which gradients are summed, and norms that no order of sums changes.
May import: `_core`, `_comm`, `_params`, `_runtime`, `_state`.
Must never know: which front-end made a unit.
"""

from fsdp_wrap._reproducible.model import Reproducible, reproducible

__all__ = ["Reproducible", "reproducible"]
