"""Models of generated programs: plain ones, and how each is sharded."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from fronts import chosen, shard
from fsdp_wrap import (
    CPUOffload,
    allow_skipping,
    replicate,
    set_gradients_in_place,
    set_travel_together_bytes,
)

WIDTH, ROWS = 6, 4
FRONTS = ("flat", "orig", "composable", "replicate")


class Fuse(nn.Module):
    """Passes its input on; raises in forward or backward if it is armed, or waits in the backward."""

    armed: str | None = None
    pause = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.pause and x.requires_grad:
            x = x.clone()
            x.register_hook(lambda grad: time.sleep(self.pause))
        if self.armed == "forward":
            self._burn()
        if self.armed == "backward" and x.requires_grad:
            x = x.clone()
            x.register_hook(self._burn)
        return x

    def _burn(self, *_: Any) -> None:
        raise ArithmeticError("on purpose")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH + 3), nn.Linear(WIDTH + 3, WIDTH)
        self.fuse = Fuse()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.fuse(self.up(x)).tanh())


class Chain(nn.Module):
    """Blocks in some order, in checkpoints or not, between parameters of its own."""

    def __init__(self, order: Sequence[int] = (0, 1, 2), reentrant: bool | None = None) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 2)
        self._order, self._reentrant = order, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for number in self._order:
            block = self.blocks[number]
            x = block(x) if self._reentrant is None else checkpoint(block, x, use_reentrant=self._reentrant)
        return self.head(x)


class Net(nn.Module):
    """One or several models that train together by one loss.

    Attributes:
        roots: The names of the models.
        lacks: The names of optimizers, and of what an event may do, that cannot go with it.
    """

    roots: Sequence[str] = ("model",)
    lacks: frozenset[str] = frozenset()

    def models(self) -> list[Any]:
        return [getattr(self, name) for name in self.roots]

    def units(self) -> list[nn.Module]:
        """Returns the modules that become units before the roots do."""
        blocks = [block for model in self.models() for block in model.blocks]
        return [*dict.fromkeys(blocks)]

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.models()[0](x).square().mean()

    def sharded(self) -> None:
        """Is called after the net was sharded."""


class Single(Net):
    def __init__(self, *given: Any) -> None:
        super().__init__()
        self.model = Chain(*given)


class Tied(Single):
    def __init__(self) -> None:
        super().__init__()
        self.model.blocks[2].up.weight = self.model.blocks[0].up.weight


class Reentrant(Single):
    """Has no gradients by `autograd.grad`, nor derivatives of derivatives."""

    lacks = frozenset({"penalty", "fgsm", "saliency", "hvp", "reproducible"})

    def __init__(self) -> None:
        super().__init__((0, 1, 2), True)


OF_ONE_MODEL = frozenset({"join", "reproducible", "clip", "in_backward", "in_thread"})


class Shared(Net):
    """Two models that share a unit."""

    roots, lacks = ("one", "other"), OF_ONE_MODEL

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Chain(), Chain()
        self.other.blocks[1] = self.one.blocks[1]

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x).square().mean() + self.other(x).sin().mean()


class Chained(Net):
    """One loss through two models."""

    roots, lacks = ("one", "other"), OF_ONE_MODEL

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Chain(), Chain()
        self.one.head = nn.Linear(WIDTH, WIDTH)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.one(x)).square().mean()


class Viewed(nn.Module):
    """A block whose output its caller edits in place: a view, views, or a whole tensor."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.block, self._way = Block(), way

    def forward(self, x: torch.Tensor) -> Any:
        y = self.block(x)
        if self._way == "flattened":
            return y.unflatten(-1, (2, -1)).flatten(1).transpose(0, 1)
        return (y[:, :2], y[:, 2:]) if self._way == "sliced" else y


class Editing(Net):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.model = _Editor(way)


class _Editor(nn.Module):
    def __init__(self, way: str) -> None:
        super().__init__()
        self.blocks, self._way = nn.ModuleList(Viewed(way) for _ in range(2)), way
        self.place, self.head = nn.Parameter(torch.rand(WIDTH, 1)), nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            y = block(x)
            if self._way == "sliced":
                y[0].mul_(2.0)
                y[1].add_(self.place[2:, 0])
                x = torch.cat(y, 1)
            elif self._way == "flattened":
                y += self.place
                x = y.transpose(0, 1)
            else:
                x = y.relu_() + self.place[:, 0]
        return self.head(x)


class _Mixture(nn.Module):
    """Experts of which a rank's batch reaches some."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(Block() for _ in range(3))
        self.scale, self.head = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = x.detach()[:2, 0].mul(3).long().abs() % 3
        x = x * self.scale
        out = x
        for number in chosen.unique().tolist():
            out = out + self.experts[number](x)
        return self.head(out)


class Experts(Net):
    lacks = frozenset({"raise"})

    def __init__(self) -> None:
        super().__init__()
        self.model = _Mixture()

    def units(self) -> list[nn.Module]:
        return [*self.model.experts]

    def sharded(self) -> None:
        allow_skipping(self.model.experts)


class _TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block, self.side = Block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.block(x), self.side(x)


class _Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.own = _TwoOutputs(), nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = self.inner(x * self.own)
        return first * self.own, second


class _Crossed(nn.Module):
    """The gradient of the second output comes first, that of the first after another unit's backward."""

    def __init__(self) -> None:
        super().__init__()
        self.outer, self.block, self.head = _Outer(), Block(), nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.outer(x)
        return self.head(self.block(first) + second)


class Nested(Net):
    """A unit with a parameter of its own, around one with two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.model = _Crossed()

    def units(self) -> list[nn.Module]:
        return [self.model.outer.inner, self.model.outer, self.model.block]


class Score(Single):
    """Sliced score matching, by forward derivatives."""

    lacks = frozenset({"raise"})

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        direction = torch.ones_like(x)
        both: Any = torch.func.jvp(self.model, (x,), (direction,))
        out, along = both
        return (along.sum(-1) + 0.5 * out.square().sum(-1)).mean()


NETS: dict[str, Callable[[], Net]] = {
    "plain": Single,
    "tied": Tied,
    "twice": lambda: Single((0, 1, 0, 2, 1)),
    "checkpointed": lambda: Single((0, 1, 2), False),
    "reentrant": Reentrant,
    "shared": Shared,
    "chained": Chained,
    "flattened": lambda: Editing("flattened"),
    "sliced": lambda: Editing("sliced"),
    "whole": lambda: Editing("whole"),
    "experts": Experts,
    "nested": Nested,
    "score": Score,
}


def make(name: str) -> Net:
    torch.manual_seed(0)
    return NETS[name]().double()


@cache
def lacks(name: str) -> frozenset[str]:
    """Returns `Net.lacks` of a net."""
    return NETS[name]().lacks


def shard_net(net: Net, front: str, strategy: str, flags: Sequence[str]) -> None:
    """Shards a net in place. Modules become units from the inside out, the roots last."""
    given = chosen(front, strategy, dist.get_world_size())
    if "offload" in flags:
        given["cpu_offload"] = CPUOffload(offload_params=True)
    if "ahead" in flags:
        given["forward_prefetch"] = True

    def sharded(module: nn.Module) -> nn.Module:
        return replicate(module) if front == "replicate" else shard(front, module, **given)

    places = [(module, name, child) for module in net.modules() for name, child in module._modules.items()]
    for unit in [*net.units(), *net.models()]:
        wrapped = sharded(unit)
        for module, name, child in places:
            if child is unit and wrapped is not unit:
                setattr(module, name, wrapped)
    for model in net.models():
        set_travel_together_bytes(model, 0 if "alone" in flags else None)
        set_gradients_in_place(model, "overwrites" in flags)
    net.sharded()
