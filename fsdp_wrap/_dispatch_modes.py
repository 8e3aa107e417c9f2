"""Lets torch's dispatch modes see collectives that no process group carries.

`CommDebugMode` and the like count c10d's operators, which a collective through shared memory does not call.
"""

from __future__ import annotations

import functools

import torch
import torch.distributed as dist

from fsdp_wrap._torch_private import FakeProcessGroup, HashStore, current_dispatch_mode

__all__ = ["stand_in_for_modes"]


def stand_in_for_modes(rank: int, size: int) -> dist.ProcessGroup | None:
    """Returns a group that carries nothing, to call what another way stands for; None if no mode listens.

    What the call would write may be spoiled.

    Args:
        rank: This process's rank in the group that the other way is for.
        size: How many ranks it has.
    """
    return _make_stand_in(rank, size) if current_dispatch_mode() is not None else None


@functools.cache
def _make_stand_in(rank: int, size: int) -> dist.ProcessGroup:
    group = dist.ProcessGroup(HashStore(), rank, size)
    backend = FakeProcessGroup._create_internal(rank, size)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    return group
