"""`Traffic`: what the units of one tree send and receive: gathers, and one reduction at a time."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable

import torch.distributed as dist

from fsdp_wrap._agreement import Agreement
from fsdp_wrap._collectives import Communicator
from fsdp_wrap._errors import NoValuesError
from fsdp_wrap._events import EventKind, Phase, emit, observers
from fsdp_wrap._handle import HandleState
from fsdp_wrap._initial_values import find_difference
from fsdp_wrap._positions import Tree, UnitPositions
from fsdp_wrap._unit import Unit

__all__ = ["Traffic"]

_SAME_MODEL = "All ranks must shard the same model"
_CURE = (
    "what is trained is a mixture of models. Initialise with the same seed on all ranks, pass "
    "sync_module_states=True to the wrapper, or broadcast or load the parameters before sharding"
)


class Traffic:
    """Lets units communicate, notes it for the other ranks, and tells the observers of events.

    Args:
        units: The units of one tree.

    Attributes:
        reducing: The unit whose reduction is in flight.
        iteration: How many outermost forwards have begun.
    """

    def __init__(self, units: Iterable[Unit]) -> None:
        tree, units = Tree(), list(units)
        self._told_of_values = False
        self._positions = {unit: self._positions_of(unit, tree) for unit in units}
        self._communicators = {one for unit in units for one in _communicators_of(unit)}
        self.iteration = 0
        self.reducing: Unit | None = None

    def _positions_of(self, unit: Unit, tree: Tree) -> UnitPositions:
        communicators = _communicators_of(unit)
        within = unit.options.reshards_within
        return UnitPositions(
            unit.name,
            tree,
            gathering=[one.positions for one in communicators[:1] if one.positions is not None],
            # The replicas' first: who finds a mix-up there does not tell the others that it comes to reduce.
            reducing=[one.positions for one in reversed(communicators) if one.positions is not None],
            keeping=[] if within is None or within.positions is None else [within.positions],
            waits=all(one.device.type == "cpu" for one in communicators),
            agree=functools.partial(self._agree, unit),
        )

    def _agree(self, unit: Unit, agreement: Agreement, name: str) -> None:
        """Checks that the ranks of a group have the same unit, and warns once if it began differently."""
        agreement.require(f"what {name} consists of", _contents_of(unit), _SAME_MODEL)
        handle = unit.handle
        if handle is None or unit.initial is None or self._told_of_values or not agreement.compares:
            return
        lines = unit.initial.lines([segment.layout for segment in handle.segments])
        if not any(lines):  # who has loaded values says nothing
            return
        rank, others = agreement.first(f"the initial values of {name}", lines)
        differs = find_difference(lines, others)
        if differs is not None:
            self._told_of_values = True
            fqns = [fqn for segment in handle.segments for fqn in segment.layout.fqns]
            warnings.warn(
                f"the parameter '{unit.name_of(fqns[differs])}' began with other values on rank "
                f"{dist.get_rank()} than on rank {rank}, and each rank keeps its own: {_CURE}",
                stacklevel=2,
            )

    def begin_iteration(self) -> int:
        """Counts the outermost forwards; returns the number of the new one.

        Raises:
            RuntimeError: If a process group was destroyed: a mesh may keep it alive.
        """
        for communicator in self._communicators:
            communicator.require_group()
        self.iteration += 1
        return self.iteration

    # parameters

    def unshard(self, unit: Unit, phase: Phase) -> None:
        """Makes a unit's leaves usable, gathering if they are not, or not being gathered already.

        Raises:
            RuntimeError: If its parameters are in the user's hands or in a state dict's.
            ValueError: If they have no values.
        """
        handle, positions = unit.handle, self._positions[unit]
        assert handle is not None
        if handle.state is HandleState.SUMMONED or handle.state is HandleState.REPLACED:
            raise _not_ours(unit, handle.state)
        positions.enter(phase, self.iteration)
        self.gather(unit, phase)
        if handle.wait():
            positions.gathered()

    def gather(self, unit: Unit, phase: Phase) -> bool:
        """Issues a unit's all-gather; returns False if it is unsharded, or being so, already.

        Raises:
            NoValuesError: If parameters are on the meta device.
        """
        handle = unit.handle
        if handle is None or handle.state is not HandleState.SHARDED:
            return False
        if handle.without_values:
            raise NoValuesError(
                f"parameters of {unit.name} are on the meta device and have no values: "
                f"{', '.join(handle.without_values)}; call to_empty(device=...) on the model and initialise "
                "or load them before the first forward"
            )
        if self.reducing is not None and handle.lends:
            self.finish_reduction()
        positions = self._positions[unit]
        gather = positions.gather if handle.kept is None else positions.gather_kept
        gather.issue(phase, self.iteration)
        handle.unshard(lasting=phase is Phase.IDLE or not unit.options.reshards_after_backward)
        if observers:
            emit(EventKind.UNSHARD, unit.fqn, phase, handle.unsharded_nbytes, handle.communicator)
        return True

    def reshard(self, unit: Unit, phase: Phase, within: Communicator | None = None) -> None:
        """Frees a unit's full parameters, unless a forward that is running needs them.

        Args:
            unit: The unit.
            phase: Where in the iteration this is.
            within: Ranks that keep the full parameters between them.
        """
        handle = unit.handle
        # A backward may run inside a forward, which still needs its leaves.
        if handle is None or unit.running > (phase is Phase.FORWARD):
            return
        if handle.reshard(within):
            if unit.held:
                unit.hold(False)
            if observers:
                emit(EventKind.RESHARD, unit.fqn, phase, handle.unsharded_nbytes)

    # gradients

    def reduce(self, unit: Unit, phase: Phase) -> None:
        """Issues the reduction of a unit's gradients; none may be in flight."""
        assert unit.handle is not None
        options, positions = unit.options, self._positions[unit]
        reduction = positions.reduction if options.sums_over_replicas else positions.reduction_in_copy
        reduction.issue(phase, self.iteration)
        nbytes = unit.handle.start_reduction(options.sums_over_replicas, options.counts_unused)
        if observers:
            emit(EventKind.REDUCE, unit.fqn, phase, nbytes, unit.handle.communicator)
        self.reducing = unit

    def finish_reduction(self) -> None:
        """Waits for the reduction in flight, if any, and hands on its result."""
        unit, self.reducing = self.reducing, None
        handle = None if unit is None else unit.handle
        if unit is not None and handle is not None:
            handle.finish_reduction()
            if not handle.has_own_reduction:  # which may have waited for nobody
                self._positions[unit].reduced()

    def forget_reduction(self) -> None:
        """Leaves the reduction in flight to its unit's handle."""
        self.reducing = None


def _not_ours(unit: Unit, state: HandleState) -> RuntimeError:
    if state is HandleState.REPLACED:
        return RuntimeError(
            f"a state dict with the parameters of {unit.name} is being taken or loaded; run forward or "
            "backward after that"
        )
    return RuntimeError(
        f"the parameters of {unit.name} are shown in full by summon_full_params; leave its context "
        "before running forward or backward"
    )


def _communicators_of(unit: Unit) -> list[Communicator]:
    return [] if unit.handle is None else [unit.handle.communicator, unit.handle.replicas]


def _contents_of(unit: Unit) -> list[str]:
    """Names the parameters, in the order in which they travel, with their shapes and dtypes."""
    return [
        f"'{fqn}' of shape {tuple(leaf.shape)}, {segment.layout.dtype}"
        for segment in ([] if unit.handle is None else unit.handle.segments)
        for fqn, leaf in zip(segment.layout.fqns, segment.leaves)
    ]
