"""Custom communication of a unit: users' collectives, memory of buffers, and reduction hooks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fsdp_wrap._comm import (
    Accelerator,
    Buffer,
    Pending,
    SymmetricMemory,
    Then,
    accelerator_of,
    as_transport,
    lane_of,
    registered_memory,
    symmetric_memory,
)
from fsdp_wrap._core import OtherCommsError, PlugIn, Precedence
from fsdp_wrap._core.torch_private import foreach_copy_
from fsdp_wrap._params import Layout, ParamHandle
from fsdp_wrap._runtime.unit import Unit

Hook = Callable[[torch.Tensor], None]


def use_comms(handle: ParamHandle, name: str, **comms: Any) -> None:
    """Makes a unit gather (`all_gather=`) or reduce (`reduce_scatter=`) by a user's object.

    The object has the interface of torch's `AllGather` or `ReduceScatter`. Units with codecs (`compress`)
    are refused.
    """
    before = handle.transport
    if not isinstance(before, CustomTransport) and before is not handle.communicator:
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
    handle.set_transport(lambda each: CustomTransport(each, {**theirs, **comms}))


def allocate_by_group(unit: Unit, enable: bool) -> None:
    """Allocates a unit's communication buffers by its process group's allocator, if it has one, or not."""
    handle, method = unit.handle, "set_allocate_memory_from_process_group_for_comm()"
    if not unit.layouts:
        return
    _refuse_other_memory(unit, handle, method)
    communicator = handle.communicator
    if isinstance(communicator.memory, SymmetricMemory):
        raise OtherCommsError(
            f"{method} has no effect on {unit.name}, which set_symm_mem_for_comm() was called on: call "
            "one of the two"
        )
    _require_unused(unit, handle, method)
    group = communicator.group if enable else None
    handle.allocate_in(None if group is None else registered_memory(group, communicator.device))


def allocate_symmetric(unit: Unit, backend: str) -> None:
    """Allocates a unit's communication buffers in symmetric memory; collective."""
    handle, method = unit.handle, "set_symm_mem_for_comm()"
    if backend != "NCCL":
        raise ValueError(f"{method} knows no backend but 'NCCL', not {backend!r}")
    if not unit.layouts:
        return
    _refuse_other_memory(unit, handle, method)
    communicator = handle.communicator
    if communicator.memory is not None and not isinstance(communicator.memory, SymmetricMemory):
        raise OtherCommsError(
            f"{method} has no effect on {unit.name}, whose memory its process group allocates: call "
            "set_allocate_memory_from_process_group_for_comm(False) first"
        )
    group = communicator.group
    if group is not None:
        _require_unused(unit, handle, method)
        handle.allocate_in(symmetric_memory(group, communicator.device, f"{method} for {unit.name}"))


def _refuse_other_memory(unit: Unit, handle: ParamHandle, method: str) -> None:
    if isinstance(handle.transport, CustomTransport):
        raise OtherCommsError(
            f"{method} has no effect on {unit.name}, whose memory is allocated by what "
            "set_custom_all_gather() or set_custom_reduce_scatter() was given: call one of them"
        )


def _require_unused(unit: Unit, handle: ParamHandle, method: str) -> None:
    if handle.accumulates or not handle.become_sharded():
        raise RuntimeError(
            f"{method} must be called between steps: the parameters of {unit.name} are in use, or gradients "
            "that no_sync left wait for a reduction"
        )


def hook_reductions(unit: Unit, hook: Hook | None, stream: torch.Stream | None, notes: bool = False) -> None:
    """Sets the hook that sees, and may change, a unit's averaged gradients; None removes it.

    With `notes` it averages them over models, and with them the notes of which parameters have any.
    """
    if hook is not None and not callable(hook):
        raise TypeError(f"set_all_reduce_hook() of {unit.name} takes a function of one tensor, not {hook!r}")
    handle = unit.handle
    if not unit.layouts:
        return
    if stream is not None and handle.replicas.size > 1:
        raise ValueError(
            f"{unit.name} is summed over replicas, which the hook follows on their stream; leave stream out"
        )
    accelerator = accelerator_of(handle.communicator.device)
    if stream is not None and accelerator is None:
        raise ValueError(
            f"{unit.name} computes on the CPU, where there are no streams and hooks run in order; leave "
            "stream out"
        )
    if hook is not None and stream is not None and accelerator is not None:
        hook = _on_stream(hook, stream, accelerator)
    before = hook_of(unit)
    if before is not None:
        unit.plug_ins.detach(before)
    if hook is not None:
        unit.plug_ins.attach(ReductionHook(hook, notes))


def hook_of(unit: Unit) -> ReductionHook | None:
    """Returns the hook of a unit's reductions, if it has one."""
    return next((each for each in unit.plug_ins.own if isinstance(each, ReductionHook)), None)


class ReductionHook(PlugIn):
    """Calls a function with the averaged gradients of a unit; see `hook_reductions`."""

    order = Precedence.EVENTS
    copied = True

    def __init__(self, hook: Hook, notes: bool) -> None:
        self._hook, self._notes = hook, notes

    @property
    def averages_notes(self) -> bool:
        return self._notes

    def averaged(self, layout: Layout, reduced: torch.Tensor) -> None:
        self._hook(reduced if self._notes else reduced[: reduced.numel() - layout.noted_numel])


def _on_stream(hook: Hook, stream: torch.Stream, accelerator: Accelerator) -> Hook:
    """Returns a hook that runs on a stream, ordered with the current stream on both sides."""

    def run(reduced: torch.Tensor) -> None:
        current = accelerator.current_stream()
        stream.wait_stream(current)
        with stream:
            hook(reduced)
        current.wait_stream(stream)

    return run


class CustomTransport:
    """A `Transport` by users' collectives, with keys "all_gather" and "reduce_scatter".

    The communicator does the missing one. The user's allocator gives staging memory only: results are
    copied to the unit's own buffers.
    """

    compresses_reductions = False

    def __init__(self, handle: ParamHandle, comms: dict[str, Any]) -> None:
        self._communicator, self.positions = handle.communicator, handle.communicator.positions
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
        staged = [comm.allocate(each.size(), dtype=each.dtype, device=each.device) for each in full]

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
                    comm.allocate(each.size(), dtype=shard.dtype, device=shard.device)
                    for each in (source, shard)
                )
                sent.copy_(source)
                comm(output_tensor=got, input_tensor=sent, group=group, op=dist.ReduceOp.SUM)
                shard.copy_(got)

        return lane_of(self._communicator.device, "reduce").issue(start)
