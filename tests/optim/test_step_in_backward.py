"""Units that are updated while the backward goes on: the numbers of steps after it, with fewer gradients."""

from __future__ import annotations

import copy
import gc
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.utils.checkpoint import checkpoint

import fronts
import mesh_nets
from bed import ranks, run_ranks
from fronts import each_front, full, full_state, no_sync, shard, twins
from fsdp_wrap import (
    CPUOffload,
    FSDPModule,
    ShardingStrategy,
    clip_grad_norm_,
    set_gradients_in_place,
)
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import checkpoint as saved
from fsdp_wrap.distributed_state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from fsdp_wrap.optim import backward_steps, on_shards, step_in_backward
from fsdp_wrap.sharded_grad_scaler import ShardedGradScaler
from fsdp_wrap.wrap import ModuleWrapPolicy
from models import WRAPPINGS, Transformer, loss_of, tokens

SIZE = 6
Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def groups(params: Any) -> torch.optim.Optimizer:
    """Without decay of what has one dimension, or lies in a `FlatParameter`."""
    params = [*params]
    flat = [param for param in params if param.dim() < 2]
    others = [param for param in params if param.dim() > 1]
    both: list[dict[str, Any]] = [{"params": others}, {"params": flat, "weight_decay": 0.0}]
    return torch.optim.AdamW(both, lr=0.01)


class Layer(nn.Module):
    def __init__(self, checkpoints: bool | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(SIZE, SIZE + 1), nn.Linear(SIZE + 1, SIZE)
        self._reentrant = checkpoints

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self._reentrant is None:
            return x + self._inner(x)
        return x + checkpoint(self._inner, x, use_reentrant=self._reentrant)


class Chain(nn.Module):
    """Layers one after the other, as often as a list says, in checkpoints or not."""

    def __init__(self, order: tuple[int, ...] = (0, 1, 2), outside: bool | None = None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.scale = nn.Parameter(torch.rand(SIZE))
        self._order, self._reentrant = order, outside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.scale
        for number in self._order:
            layer = self.layers[number]
            x = layer(x) if self._reentrant is None else checkpoint(layer, x, use_reentrant=self._reentrant)
        return x


def tied() -> nn.Module:
    chain = Chain()
    chain.layers[2].up = chain.layers[0].up
    return chain


def frozen() -> nn.Module:
    chain = Chain()
    chain.layers[1].requires_grad_(False)
    chain.layers[2].down.weight.requires_grad_(False)
    return chain


def checkpointing(reentrant: bool) -> nn.Module:
    chain = Chain()
    chain.layers = nn.ModuleList(Layer(reentrant) for _ in range(3))
    return chain


KINDS: dict[str, Callable[[], nn.Module]] = {
    "plain": Chain,
    "twice": lambda: Chain((0, 1, 0, 2, 1)),
    "tied": tied,
    "frozen": frozen,
    "checkpoints inside": lambda: checkpointing(False),
    "reentrant inside": lambda: checkpointing(True),
    "checkpoints around": lambda: Chain((0, 1, 0, 2), False),
    "reentrant around": lambda: Chain((0, 1, 0, 2), True),
}
POLICY = ModuleWrapPolicy({Layer})


def batch(rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.rand(3, SIZE, generator=generator, dtype=torch.float64)


def pair(front: str, make: Callable[[], nn.Module], **options: Any) -> tuple[nn.Module, nn.Module]:
    """Two sharded models of the same values."""
    torch.manual_seed(0)
    module = make().double()
    return tuple(shard(front, copy.deepcopy(module), POLICY, **options) for _ in range(2))  # type: ignore[return-value]


def assert_same_bits(model: nn.Module, usual: nn.Module, told: str = "") -> None:
    found, expected = full_state(model), full_state(usual)
    for name, value in expected.items():
        assert torch.equal(found[name], value), f"{told}: {name}"


def assert_same_state(optimizer: torch.optim.Optimizer, usual: torch.optim.Optimizer) -> None:
    """State dicts have the same structure and bits."""
    found, expected = optimizer.state_dict(), usual.state_dict()
    assert (
        found["param_groups"] == expected["param_groups"]
        and found["state"].keys() == expected["state"].keys()
    )
    for number, entry in sorted(expected["state"].items()):  # which ranks may have in other orders
        assert found["state"][number].keys() == entry.keys()
        for key, value in entry.items():
            assert torch.equal(full(found["state"][number][key]), full(value)), (number, key)


def compare(
    model: nn.Module, usual: nn.Module, make: Make, rank: int, told: str, steps: int = 3, **options: Any
) -> None:
    """Trains both, one in backward; losses, parameters and state have the same bits."""
    optimizer = step_in_backward(model, make, **options)
    other = make([param for param in usual.parameters() if param.requires_grad])
    for step in range(steps):
        losses = [each(batch(rank, step)).square().sum() for each in (model, usual)]
        assert torch.equal(*losses), told
        other.zero_grad()
        for loss in losses:
            loss.backward()
        other.step()
        assert all(param.grad is None for param in model.parameters()), told
        optimizer.step()  # changes nothing
    assert_same_bits(model, usual, told)
    assert_same_state(optimizer, other)


FEW = ("plain", "tied", "frozen", "reentrant around")


@each_front
@pytest.mark.parametrize("seldom", [False, pytest.param(True, marks=pytest.mark.slow)])
@ranks(2)
def test_the_bits_of_steps_after_the_backward(rank, world_size, front, seldom):
    for kind, make in KINDS.items():
        if (kind in FEW) == seldom:
            continue
        model, usual = pair(front, make)
        compare(model, usual, groups if kind == "plain" else adamw, rank, kind)


@pytest.mark.each_value
@each_front
@pytest.mark.parametrize("option", ["offload", "kept", "apart", "NO_SHARD", "in_thread", "in place"])
@ranks(2)
def test_options_of_units(rank, world_size, front, option):
    ways: dict[str, dict[str, Any]] = {
        "offload": {"cpu_offload": CPUOffload(True)},
        "kept": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
        "apart": {"travel_together_bytes": 0},
        "NO_SHARD": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    }
    options = ways.get(option, {})
    if option == "NO_SHARD" and front == "composable":
        options = {}  # which it has not
    for kind in ("plain", "twice"):
        model, usual = pair(front, KINDS[kind], **options)
        if option == "in place" and kind != "twice":  # which would be refused
            for each in (model, usual):
                set_gradients_in_place(each)
        compare(model, usual, adamw, rank, kind, in_thread=option == "in_thread")


@pytest.mark.slow
@each_front
@pytest.mark.parametrize("strategy", ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"])
@ranks(4)
def test_replicas(rank, world_size, front, strategy):
    from torch.distributed.device_mesh import init_device_mesh

    from fsdp_wrap import fully_shard

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for kind in ("plain", "twice"):
        if front == "composable":
            torch.manual_seed(0)
            module: Any = KINDS[kind]().double()
            both: list[Any] = [copy.deepcopy(module) for _ in range(2)]
            for each in both:
                for part in (*each.layers, each):
                    fully_shard(part, mesh=mesh, reshard_after_forward=strategy == "HYBRID_SHARD")
        else:
            both = [*pair(front, KINDS[kind], sharding_strategy=ShardingStrategy[strategy], device_mesh=mesh)]
        model, usual = both
        compare(model, usual, adamw, rank, kind)


@each_front
@ranks(2)
def test_against_a_plain_model_in_float64(rank, world_size, front):
    plain, model = twins(front, Transformer, torch.float64, auto_wrap_policy=WRAPPINGS["block"]())
    step_in_backward(model, adamw)
    optimizer = adamw(plain.parameters())
    for step in range(3):
        optimizer.zero_grad()
        mean = sum(loss_of(plain, tokens(each, step)) for each in range(world_size)) / world_size
        mean.backward()
        optimizer.step()
        loss_of(model, tokens(rank, step)).backward()
    found = full_state(model)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(found[name], param.detach(), rtol=1e-9, atol=1e-9)


class Watching(torch.optim.SGD):
    """Notes at each step how many parameters of all have gradients."""

    def __init__(self, params: Any) -> None:
        self.all = [*params]
        self.seen: list[int] = []
        super().__init__(self.all, lr=0.01)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.seen.append(sum(param.grad is not None for param in self.all))
        super().step(closure)


@each_front
@ranks(2)
def test_gradients_of_no_more_than_two_units_exist(rank, world_size, front):
    """Travelling together, of those that do."""
    model = shard(front, nn.Sequential(*(Layer() for _ in range(6))), POLICY, travel_together_bytes=0)
    optimizer = step_in_backward(model, Watching)
    per_unit = len(optimizer.all) // 6
    for step in range(3):
        model(batch(rank, step).float()).sum().backward()
    assert len(optimizer.seen) == 3 * 6 and max(optimizer.seen) <= 2 * per_unit
    assert backward_steps(optimizer).updated == [f"unit '{number}'" for number in range(5, -1, -1)] or (
        front != "composable"
        and backward_steps(optimizer).updated
        == [f"unit '_fsdp_wrapped_module.{n}'" for n in range(5, -1, -1)]
    )


@each_front
@ranks(2)
def test_accumulation(rank, world_size, front):
    """A backward under `no_sync` is no step; what it left counts in the next, also of units not used then."""

    class Some(Chain):
        def forward(self, x: torch.Tensor, seldom: bool = True) -> torch.Tensor:
            x = self.layers[0](x * self.scale)
            return self.layers[1](self.layers[2](x) if seldom else x)

    model, usual = pair(front, Some)
    optimizer, other = step_in_backward(model, adamw), adamw(usual.parameters())
    for step in range(3):
        other.zero_grad()
        for each in (model, usual):
            before = {name: value.clone() for name, value in full_state(each).items()}
            with no_sync(each):
                each(batch(rank, step)).square().sum().backward()
            if each is model:
                assert all(torch.equal(value, before[name]) for name, value in full_state(each).items())
            each(batch(rank, step + 10), seldom=step == 1).square().sum().backward()
        other.step()
        assert all(param.grad is None for param in model.parameters())
    assert_same_bits(model, usual)
    assert_same_state(optimizer, other)


@each_front
@ranks(2)
def test_a_gradient_of_inputs_is_no_step(rank, world_size, front):
    """What `no_sync` left waits for the next backward that reaches parameters."""
    model, usual = pair(front, Chain)
    optimizer, other = step_in_backward(model, adamw), adamw(usual.parameters())
    for step in range(2):
        for each in (model, usual):
            with no_sync(each):
                each(batch(rank, step)).square().sum().backward()
            inputs = batch(rank, step + 10).requires_grad_()
            loss = each(inputs).square().sum()
            (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
            (loss + slope.square().sum()).backward()
        other.step(), other.zero_grad()
    assert_same_bits(model, usual)
    assert_same_state(optimizer, other)


@ranks(2)
def test_backwards_that_a_later_one_ends(rank, world_size):
    model, usual = pair("composable", Chain)
    assert isinstance(model, FSDPModule) and isinstance(usual, FSDPModule)
    optimizer, other = step_in_backward(model, adamw), adamw(usual.parameters())
    for step in range(4):
        manual = step > 1
        for each in (model, usual):
            each.set_manual_backward_finalization(manual)
            losses = [each(batch(rank, step + 10 * number)).square().sum() for number in range(2)]
            each.set_is_last_backward(False)
            losses[0].backward()
            each.set_is_last_backward(True)
            losses[1].backward()
            if manual:
                each.finalize_backward()
        other.step()
        other.zero_grad()
        assert all(param.grad is None for param in model.parameters())
    assert_same_bits(model, usual)
    assert_same_state(optimizer, other)


@each_front
@ranks(2)
def test_a_second_backward_of_a_forward_is_refused_by_name(rank, world_size, front):
    model, _ = pair(front, Chain)
    step_in_backward(model, adamw)
    loss = model(batch(rank, 0)).square().sum()
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match=r"layers\.2.* between forward and backward on rank .*\(by a step"):
        loss.backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # nothing was updated in the one that raised
        model(batch(rank, 1)).square().sum().backward()


@each_front
@ranks(2)
def test_a_recomputation_that_no_forward_told_of(rank, world_size, front):
    """Both forwards ran as evaluations do; the second would compute with what the first has updated."""
    model, _ = pair(front, Chain)
    step_in_backward(model, adamw)
    x = batch(rank, 0).requires_grad_()
    loss = checkpoint(model, checkpoint(model, x, use_reentrant=True), use_reentrant=True).square().sum()
    with pytest.raises(RuntimeError, match="comes to .* again on rank .* use_reentrant=False"):
        loss.backward()
    before = full_state(model)["layers.0.up.weight"].clone()
    model(batch(rank, 1)).square().sum().backward()
    assert not torch.equal(full_state(model)["layers.0.up.weight"], before)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("on purpose")


@pytest.mark.each_value
@each_front
@pytest.mark.parametrize("in_thread", [False, True])
@ranks(2)
def test_a_backward_that_raises(rank, world_size, front, in_thread):
    """The units that were updated are named; the model goes on as one that has their values."""

    class Once(Chain):
        fails = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[0](x * self.scale)
            x = Failing.apply(x) if self.fails else x
            return self.layers[2](self.layers[1](x))

    model, usual = pair(front, Once, travel_together_bytes=0)
    optimizer = step_in_backward(model, lambda params: torch.optim.SGD(params, lr=0.1), in_thread=in_thread)
    for each in (model, usual):
        for module in each.modules():
            module.fails = True
        with pytest.raises(ArithmeticError):
            each(batch(rank, 0)).square().sum().backward()
        for module in each.modules():
            module.fails = False
    updated = [name for name in backward_steps(optimizer).updated if "layers.2" in name]
    assert updated == backward_steps(optimizer).updated and len(updated) == 1
    kept = {name for name, value in full_state(usual).items() if "layers.2" not in name}
    with pytest.warns(UserWarning, match=r"after 1 of 4 units .*layers\.2'; the others have kept") as caught:
        found = full_state(model)
    assert [warning.filename for warning in caught] == [fronts.__file__]  # the line that asks for the state
    expected = full_state(usual)
    assert {name for name in found if torch.equal(found[name], expected[name])} == kept
    model(batch(rank, 1)).square().sum().backward()


class Slow(torch.optim.SGD):
    """Takes longer for an update than a state dict needs to begin."""

    def step(self, closure: Any = None) -> Any:
        time.sleep(0.2)
        return super().step(closure)


@each_front
@ranks(2)
def test_what_is_saved_after_a_backward_that_raised_holds_its_updates(rank, world_size, front):
    """A thread still updates when the error arrives."""

    class Fails(Chain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[2](self.layers[1](Failing.apply(self.layers[0](x * self.scale))))

    model, _ = pair(front, Fails, travel_together_bytes=0)
    before = full_state(model)
    optimizer = step_in_backward(model, lambda params: Slow(params, lr=0.1), in_thread=True)
    with pytest.raises(ArithmeticError):
        model(batch(rank, 0)).square().sum().backward()
    with pytest.warns(UserWarning, match="after 1 of 4 units"):
        found = full_state(model)
    changed = {name for name in found if not torch.equal(found[name], before[name])}
    assert len(backward_steps(optimizer).updated) == 1
    assert changed == {name for name in found if "layers.2" in name}


# clipping


class Recorded(torch.optim.SGD):
    """Takes the gradients as steps."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, lr=1.0)


@pytest.mark.each_value
@each_front
@pytest.mark.parametrize("in_thread", [False, True])
@ranks(2)
def test_clipping_by_the_norm_of_the_last_backward(rank, world_size, front, in_thread):
    """The first backward clips by its own, as `clip_grad_norm_` would; against a plain model in float64."""
    torch.manual_seed(0)
    plain = Chain().double()
    model = shard(front, copy.deepcopy(plain), POLICY, travel_together_bytes=0)
    optimizer = step_in_backward(model, Recorded, max_norm=0.5, in_thread=in_thread)
    steps, reference = backward_steps(optimizer), Recorded(plain.parameters())
    known = None
    for step in range(4):
        reference.zero_grad()
        sum(plain(batch(each, step)).square().sum() for each in range(world_size)).div(world_size).backward()
        own = nn.utils.get_total_norm([param.grad for param in plain.parameters()])
        factor = min(1.0, 0.5 / ((own if known is None else known).item() + 1e-6))
        for param in plain.parameters():
            param.grad *= factor
        reference.step()
        with no_sync(model):
            (0 * model(batch(rank, step))).sum().backward()  # which is no step, and tells no norm
        model(batch(rank, step)).square().sum().backward()
        torch.testing.assert_close(steps.total_norm, own, rtol=1e-9, atol=0)
        known = own
    found = full_state(model)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(found[name], param.detach(), rtol=1e-9, atol=1e-9)


@each_front
@ranks(2)
def test_clipping_by_value(rank, world_size, front):
    model, usual = pair(front, Chain)
    step_in_backward(model, Recorded, clip_value=0.01)
    other = Recorded(usual.parameters())
    for step in range(2):
        other.zero_grad()
        for each in (model, usual):
            each(batch(rank, step)).square().sum().backward()
        nn.utils.clip_grad_value_(usual.parameters(), 0.01)
        other.step()
    assert_same_bits(model, usual)


@each_front
@ranks(2)
def test_the_first_norm_is_that_of_clip_grad_norm(rank, world_size, front):
    model, usual = pair(front, KINDS["tied"])  # whose root has several parameters
    optimizer = step_in_backward(model, Recorded, max_norm=0.1)
    for each in (model, usual):
        each(batch(rank, 0)).square().sum().backward()
    norm = clip_grad_norm_(usual, 0.1)
    torch.testing.assert_close(backward_steps(optimizer).total_norm, norm.double(), rtol=1e-12, atol=0)
    Recorded(usual.parameters()).step()
    found, expected = full_state(model), full_state(usual)
    for name, value in expected.items():  # the sums of the norms have another order
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12)


# scaled losses


@each_front
@ranks(2)
def test_scaled_losses_without_overflow(rank, world_size, front):
    model, usual = pair(front, Chain)
    scalers = [ShardedGradScaler("cpu", init_scale=4.0, growth_interval=2) for _ in range(2)]
    step_in_backward(model, adamw, scaler=scalers[0], max_norm=1e9)
    other = adamw(usual.parameters())
    for step in range(4):
        other.zero_grad()
        for scaler, each in zip(scalers, (model, usual)):
            scaler.scale(each(batch(rank, step)).square().sum()).backward()
        scalers[1].step(other)
        for scaler in scalers:
            scaler.update()
        assert scalers[0].get_scale() == scalers[1].get_scale() == 4.0 * 2 ** ((step + 1) // 2)
    assert_same_bits(model, usual)


class Overflowing(torch.autograd.Function):
    """Lets one element of a gradient overflow."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.clone()
        grad[0, 0] = torch.inf
        return grad


@pytest.mark.each_value
@each_front
@pytest.mark.parametrize("max_norm", [None, 1.0])
@ranks(2)
def test_a_unit_that_overflows_is_skipped_on_all_ranks_alike(rank, world_size, front, max_norm):
    """And all that come after it; where the norm is awaited, all units are. The scale goes down."""

    class Sometimes(Chain):
        overflows = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.layers[0](x * self.scale)
            x = Overflowing.apply(self.layers[1](x)) if self.overflows and rank == 1 else self.layers[1](x)
            return self.layers[2](x)

    torch.manual_seed(0)
    model = shard(front, Sometimes().double(), POLICY, travel_together_bytes=0)
    scaler = ShardedGradScaler("cpu", init_scale=4.0)
    optimizer = step_in_backward(model, adamw, scaler=scaler, max_norm=max_norm)
    for overflows, scale in ((True, 2.0), (False, 2.0), (True, 1.0)):
        first = overflows and scale == 2.0
        before = {name: value.clone() for name, value in full_state(model).items()}
        for module in model.modules():
            module.overflows = overflows
        scaler.scale(model(batch(rank, 0)).square().sum()).backward()
        scaler.update()
        assert scaler.get_scale() == scale
        changed = {name for name, value in full_state(model).items() if not torch.equal(value, before[name])}
        expected = {name for name in before if not overflows or "layers.2" in name}
        assert changed == (set() if max_norm and first else expected)
        assert all(param.grad is None for param in model.parameters())
        norm = backward_steps(optimizer).total_norm
        assert norm is None if max_norm is None or first else norm.isfinite()


# state dicts, schedulers


@each_front
@ranks(2)
def test_schedulers_and_groups(rank, world_size, front):
    """A scheduler changes what counts in the next backward; so does what a step leaves in a group."""

    class Counting(torch.optim.AdamW):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                group["lr"] = 0.5 * group["lr"]
                group["count"] = group.get("count", 0) + 1
            super().step(closure)

    def counting(params: Any) -> torch.optim.Optimizer:
        return Counting(params, lr=0.1)

    for make in (groups, counting):
        model, usual = pair(front, Chain)
        optimizer = step_in_backward(model, make)
        other = make(usual.parameters())
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (optimizer, other)]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            warnings.filterwarnings("ignore", "weight decay may be lost")  # as `groups` goes by dimensions
            for step in range(3):
                other.zero_grad()
                for each in (model, usual):
                    each(batch(rank, step)).square().sum().backward()
                other.step()
                for scheduler in schedulers:
                    scheduler.step()
        assert_same_bits(model, usual)
        assert_same_state(optimizer, other)


FULL = StateDictOptions(full_state_dict=True)


@pytest.mark.each_value
@each_front
@pytest.mark.parametrize("back", [False, True])
@ranks(2)
def test_resuming_with_and_without_steps_in_backward(rank, world_size, front, back):
    """By full states, which fit any number of ranks, and to the bit."""
    model, usual = pair(front, Chain)

    def train(each: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            each(batch(rank, step)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def make(each: nn.Module, in_backward: bool) -> torch.optim.Optimizer:
        return step_in_backward(each, groups) if in_backward else groups([*each.parameters()])

    first = make(model, back)
    train(model, first, range(2))
    state = get_optimizer_state_dict(model, first, options=FULL)
    values = {name: value.clone() for name, value in full_state(model).items()}
    if back:
        backward_steps(first).remove()
    straight = make(usual, back)
    train(usual, straight, range(4))

    torch.manual_seed(1)
    resumed = shard(front, Chain().double(), None)  # wrapped otherwise
    with torch.no_grad():
        if front == "composable":
            for name, param in resumed.named_parameters():
                param.copy_(_like(param, values[name]))
        else:
            resumed.load_state_dict(values)
    second = make(resumed, not back)
    set_optimizer_state_dict(resumed, second, copy.deepcopy(state), options=FULL)
    train(resumed, second, range(2, 4))
    assert_same_bits(resumed, usual)


def _trained(rank: int, world_size: int, front: str, before: int, path: Any) -> None:
    """Saves a run after two steps on `before` ranks, or ends what was saved there as a plain model would."""
    torch.manual_seed(0)
    plain = Chain().double()
    model = shard(front, copy.deepcopy(plain), POLICY)
    optimizer = step_in_backward(model, adamw, max_norm=1e9)
    resumed = world_size != before
    if resumed:
        saved.load(path, model, optimizer)
    for step in range(2, 4) if resumed else range(2):
        model(batch(0, step)).square().sum().backward()  # all ranks see the same
    if not resumed:
        saved.save(path, model, optimizer, step=1)
        return
    reference = adamw(plain.parameters())
    for step in range(4):
        reference.zero_grad()
        plain(batch(0, step)).square().sum().backward()
        reference.step()
    found, parameters = full_state(model), dict(plain.named_parameters())
    for name, param in parameters.items():
        torch.testing.assert_close(found[name], param.detach(), rtol=0, atol=1e-10)
    for name, entry in get_optimizer_state_dict(model, optimizer, options=FULL)["state"].items():
        for key, value in reference.state[parameters[name]].items():
            torch.testing.assert_close(entry[key], value, rtol=0, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("giver", "before", "taker", "after"),
    [("flat", 2, "composable", 3), ("composable", 3, "orig", 1), ("orig", 1, "flat", 2)],
)
def test_checkpoints_fit_other_numbers_of_ranks(tmp_path, giver, before, taker, after):
    run_ranks(before, _trained, giver, before, tmp_path)
    run_ranks(after, _trained, taker, before, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("front", ["ours", "orig", "flat"])
@ranks(4)
def test_tensor_parallelism_and_hybrid_meshes(rank, world_size, front):
    """Against a plain model, with the norm and without; the two bounds of a norm hold nothing back."""
    for kind in ("tp", "hybrid", "hybrid_tp"):
        plain, model = mesh_nets.net(0), mesh_nets.on_mesh(front, kind, seed=0)
        optimizer = step_in_backward(model, adamw, max_norm=None if kind == "hybrid" else 1e9)
        reference = adamw(plain.parameters())
        for step in range(3):
            norm = _plain_norm(plain, step)
            mesh_nets.train(plain, reference, step)
            mesh_nets.train(model, optimizer, step)
            if kind != "hybrid":
                torch.testing.assert_close(backward_steps(optimizer).total_norm, norm, rtol=1e-9, atol=0)
        with FSDP.summon_full_params(model, writeback=False):
            found = {
                name.replace("_fsdp_wrapped_module.", ""): full(param.detach()).clone()
                for name, param in model.named_parameters()
            }
        for name, param in plain.named_parameters():
            torch.testing.assert_close(found[name], param.detach(), rtol=0, atol=1e-9, msg=f"{kind}: {name}")


def _plain_norm(plain: nn.Module, step: int) -> torch.Tensor:
    copied = copy.deepcopy(plain)
    norms: list[torch.Tensor] = []

    class Noting(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            norms.append(nn.utils.get_total_norm([param.grad for param in copied.parameters()]))

    mesh_nets.train(copied, Noting(copied.parameters()), step)
    return norms[0]


def _like(param: Any, value: torch.Tensor) -> torch.Tensor:
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value, param.device_mesh, param.placements)


@ranks(2)
def test_on_shards(rank, world_size):
    """What it knows of each unit outlives steps with others."""
    model, usual = pair("composable", Chain)

    def make(params: Any) -> torch.optim.Optimizer:
        return on_shards(torch.optim.AdamW(params, lr=0.01, weight_decay=0.1))

    for in_thread in (False, True):
        compare(model, usual, make, rank, "on shards", in_thread=in_thread)
        model, usual = pair("composable", Chain)


# what is refused, and what goes


@ranks(1)
def test_mistakes_are_named_before_anything_changes(rank, world_size):
    model = shard("orig", Chain(), POLICY)
    params = [*model.parameters()]
    alien = nn.Parameter(torch.ones(1))
    for options, make, error, rule in (
        ({}, lambda given: given, TypeError, "must return a torch.optim.Optimizer, not a list"),
        ({}, lambda given: torch.optim.LBFGS(given), ValueError, "LBFGS computes with all gradients"),
        ({}, lambda given: torch.optim.Adafactor(given), ValueError, "Adafactor computes with whole"),
        ({}, lambda given: adamw([*given, alien]), ValueError, "AdamW of make_optimizer has .* not given"),
        ({"max_norm": 0.0}, adamw, ValueError, "max_norm must be positive"),
        ({"clip_value": -1.0}, adamw, ValueError, "clip_value must be positive"),
        ({}, lambda g: torch.optim.SGD(g, lr=0.1, differentiable=True), ValueError, "is differentiable"),
    ):
        with pytest.raises(error, match=rule):
            step_in_backward(model, make, **options)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="Linear has no wrapped or sharded module"):
        step_in_backward(nn.Linear(2, 2), adamw)
    with pytest.raises(ValueError, match="was not made by step_in_backward"):
        backward_steps(adamw(params))
    optimizer = step_in_backward(model, adamw)
    with pytest.raises(ValueError, match=r"is updated in backward already: call backward_steps"):
        step_in_backward(model, adamw)
    backward_steps(optimizer).remove()
    model(batch(0, 0).float()).sum().backward()
    assert all(param.grad is not None for param in params)


@ranks(2)
def test_scalers_that_ranks_may_disagree_about_are_refused(rank, world_size):
    model = shard("orig", Chain(), POLICY)
    with pytest.raises(ValueError, match="pass a fsdp_wrap.*ShardedGradScaler"):
        step_in_backward(model, adamw, scaler=torch.amp.GradScaler("cpu"))


@each_front
@ranks(1)
def test_a_dropped_model_is_freed(rank, world_size, front):
    model = shard(front, Chain(), POLICY)
    optimizer = step_in_backward(model, adamw, max_norm=1.0, in_thread=True)
    for step in range(2):
        model(batch(0, step).float()).sum().backward()
    references = [weakref.ref(each) for each in (*model.parameters(), model, optimizer)]
    del model, optimizer
    gc.collect()
    assert [reference() for reference in references] == [None] * len(references)
