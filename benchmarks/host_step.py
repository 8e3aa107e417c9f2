"""Time of AdamW in host memory against what memory allows, and beside a backward.

python -m benchmarks.host_step --cases 32M
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from benchmarks.harness import Figures, Question, Settings, Table, ask_alone, run_ranks
from benchmarks.implementations import IMPLEMENTATIONS
from benchmarks.models import MLP, TINY
from fsdp_wrap.optim import HostAdamW, step_in_backward

SIZES = {"32M": 1 << 25, "tiny": 1 << 12}
ELEMENT = {torch.float32: 28, torch.bfloat16: 20}
"""Bytes that a step reads and writes for an element: parameter, gradient and two moments."""


def _medians(actions: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Returns the median seconds of each function; they take turns."""
    times: dict[str, list[float]] = {name: [] for name in actions}
    for number in range(rounds + 1):
        for name, action in actions.items():
            begin = time.perf_counter()
            action()
            if number:
                times[name].append(time.perf_counter() - begin)
    return {name: statistics.median(seconds) for name, seconds in times.items()}


def measure_step(case: str, threads: int, rounds: int) -> Table:
    """Measures steps of one large parameter, and the fastest reading and writing of as many bytes."""
    torch.set_num_threads(threads)
    numel = SIZES[case]
    a, b, out = (torch.rand(numel) for _ in range(3))
    actions: dict[str, Callable[[], object]] = {"memory": lambda: torch.add(a, b, out=out)}
    for name, make in (
        ("AdamW", torch.optim.AdamW),
        ("AdamW, fused", partial(torch.optim.AdamW, fused=True)),
        ("HostAdamW, float32", HostAdamW),
        ("HostAdamW, bfloat16", partial(HostAdamW, moments=torch.bfloat16)),
    ):
        param = nn.Parameter(torch.rand(numel))
        param.grad = b
        actions[name] = make([param]).step
    medians = _medians(actions, rounds)
    rate = 12 * numel / medians.pop("memory")  # bytes a second
    table = {"memory": {"GB/s": rate / 1e9}}
    for name, seconds in medians.items():
        nbytes = numel * ELEMENT[torch.bfloat16 if "bfloat16" in name else torch.float32]
        floor = nbytes / rate
        row = {"ms": 1e3 * seconds, "GB/s": nbytes / seconds / 1e9, "/ memory": seconds / floor}
        table[name] = row
    return table


def measure_beside(tiny: bool, rounds: int) -> Table:
    """Measures a backward and a step, in turn and beside each other; called on every rank."""
    case = TINY if tiny else MLP
    make = IMPLEMENTATIONS["fsdp_wrap"]

    def trained(in_thread: bool | None) -> Callable[[], object]:
        torch.manual_seed(0)
        model, batch = make(case.model()), case.batch()
        if in_thread is None:
            optimizer: torch.optim.Optimizer = HostAdamW(model.parameters())
        else:
            step_in_backward(model, HostAdamW, in_thread=in_thread)

        def run() -> None:
            model(batch).backward()
            if in_thread is None:
                optimizer.step()
                optimizer.zero_grad()

        return run

    ways = {"step after the backward": trained(None), "in it": trained(False), "in a thread": trained(True)}
    medians = _medians(ways, rounds)
    after = medians["step after the backward"]
    return {name: {"ms": 1e3 * seconds, "/ after": seconds / after} for name, seconds in medians.items()}


def ask(settings: Settings) -> Figures:
    """Returns a table for one thread and one for two, and one of a step beside a backward."""
    figures: Figures = {}
    for case in settings.cases_of([*SIZES], usual=["32M"]):
        for threads in (1, 2):
            title = f"{case} elements, {threads} thread{'s' * (threads > 1)}"
            figures[title] = run_ranks(measure_step, 1, case, threads, settings.rounds or 11)
        beside = run_ranks(measure_beside, 1, case == "tiny", settings.rounds or 11)
        figures[f"beside the backward, {'tiny' if case == 'tiny' else 'mlp'}"] = beside
    return figures


QUESTION = Question(
    "host_step",
    "Steps on the host",
    """\
AdamW of one parameter in host memory: `GB/s` counts each byte of parameter, gradient and moments once for
each time that it must be read or written (28 for an element, 20 with moments in bfloat16); `memory` is
`torch.add` of two tensors into a third one, and `/ memory` the time to what so many bytes take at that rate.
`beside the backward`: forward, backward and step of mlp on one rank, one thread each for the backward and for
the step; `/ after`: to the step after the backward.""",
    ask,
    chart="ms",
    cases=[*SIZES],
)


if __name__ == "__main__":
    ask_alone(QUESTION)
