"""`Plan`: memory, communication and time of a training step, and the page that shows them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from textwrap import wrap
from typing import Any

from fsdp_wrap._core import format_bytes, format_count, format_seconds, own_output
from fsdp_wrap.tools.planning.comparison import Comparison, compared, record_of
from fsdp_wrap.tools.planning.figures import (
    OPTIMIZER_TEMPORARIES,
    STEP,
    HostMemory,
    Moment,
    Place,
    UnitPlan,
)
from fsdp_wrap.tools.planning.machine import Machine
from fsdp_wrap.tools.planning.picture import draw
from fsdp_wrap.tools.timeline import Timeline

_BAR, _NAME = 24, 24  # columns
_MOST_UNITS = 16  # lines of the table of units


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A training step of one rank, found without running it: its memory, communication and predicted time.

    All bytes are of this rank, and of its device except in `host`. The step is the second one: by then the
    optimizer has its state.

    Attributes:
        ranks: Number of ranks.
        rank: The rank that was planned.
        device: Type of the device, such as "cuda".
        parameters: Number of elements of the model's parameters, over all ranks.
        rest_bytes: Bytes held between steps.
        rest_by_kind: The same by kind; see `KINDS`.
        peak_bytes: The most bytes that are held at any time in the step.
        peak_by_kind: The same by kind.
        peak_at: The place of the peak in the step.
        peak_operator: The operator that took the last bytes of it, such as "aten.mm", and for which optimizer
            or collective if so: "aten.sqrt (AdamW's step)".
        first_peak_bytes: The most bytes at any time in the first step, in which optimizers make their state.
        setup_peak_bytes: The most bytes at any time while the model was built.
        moments: The step in the order of time, by place.
        units: The units in the order of the model.
        wire_bytes: Bytes that this rank receives in a step by kind of collective: "all_gather",
            "reduce_scatter", "all_reduce", "broadcast", "all_to_all".
        collectives: Number of collectives issued in a step, by kind.
        payload_bytes: Bytes of the full tensors of these collectives, by kind.
        gathered_bytes: Bytes of the full parameters that are gathered, by phase ("forward", "backward") and
            dtype.
        host: Memory of the host.
        unfused: Names of the classes of optimizers that take `fused=True` and do not have it: their steps
            make temporaries.
        flops: Floating-point operations of a step, as torch counts them: matrices, convolutions, attention.
        machine: The machine of the prediction; None if none was given.
        predicted_seconds: Seconds of a step; None without a machine.
        compute_seconds: Seconds in which the device computes; None without a machine.
        communication_seconds: Seconds in which collectives run; None without a machine.
        exposed_seconds: Seconds in which the computation waits for collectives and copies; None without a
            machine.
        predicted_range: Seconds of the fastest and of the slowest step, for a machine with a range
            (`Machine.attained`): all other times are of its middle. None for other ones.
    """

    ranks: int
    rank: int
    device: str
    parameters: int
    rest_bytes: int
    rest_by_kind: Mapping[str, int]
    peak_bytes: int
    peak_by_kind: Mapping[str, int]
    peak_at: Place
    first_peak_bytes: int
    setup_peak_bytes: int
    moments: tuple[Moment, ...]
    units: tuple[UnitPlan, ...]
    wire_bytes: Mapping[str, int]
    collectives: Mapping[str, int]
    payload_bytes: Mapping[str, int]
    gathered_bytes: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    host: HostMemory = HostMemory()
    unfused: tuple[str, ...] = ()
    flops: int = 0
    peak_operator: str = ""
    machine: Machine | None = None
    predicted_seconds: float | None = None
    compute_seconds: float | None = None
    communication_seconds: float | None = None
    exposed_seconds: float | None = None
    predicted_range: tuple[float, float] | None = None

    @property
    def needed_bytes(self) -> int:
        """The most bytes at any time: while the model is built, in the first step and in later ones."""
        return max(self.peak_bytes, self.first_peak_bytes, self.setup_peak_bytes)

    def avoidable(self) -> Iterator[str]:
        """Yields the line about temporaries at the peak that fused optimizers would not make, if any."""
        nbytes = self.peak_by_kind.get(OPTIMIZER_TEMPORARIES, 0)
        if nbytes and self.unfused:
            names = " and ".join(f"{name}(fused=True)" for name in self.unfused)
            yield f"{format_bytes(nbytes)} of it are temporaries: {names} makes none"

    def __str__(self) -> str:
        """The page that a person reads: at most 80 columns."""
        sections = (_head(self), _memory(self), _wire(self), _time(self), _units(self))
        return "\n\n".join("\n".join(section) for section in sections)

    def plot(self, path: str | Path) -> None:
        """Draws the step's memory by kind, and writes it to a file.

        Args:
            path: Path of the file; its ending tells the format, such as ".svg".

        Raises:
            ImportError: If matplotlib is not installed.
        """
        title = f"Memory of rank {self.rank} of {self.ranks} on {self.device}"
        draw(path, title, self.moments, Moment(self.peak_at, self.peak_by_kind), self.predicted_seconds)

    def compare(self, timeline: Timeline) -> Comparison:
        """Sets planned figures beside those that a timeline has measured, by unit.

        Args:
            timeline: A recording of steps like the one planned.

        Raises:
            ValueError: If the timeline is of other units, of more ranks, or has no record of the plan's rank.
        """
        return compared(self.units, self.predicted_seconds, record_of(timeline, self.rank, self.ranks))

    def to_json(self, path: str | Path | None = None) -> str:
        """Returns the plan as JSON, and writes it to a file if one is named.

        Args:
            path: The file to write; None for none.
        """
        text = json.dumps(dataclasses.asdict(self), indent=1)
        if path is not None:
            own_output(Path(path)).write_text(text)
        return text

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Makes a plan of the text that `to_json` returned.

        Args:
            text: The JSON.

        Raises:
            ValueError: If it is another text.
        """
        try:
            plain: dict[str, Any] = json.loads(text)
            machine, between = plain["machine"], plain.get("predicted_range")
            plain.update(
                peak_at=Place(**plain["peak_at"]),
                moments=tuple(Moment(Place(**moment.pop("place")), **moment) for moment in plain["moments"]),
                units=tuple(UnitPlan(**unit) for unit in plain["units"]),
                host=HostMemory(**plain["host"]),
                unfused=tuple(plain.get("unfused", ())),
                machine=None if machine is None else Machine.from_dict(machine),
                predicted_range=None if between is None else tuple(between),
            )
            return cls(**plain)
        except (TypeError, KeyError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"this is not what Plan.to_json() writes: {error}") from error


def _head(plan: Plan) -> Iterator[str]:
    yield f"Plan of one step: rank {plan.rank} of {plan.ranks}, on {plan.device}"
    parameters, flops = format_count(plan.parameters), format_count(plan.flops)
    yield f"{parameters} parameters in {len(plan.units)} units, {flops} FLOPs a rank"
    yield ""
    yield f"  at rest  {format_bytes(plan.rest_bytes):>9}"
    limit, fits = None if plan.machine is None else plan.machine.device_memory, ""
    if limit is not None:
        fits = f", {'fits' if plan.peak_bytes <= limit else 'does NOT fit'} in {format_bytes(limit)}"
    yield f"  peak     {format_bytes(plan.peak_bytes):>9}  {_place_of_peak(plan)}{fits}"
    if plan.peak_operator:
        yield f"{'':22}in {plan.peak_operator}"
    yield from (f"  {line}" for line in plan.avoidable())
    first, setup = format_bytes(plan.first_peak_bytes), format_bytes(plan.setup_peak_bytes)
    yield f"  peak of the first step {first}, of setup {setup}"


def _place_of_peak(plan: Plan) -> str:
    """Names the place of the peak; that of the program's own code by its neighbours."""
    if plan.peak_at.phase != STEP:
        return f"in {plan.peak_at}"
    places = [moment.place for moment in plan.moments]
    at = max(range(len(places)), key=lambda index: plan.moments[index].nbytes)
    if 0 < at < len(places) - 1:
        return f"between {places[at - 1]} and {places[at + 1]}"
    return f"after {places[at - 1]}" if at else f"before {places[at + 1]}"


def _memory(plan: Plan) -> Iterator[str]:
    yield f"{'Memory':<24}{'at rest':>10}{'at the peak':>13}"
    kinds = {**plan.peak_by_kind, **plan.rest_by_kind}
    for kind in sorted(kinds, key=lambda kind: -plan.peak_by_kind.get(kind, 0)):
        rest, peak = plan.rest_by_kind.get(kind, 0), plan.peak_by_kind.get(kind, 0)
        bar = "#" * round(_BAR * peak / max(plan.peak_bytes, 1))
        yield f"  {kind:<22}{format_bytes(rest):>10}{format_bytes(peak):>13}  {bar}".rstrip()
    host = plan.host
    if plan.device != "cpu" and host.offloaded > 1 << 20:
        held, pinned, peak_bytes = map(format_bytes, (host.offloaded, host.pinned, host.peak))
        yield f"  on the host: {held} held ({pinned} pinned), {peak_bytes} at most"
    if host.checkpoint:
        held = format_bytes(host.checkpoint)
        yield f"  an asynchronous checkpoint holds {held} of the host's memory meanwhile,"
        yield f"  a full state dict {format_bytes(host.loading)}"


def _wire(plan: Plan) -> Iterator[str]:
    yield f"{'Received in a step':<24}{'times':>10}{'bytes':>13}"
    for kind, nbytes in plan.wire_bytes.items():
        yield f"  {kind:<22}{plan.collectives[kind]:>10}{format_bytes(nbytes):>13}"
    if not plan.wire_bytes:
        yield "  nothing"
    for phase, by_dtype in plan.gathered_bytes.items():
        if len(by_dtype) > 1:
            told = ", ".join(f"{dtype} {format_bytes(count)}" for dtype, count in by_dtype.items())
            yield from wrap(f"  gathered in {phase}: {told}", 80, subsequent_indent="    ")


def _time(plan: Plan) -> Iterator[str]:
    if plan.machine is None or plan.predicted_seconds is None:
        yield "No time is predicted: pass machine= (--machine on the command line)"
        return
    yield f"Predicted on {plan.machine.title}"
    computes, waits = format_seconds(plan.compute_seconds), format_seconds(plan.exposed_seconds)
    if plan.predicted_range is not None:
        yield f"  step {' to '.join(map(format_seconds, plan.predicted_range))}; in the middle:"
    yield f"  step {format_seconds(plan.predicted_seconds)}: computes {computes}, waits {waits}"
    yield f"  collectives run for {format_seconds(plan.communication_seconds)} beside it"


def _units(plan: Plan) -> Iterator[str]:
    timed = f"{'computes':>9}{'waits':>8}" if plan.predicted_seconds is not None else ""
    yield f"{'Unit':<{_NAME}}{'shard':>10}{'gathered':>10}{'gathers':>9}{'received':>10}{timed}"
    rows = [*_rows(plan.units)]
    for name, cells in rows[:_MOST_UNITS]:
        yield f"{name if len(name) < _NAME else f'..{name[3 - _NAME :]}':<{_NAME}}{cells}"
    if len(rows) > _MOST_UNITS:
        yield f"... and {len(rows) - _MOST_UNITS} more lines: see Plan.units"
    most = max(plan.units, key=lambda unit: unit.padding_bytes, default=None)
    if most is not None and most.padding_bytes:
        padding = format_bytes(sum(unit.padding_bytes for unit in plan.units))
        yield f"Aligned shards take {padding} of padding in all ranks together,"
        yield f"most in {most.name or '(root)'}: {format_bytes(most.padding_bytes)}"


def _rows(units: Sequence[UnitPlan]) -> Iterable[tuple[str, str]]:
    """Yields names and figures of the units, one row for neighbours that are alike."""
    for cells, group in groupby(units, key=_cells):
        members = [*group]
        first, last = members[0].name or "(root)", members[-1].name
        yield first if len(members) == 1 else f"{first} .. {last.rpartition('.')[2]}", cells


def _cells(unit: UnitPlan) -> str:
    shard, gathered = format_bytes(unit.shard_bytes), format_bytes(unit.gathered_bytes)
    cells = f"{shard:>10}{gathered:>10}{unit.gathers:>9}{format_bytes(sum(unit.wire_bytes.values())):>10}"
    if unit.compute_seconds is None:
        return cells
    return f"{cells}{format_seconds(unit.compute_seconds):>9}{format_seconds(unit.wait_seconds):>8}"
