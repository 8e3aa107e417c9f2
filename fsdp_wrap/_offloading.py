"""`Offloading`: copies of offloaded units between host and device, and when to wait for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fsdp_wrap._comm import Accelerator, FromHost, await_copies
from fsdp_wrap._core import Computing, PlugIn, Precedence, SpanKind
from fsdp_wrap._params import Buffers, NoBuffers, ShardedParams, Where
from fsdp_wrap._runtime import Unit


class Offloading(PlugIn):
    """Copies of a tree's shards to the device before they are gathered, and of its gradients to the host.

    Args:
        units: The units of the tree.
        accelerator: Their device.
    """

    order = Precedence.HOST

    def __init__(self, units: Sequence[Unit], accelerator: Accelerator) -> None:
        self._units, self._accelerator = units, accelerator
        self._ahead: Buffers = NoBuffers()
        self._arriving: list[Unit] = []

    # parameters

    def follows(self, step: Any, units: Sequence[Unit]) -> None:
        """Discards device copies of shards: users may write to shards unnoticed."""
        self._recall()
        for unit in units:
            for copier in _copiers(unit.buffers):
                copier.outdate()

    def expects(self, unit: Unit | None) -> None:
        """Copies the shard of the next unit to the device while the current one computes.

        Skips groups of one rank: the shard is the whole unit there, and sending it ahead would be a prefetch,
        which takes as much memory and is the user's choice.
        """
        if unit is None or unit.buffers is self._ahead or unit.buffers.communicator.size == 1:
            return
        buffers = unit.buffers
        if (
            buffers.where is not Where.SHARDED
            or buffers.post_forward_shards is not None
            or buffers.segments.without_values
        ):
            return
        self._recall()
        buffers.look()  # or the gather would notice changed values and copy again
        self._ahead = buffers
        copiers = _copiers(buffers)
        nbytes = sum(copier.nbytes for copier in copiers)
        with unit.plug_ins.span(SpanKind.COPY, None, (unit,), nbytes):
            for copier in copiers:
                copier.send_ahead(buffers.communicator.empty)

    def _recall(self) -> None:
        ahead, self._ahead = self._ahead, NoBuffers()
        for copier in _copiers(ahead):
            copier.recall()

    def computed(self, unit: Any, what: Computing) -> None:
        """Waits, after an outermost forward, for copies from shards: the user may write to shards now."""
        if what is Computing.FORWARD and not unit.step.depth:
            self._recall()
            if any(copier.lends for other in self._units for copier in _copiers(other.buffers)):
                self._await_copies()

    def _await_copies(self) -> None:
        with self._units[0].plug_ins.span(SpanKind.AWAIT_COPIES, None, self._units):
            await_copies(self._accelerator)

    # gradients

    def awaits_reduction(self, unit: Unit) -> None:
        """Lets the compute stream wait for the copy of the unit before to the host: one runs at a time.

        The host waits for it, too, where users have hooked its sharded parameters, to call the hooks.
        """
        before = self._arriving[-1] if self._arriving else None
        if before is not None:
            for sharded in before.params:
                sharded.gradients.release_arriving()
            if any(sharded.gradients.has_hooks for sharded in before.params):
                add = before.buffers.gradients.take_arriving()
                if add is not None:
                    add()
        self._arriving.append(unit)

    def backward_closes(self, step: Any, complete: bool) -> None:
        """Waits for all copies, and adds all gradients to those of the sharded parameters."""
        self._recall()
        self._await_copies()
        for sharded in self._arriving_params():
            sharded.gradients.release_arriving()
            sharded.gradients.take_arriving()()

    def dropped(self, step: Any) -> None:
        """Drops copies and gradients that a failed backward left."""
        self._recall()
        for sharded in self._arriving_params():
            sharded.gradients.release_arriving()
            sharded.gradients.take_arriving()

    def _arriving_params(self) -> list[ShardedParams]:
        """Returns the parameters whose gradients are on their way; from now on none is."""
        arriving, self._arriving = self._arriving, []
        return [sharded for unit in arriving for sharded in unit.params]


def _copiers(buffers: Buffers) -> list[FromHost]:
    """Returns the copiers of shards in host memory to the device."""
    return [segment.from_host for segment in buffers.segments if segment.from_host is not None]
