"""Nets of a few linear layers, for tests that need no more of a model."""

from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH = 6


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    """Two blocks between layers of the root."""

    block: type[nn.Module] = Block

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([self.block(), self.block()])
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return Net().double()


def stack(*widths: int) -> nn.Sequential:
    """Makes layers of these widths with tanh between them, always of the same values."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for before, behind in pairwise(widths):
        layers += [nn.Linear(before, behind), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()


class Checkpointing(nn.Module):
    """Lets a `Net` recompute its blocks in backward."""

    reentrant = False

    def forward(self: Any, x: torch.Tensor) -> Any:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


class Middle(nn.Module):
    """A layer in a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return torch.tanh(self.linear(x))


class Around(nn.Module):
    """A nested module between two layers of the root."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(WIDTH, WIDTH), Middle(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.last(self.middle(self.first(x)))
