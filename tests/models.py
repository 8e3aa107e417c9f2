"""Small models and loops that several tests train."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import ShardingStrategy
from fsdp_wrap.wrap import ModuleWrapPolicy, NameWrapPolicy, size_based_auto_wrap_policy

VOCABULARY, WIDTH, LENGTH = 50, 32, 7


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """A byte-sized language model with an odd vocabulary; its loss is the output."""

    def __init__(self, blocks: int = 3, width: int = WIDTH, vocabulary: int = VOCABULARY + 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


WRAPPINGS: dict[str, Callable[[], Any]] = {
    "whole": lambda: None,
    "block": lambda: ModuleWrapPolicy({Block}),
    "name": lambda: NameWrapPolicy("Block"),
    "size": lambda: (
        lambda module, recurse, nonwrapped_numel: size_based_auto_wrap_policy(
            module, recurse, nonwrapped_numel, min_num_params=3000
        )
    ),
}
"""Makers of `auto_wrap_policy` by a name that travels to the ranks."""


def tokens(rank: int, step: int, batch: int = 2) -> torch.Tensor:
    """Returns a batch that depends on rank and step only."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, VOCABULARY, (batch, LENGTH), generator=generator)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Returns the next-token loss."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> list[float]:
    """Trains a plain model; returns the losses."""
    losses = []
    for step in steps:
        loss = loss_of(model, tokens(rank, step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def twins(
    make: Callable[[], nn.Module], dtype: torch.dtype = torch.float32, **kwargs: Any
) -> tuple[nn.Module, FSDP]:
    """Makes a plain model and a wrapped one with the same parameters."""
    torch.manual_seed(0)
    plain = make().to(dtype)
    return plain, FSDP(copy.deepcopy(plain), **kwargs)


def transformer_twins(
    use_orig_params: bool, strategy: str = "FULL_SHARD", **options: Any
) -> tuple[nn.Module, FSDP]:
    """Makes a plain transformer in float64, and an equal one with a unit for each block."""
    return twins(
        Transformer,
        torch.float64,
        auto_wrap_policy=WRAPPINGS["block"](),
        use_orig_params=use_orig_params,
        sharding_strategy=ShardingStrategy[strategy],
        **options,
    )


def full_grads(model: FSDP) -> dict[str, torch.Tensor]:
    """Full gradients by clean name, gathered with plain collectives from the intervals that ranks hold.

    Gradients are moved into the place of the parameters, whose full form the state dict gives.
    """
    all_buffers = [unit._unit.buffers for unit in FSDP.fsdp_modules(model) if unit._unit.params]
    sharded = [segment.params for buffers in all_buffers for segment in buffers.segments]
    holders = {id(param): param for params in sharded for param in params.sources}
    kept = {key: param.detach().clone() for key, param in holders.items()}
    with torch.no_grad():
        for param in holders.values():
            param.copy_(torch.zeros_like(param) if param.grad is None else param.grad)
        grads = model.state_dict()
        for key, param in holders.items():
            param.copy_(kept[key])
    return grads


def gather_objects(value: Any) -> list[Any]:
    """Returns the value of every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def named_state(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Returns parameters of a plain module, or of DDP's."""
    yield from getattr(module, "module", module).named_parameters()
