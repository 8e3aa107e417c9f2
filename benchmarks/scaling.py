"""How the costs grow with the number of blocks and of ranks.

python -m benchmarks.scaling --impl ddp,fsdp2,fsdp_wrap --cases "4 blocks,64 blocks"
"""

from __future__ import annotations

from benchmarks import host, step
from benchmarks.harness import Figures, Question, Settings, Table, ask_alone, compare, run_fake, run_ranks
from benchmarks.implementations import DEFAULTS, OURS
from benchmarks.memory import phases
from benchmarks.meters import OutsideGroups
from benchmarks.models import transformer

USUAL = ["ddp", *OURS]
USUAL_FAKE = ["fsdp1_flat", "fsdp2", *OURS]  # with original parameters FSDP1 is slower
FEW = 16  # blocks where the ranks grow
# Blocks, ranks and rounds of the steps.
STEPS = {
    "4 blocks": (4, 2, 20),
    "16 blocks": (FEW, 2, 20),
    "64 blocks": (64, 2, 20),
    "16 blocks on 4 ranks": (FEW, 4, 20),
}
OUTSIDE = "us outside"
FAKE_RANKS = (2, 1024)
FAKE = {f"fake group of {ranks}": ranks for ranks in FAKE_RANKS}


def measure(blocks: int, names: list[str], rounds: int) -> dict[str, list[float]]:
    """Returns seconds of a step, by implementation; called on every rank."""
    return step.measure(transformer(blocks, 64, 4, 16, 256, batch=2), names, rounds)


def measure_fake(names: list[str], rounds: int | None) -> Table:
    """Returns host time per unit, and memory; called on a fake group."""
    times = compare(host.measure(12, names, rounds or 20), host.BASELINES, ("us", 1e6))
    with OutsideGroups().running() as clock:
        outside = compare(host.measure(12, names, rounds or 20, clock), host.BASELINES, ("us", 1e6))
    case = transformer(FEW, 64, 4, 16, 256, batch=2)
    return {
        name: {"us": times[name]["us"], OUTSIDE: outside[name]["us"], **phases(name, case)} for name in names
    }


def ask(settings: Settings) -> Figures:
    """Returns a table a size, and one of the costs of the largest size relative to the smallest."""
    names = settings.implementations(DEFAULTS if settings.impl else USUAL)
    sharding = settings.implementations(DEFAULTS[1:] if settings.impl else USUAL_FAKE)
    figures = {}
    for case in settings.cases_of([*STEPS]):
        blocks, ranks, rounds = STEPS[case]
        figures[case] = compare(run_ranks(measure, ranks, blocks, names, settings.rounds or rounds))
    fake = {
        case: run_fake(measure_fake, FAKE[case], sharding, settings.rounds)
        for case in settings.cases_of([*FAKE])
    }
    figures |= fake
    growth: Table = {name: {} for name in sharding}
    smallest, largest = FAKE
    for first, last, column, head in (
        ("4 blocks", "64 blocks", "/ ddp", "blocks: / ddp"),
        ("16 blocks", "16 blocks on 4 ranks", "/ ddp", "ranks: / ddp"),
        (smallest, largest, "us", "fake ranks: us"),
        (smallest, largest, OUTSIDE, "fake ranks: us outside"),
        (smallest, largest, "backward", "fake ranks: memory"),
    ):
        if first in figures and last in figures:
            for name, row in growth.items():
                if name in figures[first]:
                    row[head] = figures[last][name][column] / figures[first][name][column]
    return {**figures, "growth": growth}


QUESTION = Question(
    "scaling",
    "Growth",
    f"""\
The model `small` of 4, {FEW} and 64 blocks at 2 ranks, and of {FEW} at 4 ranks, over gloo: the time of a
step of ours and of DDP. On a group of 2 and of 1,024 ranks that sends nothing, with FSDP1 and FSDP2 beside:
host time per unit of 12 parameters, and memory as above, of {FEW} blocks. `us outside` is what is not spent
in the group's own gathers and reductions, since that group copies a shard once for each rank. `growth`: how
much more a column of a table above (of memory `backward`) is at the largest size than at the smallest; 1.00
would be perfect.""",
    ask,
    chart="/ ddp",
    cases=[*STEPS, *FAKE],
    implementations=DEFAULTS,
)


if __name__ == "__main__":
    ask_alone(QUESTION)
