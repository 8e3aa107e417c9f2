"""The goals, as data, and how far they are met by the figures of a run.

    python -m benchmarks.goals

prints them beside the figures that `python -m benchmarks` kept. Goals are ratios; the smaller the better.
Times are paired ratios, with those of the medians in parentheses; what misses its goal is bold. A goal is met
where all of our implementations that it names, and that took part, meet it. Rows of shared memory and of
gradients in place stand in the column of the same form without.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness import Figures
from benchmarks.implementations import IN_PLACE, ON_SHARDS, OURS, SHARED


@dataclass(frozen=True)
class Goal:
    """An upper limit on one figure of our implementations.

    Attributes:
        name: Name of the goal.
        about: The figure in words.
        limit: The largest value that meets the goal.
        place: Question, table and column of the figure.
        over: Rows to divide the figure by, where it is no ratio yet; the least of several counts.
        medians: The column of the same ratio of medians, shown beside it.
        rows: The implementations.
    """

    name: str
    about: str
    limit: float
    place: tuple[str, str, str]
    over: tuple[str, ...] = ()
    rows: tuple[str, ...] = OURS

    def figure(self, results: Mapping[str, Figures], row: str) -> float | None:
        """Returns the figure of one implementation, if it was measured."""
        question, title, column = self.place
        table = results.get(question, {}).get(title, {})
        figure = table.get(row, {}).get(column)
        if figure is None or not self.over:
            return figure
        bases = [table[base][column] for base in self.over if base in table]
        return figure / min(bases) if bases else None

    def met(self, results: Mapping[str, Figures]) -> bool | None:
        """Whether all of our implementations that were measured meet it; None if none was."""
        figures = [self.figure(results, row) for row in self.rows]
        measured = [value for value in figures if value is not None]
        return max(measured) <= self.limit if measured else None

    def medians(self, results: Mapping[str, Figures], row: str) -> float | None:
        """Returns the ratio of the medians, where the figure is a paired one."""
        question, title, column = self.place
        return results.get(question, {}).get(title, {}).get(row, {}).get(f"medians {column}")


def _steps(name: str, about: str, base: str, limits: Mapping[str, float]) -> list[Goal]:
    """Returns a goal over gloo for each case."""
    return [
        Goal(name, f"step of {case}, {about}", limit, ("step", case, f"/ {base}"))
        for case, limit in limits.items()
    ]


def _shared_steps(name: str, about: str, base: str, limits: Mapping[str, float]) -> list[Goal]:
    """Returns a goal through shared memory for each case at either number of ranks."""
    rows = tuple(SHARED.values())
    return [
        Goal(
            name,
            f"step of {case}{where}, shared memory, {about}",
            limit,
            ("step", f"{case}{where}", f"/ {base}"),
            rows=rows,
        )
        for where in ("", " on 4 ranks")
        for case, limit in limits.items()
    ]


def _mesh_steps(limit: float) -> list[Goal]:
    """Returns a goal for each case on a mesh of two dimensions: each front-end beside torch's own."""
    return [
        Goal(
            "P11",
            f"step of {case}, {told}to {base}",
            limit,
            ("step", case, f"/ {base}"),
            rows=(names[row],),
        )
        for case in MESH_CASES
        for told, names in (("", dict(zip(SHARED, SHARED))), ("shared memory, ", SHARED))
        for base, row in (("fsdp1", "fsdp_wrap"), ("fsdp2", "fully_shard"))
    ]


def _memory(case: str, group: str, column: str) -> tuple[str, str, str]:
    return "memory", f"{case}, {group}", column


FLAT, EITHER, FSDP2 = ("fsdp1_flat",), ("fsdp1", "fsdp1_flat"), ("fsdp2",)
WRAPPED = ("fsdp_wrap", "fully_shard")  # whose optimizer has original parameters

IN_BACKWARD_IN_PLACE = "fsdp_wrap_in_place_steps"

MESH_CASES = (
    *("gpt with tensor parallelism", "small with tensor parallelism"),
    *(f"{case} accumulated over replicas" for case in ("small", "mlp")),
)

GOALS: list[Goal] = [
    *_steps("P1", "to DDP", "ddp", {"gpt": 1.00, "small": 1.75, "mlp": 0.95, "lora": 1.10}),
    *_steps("P2", "to the best of FSDP1", "fsdp1", {"gpt": 0.82, "small": 0.57, "mlp": 0.60, "lora": 0.58}),
    *_steps("P2", "to FSDP2", "fsdp2", {"gpt": 0.65, "small": 0.35, "mlp": 0.41, "lora": 0.72}),
    *_shared_steps("P1", "to DDP", "ddp", {"gpt": 0.90, "small": 0.85, "mlp": 0.58, "lora": 1.00}),
    *_shared_steps(
        "P2", "to the best of FSDP1", "fsdp1", {"gpt": 0.73, "small": 0.28, "mlp": 0.37, "lora": 0.52}
    ),
    *_shared_steps("P2", "to FSDP2", "fsdp2", {"gpt": 0.58, "small": 0.17, "mlp": 0.25, "lora": 0.65}),
    *_mesh_steps(0.85),
    Goal("P3", "host time of a unit of 12, to FSDP1 flat", 0.20, ("host", "12 parameters", "/ fsdp1_flat")),
    Goal("P3", "host time of a unit of 12, to FSDP2", 0.12, ("host", "12 parameters", "/ fsdp2")),
    *(
        Goal(
            "P4",
            f"backward peak, {case} on {group}, {what}, to {base[0]}",
            0.85,
            _memory(case, group, column),
            base,
        )
        for case in ("gpt", "mlp")
        for group, column, what in (
            ("resident", "backward", "gradients in it"),
            ("resident", "above gradients", "gradients as state"),
            ("fake group", "backward", "gradients in it"),
        )
        for base in (("fsdp1",), FSDP2)
    ),
    *(
        Goal(
            "P4",
            f"the same, in place, {case} on {group}, to {base[0]}",
            0.70,
            _memory(case, group, "backward"),
            base,
            rows=(IN_PLACE,),
        )
        for case in ("gpt", "mlp")
        for group in ("resident", "fake group")
        for base in (("fsdp1",), FSDP2)
    ),
    *(
        Goal(
            "P13",
            f"the same with steps in it, in place, {case} on fake group, to fsdp1",
            0.60,
            ("in_backward", f"{case}, fake group", "/ fsdp1"),
            rows=(IN_BACKWARD_IN_PLACE,),
        )
        for case in ("gpt", "mlp")
    ),
    *(
        Goal(
            "P14",
            f"AdamW on the host, moments in {name}, to what its bytes take of memory",
            1 / 0.8,
            ("host_step", "32M elements, 2 threads", "/ memory"),
            rows=(f"HostAdamW, {name}",),
        )
        for name in ("float32", "bfloat16")
    ),
    *(
        Goal("P5", f"forward peak, {case}, to {base[0]}", limit, _memory(case, "fake group", "forward"), base)
        for case in ("gpt", "mlp")
        for base, limit in ((("fsdp1",), 1.00), (FSDP2, 0.67))
    ),
    Goal("P6", "backward peak, lora, to FSDP1", 0.45, _memory("lora", "fake group", "backward"), ("fsdp1",)),
    Goal("P6", "gradient bytes, lora, to FSDP1", 0.02, ("wire", "lora", "reduced MB"), ("fsdp1",), WRAPPED),
    *(
        Goal("P7", f"bytes on the wire, {case}, to {base[0]}", 0.755, ("wire", case, "step MB"), base)
        for case in ("gpt", "mlp")
        for base in (EITHER, FSDP2)
    ),
    *(
        Goal(
            "P8",
            f"{what} on {group}, to {base}",
            limit,
            ("update", f"{what}, {group}", f"/ {base}"),
            rows=WRAPPED,
        )
        for group in ("gloo", "fake group")
        for what, limits in (("clip", (0.25, 0.05)), ("AdamW", (1.00, 0.35)))
        for base, limit in zip(("fsdp1", "fsdp2"), limits)
    ),
    *(
        Goal(
            "P12",
            f"{what} on shards, {group}, to {told}",
            limit,
            ("update", f"{what}, {group}", column),
            over,
            rows=(ON_SHARDS,),
        )
        for group in ("gloo", "fake group")
        for what in ("clip", "AdamW")
        for told, limit, column, over in (
            ("fsdp2", 0.15, "/ fsdp2", ()),
            ("slices of the wrapper", 1.3, "ms", ("fsdp_wrap",)),
        )
    ),
    *(
        Goal(
            "P15",
            f"Muon on {ranks} ranks, {told}",
            limit,
            ("muon", f"medium{where}", column),
            rows=(*OURS, *SHARED.values()),
        )
        for ranks, where in ((2, ""), (4, " on 4 ranks"))
        for told, limit, column in (
            ("step, to one that gathers everything on fsdp2", 0.60, "/ fsdp2"),
            ("bytes sent by all, to those of all matrices", 2.00, "/ matrices"),
            ("operations of the busiest rank, to the mean", 1.10, "most / mean"),
        )
    ),
    *(
        Goal(
            "W1",
            f"weights out of {case}, to full_tensor() of fsdp2",
            0.50,
            ("weights", case, "/ full_tensor"),
            rows=(*WRAPPED, *SHARED.values()),
        )
        for case in ("gpt", "gpt, fused", "gpt, LoRA merged", "288 parameters")
    ),
    *(
        Goal("C1", f"{what}, to {base}", 0.90, ("checkpoint", title, f"/ {base}"), rows=("fsdp_wrap",))
        for what, title, base in (
            ("sharded load of gpt", "gpt, load", "fsdp2"),
            ("full state dict of gpt on the first rank", "gpt, full", "fsdp1"),
            ("sharded save of 5,000 parameters", "5,000 parameters, save", "fsdp2"),
            ("sharded load of 5,000 parameters", "5,000 parameters, load", "fsdp2"),
        )
    ),
    *(
        Goal(
            "C2",
            f"save of {case} in the background, {told}",
            limit,
            ("async_save", case, column),
            over,
            WRAPPED,
        )
        for case in ("gpt", "2,000 parameters")
        for told, limit, column, over in (
            ("how long it holds up, to a save", 0.05, "held up / save", ()),
            ("the next ten steps, to ten without", 1.035, "ten steps", ()),
            (
                "host memory, to fsdp2 by thread or process",
                1.00,
                "host MB",
                ("fsdp2_thread", "fsdp2_process"),
            ),
        )
    ),
    *(
        Goal(
            "P9",
            f"at rest, {case}, to FSDP1 with original parameters",
            0.78,
            _memory(case, "resident", "rest MB"),
            ("fsdp1",),
        )
        for case in ("gpt", "mlp")
    ),
    *(
        Goal("P10", f"growth of {what}", 1.05, ("scaling", "growth", column))
        for what, column in (
            ("the step to DDP, 4 to 64 blocks", "blocks: / ddp"),
            ("the step to DDP, 2 to 4 ranks", "ranks: / ddp"),
            ("host time per unit, 2 to 1,024 ranks", "fake ranks: us outside"),
            ("peak memory, 2 to 1,024 ranks", "fake ranks: memory"),
        )
    ),
]
GOALS += [
    *(
        Goal(
            "G1",
            f"backward peak on CUDA, {ranks} fake ranks, to {base}",
            0.70,
            ("gpu", f"memory, fake group of {ranks}", "peak MB"),
            (base,),
            WRAPPED,
        )
        for ranks in (8, 64)
        for base in ("fsdp1", "fsdp2")
    ),
    *(
        Goal(
            "G1",
            f"reserved in vain, {ranks} fake ranks",
            0.03,
            ("gpu", f"memory, fake group of {ranks}", "reserved in vain"),
            rows=WRAPPED,
        )
        for ranks in (8, 64)
    ),
    *(
        Goal("G2", about, limit, ("gpu", title, f"medians / {base}"), rows=WRAPPED)
        for about, limit, title, base in (
            ("step of 48 small units, to FSDP2", 0.50, "48 small units", "fsdp2"),
            ("step in bf16, to plain", 1 / 0.97, "width 4096 in bf16", "plain"),
        )
    ),
    Goal("G3", "offloaded step, to FSDP2", 1 / 1.8, ("gpu", "offload", "s"), FSDP2, WRAPPED),
    Goal("G3", "offloaded step, to roofline", 1 / 0.85, ("gpu", "offload", "/ roofline"), rows=WRAPPED),
    *(
        Goal(
            "order",
            f"{purpose}s beside which nothing is computed, {title}",
            0.50,
            ("gpu", title, f"{purpose} exposed"),
            rows=WRAPPED,
        )
        for title in ("overlap", "overlap, offload")
        for purpose in ("gather", "reduce")
    ),
    Goal("order", "waits of the host in a step", 0.0, ("gpu", "overlap", "waits of the host"), rows=WRAPPED),
]


@dataclass(frozen=True)
class Verdict:
    """A goal with the figure of each implementation that took part."""

    goal: Goal
    measured: Mapping[str, float]

    @property
    def met(self) -> bool:
        """Whether all that the goal names were measured and meet it."""
        return set(self.measured) == set(self.goal.rows) and max(self.measured.values()) <= self.goal.limit

    def __str__(self) -> str:
        figures = ", ".join(f"{row} {value:.3f}" for row, value in self.measured.items()) or "not measured"
        missing = [row for row in self.goal.rows if row not in self.measured] if self.measured else []
        without = f" (without {', '.join(missing)})" if missing else ""
        over = any(value > self.goal.limit for value in self.measured.values())
        told = "met" if self.met else "missed" if over else "open"
        about, limit = self.goal.about, self.goal.limit
        return f"{told:6} {self.goal.name}: {about}: at most {limit:.3f}, {figures}{without}"


def verdicts(results: Mapping[str, Figures], goals: Sequence[Goal]) -> list[Verdict]:
    """Judges goals one by one."""
    judged = []
    for goal in goals:
        figures = {row: goal.figure(results, row) for row in goal.rows}
        judged.append(Verdict(goal, {row: value for row, value in figures.items() if value is not None}))
    return judged


# Where rows are shown that have no column of their own.
_COLUMNS = {
    IN_PLACE: "fsdp_wrap",
    IN_BACKWARD_IN_PLACE: "fsdp_wrap",
    **{f"HostAdamW, {name}": "fsdp_wrap" for name in ("float32", "bfloat16")},
    ON_SHARDS: "fully_shard",
    **dict(zip(SHARED.values(), SHARED)),
}


_MET = {True: "yes", False: "no", None: "not measured"}


def judged(results: Mapping[str, Figures]) -> str:
    """Returns the goals as a table: our figures beside each, marked where they miss it."""
    lines = [f"| goal | | at most | {' | '.join(OURS)} | met |", f"|---|---|---:|{'---:|' * len(OURS)}---|"]
    for goal in GOALS:
        figures = {row: goal.figure(results, row) for row in goal.rows}
        met = _MET[goal.met(results)]
        shown = {_COLUMNS.get(row, row): row for row in figures}
        cells = (
            _cell(figures.get(name), goal.medians(results, name), goal.limit)
            for name in (shown.get(column, "") for column in OURS)
        )
        lines.append(f"| {goal.name} | {goal.about} | {goal.limit:.4g} | {' | '.join(cells)} | {met} |")
    return "\n".join(lines)


def _cell(value: float | None, medians: float | None, limit: float) -> str:
    if value is None:
        return ""
    shown = f"{value:.2f}" if abs(value) >= 0.1 else f"{value:.3f}"
    shown += f" ({medians:.2f})" if medians is not None else ""
    return shown if value <= limit else f"**{shown}**"


def main() -> None:
    """Prints the goals, and how many are met by the figures that were kept."""
    kept = Path(__file__).resolve().parents[1] / "docs" / "performance" / "figures.json"
    results = {name: answer["figures"] for name, answer in json.loads(kept.read_text()).items()}
    outcomes = [outcome for goal in GOALS if (outcome := goal.met(results)) is not None]
    print(judged(results))
    print(
        f"\n{sum(outcomes)} of {len(outcomes)} goals are met, {len(GOALS) - len(outcomes)} were not measured"
    )


if __name__ == "__main__":
    main()
