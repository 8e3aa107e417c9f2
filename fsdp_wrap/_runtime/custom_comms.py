"""Collectives that users bring along for `fully_shard`, in place of the communicator's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_wrap._comm import Buffer, Communicator, Pending, Then, accelerator_of, as_transport, lane_of
from fsdp_wrap._core import OtherCommsError
from fsdp_wrap._params import ParamHandle


def use_comms(handle: ParamHandle, name: str, **comms: Any) -> None:
    """Lets a unit gather or reduce by an object of the user's.

    Args:
        handle: The unit's.
        name: The unit, for messages.
        comms: `all_gather` or `reduce_scatter`, each with torch's interface: `allocate(size, *, dtype,
            device)`, and a call with `output_tensor`, `input_tensor`, `group`, and `async_op` or `op`.

    Raises:
        RuntimeError: If the unit's parameters or gradients travel in fewer bytes (`compress`).
    """
    before = handle.transport
    if not isinstance(before, CustomTransport) and before is not handle.communicator:
        raise OtherCommsError(
            f"compress() decides how {name} communicates; call compress(module) without codecs first"
        )
    if handle.communicator.size > 1:  # else nothing travels
        theirs = before.comms if isinstance(before, CustomTransport) else {}
        handle.travel_by(CustomTransport(handle, {**theirs, **comms}))


def refuse_custom_comms(handle: ParamHandle, name: str, method: str) -> None:
    """Refuses what would say how to allocate where the user's objects allocate.

    Raises:
        RuntimeError: If the unit has such.
    """
    if isinstance(handle.transport, CustomTransport):
        raise OtherCommsError(
            f"{method} has no say in {name}, whose memory is allocated by what set_custom_all_gather or "
            "set_custom_reduce_scatter was given"
        )


def hook_on_stream(
    hook: Callable[[torch.Tensor], None], stream: torch.Stream | None
) -> Callable[[torch.Tensor], None]:
    """Returns a hook that runs on a stream, after and before all else that concerns its argument."""
    if stream is None:
        return hook

    def run(reduced: torch.Tensor) -> None:
        accelerator = accelerator_of(reduced.device)
        assert accelerator is not None
        current = accelerator.current_stream()
        stream.wait_stream(current)
        with stream:
            hook(reduced)
        current.wait_stream(stream)

    return run


class CustomTransport:
    """How a unit's parameters and gradients travel by users' collectives (a `Transport`).

    What the user allocates is staging memory: what comes is copied to where the unit computes.

    Args:
        handle: The unit's.
        comms: By "all_gather" and "reduce_scatter"; what is missing is left to the communicator.

    Attributes:
        comms: The same.
        keeps_notes: Whether what layouts note in a reduction arrives: a user's may round.
        compresses_reductions: What the user's do is not our business.
    """

    compresses_reductions = False

    def __init__(self, handle: ParamHandle, comms: dict[str, Any]) -> None:
        self._communicator: Communicator = handle.communicator
        self._param: nn.Parameter = handle.segments[0].layout.sources[0]
        self.comms = comms
        self.keeps_notes = "reduce_scatter" not in comms

    @property
    def _group(self) -> dist.ProcessGroup:
        mesh = self._param.device_mesh  # type: ignore[attr-defined]  # groups are not to be kept alive
        group: dist.ProcessGroup = mesh.get_group(mesh.ndim - 1)
        return group

    def gather_into(self, buffers: list[Buffer], fill: Callable[[], object]) -> Pending:
        """As a communicator's."""
        communicator, comm = self._communicator, self.comms.get("all_gather")
        if comm is None:
            return communicator.gather_into(buffers, fill)
        for buffer in buffers:
            buffer.allocate()
        full = [as_transport(buffer.data) for buffer in buffers]
        staged = [comm.allocate(each.size(), dtype=each.dtype, device=each.device) for each in full]

        def start(async_op: bool) -> list[Any]:
            fill()
            works, group = [], self._group
            for source, target in zip(full, staged):
                own = communicator.own_part(target)
                own.copy_(communicator.own_part(source))
                works.append(comm(output_tensor=target, input_tensor=own, group=group, async_op=async_op))
            return [work for work in works if work is not None]

        def copy() -> None:
            for target, source in zip(full, staged):
                target.copy_(source)

        return Then([lane_of(communicator.device, "gather").issue(start)], [copy])

    def reduce_scatter(self, shards: list[torch.Tensor], full: list[torch.Tensor]) -> Pending:
        """As a communicator's; the user's object gets `ReduceOp.SUM`, and what comes is divided by us."""
        comm = self.comms.get("reduce_scatter")
        if comm is None:
            return self._communicator.reduce_scatter(shards, full)

        def start(_: bool) -> None:
            for shard, source in zip(shards, full):
                sent, got = (
                    comm.allocate(each.size(), dtype=shard.dtype, device=shard.device)
                    for each in (source, shard)
                )
                sent.copy_(source)
                comm(output_tensor=got, input_tensor=sent, group=self._group, op=dist.ReduceOp.SUM)
                shard.copy_(got)

        return lane_of(self._communicator.device, "reduce").issue(start)
