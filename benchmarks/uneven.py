"""Cost of `uneven`: its agreement in each forward, and a rank without a batch against a dummy batch on it.

python -m benchmarks.uneven --cases agreement,small
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from operator import sub
from statistics import mean, median
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from benchmarks.harness import Figures, Question, Settings, Table, ask_alone, compare, interleave, run_ranks
from benchmarks.implementations import SHARED, Trained
from benchmarks.models import CASES, stacked
from fsdp_wrap import uneven

AGREEMENT = "agreement"
RANKS = (2, 4)  # that agree
IDLE_RANKS = 4  # of which the last has no batch
FORWARDS = 20  # of a turn
ROUNDS = {AGREEMENT: 60, "gpt": 9, "small": 40}
ALL_CASES = [*ROUNDS, "tiny"]
WAYS = {"fsdp_wrap": "0", SHARED["fsdp_wrap"]: "1"}
DUMMY, NONE, ALL = "dummy batch", "no batch", "all have a batch"


def over(way: str) -> Any:
    """Lets the library communicate over gloo or through memory: its models, and the ranks that agree."""
    return patch.dict(os.environ, FSDP_WRAP_SHARED_MEMORY=WAYS[way])


# --- the agreement ------------------------------------------------------------------------------------


@torch.no_grad()
def measure_agreement(way: str, rounds: int) -> dict[str, float]:
    """Returns microseconds of a forward outside and inside, and of the agreement; called on every rank."""
    with over(way):
        subject = Trained(way, stacked(1, 2))
        turns = [(_turn(subject, False), _turn(subject, True)) for _ in range(2 + rounds)][2:]
    outside, inside = ([*zip(*of_turns)] for of_turns in zip(*turns))
    wall, busy, context = range(3)
    return {
        "outside us": 1e6 * median(outside[wall]),
        "inside us": 1e6 * median(inside[wall]),
        "agreement us": 1e6 * median(map(sub, inside[wall], outside[wall])),
        "agreement CPU us": 1e6 * median(map(sub, inside[busy], outside[busy])),
        "context us": 1e6 * median(inside[context]),
    }


def _turn(subject: Trained, inside: bool) -> list[float]:
    """Returns seconds of a forward, of the processor in it, and of the context: of all ranks, their mean."""
    dist.barrier()
    entered = time.perf_counter()
    with uneven(subject.model) if inside else nullcontext():
        begin, spent = time.perf_counter(), time.process_time()
        for _ in range(FORWARDS):
            subject.forward()
        took, busy = time.perf_counter() - begin, time.process_time() - spent
    context = time.perf_counter() - entered - took
    means = torch.tensor([took / FORWARDS, busy / FORWARDS, context], dtype=torch.float64)
    dist.all_reduce(means)
    return (means / dist.get_world_size()).tolist()


# --- a rank without a batch ---------------------------------------------------------------------------


def measure_idle(way: str, case: str, rounds: int) -> Table:
    """Returns a row for each way to step where the last rank has no batch; called on every rank."""
    has_batch = dist.get_rank() < dist.get_world_size() - 1
    steps: dict[str, Callable[[Trained], None]] = {
        DUMMY: pad_step,
        NONE: partial(uneven_step, has_batch),
        ALL: partial(uneven_step, True),
    }
    busy: dict[str, list[float]] = {name: [] for name in steps}
    with over(way):
        turns = {
            name: partial(_counting, partial(step, Trained(way, CASES[case])), busy[name])
            for name, step in steps.items()
        }
        table = compare(interleave(turns, rounds), {DUMMY: (DUMMY,)})
    by_rank: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, {name: 1e3 * median(seconds[-rounds:]) for name, seconds in busy.items()})
    *others, last = by_rank
    for name, row in table.items():
        row["its CPU ms"] = last[name]
        row[f"its CPU / {DUMMY}"] = last[name] / last[DUMMY]
        row["others' CPU ms"] = mean(other[name] for other in others)
    return table


def pad_step(subject: Trained) -> None:
    """Takes a step in which each rank has a batch, if need be one that does not count."""
    subject.optimizer.zero_grad()
    subject.forward().backward()
    subject.optimizer.step()


def uneven_step(has_batch: bool, subject: Trained) -> None:
    """Takes a step to which this rank may have no batch."""
    subject.optimizer.zero_grad()
    with uneven(subject.model):
        if has_batch:
            subject.forward().backward()
    subject.optimizer.step()


def _counting(step: Callable[[], None], seconds: list[float]) -> None:
    begin = time.process_time()
    step()
    seconds.append(time.process_time() - begin)


def ask(settings: Settings) -> Figures:
    """Returns a table of the agreement by number of ranks, and one for each model and way to travel."""
    figures: Figures = {}
    for case in settings.cases_of(ALL_CASES, usual=[*ROUNDS]):
        rounds = settings.rounds or ROUNDS.get(case, 1)
        for ranks in RANKS if case == AGREEMENT else ():
            table = {way: run_ranks(measure_agreement, ranks, way, rounds) for way in WAYS}
            figures[f"a forward's agreement, {ranks} ranks"] = table
        for way in WAYS if case != AGREEMENT else ():
            figures[f"{case}, {way}"] = run_ranks(measure_idle, IDLE_RANKS, way, case, rounds)
    return figures


QUESTION = Question(
    "uneven",
    "Ranks without a batch",
    f"""\
`fsdp_wrap.uneven`, through shared memory (`_shared`) and over gloo; a round takes all ways in turn
({", ".join(f"{rounds} rounds for {case}" for case, rounds in ROUNDS.items())}). The agreement:
{FORWARDS} forwards of one small unit without gradients, outside of the context and inside, in microseconds of
one, means of the ranks; `agreement` is the median of the differences, of time and of the processor's;
`context`: to enter and to leave it. Then steps of {IDLE_RANKS} ranks, outside with a `{DUMMY}` on the
last rank, as people pad by hand, and inside, where it has `{NONE}` and helps the others; `{ALL}`,
inside, shows what the context itself takes. Milliseconds of the slowest rank; `its CPU` is the processor's
time of the last rank, and its ratio that of medians.""",
    ask,
    chart=f"/ {DUMMY}",
    cases=ALL_CASES,
)


if __name__ == "__main__":
    ask_alone(QUESTION)
