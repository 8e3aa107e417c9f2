"""The records of all ranks together: the last rank of each transfer, waits by cause, achieved bandwidth.

Until the last rank has begun to issue a transfer, the others wait for that rank; from then on they wait for
the transfer itself.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from fsdp_wrap._core import Computing
from fsdp_wrap.tools.timeline.records import AT_MOST, GATHER, HELP, RankRecord, Transfer, TransferWait

_COMPUTES = ("forward", "recompute", "backward")
_NOTHING = "\0"  # stands for a unit where nothing is computed
LATE_NS = 100_000
"""A rank is late if the others began so much earlier."""


@dataclass(frozen=True)
class Joint:
    """One transfer of the ranks that depend on the same ranks, in the clock of rank 0.

    Attributes:
        own: The records of these ranks.
        begins: When each rank that they depend on began to issue it, as far as recorded.
        last: The rank that began last.
        complete: Whether all ranks that they depend on are recorded.
    """

    own: Mapping[int, Transfer]
    begins: Mapping[int, int]
    last: int
    complete: bool

    @property
    def lateness(self) -> int:
        """Nanoseconds from the median begin to the last one."""
        begins = sorted(self.begins.values())
        return begins[-1] - begins[(len(begins) - 1) // 2]


@dataclass(frozen=True)
class SplitWait:
    """A unit's wait on a rank for a kind of transfer, split by its cause.

    Attributes:
        phase: The phase of the transfer's issue.
        way: How the transfer is sent; see `Transfer`.
        begin: In the clock of rank 0.
        late: Nanoseconds until the last rank had begun.
        transfer: Nanoseconds after that.
        last: The rank that began last.
        head: Nanoseconds from the transfer's issue to the wait.
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
        """All nanoseconds of the wait."""
        return self.late + self.transfer


@dataclass
class TransferTotals:
    """One kind of transfer of a unit, summed over ranks and passes.

    Attributes:
        nanoseconds: From the begin of the last rank to the end.
        nbytes: Bytes that a rank of a ring receives: (n - 1) / n of the full buffers.
        bounded: Whether some ends are only known as bounds.
        issuing: Nanoseconds in which the host issued it.
    """

    nanoseconds: float = 0
    nbytes: float = 0
    bounded: bool = False
    issuing: float = 0

    @property
    def bandwidth(self) -> float:
        """Achieved bytes a second; 0 where nothing was sent."""
        return 1e9 * self.nbytes / self.nanoseconds if self.nanoseconds else 0.0


@dataclass
class UnitTimes:
    """One unit's transfers over all recorded ranks.

    Attributes:
        peak: The most bytes of its full parameters and reduced gradients.
        lasts: How often each rank came last, and late.
        lateness: Nanoseconds by which each rank came late, in sum.
        transfers: Number of its transfers that all ranks have recorded.
    """

    unit: str
    gathers: TransferTotals = field(default_factory=TransferTotals)
    reductions: TransferTotals = field(default_factory=TransferTotals)
    waits: list[SplitWait] = field(default_factory=list)
    peak: int = 0
    lasts: Counter[int] = field(default_factory=Counter)
    lateness: Counter[int] = field(default_factory=Counter)
    transfers: int = 0


class Analysis:
    """The records of all ranks together.

    Attributes:
        joint: The transfers, in the order of their issue.
        units: By name, in the order of their first transfers.
        passes: The least number of passes of a rank, at least 1.
        pass_ns: Average nanoseconds of a pass.
        computed: `own_times` of each rank.
        helping: By rank, the passes of other ranks that it has helped: no computation waits in them.
    """

    def __init__(self, ranks: Sequence[RankRecord]) -> None:
        self._ranks = {record.rank: record for record in ranks}
        self.joint = [*_joined(ranks)]
        self.units: dict[str, UnitTimes] = {}
        self.helping = {record.rank: [one for one in record.compute if one.what == HELP] for record in ranks}
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
            self._add_transfer(joint, rank, own)
            for wait in own.waits:
                if not any(slice_.begin <= wait.begin < slice_.end for slice_ in self.helping[rank]):
                    self._unit(wait.unit).waits.append(self._split(joint, rank, own, wait))
        first = next(iter(joint.own.values()))
        if joint.complete and len(first.ranks) > 1:
            for name in first.units:
                unit = self._unit(name)
                unit.transfers += 1
                if joint.lateness >= LATE_NS:
                    unit.lasts[joint.last] += 1
                    unit.lateness[joint.last] += joint.lateness

    def _add_transfer(self, joint: Joint, rank: int, own: Transfer) -> None:
        """Adds one rank's transfer to its units in even shares."""
        offset, size = self._ranks[rank].offset, len(own.ranks)
        begin = max(joint.begins[joint.last], own.begin + offset)
        if own.way.startswith("shared memory") and own.waits:  # nothing is copied before somebody waits
            begin = max(begin, own.waits[0].begin + offset)
        nanoseconds = max(0, own.end + offset - begin) if size > 1 else 0
        for name in own.units:
            unit = self._unit(name)
            totals = unit.gathers if own.kind == GATHER else unit.reductions
            totals.nanoseconds += nanoseconds / len(own.units)
            totals.nbytes += own.nbytes * (size - 1) / max(1, size) / len(own.units)
            totals.bounded |= own.known == AT_MOST
            totals.issuing += (own.issued - own.begin) / len(own.units)

    def _split(self, joint: Joint, rank: int, own: Transfer, wait: TransferWait) -> SplitWait:
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
        """Nanoseconds of all updates in threads of the host, and of those beside a backward."""
        by_rank = [_beside_units(record) for record in self._ranks.values()]
        return sum(whole for whole, _ in by_rank), sum(beside for _, beside in by_rank)

    @property
    def waits(self) -> Iterator[SplitWait]:
        """All waits of all units."""
        for unit in self.units.values():
            yield from unit.waits

    def slower_in(self, rank: int) -> tuple[str | None, float]:
        """Returns the unit (None: outside of all) in which a rank is slowest, and by how much.

        The excess is in nanoseconds of a pass, over the median of the other ranks.
        """
        others = [computed for other, computed in self.computed.items() if other != rank]

        def excess(unit: str | None) -> float:
            return self.computed[rank][unit] - median(computed[unit] for computed in others)

        units = {*self.computed[rank]}.union(*others)
        worst = max(units, key=lambda unit: (excess(unit), unit or ""))
        return worst, excess(worst) / self.passes


def own_times(record: RankRecord) -> Counter[str | None]:
    """Returns the nanoseconds that a rank computed in each unit, without inner units, waits and issues.

    None stands for the time outside of all units: the loss, the optimizer, the time between steps.
    """
    times: Counter[str | None] = Counter({None: record.end - record.begin})
    around: list[tuple[int, str | None]] = []  # the end of a slice, and its unit
    for slice_ in record.compute:
        while around and around[-1][0] <= slice_.begin:
            around.pop()
        times[around[-1][1] if around else None] -= slice_.end - slice_.begin
        inner = slice_.unit if slice_.what in _COMPUTES else None if slice_.what == "optimizer" else _NOTHING
        times[inner] += slice_.end - slice_.begin
        around.append((slice_.end, inner))
    del times[_NOTHING]
    return times


def _pass_ns(record: RankRecord) -> float:
    """Returns the average nanoseconds of a pass; of the whole record where there is none."""
    if not record.passes:
        return float(record.end - record.begin)
    begin = min([record.passes[0], *(wait.begin for transfer in record.transfers for wait in transfer.waits)])
    return (max(record.end, record.passes[-1]) - begin) / len(record.passes)


def _joined(ranks: Iterable[RankRecord]) -> Iterator[Joint]:
    """Yields each transfer of several ranks once."""
    transfers: dict[tuple[str, tuple[str, ...], int], dict[int, Transfer]] = defaultdict(dict)
    offsets = {}
    for record in ranks:
        offsets[record.rank] = record.offset
        for transfer in record.transfers:
            transfers[transfer.kind, transfer.units, transfer.number][record.rank] = transfer
    joints = []
    for of_ranks in transfers.values():
        # With replicas a reduction involves the ranks of the own replica, and the same shard's of the others.
        for needed in dict.fromkeys(transfer.ranks for transfer in of_ranks.values()):
            own = {rank: transfer for rank, transfer in of_ranks.items() if transfer.ranks == needed}
            begins = {rank: of_ranks[rank].begin + offsets[rank] for rank in needed if rank in of_ranks}
            if begins:
                last = max(begins, key=lambda rank: begins[rank])
                joints.append(Joint(own, begins, last, len(begins) == len(needed)))
    yield from sorted(joints, key=lambda joint: min(joint.begins.values()))


def _beside_units(record: RankRecord) -> tuple[int, int]:
    """Returns the nanoseconds of a rank's updates in a thread, and of those beside a backward."""
    whole = beside = 0
    computing = [slice_ for slice_ in record.compute if slice_.what == Computing.BACKWARD.value]
    for update in record.updates:
        whole += update.end - update.begin
        reached = update.begin
        for slice_ in computing:  # in the order of their beginnings; they may nest
            begin, end = max(slice_.begin, reached), min(slice_.end, update.end)
            if begin < end:
                beside, reached = beside + end - begin, end
    return whole, beside
