"""`audit` finds flipped bits in drawn steps, names rank, unit and phase, and nothing in clean steps."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.checkpoint import checkpoint

from bed import ranks
from fronts import FRONTS, inner, no_sync, shard, shard_columns, within_copy
from fsdp_wrap import (
    Audit,
    Corruption,
    CorruptionError,
    CPUOffload,
    MixedPrecision,
    ShardingStrategy,
    audit,
    fully_shard,
)
from fsdp_wrap._core import ValueSeam, ValueWatcher, value_watchers
from fsdp_wrap._core.torch_private import graph_task
from fsdp_wrap._values.statistics import bit_sums, block_sums, changed_place
from fsdp_wrap.wrap import ModuleWrapPolicy
from nets import WIDTH, Block, Net

INTS = {2: torch.int16, 4: torch.int32}
flips: list[Callable[[torch.Tensor], torch.Tensor]] = []
"""What is to be done once to the activation of a block, or to its gradient."""


class Passing(torch.autograd.Function):
    """Passes a tensor and its gradient on, and flips a bit once."""

    @staticmethod
    def forward(ctx, x, backward):
        ctx.backward = backward
        return x.clone() if backward or not flips else flips.pop()(x)

    @staticmethod
    def backward(ctx, grad):
        return (flips.pop()(grad) if ctx.backward and flips else grad), None


class FaultyBlock(Block):
    backward: bool | None = None

    def __init__(self) -> None:
        super().__init__()
        self.drop, self.norm = nn.Dropout(0.2), nn.BatchNorm1d(5)

    def forward(self, x):
        hidden = torch.tanh(self.up(x))
        if self.backward is not None:
            hidden = Passing.apply(hidden, self.backward)
        return x + self.down(self.drop(self.norm(hidden)))


class FaultyNet(Net):
    block = FaultyBlock


class CheckpointedNet(FaultyNet):
    reentrant = False

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(x)


class ReentrantNet(CheckpointedNet):
    reentrant = True


def made(front: str, net: type[nn.Module] = FaultyNet, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    return shard(front, net(), ModuleWrapPolicy({FaultyBlock}), **options)


def batch() -> torch.Tensor:
    return torch.randn(8, WIDTH) + dist.get_rank()


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(batch()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


# faults


def flip(tensor: torch.Tensor, draw: random.Random) -> None:
    """Flips a bit of an element."""
    flat = tensor.detach().reshape(-1) if tensor.is_contiguous() else tensor.detach()
    ints = flat.view(INTS[tensor.element_size()])
    place = tuple(draw.randrange(length) for length in ints.shape)
    bit = draw.randrange(8 * tensor.element_size())
    ints[place] ^= (1 << bit) - (bit == 8 * tensor.element_size() - 1) * (1 << bit + 1)


def flipped(draw: random.Random) -> Callable[[torch.Tensor], torch.Tensor]:
    def apply(tensor: torch.Tensor) -> torch.Tensor:
        tensor = tensor.detach().clone(memory_format=torch.contiguous_format)
        flip(tensor, draw)
        return tensor

    return apply


def pieces_of(layout: Any) -> list[torch.Tensor]:
    return [each.data for each in layout.intervals() if each.data.numel()]


class Fault(ValueWatcher):
    """Flips one bit at a seam of a unit, before others look; `last` after they have looked."""

    def __init__(self, kind: str, unit: Any, draw: random.Random) -> None:
        self.kind, self.unit, self.draw, self.done = kind, unit, draw, False
        self._layout = draw.choice([each for each in unit.layouts if pieces_of(each)] or [None])

    def see(self, owner: Any, seam: ValueSeam, values: Any) -> None:
        if self.done or (owner is not self.unit and owner not in self.unit.layouts):
            return
        target, again = None, graph_task() != -1
        if seam is ValueSeam.PARAMETERS and self.kind == f"gather, {'back' if again else 'for'}ward":
            segment = self.draw.choice([*self.unit.segments])
            target = self.draw.choice([leaf for leaf in segment.leaves]).data
        elif seam is ValueSeam.OUTPUTS and self.kind == "output" and not again:
            target = values[0]
        elif seam is ValueSeam.OUTPUTS and self.kind == "shard, in the step" and self._layout is not None:
            target = self.draw.choice(pieces_of(self._layout))
        elif seam is ValueSeam.GRADIENTS and self.kind == "gradient":
            grads = [leaf.grad for each in self.unit.segments for leaf in each.leaves]
            target = self.draw.choice([each for each in grads if each is not None])
        elif (seam is ValueSeam.REDUCED and self.kind == "reduced shard") or (
            seam is ValueSeam.SENT and self.kind == "reduce buffer, sent"
        ):
            whole = owner.pieces(values[0]) if seam is ValueSeam.REDUCED else owner.parts(values[0])
            parts = whole if seam is ValueSeam.REDUCED else [each for several in whole for each in several]
            target = self.draw.choice([each for each in parts if each.numel()] or [None])
        if target is not None:
            self.done = True
            flip(target, self.draw)


KINDS = {
    "shard, between steps": "shard",
    "shard, in the step": "shard",
    "gather, forward": "gather",
    "gather, backward": "gather",
    "activation": "forward",
    "output": "forward",
    "activation's gradient": "backward",
    "gradient": "backward",
    "reduced shard": "reduction",
    "reduce buffer, sent": "reduction",
    "update": "update",
}
"""Kinds of faults, with the phase to be named."""


@contextmanager
def watching(watcher: Fault, last: bool) -> Iterator[None]:
    value_watchers.insert(len(value_watchers) if last else 0, watcher)
    yield
    value_watchers.remove(watcher)


class Outcome(NamedTuple):
    """What became of a fault: whether it was made and found, and whether rank, unit and phase are right."""

    kind: str
    made: bool
    found: bool
    rank: bool
    unit: bool
    phase: bool
    told: list[Corruption]


def faulty_step(
    kind: str, draw: random.Random, model: nn.Module, optimizer: Any, watch: Audit
) -> tuple[bool, int, str]:
    """Runs a step with one fault; returns whether it was made, the culprit and the name of the unit."""
    (tree,) = watch._trees
    culprit, number = draw.randrange(dist.get_world_size()), tree._number + tree._stepped
    drawn = tree._random("unit", number).choice(
        [unit for unit, name in tree._units.items() if name.startswith("blocks")]
    )
    unit = draw.choice([*tree._units]) if KINDS[kind] in ("shard", "gather", "reduction") else drawn
    here, draw = dist.get_rank() == culprit, random.Random(draw.random())
    fault = Fault(kind if here else "", unit, draw)
    if kind == "shard, between steps":  # of the audited step and the next one
        step(model, optimizer)
        if here and fault._layout is not None:
            flip(draw.choice(pieces_of(fault._layout)), draw)
            fault.done = True
    elif kind.startswith("activation"):
        FaultyBlock.backward = kind != "activation"
        block = getattr(unit.module, "module", unit.module)
        block.backward = FaultyBlock.backward
        FaultyBlock.backward = None
        flips[:] = [flipped(draw)] if here else []
        step(model, optimizer)
        fault.done = not flips
        del block.backward
        flips.clear()
    elif kind == "update":
        optimizer.fault = draw if here else None
        step(model, optimizer)
        unit, fault.done = optimizer.hit or (unit, False)
        optimizer.fault = optimizer.hit = None
    else:
        with watching(fault, last=kind.endswith("sent")):
            step(model, optimizer)
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (fault.done, tree._units[unit]))
    return (*told[culprit][:1], culprit, told[culprit][1])  # type: ignore[return-value]


def sweep(front: str, number: int, seed: int, **options: Any) -> list[Outcome]:
    """Injects faults of all kinds in turn, each into a step of its own."""
    draw, outcomes = random.Random(f"{front} {seed}"), []
    model = made(front, **options)
    start = {name: value.clone() for name, value in inner(model).state_dict().items()}
    for index in range(number):
        kind = [*KINDS][index % len(KINDS)]
        inner(model).load_state_dict(start)
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.01)
        optimizer.fault = optimizer.hit = None

        def spoil(stepped: Any, args: Any, kwargs: Any, optimizer: Any = optimizer) -> None:
            (tree,) = watch._trees
            before = tree._updates._before
            if stepped is optimizer and optimizer.fault is not None and before is not None:
                flip(getattr(before.param, "_local_tensor", before.param), optimizer.fault)
                optimizer.hit = before.unit, True

        hook = register_optimizer_step_post_hook(spoil)
        with audit(model, every=1, on_fault=lambda found: None, seed=seed + index) as watch:
            step(model, optimizer)
            made_it, culprit, unit = faulty_step(kind, draw, model, optimizer, watch)
        hook.remove()
        told = watch.findings
        first = told[0] if told else None
        right = first is not None
        outcomes.append(
            Outcome(
                kind,
                made_it,
                right,
                right and first.rank == culprit,
                right and first.unit == unit,
                right and first.phase == KINDS[kind],
                told,
            )
        )
    return outcomes


@ranks(2)
@pytest.mark.parametrize("front", FRONTS)
def test_sweep(rank, world_size, front):
    found = sweep(front, 44, 0)
    if rank == 0:
        for each in found:
            print(*each[:6], each.told[0].describe() if each.told else "")
    assert False


CLEAN: dict[str, dict[str, Any]] = {
    "plain": {},
    "kept": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "whole": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "offloaded": {"cpu_offload": CPUOffload(offload_params=True)},
    "bf16": {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)},
    "all bf16": {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)},
    "fp16": {"mixed_precision": MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16)},
    "checkpointed": {"net": CheckpointedNet},
    "reentrant": {"net": ReentrantNet},
    "apart": {"travel_together_bytes": 0},
}


def train_clean(model: nn.Module, steps: int) -> int:
    """Trains with all that a program may do between steps; returns the number of audited steps."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    with audit(model, every=1, on_fault="raise") as watch:
        for number in range(steps):
            for context in ([no_sync], [within_copy], [], [])[number % 4]:
                with context(model):
                    model(batch()).square().mean().backward()
            step(model, optimizer)
            with torch.no_grad():
                model.eval()
                model(batch())
                model.train()
                for param in model.parameters():  # as some programs do
                    getattr(param, "_local_tensor", param).data.clamp_(-0.9, 0.9)
    assert not watch.skipped, watch.skipped
    return watch.steps


@ranks(2)
@pytest.mark.parametrize("case", CLEAN)
@pytest.mark.parametrize("front", ["flat", "orig"])
def test_clean(rank, world_size, case, front):
    assert train_clean(made(front, **CLEAN[case]), 8) == 8


@ranks(2)
def test_clean_comp(rank, world_size):
    assert train_clean(made("composable"), 8) == 8
    net = FaultyNet()
    assert train_clean(shard_columns(net, net.blocks), 8) == 8


@ranks(4)
def test_hybrid(rank, world_size):
    torch.manual_seed(0)
    net, mesh = FaultyNet(), init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for block in net.blocks:
        fully_shard(block, mesh=mesh)
    assert train_clean(fully_shard(net, mesh=mesh), 8) == 8
