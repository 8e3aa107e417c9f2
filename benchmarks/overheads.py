"""What sharding costs besides computing and sending, with the competitors taking turns in one run.

    python -m benchmarks.overheads --impl fsdp1,fsdp2,fsdp_wrap,fully_shard

- `host`: time per unit of 12 parameters and step on a process group that sends nothing ("fake", of 8 ranks),
  beyond that of the same model without wrapping.
- `memory`: most bytes above the sharded state (parameters and optimizer state) in an evaluation, and in a
  forward with its backward, in blocks of the largest wrapped module's parameters; over gloo.
- `update`: clipping the gradients' norm, and a step of AdamW, of a model with 150 parameters; over gloo.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

if not __package__:  # run as a file: let the repository be found
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.harness import interleave, machine, peak_bytes, run_ranks, summarize, table
from benchmarks.step import CASES, IMPLEMENTATIONS, Block, Case, _count, _names

FAKE_RANKS = 8


class Stacked(nn.Module):
    """Blocks of 12 tiny parameters each, so that nearly all of a step is overhead."""

    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(TwelveParameters() for _ in range(blocks)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).sum()


class TwelveParameters(Block):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


BLOCKS = 16
STACKED = Case("16 blocks of 12 parameters", 40, lambda: Stacked(BLOCKS), lambda: torch.randn(2, 8))


class Trained:
    """A wrapped model, its optimizer and its batch; gradients are there after construction."""

    def __init__(self, implementation: str, case: Case) -> None:
        torch.manual_seed(0)
        make = IMPLEMENTATIONS.get(implementation, lambda module: module)
        self.model: Any = make(case.model())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self._batch = case.batch()
        self.pass_through()
        self.optimizer.step()

    def forward(self) -> torch.Tensor:
        loss: torch.Tensor = self.model(self._batch)
        return loss

    def pass_through(self) -> None:
        self.forward().backward()

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.pass_through()

    def clip(self) -> None:
        """The library's own method where there is one."""
        clip = getattr(self.model, "clip_grad_norm_", None)
        if clip is None:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1e9)
            getattr(norm, "full_tensor", lambda: norm)()
        else:
            clip(1e9)


# --- questions ----------------------------------------------------------------------------------------


def host(names: list[str], rounds: int) -> dict[str, Any]:
    """Called in one process: milliseconds of a step by competitor, and of the plain model."""
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=FAKE_RANKS)
    competitors = {name: Trained(name, STACKED) for name in ["plain", *names]}
    return interleave({name: each.step for name, each in competitors.items()}, rounds, warmup=5, alone=True)


def memory(names: list[str], case_name: str) -> dict[str, Any]:
    """Called on every rank: peak bytes above the sharded state, by competitor and phase."""
    found = {}
    for name in names:
        trained = Trained(name, CASES[case_name])
        trained.step()
        trained.optimizer.zero_grad()
        forward = torch.no_grad()(trained.forward)
        forward()
        found[name] = {
            "rest": _held(trained),
            "forward": peak_bytes(forward),
            "step": peak_bytes(trained.pass_through),
        }
        del trained, forward
    return found


def update(names: list[str], case_name: str, rounds: int) -> dict[str, Any]:
    """Called on every rank: seconds of clipping and of the optimizer, by competitor."""
    competitors = {name: Trained(name, CASES[case_name]) for name in names}
    for each in competitors.values():
        each.pass_through()
    return {
        "clip": interleave({name: each.clip for name, each in competitors.items()}, rounds, warmup=3),
        "optimizer": interleave(
            {name: each.optimizer.step for name, each in competitors.items()}, rounds, warmup=3
        ),
    }


def _held(trained: Trained) -> int:
    """Bytes of this rank's parameters and optimizer state."""
    params = list(trained.model.parameters())
    state = [value for entry in trained.optimizer.state.values() for value in entry.values()]
    local = [getattr(each, "_local_tensor", each) for each in (*params, *state)]
    storages = (each.untyped_storage() for each in local)
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


# --- reporting ----------------------------------------------------------------------------------------


def ask_host(options: argparse.Namespace) -> None:
    times = run_ranks(host, 1, options.impl, options.rounds or STACKED.steps)
    rows = summarize(times, options.impl[0])
    plain = rows.pop("plain").median_ms
    width = max(map(len, rows))
    print(f"host time per unit and step, {FAKE_RANKS} ranks on a fake process group: microseconds")
    first = 1e3 * (rows[options.impl[0]].median_ms - plain) / BLOCKS
    for name, row in rows.items():
        per_unit = 1e3 * (row.median_ms - plain) / BLOCKS
        print(f"  {name:{width}}  {per_unit:8.0f}  {per_unit / first:6.2f}")
    print(flush=True)


def ask_memory(options: argparse.Namespace) -> None:
    for case in options.cases:
        found = run_ranks(memory, options.ranks, options.impl, case)
        unit = _largest_block(CASES[case].model())
        width = max(map(len, found))
        print(f"{case}: peak bytes above the sharded state, in blocks of {unit / 1e6:.1f} MB; MB at rest")
        for name, row in found.items():
            cells = f"{row['forward'] / unit:8.2f} {row['step'] / unit:8.2f} {row['rest'] / 1e6:8.1f}"
            print(f"  {name:{width}}  evaluation, training, rest: {cells}")
        print(flush=True)


def ask_update(options: argparse.Namespace) -> None:
    found = run_ranks(update, options.ranks, options.impl, "small", options.rounds or 60)
    for what, times in found.items():
        print(table(f"small: {what}", summarize(times, options.impl[0]), options.impl[0]) + "\n", flush=True)


def _largest_block(model: nn.Module) -> int:
    blocks = (module for module in model.modules() if isinstance(module, Block))
    return max(sum(param.nbytes for param in block.parameters()) for block in blocks)


QUESTIONS: dict[str, Callable[[argparse.Namespace], None]] = {
    "host": ask_host,
    "memory": ask_memory,
    "update": ask_update,
}


def main() -> None:
    options = _parse()
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    print(f"{options.ranks} ranks, 1 thread each\n", flush=True)
    for question in options.questions:
        QUESTIONS[question](options)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Host time, memory, clipping and optimizer.")
    known = partial(_names, IMPLEMENTATIONS)
    parser.add_argument("--impl", type=known, default="fsdp1,fsdp2,fsdp_wrap,fully_shard", metavar="A,B")
    parser.add_argument(
        "--questions", type=partial(_names, QUESTIONS), default="host,memory,update", metavar="A,B"
    )
    parser.add_argument("--cases", type=partial(_names, CASES), default="mlp", metavar="A,B")
    parser.add_argument("--ranks", type=_count, default=2, metavar="N")
    parser.add_argument("--rounds", type=_count, metavar="N")
    return parser.parse_args()


if __name__ == "__main__":
    main()
