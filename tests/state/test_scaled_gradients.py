"""`ShardedGradScaler` against torch's on a plain model of all batches; gradients in place."""

import copy
import math
import os
import pickle
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import fronts
from bed import ranks
from bed.memory import Peak, settled_bytes
from bed.references import count_collectives
from fronts import assert_same_grads, assert_same_values, no_sync, shard
from fsdp_wrap import CPUOffload, MixedPrecision, ShardingStrategy, set_gradients_in_place
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.sharded_grad_scaler import ShardedGradScaler
from fsdp_wrap.wrap import ModuleWrapPolicy
from models import WRAPPINGS, Transformer, gather_objects, loss_of, tokens, train, twins

SCALING: dict[str, Any] = {"init_scale": 2.0**10, "growth_interval": 2}
OVERFLOWS = (1, 4)
"""Steps at which the last rank's loss is infinite."""


def loss_at(model: nn.Module, rank: int, world_size: int, step: int) -> torch.Tensor:
    loss = loss_of(model, tokens(rank, step))
    return loss * math.inf if rank == world_size - 1 and step in OVERFLOWS else loss


def scaled_step(scaler: GradScaler, optimizer: torch.optim.Optimizer, loss: torch.Tensor, clip=None) -> None:
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    if clip is not None:
        scaler.unscale_(optimizer)
        clip(0.1)
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize(
    ("front", "strategy", "clips", "offload", "kind"),
    [
        ("flat", "FULL_SHARD", True, False, ShardedGradScaler),
        ("orig", "FULL_SHARD", False, True, ShardedGradScaler),
        ("flat", "NO_SHARD", False, True, ShardedGradScaler),
        ("orig", "NO_SHARD", True, False, ShardedGradScaler),
        ("composable", "FULL_SHARD", True, False, GradScaler),
        ("composable", "FULL_SHARD", False, True, ShardedGradScaler),
    ],
)
@ranks(3)
def test_training_equals_plain(rank, world_size, front, strategy, clips, kind, offload):
    plain, model = fronts.twins(
        front,
        Transformer,
        torch.float64,
        auto_wrap_policy=WRAPPINGS["block"](),
        sharding_strategy=ShardingStrategy[strategy],
        cpu_offload=CPUOffload(offload),
    )
    ours, reference = kind("cpu", **SCALING), GradScaler("cpu", **SCALING)
    sgd: dict[str, Any] = {"lr": 0.1, "momentum": 0.9}
    optimizer, plain_optimizer = (torch.optim.SGD(net.parameters(), **sgd) for net in (model, plain))
    clip, plain_clip = (partial(fronts.clip, net) if clips else None for net in (model, plain))
    scales = []
    for step in range(8):
        scaled_step(ours, optimizer, loss_at(model, rank, world_size, step), clip)
        loss = sum(loss_at(plain, r, world_size, step) for r in range(world_size)) / world_size
        scaled_step(reference, plain_optimizer, loss, plain_clip)
        assert ours.state_dict() == reference.state_dict()
        scales.append(ours.get_scale())
    assert scales == [2.0**power for power in (10, 9, 9, 10, 9, 9, 10, 10)]
    state = fronts.full_state(model)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(state[name], param.detach(), rtol=0, atol=1e-10, msg=name)


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@ranks(2)
def test_what_one_rank_finds_all_know(rank, world_size, fused):
    """Fused optimizers skip a step by themselves, by what the scaler tells them."""
    for value, where in ((math.inf, 0), (-math.inf, 1), (math.nan, 1)):
        model = FSDP(nn.Linear(4, 4))
        optimizer = torch.optim.Adam(model.parameters(), lr=0.1, fused=fused)
        scaler = ShardedGradScaler("cpu")
        before = model.state_dict()
        scaler.scale(model(torch.ones(1, 4)).sum()).backward()
        if rank == where:
            model._flat_param.grad[1] = value
        with count_collectives() as traffic:
            scaler.step(optimizer)
        assert {name: calls for name, (calls, _) in traffic.items()} == {"all_reduce": 1}
        scaler.update()
        assert gather_objects(scaler.get_scale()) == [2.0**15] * 2
        after = model.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)

        scaled_step(scaler, optimizer, model(torch.ones(1, 4)).sum())  # what nobody finds, nobody skips
        for name, actual in model.state_dict().items():
            torch.testing.assert_close(actual, before[name] - 0.1, rtol=0, atol=1e-5)


@ranks(4)
def test_ranks_without_elements_or_parameters_take_part(rank, world_size):
    plain, model = twins(lambda: nn.Linear(2, 1), torch.float64, use_orig_params=True)
    scaler = ShardedGradScaler("cpu", init_scale=8.0, growth_interval=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for factor in (1.0, math.inf):
        loss = factor * model(torch.tensor([[3.0, -4.0]]).double()).sum()
        scaled_step(scaler, optimizer, loss)
    assert scaler.get_scale() == 8.0  # grown once, backed off once
    state = model.state_dict()
    torch.testing.assert_close(state["weight"], plain.weight.detach() - torch.tensor([[3.0, -4.0]]).double())
    torch.testing.assert_close(state["bias"], plain.bias.detach() - 1.0)
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.tensor([math.inf, 1.0]) if rank == 0 else None
    scaler.step(torch.optim.SGD([param], lr=1.0))
    scaler.update()
    assert scaler.get_scale() == 4.0
    assert torch.equal(param.detach(), torch.ones(2))


@ranks(2)
def test_each_optimizer_skips_for_itself(rank, world_size):
    _, model = twins(
        lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)),
        auto_wrap_policy=ModuleWrapPolicy({nn.Linear}),
        use_orig_params=True,
    )
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1) for layer in model.module]
    scaler = ShardedGradScaler("cpu")
    before = model.state_dict()
    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    for param in model.module[rank].parameters() if rank == 1 else ():
        param.grad.fill_(math.inf)
    with count_collectives() as traffic:
        scaler.unscale_(optimizers[0])
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    assert traffic["all_reduce"].calls == 2
    assert scaler.get_scale() == 2.0**15
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"0.weight", "0.bias"}


@ranks(4)
def test_a_group_of_its_own(rank, world_size):
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    model = FSDP(nn.Linear(4, 4), process_group=groups[rank // 2])
    scaler = ShardedGradScaler("cpu", process_group=groups[rank // 2])
    scaler.scale(model(torch.ones(1, 4)).sum() * (math.inf if rank == 1 else 1.0)).backward()
    scaler.step(torch.optim.SGD(model.parameters(), lr=0.1))
    scaler.update()
    assert gather_objects(scaler.get_scale()) == [2.0**15] * 2 + [2.0**16] * 2


@ranks(1, backend=None)
def test_it_works_without_a_process_group_and_disabled(rank, world_size):
    param = nn.Parameter(torch.ones(2))
    scaler, optimizer = ShardedGradScaler("cpu"), torch.optim.SGD([param], lr=1.0)
    scaled_step(scaler, optimizer, param.sum())
    assert torch.equal(param.detach(), torch.zeros(2))
    scaled_step(scaler, optimizer, param.sum() * math.inf)
    assert torch.equal(param.detach(), torch.zeros(2)) and scaler.get_scale() == 2.0**15
    disabled, loss = ShardedGradScaler("cpu", enabled=False), param.sum()
    assert disabled.scale(loss) is loss
    with count_collectives() as traffic:
        scaled_step(disabled, optimizer, loss, clip=lambda bound: None)
    assert traffic == {}
    assert torch.equal(param.detach(), -torch.ones(2))
    assert disabled.state_dict() == {} and disabled.get_scale() == 1.0 and not disabled.is_enabled()


@ranks(2)
def test_scaling_keeps_dtypes_and_structures_and_state_travels(rank, world_size):
    scaler = ShardedGradScaler("cpu", init_scale=4.0, growth_factor=3.0, backoff_factor=0.25)
    half, double = torch.ones((), dtype=torch.float16), torch.ones((), dtype=torch.float64)
    nested: list[Any] = [half, (double, [half])]
    scaled: list[Any] = scaler.scale(nested)
    assert [type(scaled), type(scaled[1]), type(scaled[1][1])] == [list, tuple, list]
    for result, given in ((scaled[0], half), (scaled[1][0], double), (scaled[1][1][0], half)):
        assert result.dtype == given.dtype and torch.equal(result, 4 * given)
    assert torch.equal(next(iter(scaler.scale(tensor for tensor in (half,)))), 4 * half)
    with pytest.raises(ValueError, match="takes a tensor or an iterable of tensors, not float"):
        scaler.scale(1.0)  # type: ignore[call-overload]

    expected = GradScaler("cpu", init_scale=4.0, growth_factor=3.0, backoff_factor=0.25).state_dict()
    assert scaler.state_dict() == expected
    fresh = ShardedGradScaler("cpu")
    fresh.load_state_dict(scaler.state_dict())
    param = nn.Parameter(torch.ones(2))
    for other in (fresh, pickle.loads(pickle.dumps(scaler)), copy.deepcopy(scaler)):
        assert other.state_dict() == scaler.state_dict()
        scaled_step(other, torch.optim.SGD([param], lr=1.0), param.sum() * math.inf)
        assert other.get_scale() == 1.0


# gradients that take the memory of their parameters (`set_gradients_in_place`)

wrapper_fronts = pytest.mark.parametrize("front", ["flat", "orig"])


@pytest.mark.parametrize(
    ("front", "wrapping"),
    [("flat", "whole"), ("orig", "block"), ("composable", "whole"), ("composable", "block")],
)
@ranks(2)
def test_training_is_bit_equal_to_ddp(rank, world_size, front, wrapping):
    plain, wrapped = fronts.twins(front, Transformer, auto_wrap_policy=WRAPPINGS[wrapping]())
    set_gradients_in_place(wrapped)
    ddp = DDP(plain)
    for model in (ddp, wrapped):
        optimizer = torch.optim.AdamW(model.parameters())
        train(model, optimizer, rank, range(2))
        optimizer.zero_grad()
        with no_sync(model) if model is wrapped else ddp.no_sync():
            loss_of(model, tokens(rank, 2)).backward()
        loss_of(model, tokens(rank, 3)).backward()
        optimizer.step()
        train(model, optimizer, rank, range(4, 6))
    assert_same_values(wrapped, ddp)


class _SharedInside(nn.Module):
    """A unit whose layer gets a gradient from each of two backwards inside its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=True)
        return x


@wrapper_fronts
@ranks(2)
def test_a_second_gradient_in_one_backward_is_noticed(rank, world_size, front):
    plain, wrapped = fronts.twins(front, _SharedInside, torch.float64)
    set_gradients_in_place(wrapped)
    x = torch.full((2, 8), rank + 1.0, dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match="'layer.(weight|bias)' got a second gradient"):
        wrapped(x).sum().backward()
    wrapped.zero_grad()
    set_gradients_in_place(wrapped, enabled=False)
    wrapped(x).square().sum().backward()
    (sum(plain(torch.full_like(x, r + 1.0).requires_grad_()).square().sum() for r in range(2)) / 2).backward()
    assert_same_grads(wrapped, plain, rtol=1e-10, atol=1e-12)


@ranks(2)
def test_mixed_dtypes_and_frozen_parameters_take_what_way_they_can(rank, world_size):
    def make() -> nn.Module:
        model = Transformer()
        model.blocks[1].requires_grad_(False)
        return model

    policy = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for mixed in (MixedPrecision(), policy):
        _, wrapped = fronts.twins("orig", make, auto_wrap_policy=WRAPPINGS["block"](), mixed_precision=mixed)
        _, usual = fronts.twins("orig", make, auto_wrap_policy=WRAPPINGS["block"](), mixed_precision=mixed)
        set_gradients_in_place(wrapped)
        for model in (wrapped, usual):
            loss_of(model, tokens(rank, 0)).backward()
        grads, expected = fronts.full_grads(wrapped), fronts.full_grads(usual)
        assert all(torch.equal(grads[name], expected[name]) for name in expected)


class _Halves(nn.Module):
    """A unit of equal parameters, whose gradients come one after the other.

    Of 4 MiB: over gloo, tensors of less than 4 MB are reduced by way of a second one of their size.
    """

    WIDTH = 512

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(self.WIDTH, self.WIDTH, bias=False) for _ in range(4)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


UNITS = 4


@pytest.mark.slow
@wrapper_fronts
@ranks(2)
def test_a_unit_of_memory_less(rank, world_size, front):
    """Measures the peak of a backward beside all shards, with and without gradients in place."""
    os.environ["FSDP_WRAP_SHARED_MEMORY"] = "0"  # which would hold what travels once more
    before = settled_bytes()  # of earlier tests
    model = shard(front, nn.Sequential(*(_Halves() for _ in range(UNITS))), ModuleWrapPolicy({_Halves}))
    unit = 4 * _Halves.WIDTH**2 * 4
    held = before + 2 * UNITS * unit / world_size
    peaks = []
    for in_place in (False, True):
        set_gradients_in_place(model, in_place)
        model(torch.ones(1, _Halves.WIDTH)).sum().backward()
        model.zero_grad()
        loss = model(torch.ones(1, _Halves.WIDTH)).sum()
        with Peak(held + 2.1 * unit) as peak:
            loss.backward()
        peaks.append((peak.value - held) / unit)
    assert 1.9 < peaks[0] <= 2.1  # 3, without the gradients of two units that are not there yet
    assert peaks[1] <= 1.8


def test_a_module_without_units_is_refused():
    with pytest.raises(ValueError, match="Linear has no wrapped or sharded module"):
        set_gradients_in_place(nn.Linear(2, 2))
