"""What a step consists of at the least, and how far each implementation is from it.

python -m benchmarks.floor --impl ddp,fsdp_wrap,fully_shard --cases gpt,small
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from benchmarks.harness import Figures, Question, Settings, ask_alone, compare, interleave, run_ranks
from benchmarks.implementations import DEFAULTS, IMPLEMENTATIONS, PLAIN, SHARED, Trained
from benchmarks.models import CASES, Case
from benchmarks.wire import transfers

COMPUTING, UPDATE, BYTES, FLOOR = "computing", "AdamW", "bytes", "floor"
USUAL = [name for name in [*DEFAULTS, *SHARED.values()] if not name.startswith("fsdp1")]


def measure(case_name: str, names: list[str], rounds: int) -> dict[str, list[float]]:
    """Returns seconds of each part, of their sum, and of each implementation's step; called on every rank."""
    case = CASES[case_name]
    parts = {COMPUTING: Trained(PLAIN, case).pass_through, UPDATE: _update(case), BYTES: _exchange(case)}
    steps = {name: Trained(name, case).step for name in case.taken_by(names)}
    times = interleave({**parts, **steps}, rounds, warmup=1)
    return {**times, FLOOR: [sum(turn) for turn in zip(*(times[part] for part in parts))]}


def _update(case: Case) -> Callable[[], object]:
    """Returns a function that steps AdamW on as many elements as a rank has, in one tensor."""
    trained = sum(param.numel() for param in case.model().parameters() if param.requires_grad)
    part = torch.zeros(-(-trained // dist.get_world_size()), requires_grad=True)
    part.grad = torch.zeros_like(part)
    return torch.optim.AdamW([part]).step


def _exchange(case: Case) -> Callable[[], None]:
    """Returns a function that exchanges the parts of all collectives of a step with each other rank."""
    mine, count = dist.get_rank(), dist.get_world_size()
    others = [rank for rank in range(count) if rank != mine]
    parts = [torch.zeros(nbytes // count, dtype=torch.uint8) for nbytes in transfers(case)]
    received = [[torch.empty_like(part) for part in parts] for _ in others]

    def exchange() -> None:
        for index, part in enumerate(parts):
            works = [dist.irecv(into[index], rank) for rank, into in zip(others, received)]
            works += [dist.isend(part, rank) for rank in others]
            for work in works:
                work.wait()  # type: ignore[union-attr]

    return exchange


def ask(settings: Settings) -> Figures:
    """Returns a table a case."""
    figures = {}
    for case in settings.cases_of([*CASES], usual=[case for case in CASES if case != "tiny"]):
        names = settings.implementations([*IMPLEMENTATIONS] if settings.impl else USUAL)
        rounds = settings.rounds or CASES[case].rounds
        times = run_ranks(measure, settings.ranks, case, names, rounds)
        figures[case] = compare(times, {FLOOR: (FLOOR,)})
    return figures


QUESTION = Question(
    "floor",
    "Floor of a step",
    f"""\
Milliseconds of the parts of a step that no sharding can leave out, each by itself, in turns with whole steps
of the implementations: `{COMPUTING}`, forward and backward of the plain model on all ranks at once;
`{UPDATE}`, of a rank's part of the elements in one tensor; `{BYTES}`, over gloo, the parts that two
gathers of the blocks, one of the other parameters and one reduction need, sent by each rank to each other
one, without any sum. `{FLOOR}` is their sum in each round. Where transfers run beside the computing, on
cores or a network card of their own, a step can be below it; on as many cores as ranks both take the
processor's time. `ddp` updates all elements and sends fewer bytes; `_shared` sends none over gloo. 2 ranks of
one host.""",
    ask,
    chart="/ floor",
    cases=[*CASES],
    implementations=[*IMPLEMENTATIONS],
)


if __name__ == "__main__":
    ask_alone(QUESTION)
