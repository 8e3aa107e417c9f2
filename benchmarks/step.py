"""Time of a training step, relative to DDP, with the competitors taking turns in one run.

    python -m benchmarks.step --impl ddp,fsdp1,fsdp2,fsdp_wrap --cases gpt,small,mlp

A step is zero_grad, forward, backward and AdamW, in fp32. All competitors live in the same rank processes and
start from the same weights; a new case or implementation is one entry in `CASES` or `IMPLEMENTATIONS`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

if not __package__:  # run as a file: let the repository be found
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import fsdp_wrap
from benchmarks.harness import Summary, interleave, machine, run_ranks, summarize, table, write_json
from fsdp_wrap.wrap import ModuleWrapPolicy

WARMUP = 3


# --- models -------------------------------------------------------------------------------------------


class Block(nn.Module):
    """What is wrapped: in every case a unit of its own."""


class TransformerBlock(Block):
    """Twelve parameters: two norms, attention, a two-layer perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp_in, self.mlp_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.norm2(x))))


class Transformer(nn.Module):
    """Next-token prediction; `forward` returns the loss."""

    def __init__(self, blocks: int, width: int, heads: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(TransformerBlock(width, heads) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.token(tokens[:, :-1]) + self.position.weight)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


class LinearBlock(Block):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.linear(x))


class Perceptron(nn.Module):
    """Equal layers; `forward` returns the loss."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(LinearBlock(width) for _ in range(layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layers(x) - x).pow(2).mean()


# --- cases and implementations ------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A model that returns its loss, its input, and how many steps give a steady median."""

    about: str
    steps: int
    model: Callable[[], nn.Module]
    batch: Callable[[], torch.Tensor]


CASES = {
    "gpt": Case(
        "compute-bound: 8 blocks, width 512, 128 tokens, batch 4",
        steps=10,
        model=lambda: Transformer(8, 512, 8, 128, 4096),
        batch=lambda: torch.randint(4096, (4, 129)),
    ),
    "small": Case(
        "overhead-bound: 12 blocks, width 64, 16 tokens, batch 2",
        steps=60,
        model=lambda: Transformer(12, 64, 4, 16, 256),
        batch=lambda: torch.randint(256, (2, 17)),
    ),
    "mlp": Case(
        "communication-bound: 8 linear layers of width 2048, batch 4",
        steps=20,
        model=lambda: Perceptron(8, 2048),
        batch=lambda: torch.randn(4, 2048),
    ),
}


def _fsdp1(
    module: nn.Module,
    use_orig_params: bool = True,
    strategy: torch_fsdp.ShardingStrategy = torch_fsdp.ShardingStrategy.FULL_SHARD,
) -> nn.Module:
    return torch_fsdp.FullyShardedDataParallel(
        module,
        sharding_strategy=strategy,
        auto_wrap_policy=TorchModuleWrapPolicy({Block}),
        device_id=torch.device("cpu"),
        use_orig_params=use_orig_params,
    )


def _sharded_by(
    fully_shard: Callable[..., object], module: nn.Module, reshard_after_forward: bool = True
) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for unit in [*(child for child in module.modules() if isinstance(child, Block)), module]:
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard_after_forward)
    return module


def _fsdp_wrap(module: nn.Module, use_orig_params: bool = True) -> nn.Module:
    policy = ModuleWrapPolicy({Block})
    return fsdp_wrap.FullyShardedDataParallel(
        module, auto_wrap_policy=policy, use_orig_params=use_orig_params
    )


IMPLEMENTATIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": DistributedDataParallel,
    "fsdp1": _fsdp1,
    "fsdp1_flat": partial(_fsdp1, use_orig_params=False),
    "fsdp1_grad_op": partial(_fsdp1, strategy=torch_fsdp.ShardingStrategy.SHARD_GRAD_OP),
    "fsdp2": partial(_sharded_by, torch_fsdp.fully_shard),
    "fsdp2_keep": partial(_sharded_by, torch_fsdp.fully_shard, reshard_after_forward=False),
    "fsdp_wrap": _fsdp_wrap,
    "fsdp_wrap_flat": partial(_fsdp_wrap, use_orig_params=False),
    "fully_shard": partial(_sharded_by, fsdp_wrap.fully_shard),
    "fully_shard_keep": partial(_sharded_by, fsdp_wrap.fully_shard, reshard_after_forward=False),
}


# --- measuring ----------------------------------------------------------------------------------------


class Competitor:
    """One implementation's model and optimizer in training on one batch."""

    def __init__(self, implementation: str, case: Case) -> None:
        torch.manual_seed(0)
        self._model = IMPLEMENTATIONS[implementation](case.model())
        self._optimizer = torch.optim.AdamW(self._model.parameters())
        torch.manual_seed(1 + dist.get_rank())
        self._batch = case.batch()
        self.loss = float("nan")

    def step(self) -> None:
        self._optimizer.zero_grad()
        loss = self._model(self._batch)
        loss.backward()
        self._optimizer.step()
        self.loss = loss.item()


def measure(case_name: str, implementations: list[str], steps: int | None) -> dict[str, list[float]]:
    """Called on every rank: seconds per step of each implementation."""
    case = CASES[case_name]
    competitors = {name: Competitor(name, case) for name in implementations}
    turns = {name: competitor.step for name, competitor in competitors.items()}
    times = interleave(turns, rounds=steps or case.steps, warmup=WARMUP)
    _check_same_work({name: competitor.loss for name, competitor in competitors.items()})
    return times


def _check_same_work(losses: dict[str, float]) -> None:
    """Competitors that do the same work have, up to rounding, the same loss."""
    low, high = min(losses.values()), max(losses.values())
    if not high - low <= 1e-2 * abs(high):
        raise RuntimeError(f"the implementations do not train alike; their losses are {losses}")


def main() -> None:
    options = _parse()
    baseline = "ddp" if "ddp" in options.impl else options.impl[0]
    print(", ".join(f"{name} {value}" for name, value in machine().items()))
    print(f"{options.ranks} ranks over gloo, 1 thread each\n", flush=True)
    results: dict[str, dict[str, Summary]] = {}
    for name in options.cases:
        times = run_ranks(measure, options.ranks, name, options.impl, options.steps)
        results[name] = summarize(times, baseline)
        print(table(f"{name}, {CASES[name].about}", results[name], baseline) + "\n", flush=True)
    if options.json:
        write_json(options.json, {"ranks": options.ranks, "steps": options.steps}, results)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time of a training step, relative to DDP.")
    implementations = partial(_names, IMPLEMENTATIONS)
    parser.add_argument("--impl", type=implementations, default="ddp,fsdp1,fsdp2,fsdp_wrap", metavar="A,B")
    parser.add_argument("--cases", type=partial(_names, CASES), default="gpt,small,mlp", metavar="A,B")
    parser.add_argument("--ranks", type=_count, default=2, metavar="N")
    parser.add_argument("--steps", type=_count, metavar="N", help="rounds in each case")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser.parse_args()


def _names(known: Mapping[str, object], text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in known]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)} unknown; there are {', '.join(known)}")
    return names


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {number}")
    return number


if __name__ == "__main__":
    main()
