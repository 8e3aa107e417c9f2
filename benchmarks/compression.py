"""What compressed gathers and reductions cost a training in loss, and save in bytes and time.

    python -m benchmarks.compression --cases small,gpt

The transformers of the step benchmark learn bytes of Python's standard library, once in fp32 and once with
each way of compressing (`fsdp_wrap.comm_hooks.compress`), all in the same rank processes, from the same
weights, on the same batches, taking turns. The losses on held-out text are those of the exact weights.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

if not __package__:  # run as a file: let the repository be found
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import interleave, machine, run_ranks
from benchmarks.step import Block, Transformer
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
POINTS = 8  # of a curve in the table; the file has all


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
    "small": Case((12, 64, 4, 16, 256), batch=16, steps=1000, rate=1e-3),
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
            sizes = [sum(t.nbytes for t in tree_iter(each) if isinstance(t, torch.Tensor)) for each in args]
            self.needed += max(sizes) * (1 - 1 / dist.get_world_size())
        return result


class Training:
    """One way of communicating in training on real text."""

    def __init__(self, case: Case, way: str, corpus: Corpus) -> None:
        torch.manual_seed(0)
        self._case, self._corpus = case, corpus
        self._model = FSDP(Transformer(*case.shape), auto_wrap_policy=ModuleWrapPolicy({Block}))
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
        """With the weights as they are saved; the same windows on all ranks."""
        compress(self._model)
        index = torch.arange(HELD_OUT_WINDOWS)
        inputs, targets = self._corpus.held_out_windows(index, HELD_OUT_WINDOWS, self._case.context)
        return float(self._model(torch.cat([inputs, targets[:, -1:]], dim=1)))


def measure(case_name: str, steps: int | None) -> dict[str, Any]:
    """Called on every rank: of each way the losses over the ranks, seconds and bytes, held-out loss."""
    case = CASES[case_name]
    corpus = Corpus.load(None, case.context)
    trainings = {way: Training(case, way, corpus) for way in WAYS}
    turns = {way: training.step for way, training in trainings.items()}
    times = interleave(turns, rounds=(steps or case.steps) - WARMUP, warmup=WARMUP)
    found = {}
    for way, training in trainings.items():
        losses = torch.tensor(training.losses)
        dist.all_reduce(losses)
        found[way] = {
            "losses": (losses / dist.get_world_size()).tolist(),
            "seconds": times[way],
            "bytes": training.bytes_of_a_step(),
            "held_out": training.held_out_loss(),
        }
    return found


def table(title: str, found: dict[str, Any]) -> str:
    """Bytes, time and losses as text, one way a line, and the curves below."""
    base = found["fp32"]
    lines = [title, f"  {'':10}  MB / step  / fp32  time / fp32  last losses  held out  drift"]
    for way, row in found.items():
        last = statistics.fmean(row["losses"][-len(row["losses"]) // 10 :])
        paired = statistics.median(mine / other for mine, other in zip(row["seconds"], base["seconds"]))
        drift = row["held_out"] / base["held_out"] - 1
        sent = f"{row['bytes'] / 1e6:9.2f}  {row['bytes'] / base['bytes']:6.3f}"
        lines.append(
            f"  {way:10}  {sent}  {paired:11.2f}  {last:11.4f}  {row['held_out']:8.4f}  {drift:+.2%}"
        )
    return "\n".join([*lines, "", *curves(found)])


def curves(found: dict[str, Any]) -> list[str]:
    """Mean losses of equal stretches of the training."""
    length = max(1, len(found["fp32"]["losses"]) // POINTS)
    starts = range(0, length * POINTS, length)
    lines = [f"  {'to step':10}  " + "  ".join(f"{start + length:6}" for start in starts)]
    for way, row in found.items():
        means = [statistics.fmean(row["losses"][start : start + length]) for start in starts]
        lines.append(f"  {way:10}  " + "  ".join(f"{mean:6.3f}" for mean in means))
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description="Loss, bytes and time of training with compression.")
    parser.add_argument("--cases", default="small,gpt", metavar="A,B", help=f"of {', '.join(CASES)}")
    parser.add_argument("--ranks", type=int, default=2, metavar="N")
    parser.add_argument("--steps", type=int, metavar="N", help=f"at least {POINTS}")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    if unknown := set(options.cases.split(",")) - set(CASES):
        parser.error(f"{', '.join(sorted(unknown))} unknown; there are {', '.join(CASES)}")
    if options.ranks < 2 or (options.steps or POINTS) < POINTS:
        parser.error(f"--ranks must be at least 2, and --steps {POINTS}")
    print(", ".join(f"{name} {value}" for name, value in machine().items()), flush=True)
    results = {
        name: run_ranks(measure, options.ranks, name, options.steps) for name in options.cases.split(",")
    }
    for name, found in results.items():
        print(f"\n{table(f'{name}, {options.ranks} ranks', found)}", flush=True)
    if options.json:
        content = {"machine": machine(), "ranks": options.ranks, "cases": results}
        options.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
