"""Ranks without a batch, or without a part of the model: they take part in the collectives of the others.

Lives here: the context `uneven`, the protocol of `torch.distributed.algorithms.Join`, and `allow_skipping`.
May import: `_core`, `_comm`, `_params`, `_runtime`, `_state`.
Must never know: which front-end made a unit.
"""

from fsdp_wrap._uneven import join as join
from fsdp_wrap._uneven.context import Uneven, uneven
from fsdp_wrap._uneven.skipping import allow_skipping

__all__ = ["Uneven", "allow_skipping", "uneven"]
