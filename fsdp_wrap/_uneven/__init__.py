"""Ranks without a batch, or with fewer: they shadow the collectives of the others.

Lives here: the context `uneven`, and the protocol of `torch.distributed.algorithms.Join`.
May import: `_core`, `_comm`, `_params`, `_runtime`, `_state`.
Must never know: which front-end made a unit.
"""

from fsdp_wrap._uneven import join as join
from fsdp_wrap._uneven.context import Uneven, uneven

__all__ = ["Uneven", "uneven"]
