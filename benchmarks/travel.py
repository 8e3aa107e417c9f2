"""Small units that travel together, and each by itself: time, collectives, host time and memory of a step.

python -m benchmarks.travel --ranks 2 --cases "small,200 units,64 adapters"
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import fsdp_wrap
from benchmarks.harness import Figures, Question, Settings, Table, ask_alone, interleave, run_fake, run_ranks
from benchmarks.meters import tensors
from benchmarks.models import CASES, Block, LinearBlock, Perceptron
from fsdp_wrap import EventKind, record_events
from fsdp_wrap.wrap import ModuleWrapPolicy

FAKE_RANKS = (8, 64)
FRONTS = ("wrapper", "fully_shard")
ALONE, TOGETHER = "alone", "together"


class Adapter(Block):
    """A trainable low-rank addition, a unit of its own in a frozen one."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.up(self.down(x))


class AdaptedBlock(Block):
    """A frozen layer with an adapter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear, self.adapter = nn.Linear(width, width).requires_grad_(False), Adapter(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.adapter(self.linear(x).tanh())


class Layers(nn.Module):
    """One after the other."""

    def __init__(self, make: Callable[[], nn.Module], number: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(make() for _ in range(number)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.layers(x).pow(2).mean()
        return loss


Made = tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]
MODELS: dict[str, Made] = {
    "small": (CASES["small"].model, CASES["small"].batch),
    "200 units": (lambda: Layers(lambda: LinearBlock(141), 200), lambda: torch.randn(4, 141)),
    "64 adapters": (lambda: Layers(lambda: AdaptedBlock(768), 64), lambda: torch.randn(4, 768)),
    "tiny": (lambda: Perceptron(3, 8), lambda: torch.randn(2, 8)),
}


class Competitor:
    """A model of ours, with AdamW and a batch."""

    def __init__(self, case: str, front: str, nbytes: int | None, shared_memory: bool) -> None:
        make, batch = MODELS[case]
        torch.manual_seed(0)
        model = make()
        options: dict[str, Any] = {"shared_memory": shared_memory, "travel_together_bytes": nbytes}
        if front == "wrapper":
            policy = ModuleWrapPolicy({Block})
            model = fsdp_wrap.FullyShardedDataParallel(
                model, auto_wrap_policy=policy, use_orig_params=True, **options
            )
        else:
            blocks = [child for child in model.modules() if isinstance(child, Block)]
            for unit in [*reversed(blocks), model]:  # parts before the whole
                fsdp_wrap.fully_shard(unit, **options)
        trainable = [param for param in model.parameters() if param.requires_grad]
        self.model, self.batch = model, batch()
        self.optimizer = torch.optim.AdamW(trainable, fused=True)

    def step(self) -> None:
        """Runs zero_grad, forward, backward and AdamW."""
        self.optimizer.zero_grad()
        self.model(self.batch).backward()
        self.optimizer.step()

    def collectives(self) -> int:
        """Counts the collectives of a step; a unit of several dtypes that travels alone counts once."""
        with record_events() as events:
            self.step()
        kinds = (EventKind.UNSHARD, EventKind.REDUCE)
        return len({(e.kind, e.phase, e.together or e.unit) for e in events if e.kind in kinds})


def measure(case: str, rounds: int) -> Table:
    """Measures each way; called on every rank."""
    rows: Table = {}
    for way, shared_memory in (("gloo", False), ("memory", True)):
        for front in FRONTS:
            pair = {
                name: Competitor(case, front, nbytes, shared_memory)
                for name, nbytes in ((ALONE, 0), (TOGETHER, None))
            }
            times = interleave({name: competitor.step for name, competitor in pair.items()}, rounds, warmup=3)
            medians = {name: statistics.median(mine) for name, mine in times.items()}
            for name, competitor in pair.items():
                rows[f"{front}, {way}, {name}"] = {
                    "ms": 1e3 * medians[name],
                    "/ alone": medians[name] / medians[ALONE],
                    "collectives": competitor.collectives(),
                }
    return rows


def measure_fake(case: str, rounds: int) -> Table:
    """Returns host time of a step, and its peak of memory; called on a fake group."""
    rows: Table = {}
    for front in FRONTS:
        pair = {
            name: Competitor(case, front, nbytes, shared_memory=False)
            for name, nbytes in ((ALONE, 0), (TOGETHER, None))
        }
        times = interleave({name: competitor.step for name, competitor in pair.items()}, rounds, warmup=3)
        peaks = {name: tensors(competitor.step).peak for name, competitor in pair.items()}
        for name, mine in times.items():
            rows[f"{front}, {name}"] = {
                "ms": 1e3 * statistics.median(mine),
                "/ alone": statistics.median(mine) / statistics.median(times[ALONE]),
                "peak KiB": peaks[name] / 1024,
                "peak KiB more": (peaks[name] - peaks[ALONE]) / 1024,
            }
    return rows


def ask(settings: Settings) -> Figures:
    """Returns a table for each case, and one for each case and number of ranks that send nothing."""
    figures: Figures = {}
    for case in settings.cases_of([*MODELS], usual=["small", "200 units", "64 adapters"]):
        figures[case] = run_ranks(measure, settings.ranks, case, settings.rounds or 15)
        for ranks in FAKE_RANKS:
            figures[f"{case}, fake group of {ranks}"] = run_fake(
                partial(measure_fake, case), ranks, settings.rounds or 15
            )
    return figures


QUESTION = Question(
    "travel",
    "Small units that travel together",
    """\
A step (zero_grad, forward, backward, AdamW) of the model `small`, of 200 layers of 20,022 parameters, and of
64 frozen layers of width 768 with an adapter of rank 4, each layer and adapter a unit: `alone`, with
`travel_together_bytes=0`, and `together`, by default. `collectives` are those of a step. On groups that send
nothing: the time of a step, and the most that live tensors took in it beyond what was there before.""",
    ask,
    chart="/ alone",
    cases=[*MODELS],
)


if __name__ == "__main__":
    ask_alone(QUESTION)
