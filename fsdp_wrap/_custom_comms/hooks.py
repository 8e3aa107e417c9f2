"""Users' hooks of averaged gradients."""

from __future__ import annotations

from collections.abc import Callable

import torch

from fsdp_wrap._comm import (
    Accelerator,
    accelerator_of,
)
from fsdp_wrap._core import PlugIn, Precedence
from fsdp_wrap._params import ShardedParams
from fsdp_wrap._runtime import Unit

Hook = Callable[[torch.Tensor], None]


def hook_reductions(unit: Unit, hook: Hook | None, stream: torch.Stream | None, notes: bool = False) -> None:
    """Sets the hook that sees, and may change, a unit's averaged gradients; None removes it.

    With `notes` it averages them over models, and with them the notes of which parameters have any.
    """
    if hook is not None and not callable(hook):
        raise TypeError(f"set_all_reduce_hook() of {unit.name} takes a function of one tensor, not {hook!r}")
    buffers = unit.buffers
    if not unit.params:
        return
    if stream is not None and buffers.replicas.size > 1:
        raise ValueError(
            f"{unit.name} is summed over replicas, which the hook follows on their stream; leave stream out"
        )
    accelerator = accelerator_of(buffers.communicator.device)
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
    return next((plug_in for plug_in in unit.plug_ins.own if isinstance(plug_in, ReductionHook)), None)


class ReductionHook(PlugIn):
    """Calls a function with the averaged gradients of a unit; see `hook_reductions`."""

    order = Precedence.EVENTS
    copied = True

    def __init__(self, hook: Hook, notes: bool) -> None:
        self._hook, self._notes = hook, notes

    @property
    def averages_notes(self) -> bool:
        return self._notes

    def averaged(self, sharded: ShardedParams, reduced: torch.Tensor) -> None:
        self._hook(reduced if self._notes else reduced[: reduced.numel() - sharded.layout.noted_numel])


def _on_stream(hook: Hook, stream: torch.Stream, accelerator: Accelerator) -> Hook:
    """Returns a hook that runs on a stream, ordered with the current stream on both sides."""

    def run(reduced: torch.Tensor) -> None:
        current = accelerator.current_stream()
        stream.wait_stream(current)
        with stream:
            hook(reduced)
        current.wait_stream(stream)

    return run
