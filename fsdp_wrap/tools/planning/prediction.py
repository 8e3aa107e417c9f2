"""How long a recorded step takes on a machine: its order replayed on resources that run side by side."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fsdp_wrap.tools.planning.figures import BACKWARD, FORWARD, Place
from fsdp_wrap.tools.planning.machine import Machine
from fsdp_wrap.tools.planning.recorder import ALL_COPIES, CollectiveCall, Resource, Wait, Work


@dataclass
class Prediction:
    """Predicted seconds of a step; None and empty where nothing was predicted.

    `between` are the seconds of the fastest and of the slowest step, where the machine has a range; the
    others are of its middle then. `begins` is by index of the visit of a place. `computes`, `runs`
    (collectives) and `waits` (of the computation for them) are by unit.
    """

    seconds: float | None = None
    between: tuple[float, float] | None = None
    compute_seconds: float | None = None
    communication_seconds: float | None = None
    exposed_seconds: float | None = None
    begins: dict[int, float] = field(default_factory=dict)
    computes: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    runs: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    waits: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def of_unit(self, name: str) -> dict[str, float | None]:
        """Returns one unit's seconds under the names of `UnitPlan`."""
        if self.seconds is None:
            return {}
        return {
            "compute_seconds": self.computes.get(name, 0.0),
            "communication_seconds": self.runs.get(name, 0.0),
            "wait_seconds": self.waits.get(name, 0.0),
        }


def predicted(entries: Sequence[Work | Wait], places: Sequence[Place], machine: Machine) -> Prediction:
    """Predicts the times of a recorded step, for each end of the machine's range as well."""
    prediction = _replayed(entries, places, machine.expected)
    if machine.attained is not None:
        slowest, fastest = (_replayed(entries, places, machine.at(part)) for part in machine.attained)
        prediction.between = fastest.seconds or 0.0, slowest.seconds or 0.0
    return prediction


def _replayed(entries: Iterable[Work | Wait], places: Sequence[Place], machine: Machine) -> Prediction:
    """Replays works and waits in the order of the program.

    A work begins when it was issued, its resource is free, and earlier works of its ticket are done. A
    collective delays the computation by the part of its time that does not overlap.
    """
    now = exposed = 0.0
    free = {Resource.NETWORK: 0.0, Resource.COPIES: 0.0}
    done: dict[int, float] = {}
    busy: dict[Resource, float] = defaultdict(float)
    prediction = Prediction()
    for entry in entries:
        prediction.begins.setdefault(entry.visit, now)
        if isinstance(entry, Wait):
            until = free[Resource.COPIES] if entry.ticket == ALL_COPIES else done.get(entry.ticket, 0.0)
            waited = max(0.0, until - now)
            prediction.waits[entry.unit] += waited
            exposed, now = exposed + waited, now + waited
            continue
        seconds = _seconds(entry, machine)
        busy[entry.resource] += seconds
        if entry.resource is Resource.COMPUTE:
            if places[entry.visit].phase in (FORWARD, BACKWARD):
                prediction.computes[places[entry.visit].unit] += seconds
            now += seconds
            continue
        end = max(now, free[entry.resource], done.get(entry.ticket, 0.0)) + seconds
        free[entry.resource] = done[entry.ticket] = end
        if entry.resource is Resource.NETWORK:
            delay = (1 - machine.overlap) * seconds
            exposed, now = exposed + delay, now + delay
        units = () if entry.collective is None else entry.collective.units
        for unit in units:
            prediction.runs[unit] += seconds / len(units)
    prediction.seconds = max(now, *free.values())
    prediction.compute_seconds = busy[Resource.COMPUTE]
    prediction.communication_seconds = busy[Resource.NETWORK]
    prediction.exposed_seconds = exposed + prediction.seconds - now
    return prediction


def _seconds(work: Work, machine: Machine) -> float:
    if work.resource is Resource.COPIES:
        return machine.operator_seconds + work.nbytes / machine.host_bandwidth
    if work.collective is not None:
        return collective_seconds(work.collective, machine)
    if work.on_host:  # whose memory is taken to be as fast as the way to it
        return max(machine.operator_seconds, work.nbytes / machine.host_bandwidth)
    computing = work.flops / machine.flops_of(work.dtype)
    return max(machine.operator_seconds, computing, work.nbytes / machine.memory_bandwidth)


def collective_seconds(collective: CollectiveCall, machine: Machine) -> float:
    """Predicts how long a collective takes.

    Within a host each rank receives its bytes from its neighbours. Between hosts each host has to receive
    the bytes that its own ranks lack, over the links of its ranks that take part.
    """
    size = len(collective.ranks)
    if size < 2:
        return 0.0
    hosts = Counter(rank // machine.ranks_per_host for rank in collective.ranks)
    within = collective.received / machine.bandwidth_within
    if len(hosts) == 1:
        return machine.latency_within + within
    share = (1 - 1 / len(hosts)) / (1 - 1 / size)  # of the bytes a rank receives, the part from other hosts
    between = collective.received * share / max(hosts.values()) / machine.bandwidth_between
    return machine.latency_between + max(within if max(hosts.values()) > 1 else 0.0, between)
