"""`Offloading`: copies of offloaded units between host and device, and when to wait for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from fsdp_wrap._comm import Accelerator, await_copies
from fsdp_wrap._core import SpanKind
from fsdp_wrap._params import EmptyHandle, HandleState, Layout, ParamHandle
from fsdp_wrap._runtime.unit import Unit


class Offloading:
    """Copies of a tree's shards to the device before they are gathered, and of its gradients to the host."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._ahead: ParamHandle = EmptyHandle()
        self._arriving: list[Unit] = []

    # parameters

    def outdate(self, units: Iterable[Unit]) -> None:
        """Discards device copies of shards: users may write to shards unnoticed."""
        self._recall()
        for unit in units:
            for each in unit.handle.from_host:
                each.outdate()

    def send_ahead(self, unit: Unit | None) -> None:
        """Copies the shard of the next unit to the device while the current one computes.

        Skips groups of one rank: the shard is the whole unit there, and sending it ahead would be a prefetch,
        which takes as much memory and is the user's choice.
        """
        if unit is None or unit.handle is self._ahead or unit.handle.communicator.size == 1:
            return
        handle = unit.handle
        if (
            handle.state is not HandleState.SHARDED
            or handle.post_forward_shards is not None
            or handle.without_values
            or handle.aside  # nothing is left to send
        ):
            return
        self._recall()
        handle.look()  # or the gather would notice changed values and copy again
        self._ahead = handle
        nbytes = sum(part.nbytes for part in handle.from_host)
        with unit.plug_ins.span(SpanKind.COPY, None, (unit,), nbytes):
            for each in handle.from_host:
                each.send_ahead(handle.communicator.empty)

    def _recall(self) -> None:
        ahead, self._ahead = self._ahead, EmptyHandle()
        for copier in ahead.from_host:
            copier.recall()

    def end_forward(self, units: Sequence[Unit]) -> None:
        """Waits, after an outermost forward, for copies from shards: the user may write to shards now."""
        self._recall()
        if any(each.lends for unit in units for each in unit.handle.from_host):
            self._await_copies(units)

    def _await_copies(self, units: Sequence[Unit]) -> None:
        with units[0].plug_ins.span(SpanKind.AWAIT_COPIES, None, units):
            await_copies(self._accelerator)

    # gradients

    def finish_reduction(self, unit: Unit) -> None:
        """Finishes a unit's reduction and starts the copy of its gradients to the host.

        Only one unit's gradients are copied at a time: the compute stream waits for the unit before, and so
        does the host where users have hooked its sharded parameters, to call the hooks.
        """
        before = self._arriving[-1] if self._arriving else None
        if before is not None:
            for layout in before.layouts:
                layout.release_arriving()
            if any(layout.has_hooks for layout in before.layouts):
                self.settle(before)
        unit.finish_reduction()
        self._arriving.append(unit)

    def settle(self, unit: Unit) -> None:
        """Waits for one unit's gradients, and adds them to those of the sharded parameters."""
        add = unit.handle.take_arriving()
        if add is not None:
            add()

    def end_backward(self, units: Sequence[Unit]) -> None:
        """Waits for all copies, and adds all gradients to those of the sharded parameters."""
        self._recall()
        self._await_copies(units)
        for layout in self._arriving_layouts():
            layout.release_arriving()
            for add in layout.take_arriving():
                add()

    def abandon(self) -> None:
        """Drops copies and gradients that a failed backward left."""
        self._recall()
        for layout in self._arriving_layouts():
            layout.drop_arriving()

    def _arriving_layouts(self) -> Iterator[Layout]:
        """Yields the layouts whose gradients are on their way; from now on none is."""
        arriving, self._arriving = self._arriving, []
        return (layout for unit in arriving for layout in unit.layouts)
