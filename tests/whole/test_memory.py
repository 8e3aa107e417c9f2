"""What is in memory: shards at rest, few units while running. Measured from live tensors, not estimated."""

import gc
from typing import Any

import pytest
import torch
from torch import nn

from bed import ranks
from bed.memory import live_bytes, only_new_objects
from bed.patience import until
from fronts import assert_same_grads, each_front, either_front, no_sync, prefetching, shard, twins
from fsdp_wrap import ShardingStrategy
from fsdp_wrap._runtime.unit import units_in
from fsdp_wrap.wrap import ModuleWrapPolicy
from models import Block, Transformer, loss_of, tokens, train

WIDTH = 64


class _Square(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(512, 512)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.linear(x).tanh()


def _squares(front: str, count: int, **kwargs: object) -> tuple[nn.Module, int]:
    """Returns a sharded stack of equal units, whose root owns nothing, and the bytes of one unit."""
    module = nn.Sequential(*[_Square() for _ in range(count)])
    unit = sum(param.nbytes for param in module[0].parameters())
    return shard(front, module, ModuleWrapPolicy({_Square}), **kwargs), unit


class _Peak:
    def __init__(self, model: nn.Module) -> None:
        self.value = 0
        for module in model.modules():
            if isinstance(module, nn.Linear):
                module.register_forward_hook(lambda *_: self.look())
                module.register_full_backward_hook(lambda *_: self.look())

    def look(self) -> None:
        self.value = max(self.value, live_bytes())


@each_front
@ranks(4)
def test_few_units_are_whole_at_a_time(rank, world_size, front):
    """Backward: the running unit, the prefetched one, gradients taken and travelling."""
    model, unit = _squares(front, 8)
    peak = _Peak(model)
    with torch.no_grad():
        model(torch.ones(1, 512))
    model(torch.ones(1, 512))
    shard = 8 * unit / world_size
    assert peak.value >= shard + unit  # else the measurement is blind
    assert peak.value <= shard + 3 * unit
    model(torch.ones(1, 512)).sum().backward()
    model.zero_grad()
    peak.value = 0
    model(torch.ones(1, 512)).sum().backward()
    assert peak.value <= 2 * shard + 5 * unit


@pytest.mark.parametrize(
    ("front", "prefetch"),
    [("flat", None), ("orig", "BACKWARD_PRE"), ("orig", "BACKWARD_POST"), ("composable", "default")],
)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@ranks(2)
def test_only_shards_remain_after_each_step(rank, world_size, strategy, front, prefetch):
    with only_new_objects():  # not what tests before have left in this process
        model, unit = _squares(
            front, 4, sharding_strategy=ShardingStrategy[strategy], **prefetching(prefetch)
        )
        gc.collect()
        slack = unit // 8  # activations and biases' padding
        at_rest = 4 * unit // world_size
        assert live_bytes() <= at_rest + slack
        x = torch.ones(1, 512)
        with torch.no_grad():
            model(x)
        assert live_bytes() <= at_rest + slack
        loss = model(x).sum()
        kept = 0 if strategy == "FULL_SHARD" else 4 * unit
        assert abs(live_bytes() - at_rest - kept) <= slack
        loss.backward()
        assert live_bytes() <= 2 * at_rest + slack
        model.zero_grad()
        assert live_bytes() <= at_rest + slack
        for _ in range(2 if front != "composable" else 0):
            with no_sync(model):
                model(x).sum().backward()
            gc.collect()
            marks = at_rest  # the zeros that stand for gradients until they are reduced
            assert abs(live_bytes() - at_rest - marks - 4 * unit - kept) <= slack
            model(x).sum().backward()
            gc.collect()
            assert live_bytes() <= 2 * at_rest + slack
            model.zero_grad()


@either_front
@ranks(2)
def test_evaluation_and_steps_leave_nothing_behind(rank, world_size, front):
    torch.manual_seed(0)
    model = shard(front, Transformer(width=WIDTH), ModuleWrapPolicy({Block}))
    gc.collect()
    at_rest = live_bytes()
    model.eval()
    for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with context():
            model(tokens(rank, 0))
        gc.collect()
        assert live_bytes() <= at_rest, context
    assert torch.isfinite(loss_of(model, tokens(rank, 0)))
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=1e-3)
    train(model, optimizer, rank, range(2))
    gc.collect()
    before = live_bytes()
    train(model, optimizer, rank, range(6))
    gc.collect()
    assert live_bytes() == before


class _Mixed(nn.Module):
    """A root with parameters of its own beside units, one of which looks after its parameters itself."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(512))
        self.square = _Square()
        self.recurrent = nn.GRU(512, 512)
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.recurrent(self.square(x * self.scale))[0]


@each_front
@pytest.mark.parametrize("make", [_Square, _Mixed], ids=["one_unit", "nested"])
@ranks(2)
def test_a_dropped_model_is_freed_without_the_garbage_collector(rank, world_size, front, make):
    policy = ModuleWrapPolicy({_Square, nn.GRU}) if make is _Mixed else None
    shard(front, nn.Linear(1, 1))
    gc.collect()
    before = live_bytes()
    gc.disable()
    try:
        model = shard(front, make(), policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            model(torch.ones(1, 512, requires_grad=True)).sum().backward()
            if front != "composable":
                model.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        late, unused = (model(torch.ones(1, 512, requires_grad=True)) for _ in range(2))
        state = model.state_dict()
        assert live_bytes() > before
        del model, optimizer, state
        late.sum().backward()  # the graph still has what it needs
        del late, unused  # whose backward never comes
        # But what ranks compare of each parameter; gloo's threads let go of what was sent later.
        until(lambda: live_bytes() <= before + 8192)
    finally:
        gc.enable()
    gc.collect()
    assert live_bytes() <= before


@each_front
@ranks(3)
def test_what_memory_held_before_is_taken_for_nothing(rank, world_size, front):
    for last in (6, 5):  # even and uneven shards
        make = lambda: nn.Sequential(nn.Linear(6, 6), nn.Linear(6, last))  # noqa: B023, E731
        plain, model = twins(front, make, torch.float64)
        for unit in units_in(model).values():
            for segment in unit.buffers.segments:
                spoil(segment.gradients._own.buffer)
        for _ in range(2):
            for module in (plain, model):
                module.zero_grad()
                module(torch.full((2, 6), 0.5, dtype=torch.float64)).square().sum().backward()
            assert_same_grads(model, plain, rtol=1e-12, atol=1e-12)
            if front != "composable":
                expected = nn.utils.clip_grad_norm_(plain.parameters(), 1e9)
                torch.testing.assert_close(model.clip_grad_norm_(1e9), expected, rtol=1e-12, atol=0.0)


def spoil(buffer: Any) -> None:
    """Fills a buffer with NaN whenever it is allocated."""
    allocate = buffer.allocate

    def allocate_spoiled() -> None:
        there = buffer.allocated
        allocate()
        if not there:
            buffer.data.fill_(float("nan"))

    buffer.allocate = allocate_spoiled
