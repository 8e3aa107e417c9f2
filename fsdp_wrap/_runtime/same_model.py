"""`SameModel`: logs the collectives of units, and compares each unit between ranks before its first one.

The ranks also compare a few elements of each parameter's initial values, and what was changed since: the
notes of all later collectives tell how often this rank has loaded or edited values of the tree.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter

import torch.distributed as dist

from fsdp_wrap._comm import (
    SAME_SETTINGS,
    Agreement,
    Tree,
    UnitCollective,
    UnitPositions,
    accelerator_of,
)
from fsdp_wrap._core import Phase, PlugIn, Precedence, warn_caller
from fsdp_wrap._runtime.unit import Unit

_BATCHES = 256  # batches of units whose notes are kept
_TOLERANCE = 0.01  # of the largest element: processors need not round alike, and dtypes are coarse

_SAME_MODEL = "All ranks must shard the same model, and replicas must hold the same part of it"
_CURE = (
    "what is trained is a mixture of models. Initialise with the same seed on all ranks, pass "
    "sync_module_states=True to the wrapper, or broadcast or load the parameters before sharding"
)


_Kind = Callable[[UnitPositions], UnitCollective]
_GATHER: _Kind = attrgetter("gather")
_REDUCTION: _Kind = attrgetter("reduction")
_REDUCTION_IN_COPY: _Kind = attrgetter("reduction_in_copy")


def find_difference(lines: Sequence[str], others: Sequence[str]) -> int | None:
    """Returns the index of the first parameter with different initial values on two ranks, or None."""
    for index, (one, two) in enumerate(zip(lines, others)):
        pairs = [*zip(map(float, one.split()), map(float, two.split()))]  # none if one line is empty
        known = [pair for pair in pairs if all(map(math.isfinite, pair))]
        most = max((abs(value) for pair in known for value in pair), default=0.0)
        if any(abs(a - b) > _TOLERANCE * most for a, b in known):
            return index
    return None


class SameModel(PlugIn):
    """The log of the collectives of one tree's units, by which ranks see that they run the same.

    Args:
        tree: The identity of the tree.
        parts: Those of trees that have become parts of this one.
    """

    order = Precedence.CHECKS

    def __init__(self, tree: Tree, parts: Iterable[SameModel] = ()) -> None:
        self._tree = tree
        self._logs: dict[Unit, UnitPositions] = {}
        self._of_batch = functools.lru_cache(_BATCHES)(functools.partial(_batched, self._logs))
        self._told_of_values = False
        self._changes: Counter[str] = sum((part._changes for part in parts), Counter[str]())
        self._last: str = next((part._last for part in parts if part._last), "")
        self._call = object()
        self._tell()

    def note_change(self, unit: Unit, what: str, call: object) -> None:
        """Notes that this rank changes values of a unit as all ranks must, though nothing is communicated.

        Args:
            unit: The unit, or the first of several.
            what: The kind of change, for messages.
            call: An object of the user's call, which may change several units, and counts once.
        """
        if call is not self._call:
            self._call, self._last = call, unit.name
            self._changes[what] += 1
            self._tell()

    def _tell(self) -> None:
        counts = (
            f"{count} {what}{'s' if count > 1 else ''}" for what, count in sorted(self._changes.items())
        )
        self._tree.change(f"{' and '.join(counts)}, the last for {self._last}" if self._changes else "")

    def log(self, units: Iterable[Unit]) -> None:
        """Begins to log the collectives of units, under the names that they have now."""
        self._logs.update((unit, self._log_of(unit)) for unit in units)

    def know_gather_of(self, unit: Unit) -> bool:
        """Whether the ranks that gather a unit have compared it."""
        return self._logs[unit].gather.is_known

    def know_reduction_of(self, unit: Unit) -> bool:
        """Whether the ranks that will reduce a unit's gradients have compared it."""
        kind = _REDUCTION_IN_COPY if unit.defers else _REDUCTION
        return kind(self._logs[unit]).is_known

    # moments

    def needs(self, unit: Unit, phase: Phase) -> None:
        assert unit.step is not None
        self._logs[unit].enter(unit.step.iteration, phase.index)

    def to_gather(self, units: tuple[Unit, ...], phase: Phase) -> None:
        unit = units[0]
        assert unit.step is not None
        if len(units) > 1:
            collective = self._of_batch(_GATHER, units)
        elif unit.buffers.post_forward_shards is None:
            collective = self._logs[unit].gather
        else:
            collective = self._logs[unit].gather_kept
        collective.issue(phase, unit.step.iteration)

    def full(self, unit: Unit) -> None:
        log = self._logs[unit]
        if log.gathers:
            log.gathered()

    def to_reduce(self, units: tuple[Unit, ...], phase: Phase, in_copy: bool) -> None:
        unit, kind = units[0], _REDUCTION_IN_COPY if in_copy else _REDUCTION
        assert unit.step is not None
        collective = kind(self._logs[unit]) if len(units) == 1 else self._of_batch(kind, units)
        collective.issue(phase, unit.step.iteration)

    def reduced(self, unit: Unit) -> None:
        log = self._logs[unit]
        # Others than a communicator's own need not wait for peers.
        if log.reductions and not unit.buffers.gradients.has_own_reduction and not unit.plug_ins.takes:
            log.reduced()

    def _log_of(self, unit: Unit) -> UnitPositions:
        """Returns the log of a unit's collectives, which compares the unit before the first one."""
        communicators = unit.buffers.communicators
        within = unit.options.reshards_within
        gathering = unit.buffers.transport.positions
        return UnitPositions(
            unit.name,
            self._tree,
            gathering=[] if gathering is None else [gathering],
            # Replicas first: a rank that finds a mismatch there must not announce a reduction to its copy.
            reducing=[one.positions for one in reversed(communicators) if one.positions is not None],
            keeping=[] if within is None or within.positions is None else [within.positions],
            waits=all(accelerator_of(one.device) is None for one in communicators),
            agree=functools.partial(self._agree, unit),
        )

    def _agree(self, unit: Unit, agreement: Agreement, name: str) -> None:
        """Checks that the ranks of a group have the same unit; warns once if its initial values differ."""
        contents, (within, across) = _contents_of(unit), unit.buffers.communicators
        if across.positions is not None and across.positions.agreement is agreement:
            contents.append(f"place {within.rank + 1} of {within.size} in its group to shard over")
        agreement.require(f"what {name} consists of", contents, _SAME_MODEL)
        settings = [setting for one in unit.buffers.communicators for setting in one.settings]
        if unit.step is not None:
            wanted = unit.step.root.options.travel_together_bytes
            settings.append(f"travel_together_bytes={wanted}")
        if unit.tied_to is not None:
            settings.append(f"it runs with {unit.tied_to.name} (allow_skipping)")
        agreement.require(f"how {name} communicates", settings, SAME_SETTINGS)
        if unit.initial is None or self._told_of_values or agreement.store is None:
            return
        lines = unit.initial(unit.params)
        if not any(lines):  # all values were loaded since
            return
        rank, others = agreement.first(f"the initial values of {name}", lines)
        differs = find_difference(lines, others)
        if differs is not None:
            self._told_of_values = True
            fqns = [fqn for sharded in unit.params for fqn in sharded.layout.fqns]
            warn_caller(
                f"the parameter '{unit.name_of(fqns[differs])}' began with other values on rank "
                f"{dist.get_rank()} than on rank {rank}, and each rank keeps its own: {_CURE}"
            )


def _batched(logs: Mapping[Unit, UnitPositions], kind: _Kind, units: tuple[Unit, ...]) -> UnitCollective:
    """Returns the collective of several units that the ranks have compared."""
    first, *others = [kind(logs[unit]) for unit in units]
    return first.with_others(others)


def _contents_of(unit: Unit) -> list[str]:
    """Describes a unit's parameters, in the order of their buffers, with shapes and dtypes."""
    lines: list[str] = []
    for segment in unit.segments:
        layout = segment.layout
        aligned = "" if layout.alignment is None else f", aligned to {layout.alignment}"
        for fqn, leaf, side in zip(layout.fqns, segment.leaves, segment.params.side_data):
            stored = "" if side is None else f", {side.describe()}"
            lines.append(f"'{fqn}' of shape {tuple(leaf.shape)}, {segment.params.dtype}{aligned}{stored}")
    return lines
