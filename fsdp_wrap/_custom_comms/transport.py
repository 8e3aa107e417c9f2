"""`CustomTransport`: gathers and reductions by users' collectives."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fsdp_wrap._comm import (
    Buffer,
    Pending,
    Then,
    as_transport,
    lane_of,
)
from fsdp_wrap._core import OtherCommsError
from fsdp_wrap._core.torch_private import foreach_copy_
from fsdp_wrap._params import Buffers


class CustomTransport:
    """A `Transport` by users' collectives, with keys "all_gather" and "reduce_scatter".

    The communicator does the missing one. The user's allocator gives staging memory only: results are
    copied to the unit's own buffers.
    """

    compresses_reductions = False

    def __init__(self, buffers: Buffers, comms: dict[str, Any]) -> None:
        self._communicator, self.positions = buffers.communicator, buffers.communicator.positions
        self.comms = comms
        self._used = comms if self._communicator.size > 1 else {}  # one rank sends nothing
        self.keeps_notes = "reduce_scatter" not in self._used  # a user's reduction may round the notes

    def gather_into(self, buffers: list[Buffer], fill: Callable[[], object]) -> Pending:
        """Gathers as `Communicator.gather_into` does."""
        communicator, comm = self._communicator, self._used.get("all_gather")
        if comm is None:
            return communicator.gather_into(buffers, fill)
        for buffer in buffers:
            buffer.allocate()
        full = [as_transport(buffer.data) for buffer in buffers]
        staged = [comm.allocate(tensor.size(), dtype=tensor.dtype, device=tensor.device) for tensor in full]

        def start(async_op: bool) -> list[Any]:
            fill()
            works, group = [], communicator.group
            for source, target in zip(full, staged):
                own = communicator.own_part(target)
                own.copy_(communicator.own_part(source))
                works.append(comm(output_tensor=target, input_tensor=own, group=group, async_op=async_op))
            return [work for work in works if work is not None]

        copy = partial(foreach_copy_, full, staged)
        return Then([lane_of(communicator.device, "gather").issue(start)], [copy])

    def reduce_scatter(self, shards: list[torch.Tensor], full: list[torch.Tensor]) -> Pending:
        """Reduces as `Communicator.reduce_scatter` does; the user's object only sums."""
        comm = self._used.get("reduce_scatter")
        if comm is None:
            return self._communicator.reduce_scatter(shards, full)

        def start(_: bool) -> None:
            group = self._communicator.reducing_group or self._communicator.group
            for shard, source in zip(shards, full):
                sent, got = (
                    comm.allocate(tensor.size(), dtype=shard.dtype, device=shard.device)
                    for tensor in (source, shard)
                )
                sent.copy_(source)
                comm(output_tensor=got, input_tensor=sent, group=group, op=dist.ReduceOp.SUM)
                shard.copy_(got)

        return lane_of(self._communicator.device, "reduce").issue(start)


def use_comms(buffers: Buffers, name: str, **comms: Any) -> None:
    """Makes a unit gather (`all_gather=`) or reduce (`reduce_scatter=`) by a user's object.

    The object has the interface of torch's `AllGather` or `ReduceScatter`. Units with codecs (`compress`)
    are refused.
    """
    before = buffers.transport
    if not isinstance(before, CustomTransport) and before is not buffers.communicator:
        raise OtherCommsError(
            f"compress() decides how {name} communicates, or state_over_replicas=True does: call "
            "compress(module) without codecs first, or shard without the other"
        )
    for method, comm in comms.items():
        if not (callable(comm) and callable(getattr(comm, "allocate", None))):
            raise TypeError(
                f"set_custom_{method}() of {name} takes an object that can be called and has a method "
                f"allocate(size, *, dtype, device), as torch's AllGather and ReduceScatter, not {comm!r}"
            )
    theirs = before.comms if isinstance(before, CustomTransport) else {}
    buffers.set_transport(lambda communicator: CustomTransport(communicator, {**theirs, **comms}))
