"""Time of a step of Muon, what travels in it, and how evenly ranks share what is computed.

python -m benchmarks.muon --cases medium
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import FlopCounterMode

import fsdp_wrap
from benchmarks.harness import Figures, Question, Settings, Table, ask_alone, compare, interleave, run_ranks
from benchmarks.implementations import OURS, SHARED, Trained
from benchmarks.models import TINY, Case, transformer
from benchmarks.wire import travelled

CASES = {"medium": transformer(6, 256, 4, 64, 1024, batch=2), "tiny": TINY}
TITLES = {f"{name}{told}": (name, ranks) for name in CASES for told, ranks in (("", 2), (" on 4 ranks", 4))}
THEIRS = "fsdp2"
IMPLS = (THEIRS, *OURS, *SHARED.values())
BASELINES = {THEIRS: (THEIRS,)}


def ratio(rows: int, columns: int) -> float:
    """Returns the factor of the learning rate, as `adjust_lr_fn="match_rms_adamw"`."""
    return 0.2 * max(rows, columns) ** 0.5


class GatherEverything:
    """Muon as one writes it for `DTensor`s: every rank gathers and orthogonalises every matrix."""

    def __init__(self, params: list[torch.nn.Parameter], lr: float) -> None:
        self._params, self._lr = params, lr
        self._momentum = [torch.zeros_like(param) for param in params]

    @torch.no_grad()
    def step(self) -> None:
        for param, momentum in zip(self._params, self._momentum):
            assert param.grad is not None
            momentum.lerp_(param.grad, 0.05)
            update: Any = param.grad.lerp(momentum, 0.95)
            full = _orthogonalized(update.full_tensor())
            local = DTensor.from_local(full, param.device_mesh).redistribute(placements=param.placements)
            param.mul_(1 - self._lr * 0.1)
            param.add_(local, alpha=-self._lr * ratio(*param.shape))


def _orthogonalized(x: torch.Tensor) -> torch.Tensor:
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=-4.7750, alpha=2.0315), x, beta=3.4445)
    return x.T if tall else x


class WithMuon(Trained):
    """One implementation's model with Muon; both orthogonalise in fp32, and leave all else to nobody."""

    def __init__(self, implementation: str, case: Case) -> None:
        super().__init__(implementation, case)
        whole = case.model()
        self.nbytes = sum(whole.get_parameter(name).nbytes for name in _matrices(whole))
        if implementation == THEIRS:
            matrices = [self.model.get_parameter(name) for name in _matrices(self.model)]
            self.muon: Any = GatherEverything(matrices, lr=1e-3)
        else:
            self.muon = fsdp_wrap.optim.Muon(
                self.model,
                adjust_lr_fn="match_rms_adamw",
                ns_dtype=torch.float32,
                other=lambda params: torch.optim.SGD(params, lr=0.0),
            )


def _matrices(model: torch.nn.Module) -> list[str]:
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, torch.nn.Embedding)}
    named = model.named_parameters()
    return [name for name, param in named if param.dim() == 2 and id(param) not in embeddings]


def measure(case: str, names: list[str], rounds: int) -> dict[str, Any]:
    """Returns seconds of the optimizers' steps, bytes and floating-point operations; called on every rank."""
    competitors = {name: WithMuon(name, CASES[case]) for name in names}
    steps: dict[str, Callable[[], object]] = {}
    for name, competitor in competitors.items():
        competitor.pass_through()
        steps[name] = competitor.muon.step
        steps[f"{name}, AdamW"] = competitor.optimizer.step
    times = interleave(steps, rounds, warmup=2)
    facts = {name: _facts(competitor) for name, competitor in competitors.items()}
    return {"times": times, "facts": facts}


def _facts(trained: WithMuon) -> dict[str, float]:
    step, ranks = trained.muon.step, dist.get_world_size()
    with FlopCounterMode(display=False) as counted:
        step()
    told = torch.tensor(float(counted.get_total_flops()), dtype=torch.float64)
    flops = [torch.empty_like(told) for _ in range(ranks)]
    dist.all_gather(flops, told)
    highest, total = float(max(flops)), float(sum(flops))
    sent = ranks * travelled(step)
    return {
        "sent MB": sent,
        "/ matrices": 1e6 * sent / trained.nbytes,
        "GFLOP": highest / 1e9,
        "most / mean": highest * ranks / total,
    }


def _table(measured: dict[str, Any]) -> Table:
    times, facts = measured["times"], measured["facts"]
    table = compare({name: times[name] for name in facts}, BASELINES)
    for name, row in table.items():
        row.update(facts[name])
        row["/ AdamW"] = statistics.median(times[name]) / statistics.median(times[f"{name}, AdamW"])
    return table


def ask(settings: Settings) -> Figures:
    """Returns a table for each case and number of ranks."""
    figures: Figures = {}
    for title in settings.cases_of([*TITLES], ["medium", "medium on 4 ranks"]):
        name, ranks = TITLES[title]
        names = settings.implementations(IMPLS)
        figures[title] = _table(run_ranks(measure, ranks, name, names, settings.rounds or 15))
    return figures


QUESTION = Question(
    "muon",
    "Muon",
    """\
Milliseconds of a step of Muon by the slower rank, one thread each, orthogonalised in fp32. `fsdp2` gathers
every matrix on every rank and orthogonalises it there, on torch's `fully_shard`; the others are
`fsdp_wrap.optim.Muon`. `sent MB` is what all ranks send each other, `/ matrices` that to the bytes of all
matrices; `GFLOP` what the busiest rank computes, `most / mean` that to the mean. `/ AdamW` is a step of Muon
to one of `torch.optim.AdamW` on the same model.""",
    ask,
    chart="ms",
    cases=[*TITLES],
    implementations=IMPLS,
)


if __name__ == "__main__":
    ask_alone(QUESTION)
