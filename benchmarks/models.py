"""The models that benchmarks train: each returns its loss; a `Block` is what gets wrapped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.tensor import DTensor

ADAPTER_RANK = 5


class Block(nn.Module):
    """A transformer block: in every case a unit of its own."""


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


class SplitTransformerBlock(Block):
    """The same with a matrix for each of query, key and value, of which a rank may have some of the heads."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.mlp_in, self.mlp_out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.head_width = width // heads

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm1(x)
        projected = (made(normed) for made in (self.query, self.key, self.value))
        query, key, value = (one.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for one in projected)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.norm2(x))))


class Transformer(nn.Module):
    """Next-token prediction."""

    def __init__(
        self,
        blocks: int,
        width: int,
        heads: int,
        length: int,
        vocabulary: int,
        block: Callable[[int, int], Block] = TransformerBlock,
    ) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(block(width, heads) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.blocks(self.token(tokens[:, :-1]) + self.position.weight)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), tokens[:, 1:].flatten())


class Adapted(nn.Module):
    """A frozen linear layer with a trainable low-rank addition."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.down = nn.Linear(linear.in_features, ADAPTER_RANK, bias=False)
        self.up = nn.Linear(ADAPTER_RANK, linear.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.up(self.down(x))


def adapted(model: Transformer) -> Transformer:
    """Freezes a transformer and puts adapters on every linear layer of its blocks; nothing else trains."""
    model.requires_grad_(False)
    for block in model.blocks:
        for name in ("qkv", "out", "mlp_in", "mlp_out"):
            setattr(block, name, Adapted(getattr(block, name)))
    return model


class LinearBlock(Block):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.linear(x))


class ExpertsBlock(Block):
    """A residual layer in which each token goes to one of the experts, as many to each, wherever they are."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.norm, self.gate = nn.LayerNorm(width), nn.Linear(width, width)
        self.up = nn.Parameter(torch.randn(experts, width, 2 * width) / width)
        self.down = nn.Parameter(torch.randn(experts, 2 * width, width) / width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x)
        rows = normed.flatten(0, -2)
        if not isinstance(self.up, DTensor):
            return x + self.gate(normed).sigmoid() * self._compute(rows, self.up, self.down).view_as(x)
        group = self.up.device_mesh.get_group()
        there = all_to_all_single_autograd(rows, None, None, group)
        computed = self._compute(there, self.up.to_local(), self.down.to_local())
        back = all_to_all_single_autograd(computed, None, None, group)
        return x + self.gate(normed).sigmoid() * back.view_as(x)

    def _compute(self, rows: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        grouped = rows.unflatten(0, (up.shape[0], -1))
        return torch.bmm(F.relu(torch.bmm(grouped, up)), down).flatten(0, 1)


class Perceptron(nn.Module):
    """Equal layers."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(LinearBlock(width) for _ in range(layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.layers(x) - x).pow(2).mean()


class ManyParameters(Block):
    def __init__(self, parameters: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(parameters // 2)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Stacked(nn.Module):
    """Blocks of tiny parameters, so that nearly all of a step is overhead."""

    def __init__(self, blocks: int, parameters: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(ManyParameters(parameters) for _ in range(blocks)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).pow(2).sum()


@dataclass(frozen=True)
class Case:
    """A model, its input, and how many rounds give a steady median."""

    about: str
    rounds: int
    model: Callable[[], nn.Module]
    batch: Callable[[], torch.Tensor]
    refused_by: tuple[str, ...] = ()

    def taken_by(self, names: list[str]) -> list[str]:
        """Returns the implementations that take this model."""
        return [name for name in names if name not in self.refused_by]


def transformer(
    blocks: int,
    width: int,
    heads: int,
    length: int,
    vocabulary: int,
    batch: int,
    block: Callable[[int, int], Block] = TransformerBlock,
) -> Case:
    """Makes a transformer that trains all its parameters."""
    return Case(
        f"{blocks} blocks, width {width}, {length} tokens, batch {batch}",
        rounds=9 if width > 64 else 20,
        model=lambda: Transformer(blocks, width, heads, length, vocabulary, block),
        batch=lambda: torch.randint(vocabulary, (batch, length + 1)),
    )


def lora(length: int, batch: int) -> Case:
    """Makes a transformer of which about 1 % trains: frozen and trainable parameters in every unit."""
    return Case(
        f"8 frozen blocks with 1 % of adapters, width 512, {length} tokens, batch {batch}",
        rounds=9,
        model=lambda: adapted(Transformer(8, 512, 8, length, 4096)),
        batch=lambda: torch.randint(4096, (batch, length + 1)),
        refused_by=("fsdp1_flat",),
    )


def stacked(blocks: int, parameters: int) -> Case:
    """Makes a model of nothing but overhead."""
    return Case(
        f"{blocks} blocks of {parameters} parameters of 8 x 8 or 8",
        rounds=40,
        model=lambda: Stacked(blocks, parameters),
        batch=lambda: torch.randn(2, 8),
    )


TINY = transformer(2, 16, 2, 4, 16, batch=2)
MLP = Case(
    "communication-bound: 8 linear layers of width 2048, batch 4",
    rounds=20,
    model=lambda: Perceptron(8, 2048),
    batch=lambda: torch.randn(4, 2048),
)
CASES = {
    "gpt": transformer(8, 512, 8, 128, 4096, batch=4),
    "small": transformer(12, 64, 4, 16, 256, batch=2),
    "mlp": MLP,
    "lora": lora(128, batch=4),
    "tiny": TINY,
}
# What tensor parallelism cuts: query, key and value apart.
SPLIT_CASES = {
    "gpt": transformer(8, 512, 8, 128, 4096, 4, SplitTransformerBlock),
    "small": transformer(12, 64, 4, 16, 256, 2, SplitTransformerBlock),
    "tiny": transformer(2, 16, 2, 4, 16, 2, SplitTransformerBlock),
}
# A part of a batch at a time.
PART_CASES = {
    "small": transformer(12, 64, 4, 16, 256, batch=1),
    "mlp": MLP,
    "tiny": TINY,
}
# For memory: hardly any activations, which are the same for all and would hide what differs.
SHORT_CASES = {
    "gpt": transformer(8, 512, 8, 16, 4096, batch=1),
    "mlp": MLP,
    "lora": lora(16, batch=1),
    "tiny": TINY,
}


def sizes(case: Case) -> nn.Module:
    """Makes a case's model without its values: on the meta device."""
    with torch.device("meta"):
        return case.model()


def largest_block(case: Case) -> int:
    """Counts the bytes of the parameters of a case's largest block."""
    blocks = (module for module in sizes(case).modules() if isinstance(module, Block))
    return max(sum(param.nbytes for param in block.parameters()) for block in blocks)
