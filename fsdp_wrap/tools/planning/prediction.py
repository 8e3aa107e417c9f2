"""How long a recorded step takes on a machine: its order replayed on lanes that run side by side."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fsdp_wrap.tools.planning.machine import Machine
from fsdp_wrap.tools.planning.plan import Place
from fsdp_wrap.tools.planning.recorder import ALL_COPIES, BACKWARD, FORWARD, Collective, Lane, Wait, Work

COMPUTING = (FORWARD, BACKWARD)


Seconds = dict[str, float]
"""By unit."""


@dataclass
class Prediction:
    """When what happens; in seconds, and nothing where nothing was predicted.

    Attributes:
        seconds: Of the step.
        compute_seconds: In which the device computes.
        communication_seconds: In which collectives run.
        exposed_seconds: In which the computation waits.
        begins: When the program comes to a place, by the number of the visit.
        computes: In which each unit computes.
        runs: In which the collectives of each unit run.
        waits: In which the computation waits for those.
    """

    seconds: float | None = None
    compute_seconds: float | None = None
    communication_seconds: float | None = None
    exposed_seconds: float | None = None
    begins: dict[int, float] = field(default_factory=dict)
    computes: Seconds = field(default_factory=dict)
    runs: Seconds = field(default_factory=dict)
    waits: Seconds = field(default_factory=dict)

    def of_unit(self, name: str) -> dict[str, float | None]:
        """Returns what concerns one unit, under the names of `UnitPlan`."""
        found = {
            "compute_seconds": self.computes,
            "communication_seconds": self.runs,
            "wait_seconds": self.waits,
        }
        return {
            key: None if self.seconds is None else by_unit.get(name, 0.0) for key, by_unit in found.items()
        }


def predicted(entries: Iterable[Work | Wait], places: Sequence[Place], machine: Machine) -> Prediction:
    """Replays a step: the computation issues works and waits for some; each lane does its works in order.

    A work begins when it was issued, its lane is free, and the works of its ticket before it are done.

    Args:
        entries: Works and waits, in the order of the program.
        places: Where that comes, by the number of the visit.
        machine: Where it runs.
    """
    now = exposed = 0.0
    free = {Lane.WIRE: 0.0, Lane.COPIES: 0.0}
    done: dict[int, float] = {}
    begins: dict[int, float] = {}
    busy: dict[Lane, float] = defaultdict(float)
    computes, waits, runs = (
        defaultdict[str, float](float),
        defaultdict[str, float](float),
        defaultdict[str, float](float),
    )
    for entry in entries:
        begins.setdefault(entry.visit, now)
        if isinstance(entry, Wait):
            until = free[Lane.COPIES] if entry.ticket == ALL_COPIES else done.get(entry.ticket, 0.0)
            waits[entry.unit] += max(0.0, until - now)
            exposed, now = exposed + max(0.0, until - now), max(now, until)
            continue
        seconds = _seconds(entry, machine)
        busy[entry.lane] += seconds
        if entry.lane is Lane.COMPUTE:
            if places[entry.visit].phase in COMPUTING:
                computes[places[entry.visit].unit] += seconds
            now += seconds
            continue
        end = max(now, free[entry.lane], done.get(entry.ticket, 0.0)) + seconds
        free[entry.lane] = done[entry.ticket] = end
        units = () if entry.collective is None else entry.collective.units
        for unit in units:
            runs[unit] += seconds / len(units)
    end = max(now, *free.values())
    return Prediction(
        end,
        busy[Lane.COMPUTE],
        busy[Lane.WIRE],
        exposed + end - now,
        begins,
        dict(computes),
        dict(runs),
        dict(waits),
    )


def _seconds(work: Work, machine: Machine) -> float:
    if work.lane is Lane.COPIES:
        return machine.operator_seconds + work.nbytes / machine.host_bandwidth
    if work.collective is not None:
        return collective_seconds(work.collective, machine)
    computing = work.flops / machine.flops_of(work.dtype)
    return max(machine.operator_seconds, computing, work.nbytes / machine.memory_bandwidth)


def collective_seconds(collective: Collective, machine: Machine) -> float:
    """Predicts how long a collective takes.

    Within a host each rank receives its bytes from its neighbours. Among hosts, each host has to receive what
    its own ranks do not have, over the links of those of its ranks that take part.

    Args:
        collective: It.
        machine: Where.
    """
    size = len(collective.ranks)
    if size < 2:
        return 0.0
    hosts = Counter(rank // machine.ranks_per_host for rank in collective.ranks)
    within = collective.received / machine.bandwidth_within
    if len(hosts) == 1:
        return machine.latency_within + within
    share = (1 - 1 / len(hosts)) / (1 - 1 / size)  # of what a rank receives, the part of other hosts
    between = collective.received * share / max(hosts.values()) / machine.bandwidth_between
    return machine.latency_between + max(within if max(hosts.values()) > 1 else 0.0, between)
