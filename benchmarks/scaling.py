"""How the costs grow with the number of blocks and of ranks.

python -m benchmarks.scaling --impl ddp,fsdp1,fsdp_wrap --cases "4 blocks,64 blocks"
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks import host, step
from benchmarks.harness import Figures, Question, Settings, Table, ask_alone, compare, run_fake, run_ranks
from benchmarks.implementations import DEFAULTS
from benchmarks.memory import phases
from benchmarks.meters import tensors
from benchmarks.models import transformer

BLOCKS, RANKS = (4, 16, 64), (2, 4)
FAKE_RANKS = (2, 8, 64, 1024)
FEW = 16  # blocks where the ranks grow
STEPS = {f"{blocks} blocks": (blocks, 2) for blocks in BLOCKS} | {
    f"{ranks} ranks": (FEW, ranks) for ranks in RANKS
}
FAKE = {f"fake group of {ranks:,}": ranks for ranks in FAKE_RANKS}


def measure(blocks: int, names: list[str], rounds: int) -> dict[str, list[float]]:
    """Called on every rank: seconds of a step, by implementation."""
    return step.measure(transformer(blocks, 64, 4, 16, 256, batch=2), names, rounds)


def measure_fake(names: list[str], rounds: int | None) -> Table:
    """Called on a fake group: host time per unit, and memory."""
    times = compare(host.measure(12, names, rounds), host.BASELINES, ("us", 1e6))
    case = transformer(FEW, 64, 4, 16, 256, batch=2)
    return {name: {"us": times[name]["us"], **phases(name, case, tensors)} for name in names}


def ask(settings: Settings) -> Figures:
    """A table a size, and one of what the largest size costs relative to the smallest."""
    names = settings.implementations(DEFAULTS)
    figures = {
        case: compare(run_ranks(measure, STEPS[case][1], STEPS[case][0], names, settings.rounds or 20))
        for case in settings.cases_of([*STEPS])
    }
    sharding = [name for name in names if name != "ddp"]
    fake = {
        case: run_fake(measure_fake, FAKE[case], sharding, settings.rounds)
        for case in settings.cases_of([*FAKE])
    }
    blocks = {case: table for case, table in figures.items() if case.endswith("blocks")}
    ranks = {case: table for case, table in figures.items() if case.endswith("ranks")}
    growth: Table = {name: {} for name in sharding}
    for tables, column, head in (
        (blocks, "/ ddp", "blocks: / ddp"),
        (ranks, "/ ddp", "ranks: / ddp"),
        (fake, "us", "fake ranks: us"),
        (fake, "above gradients", "fake ranks: memory"),
    ):
        _add_growth(growth, tables, column, head)
    return {**figures, **fake, "growth": growth}


def _add_growth(growth: Table, tables: Mapping[str, Table], column: str, head: str) -> None:
    """The column at the largest size, relative to that at the smallest."""
    if len(tables) > 1:
        first, *_, last = tables.values()
        for name, row in growth.items():
            row[head] = last[name][column] / first[name][column]


QUESTION = Question(
    "scaling",
    "Growth",
    f"""\
The model `small` of {", ".join(map(str, BLOCKS))} blocks at 2 ranks, and of {FEW} at
{" and ".join(map(str, RANKS))} ranks over gloo: the time of a step. On a group that sends nothing: host
time per unit of 12 parameters, and memory as above, of {FEW} blocks. `growth`: each at the largest size,
relative to the smallest; 1.00 would be perfect.""",
    ask,
    chart="/ ddp",
)


def main() -> None:
    ask_alone(QUESTION)


if __name__ == "__main__":
    main()
