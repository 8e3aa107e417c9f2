"""`Offloading`: what offloaded units have on its way between host and device, and who waits for it when."""

from __future__ import annotations

from collections.abc import Iterable

from fsdp_wrap._comm import Accelerator, await_arrivals, await_copies
from fsdp_wrap._core import SpanKind, span
from fsdp_wrap._params import HandleState, ParamHandle
from fsdp_wrap._runtime.unit import Unit


class Offloading:
    """Of one tree: parameters that go to the device before they are gathered, and gradients that come back.

    Args:
        accelerator: Where the units compute.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._ahead: ParamHandle | None = None
        self._arriving: list[Unit] = []

    # parameters

    def outdate(self, units: Iterable[Unit]) -> None:
        """Takes values from the shards anew: users may write to them so that nothing tells it."""
        self._recall()
        for unit in units:
            for each in () if unit.handle is None else unit.handle.from_host:
                each.outdate()

    def send_ahead(self, unit: Unit | None) -> None:
        """Lets the shard of the unit that runs next go to the device beside the one that runs now.

        Only where the ranks have a part each. Where the shard is the whole unit that would be a prefetch,
        which takes as much memory, and is the user's to choose.
        """
        handle = None if unit is None else unit.handle
        if unit is None or handle is None or handle is self._ahead or handle.communicator.size == 1:
            return
        if (
            handle.state is not HandleState.SHARDED
            or handle.post_forward_shards is not None
            or handle.without_values
        ):
            return
        if handle.kept_segments:  # of which little or nothing is to be sent
            return
        self._recall()
        handle.look()  # or the gather would find that the values have changed
        self._ahead = handle
        with unit.span(SpanKind.SEND_AHEAD, None, sum(part.nbytes for part in handle.from_host)):
            for each in handle.from_host:
                each.send_ahead(handle.communicator.empty)

    def _recall(self) -> None:
        handle, self._ahead = self._ahead, None
        for each in () if handle is None else handle.from_host:
            each.recall()

    def end_forward(self, units: Iterable[Unit]) -> None:
        """Waits, when an outermost forward ends, for copies of shards, which the user may write to now."""
        self._recall()
        handles = [unit.handle for unit in units if unit.handle is not None]
        if any(each.lends for handle in handles for each in handle.from_host):
            self._await_copies(units)

    def _await_copies(self, units: Iterable[Unit]) -> None:
        owners = tuple(units)
        with span(SpanKind.AWAIT_COPIES, owners[0].fqn, None, owners):
            await_copies(self._accelerator)

    # gradients

    def finish_reduction(self, unit: Unit) -> Unit | None:
        """Finishes the reduction of a unit's gradients, which go to the host then.

        Those of one unit are on their way at a time: the computation waits for those before. Where users
        have hooked sharded parameters, the host waits for them as well, and calls the hooks.

        Returns:
            The unit whose gradients the computation waits for, and the host has not.
        """
        before = self._arriving[-1] if self._arriving else None
        if before is not None and before.handle is not None:
            for layout in before.handle.layouts:
                layout.release_arriving()
            if any(layout.has_hooks for layout in before.handle.layouts):
                self.settle(before)
        unit.finish_reduction()
        self._arriving.append(unit)
        return before

    def settle(self, unit: Unit) -> None:
        """Waits for the gradients of one unit and adds them to those of the sharded parameters."""
        if self.leave(unit):
            self.take(unit)

    def leave(self, unit: Unit) -> bool:
        """Leaves it to the caller to `take` the gradients of a unit; returns whether there are any."""
        before, self._arriving = self._arriving, [each for each in self._arriving if each is not unit]
        return len(self._arriving) < len(before)

    def take(self, unit: Unit) -> None:
        """Waits for all gradients that are on their way, and adds those of one unit; in any thread."""
        await_arrivals(self._accelerator)
        for layout in () if unit.handle is None else unit.handle.layouts:
            layout.add_arrived()

    def end_backward(self, units: Iterable[Unit]) -> None:
        """Waits, once, for all copies, and adds the gradients to those of the sharded parameters."""
        self._recall()
        self._await_copies(units)
        arrived, self._arriving = self._arriving, []
        for unit in arrived:
            for layout in () if unit.handle is None else unit.handle.layouts:
                layout.release_arriving()
                layout.add_arrived()

    def abandon(self) -> None:
        """Drops what a failed backward left."""
        self._recall()
        arriving, self._arriving = self._arriving, []
        for unit in arriving:
            for layout in () if unit.handle is None else unit.handle.layouts:
                layout.drop_arriving()
