"""What records of ranks tell together: who came last to a transfer, what waits were for, what was achieved.

A rank waits for a late rank until the last of those that take part has begun to issue the transfer; what it
waits after that is the transfer itself.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from fsdp_wrap._core import Computing
from fsdp_wrap.tools.timeline.records import AT_MOST, GATHER, RankRecord, Transfer, Wait

_COMPUTES = ("forward", "recompute", "backward")
_NOTHING = "\0"
"""Stands for a unit where nothing is computed."""
LATE_NS = 100_000
"""A rank is late where the others began so much earlier; what is less is how ranks always differ."""


@dataclass(frozen=True)
class Joint:
    """One transfer as those ranks saw it that depend on the same ranks, in the clock of rank 0.

    Attributes:
        own: What each of them has recorded.
        begins: When each rank that they depend on began to issue it, where there is a record of it.
        last: The rank that began last.
        complete: Whether there is a record of each rank that they depend on.
    """

    own: Mapping[int, Transfer]
    begins: Mapping[int, int]
    last: int
    complete: bool

    @property
    def lateness(self) -> int:
        """How much later the last rank began than the one in the middle; nanoseconds."""
        begins = sorted(self.begins.values())
        return begins[-1] - begins[(len(begins) - 1) // 2]


@dataclass(frozen=True)
class SplitWait:
    """A wait, and what it was for.

    Attributes:
        unit: Who waited.
        rank: On which rank.
        kind: For which kind of transfer.
        phase: In which that was issued.
        way: How that travels, as of `Transfer`.
        begin: When, in the clock of rank 0.
        late: Nanoseconds until the last rank had begun.
        transfer: Nanoseconds after that.
        last: The rank that began last.
        head: Nanoseconds from its issue to the wait: how early it was asked for.
    """

    unit: str
    rank: int
    kind: str
    phase: str
    way: str
    begin: int
    late: int
    transfer: int
    last: int
    head: int

    @property
    def total(self) -> int:
        """Its nanoseconds."""
        return self.late + self.transfer


@dataclass
class Travelled:
    """What one kind of transfer of a unit took, summed over ranks and passes.

    Attributes:
        nanoseconds: From when the last rank began until it was complete.
        nbytes: What came and went, as the ranks of a ring would send it: (n - 1) / n of the full buffers.
        bounded: Whether of some it is only known that they took no longer.
        issuing: Nanoseconds in which the host issued it.
    """

    nanoseconds: float = 0
    nbytes: float = 0
    bounded: bool = False
    issuing: float = 0

    @property
    def gigabytes_per_second(self) -> float:
        """Achieved; 0 where nothing travelled."""
        return self.nbytes / self.nanoseconds if self.nanoseconds else 0.0


@dataclass
class UnitTimes:
    """What a unit's transfers took, over all ranks of which there are records.

    Attributes:
        unit: Its name.
        gathers: Its gathers.
        reductions: Its reductions.
        waits: For either.
        peak: The most bytes of its full parameters, and of gradients on their way.
        lasts: How often each rank came last, and late.
        lateness: By how many nanoseconds in sum.
        transfers: How many of its transfers all ranks have recorded.
    """

    unit: str
    gathers: Travelled = field(default_factory=Travelled)
    reductions: Travelled = field(default_factory=Travelled)
    waits: list[SplitWait] = field(default_factory=list)
    peak: int = 0
    lasts: Counter[int] = field(default_factory=Counter)
    lateness: Counter[int] = field(default_factory=Counter)
    transfers: int = 0


class Analysis:
    """What records of ranks tell together.

    Args:
        ranks: The records.

    Attributes:
        joint: The transfers, in the order of their issue.
        units: By name, in the order in which they were first gathered or reduced.
        passes: How many outermost forwards each rank has begun at least.
        pass_ns: Nanoseconds from one to the next, on average; of the whole record where there is one.
        computed: Of each rank, the nanoseconds that it computed in each unit, without those within; see
            `own_times`.
    """

    def __init__(self, ranks: Sequence[RankRecord]) -> None:
        self._ranks = {record.rank: record for record in ranks}
        self.joint = [*_joined(ranks)]
        self.units: dict[str, UnitTimes] = {}
        self.passes = max(1, min((len(record.passes) for record in ranks), default=1))
        self.pass_ns = sum(map(_pass_ns, ranks)) / max(1, len(ranks))
        for joint in self.joint:
            self._add(joint)
        for record in ranks:
            for name, peak in record.peaks.items():
                unit = self._unit(name)
                unit.peak = max(unit.peak, peak)
        self.computed = {record.rank: own_times(record) for record in ranks}

    def _unit(self, name: str) -> UnitTimes:
        return self.units.setdefault(name, UnitTimes(name))

    def _add(self, joint: Joint) -> None:
        for rank, own in joint.own.items():
            self._add_travelled(joint, rank, own)
            for wait in own.waits:
                self._unit(wait.unit).waits.append(self._split(joint, rank, own, wait))
        first = next(iter(joint.own.values()))
        if joint.complete and len(first.ranks) > 1:
            for name in first.units:
                unit = self._unit(name)
                unit.transfers += 1
                if joint.lateness >= LATE_NS:
                    unit.lasts[joint.last] += 1
                    unit.lateness[joint.last] += joint.lateness

    def _add_travelled(self, joint: Joint, rank: int, own: Transfer) -> None:
        """Adds one rank's transfer to its units, each its even share where they travel together."""
        offset, size = self._ranks[rank].offset, len(own.ranks)
        begin = max(joint.begins[joint.last], own.begin + offset)
        if own.way.startswith("shared memory") and own.waits:  # nothing travels before somebody waits
            begin = max(begin, own.waits[0].begin + offset)
        nanoseconds = max(0, own.end + offset - begin) if size > 1 else 0
        for name in own.units:
            unit = self._unit(name)
            travelled = unit.gathers if own.kind == GATHER else unit.reductions
            travelled.nanoseconds += nanoseconds / len(own.units)
            travelled.nbytes += own.nbytes * (size - 1) / max(1, size) / len(own.units)
            travelled.bounded |= own.known == AT_MOST
            travelled.issuing += (own.issued - own.begin) / len(own.units)

    def _split(self, joint: Joint, rank: int, own: Transfer, wait: Wait) -> SplitWait:
        offset = self._ranks[rank].offset
        begin, end = wait.begin + offset, wait.end + offset
        last = joint.begins[joint.last] if joint.complete else begin
        late = min(max(0, last - begin), end - begin)
        head = max(0, wait.begin - own.issued)
        return SplitWait(
            wait.unit, rank, own.kind, own.phase, own.way, begin, late, end - begin - late, joint.last, head
        )

    @property
    def updates(self) -> tuple[int, int]:
        """How many nanoseconds all updates took in threads of the host, and how many of them beside units."""
        found = [_beside_units(record) for record in self._ranks.values()]
        return sum(whole for whole, _ in found), sum(beside for _, beside in found)

    @property
    def waits(self) -> Iterator[SplitWait]:
        """All waits of all units."""
        for unit in self.units.values():
            yield from unit.waits

    def slower_in(self, rank: int) -> tuple[str | None, float]:
        """Returns the unit in which a rank computes most longer than the others; None for outside of all.

        Returns:
            It, and by how many nanoseconds of a pass, as against the one in the middle of the others.
        """
        others = [computed for other, computed in self.computed.items() if other != rank]

        def excess(unit: str | None) -> float:
            return self.computed[rank][unit] - median(computed[unit] for computed in others)

        units = {*self.computed[rank]}.union(*others)
        worst = max(units, key=lambda unit: (excess(unit), unit or ""))
        return worst, excess(worst) / self.passes


def own_times(record: RankRecord) -> Counter[str | None]:
    """Returns how long a rank computed in each unit by itself, in nanoseconds.

    That is without the units within, and without what it waited and issued. Under None stands the time
    outside of all: the loss, the optimizer, what comes between steps.
    """
    times: Counter[str | None] = Counter({None: record.end - record.begin})
    around: list[tuple[int, str | None]] = []  # when it ends, and who computes in it
    for each in record.compute:
        while around and around[-1][0] <= each.begin:
            around.pop()
        times[around[-1][1] if around else None] -= each.end - each.begin
        inner = each.unit if each.what in _COMPUTES else None if each.what == "optimizer" else _NOTHING
        times[inner] += each.end - each.begin
        around.append((each.end, inner))
    del times[_NOTHING]
    return times


def _pass_ns(record: RankRecord) -> float:
    """Returns how long a pass took, on average, from its beginning to that of the next."""
    if not record.passes:
        return float(record.end - record.begin)
    return (max(record.end, record.passes[-1]) - record.passes[0]) / len(record.passes)


def _joined(ranks: Iterable[RankRecord]) -> Iterator[Joint]:
    """Yields what is the same transfer on several ranks as one."""
    found: dict[tuple[str, tuple[str, ...], int], dict[int, Transfer]] = defaultdict(dict)
    offsets = {}
    for record in ranks:
        offsets[record.rank] = record.offset
        for each in record.transfers:
            found[each.kind, each.units, each.number][record.rank] = each
    joints = []
    for of_ranks in found.values():
        # With replicas a sum depends on the ranks of the own copy, and on those with the same part of others.
        for needed in dict.fromkeys(each.ranks for each in of_ranks.values()):
            own = {rank: each for rank, each in of_ranks.items() if each.ranks == needed}
            begins = {rank: of_ranks[rank].begin + offsets[rank] for rank in needed if rank in of_ranks}
            if begins:
                last = max(begins, key=lambda rank: begins[rank])
                joints.append(Joint(own, begins, last, len(begins) == len(needed)))
    yield from sorted(joints, key=lambda joint: min(joint.begins.values()))


def _beside_units(record: RankRecord) -> tuple[int, int]:
    """Returns how long the updates of a rank took in a thread, and how long backwards went on meanwhile."""
    whole = beside = 0
    computing = [each for each in record.compute if each.what == Computing.BACKWARD.value]
    for update in record.updates:
        whole += update.end - update.begin
        reached = update.begin
        for each in computing:  # in the order of their beginnings; they may nest
            begin, end = max(each.begin, reached), min(each.end, update.end)
            if begin < end:
                beside, reached = beside + end - begin, end
    return whole, beside
