"""Compressed gathers and reductions: their cost in loss, and the bytes and time that they save.

python -m benchmarks.compression --cases small,gpt

The transformers of the step benchmark learn bytes of Python's standard library, once in fp32 and once with
each way of compressing (`fsdp_wrap.comm_hooks.compress`), all in the same rank processes, from the same
weights, on the same batches, taking turns. The losses on held-out text are those of the exact weights.
"""

from __future__ import annotations

import operator
import statistics
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from benchmarks.harness import Figures, Question, Settings, Table, ask_alone, interleave, run_ranks
from benchmarks.implementations import over
from benchmarks.models import Block, Transformer
from examples.lm.data import Corpus
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.comm_hooks import compress
from fsdp_wrap.wrap import ModuleWrapPolicy

WAYS: dict[str, dict[str, str]] = {
    "fp32": {},
    "bf16": {"gathers": "bf16", "reductions": "bf16"},
    "int8": {"gathers": "int8", "reductions": "int8"},
    "int8, int4": {"gathers": "int8", "reductions": "int4"},
}
WARMUP = 3
HELD_OUT_WINDOWS = 64
POINTS = 8  # of a curve


@dataclass(frozen=True)
class Case:
    """A transformer over bytes, and how it trains."""

    shape: tuple[int, int, int, int, int]
    batch: int
    steps: int
    rate: float

    @property
    def context(self) -> int:
        return self.shape[3]


CASES = {
    "tiny": Case((1, 32, 2, 8, 256), batch=2, steps=0, rate=1e-3),
    "small": Case((12, 64, 4, 16, 256), batch=16, steps=80, rate=1e-3),
    "gpt": Case((8, 512, 8, 128, 4096), batch=4, steps=100, rate=3e-4),
}


class Bytes(TorchDispatchMode):
    """Counts bytes that must reach other ranks: of inputs or outputs, whichever is more."""

    def __init__(self) -> None:
        super().__init__()
        self.needed = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            sizes = [sum(t.nbytes for t in tree_iter(arg) if isinstance(t, torch.Tensor)) for arg in args]
            self.needed += max(sizes) * (1 - 1 / dist.get_world_size())
        return result


class Training:
    """One way of communicating in training on real text."""

    def __init__(self, case: Case, way: str, corpus: Corpus) -> None:
        torch.manual_seed(0)
        self._case, self._corpus = case, corpus
        wrap = partial(FSDP, auto_wrap_policy=ModuleWrapPolicy({Block}))
        self._model = over(False, wrap, Transformer(*case.shape))
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=case.rate)
        compress(self._model, **WAYS[way])
        self.losses: list[float] = []

    def step(self) -> None:
        key = f"{len(self.losses)} {dist.get_rank()}"
        inputs, targets = self._corpus.batch(key, self._case.batch, self._case.context)
        loss = self._model(torch.cat([inputs, targets[:, -1:]], dim=1))
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        self.losses.append(loss.item())

    def bytes_of_a_step(self) -> float:
        with Bytes() as counted:
            self.step()
        return counted.needed

    @torch.no_grad()
    def held_out_loss(self) -> float:
        """Returns the loss of the weights as they are saved, on the same windows on all ranks."""
        compress(self._model)
        index = torch.arange(HELD_OUT_WINDOWS)
        inputs, targets = self._corpus.held_out_windows(index, HELD_OUT_WINDOWS, self._case.context)
        return float(self._model(torch.cat([inputs, targets[:, -1:]], dim=1)))


def measure(case_name: str, steps: int | None) -> dict[str, Any]:
    """Returns losses over the ranks, seconds, bytes and held-out loss of each way; called on every rank."""
    case = CASES[case_name]
    corpus = Corpus.load(None, case.context)
    trainings = {way: Training(case, way, corpus) for way in WAYS}
    turns = {way: training.step for way, training in trainings.items()}
    times = interleave(turns, rounds=(steps or case.steps) - WARMUP, warmup=WARMUP)
    rows = {}
    for way, training in trainings.items():
        losses = torch.tensor(training.losses)
        dist.all_reduce(losses)
        rows[way] = {
            "losses": (losses / dist.get_world_size()).tolist(),
            "seconds": times[way],
            "bytes": training.bytes_of_a_step(),
            "held_out": training.held_out_loss(),
        }
    return rows


def summary(rows: dict[str, Any]) -> Table:
    """Returns bytes, time and losses of each way."""
    base = rows["fp32"]
    return {
        way: {
            "MB a step": row["bytes"] / 1e6,
            "/ fp32": row["bytes"] / base["bytes"],
            "time / fp32": statistics.median(map(operator.truediv, row["seconds"], base["seconds"])),
            "loss": statistics.fmean(row["losses"][-max(1, len(row["losses"]) // 10) :]),
            "held out": row["held_out"],
            "drift %": 100 * (row["held_out"] / base["held_out"] - 1),
        }
        for way, row in rows.items()
    }


def curves(rows: dict[str, Any]) -> Table:
    """Returns mean losses of equal stretches of the training."""
    length = max(1, len(rows["fp32"]["losses"]) // POINTS)
    starts = range(0, length * POINTS, length)
    return {
        way: {f"to {at + length}": statistics.fmean(row["losses"][at : at + length]) for at in starts}
        for way, row in rows.items()
    }


def ask(settings: Settings) -> Figures:
    """Returns two tables a case; only the first case if nothing else is asked for."""
    figures = {}
    for name in settings.cases_of([*CASES], usual=["small"]):
        steps = max(settings.rounds or CASES[name].steps, WARMUP + POINTS)
        rows = run_ranks(measure, settings.ranks, name, steps)
        figures[name] = summary(rows)
        figures[f"{name}, mean loss"] = curves(rows)
    return figures


QUESTION = Question(
    "compression",
    "Compression",
    f"""\
A transformer learns bytes of Python's standard library over 2 ranks, in fp32 and with each way of
compressing gathers and reductions (`fsdp_wrap.comm_hooks.compress`), from the same weights, on the same
batches: {CASES["small"].steps} steps of small. Bytes are those that must reach other ranks, counted
below the library; `loss` is the mean of the last tenth of the steps, `held out` that of the exact weights on
other text, `drift` its distance from fp32's.""",
    ask,
    chart="/ fp32",
    cases=[*CASES],
)


if __name__ == "__main__":
    ask_alone(QUESTION)
