"""`copy.deepcopy` of wrapped modules: a second model that trains on its own; and shard-local averages."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.fx
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

from bed import ranks
from bed.references import count_collectives
from fronts import assert_tensors, either_front, full_state, inner, shard
from fsdp_wrap import CPUOffload, ShardingStrategy
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap._runtime.unit import units_in
from fsdp_wrap.wrap import ModuleWrapPolicy

WIDTH = 6


class Block(nn.Module):
    """With frozen parameters, and modules that keep or compute their weights in ways of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)
        self.recurrent = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.normed = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.up.weight.requires_grad_(False)
        self.register_buffer("slope", torch.tensor(0.9))

    def forward(self, x):
        x = x + self.slope * self.down(torch.tanh(self.up(x)))
        return self.normed(x + self.recurrent(x)[0])


class Net(nn.Module):
    """Its embedding and head share a weight, as do two inner layers. Calls `spy` in its forward."""

    spy: Callable[[], Any] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.first(self.embed(tokens))
        for block in self.blocks:
            x = block(x)
        if self.spy is not None:
            self.spy()
        return self.head(self.last(torch.tanh(x)))


def per_block(front: str, net: nn.Module, **options: Any) -> Any:
    return shard(front, net, ModuleWrapPolicy({Block}), **options)


def by_hand(front: str, net: Net, **options: Any) -> Any:
    """Units that lend parameters to each other, in both directions of the tree's order."""
    for name in ("last", "embed"):
        setattr(net, name, shard(front, getattr(net, name), **options))
    net.blocks[0] = shard(front, net.blocks[0], **options)
    net.first = shard(front, net.first, **options)  # type: ignore[assignment]
    return shard(front, net, **options)


STRATEGIES: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {},
    "SHARD_GRAD_OP": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "NO_SHARD": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "offloaded": {"cpu_offload": CPUOffload(True)},
}


def make_plain() -> Net:
    torch.manual_seed(0)
    return Net().double()


def make_pair(wrap: Callable[..., Any], front: str, **options: Any) -> tuple[Any, Net]:
    return wrap(front, make_plain(), **options), make_plain()


def train(modules: Iterable[nn.Module], seed: int) -> None:
    for module in modules:
        wrapped = bool(units_in(module))
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
        for step in range(2):
            batches = batches_of(100 * seed + step)
            optimizer.zero_grad()
            module(batches[dist.get_rank()] if wrapped else batches.flatten(0, 1)).square().mean().backward()
            optimizer.step()


def batches_of(seed: int) -> torch.Tensor:
    size = (dist.get_world_size(), 2, 4)
    return torch.randint(0, 11, size, generator=torch.Generator().manual_seed(seed))


def assert_same(model: nn.Module, plain: nn.Module) -> None:
    state, expected = full_state(model), plain.state_dict()
    assert list(state) == list(expected)
    assert_tensors(state, expected, rtol=0, atol=1e-12)


def assert_apart(model: nn.Module, plain: nn.Module) -> None:
    """A copy trains by itself, and so does the original after it."""
    second, twin = copy.deepcopy(model), copy.deepcopy(plain)
    train((second, twin), seed=2)
    assert_same(second, twin)
    assert_same(model, plain)
    train((model, plain), seed=3)
    assert_same(model, plain)
    assert_same(second, twin)


@pytest.mark.parametrize(
    ("wrap", "front", "strategy"),
    [
        (shard, "flat", "SHARD_GRAD_OP"),
        (by_hand, "flat", "FULL_SHARD"),
        (per_block, "flat", "NO_SHARD"),
        (per_block, "flat", "offloaded"),
        (by_hand, "orig", "FULL_SHARD"),
        (per_block, "orig", "SHARD_GRAD_OP"),
        (by_hand, "orig", "NO_SHARD"),
        (shard, "orig", "offloaded"),
        (by_hand, "composable", "FULL_SHARD"),
        (per_block, "composable", "offloaded"),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
@ranks(2)
def test_copy_and_original_train_on_their_own(rank, world_size, wrap, front, strategy):
    model, plain = make_pair(wrap, front, **STRATEGIES[strategy])
    model = copy.deepcopy(copy.deepcopy(model))  # which are made before a first forward, and go
    train((model, plain), seed=1)
    assert_same(model, plain)
    model.zero_grad()
    with count_collectives() as counts:
        second = copy.deepcopy(model)
    assert counts == {}
    trainable = [param.requires_grad for param in model.parameters()]
    assert [param.requires_grad for param in second.parameters()] == trainable
    assert all(param.grad is None for param in second.parameters())
    held = {param.untyped_storage()._cdata for param in model.parameters()}
    assert not held & {param.untyped_storage()._cdata for param in second.parameters()}
    if front != "composable":
        with FSDP.summon_full_params(second):
            assert second.embed.weight is second.head.weight
            assert second.first.weight is second.last.weight
            assert not any(param is other for param in second.parameters() for other in model.parameters())
    assert_same(second, plain)
    assert_apart(model, plain)


@ranks(4)
def test_copies_on_a_mesh_of_two_dims(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2))
    options = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "device_mesh": mesh}
    model, plain = make_pair(per_block, "orig", **options)
    train((model, plain), seed=1)
    assert_apart(model, plain)


@ranks(2)
def test_a_part_that_is_copied_is_a_root(rank, world_size):
    model, plain = make_pair(per_block, "orig")
    model(batches_of(0)[rank])
    part, twin = copy.deepcopy(model.blocks[1]), copy.deepcopy(plain.blocks[1])
    x = torch.ones(1, 3, WIDTH, dtype=torch.float64)
    with part.no_sync():
        part(x).sum().backward()
    part(x).sum().backward()
    assert (part.check_is_root(), model.blocks[1].check_is_root()) == (True, False)
    for _ in range(2):
        twin(x).sum().backward()
    with FSDP.summon_full_params(part, with_grads=True):
        for name, param in part.named_parameters():
            torch.testing.assert_close(param.grad, twin.get_parameter(name).grad)
    train((model, plain), seed=1)
    assert_same(model, plain)


@ranks(2)
def test_copy_keeps_what_users_set(rank, world_size):
    model, _ = make_pair(per_block, "orig")
    for param in model.parameters():
        param.note = "weight decay"
    model.blocks[0].set_reshard_after_forward(False)
    model.eval()
    second = copy.deepcopy(model)
    assert {param.note for param in second.parameters()} == {"weight decay"}
    assert second.blocks[0]._unit.options == model.blocks[0]._unit.options != model.blocks[1]._unit.options
    assert not second.training and repr(second) == repr(model)
    assert [name for name, _ in second.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert parametrize.is_parametrized(second.blocks[0].normed)
    one = shard("composable", nn.Linear(WIDTH, 3, bias=False))
    one.set_gradient_divide_factor(5.0)
    for layer in (one, copy.deepcopy(one)):
        layer(torch.ones(1, WIDTH)).sum().backward()
        assert torch.all(layer.weight.grad.full_tensor() == 2 / 5)
    with FSDP.summon_full_params(model):
        assert model.blocks[0].normed.weight.shape == (WIDTH, WIDTH)
        with pytest.raises(RuntimeError, match="parametrised tensor"):
            second.blocks[0].normed.weight  # noqa: B018


@either_front
@ranks(2)
def test_copy_with_an_optimizer_after_a_failed_backward(rank, world_size, front):
    model, plain = make_pair(per_block, front)
    inner(model).kept = [inner(model).first._parameters["weight"]]
    optimizers = [torch.optim.Adam(net.parameters(), lr=0.1) for net in (model, plain)]
    hook = inner(model.blocks[1]).down.register_full_backward_hook(lambda *args: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(batches_of(0)[rank]).sum().backward()
    hook.remove()
    twin = copy.deepcopy(plain)
    second, optimizer = copy.deepcopy((model, optimizers[0]))
    assert inner(second).kept[0] is inner(second).first._parameters["weight"]
    for net, its in ((second, optimizer), (plain, optimizers[1])):
        batches = batches_of(0)
        net(batches[rank] if net is second else batches.flatten(0, 1)).square().mean().backward()
        its.step()
    assert_same(second, plain)
    train((model, twin), seed=1)
    assert_same(model, twin)


@ranks(2)
def test_copies_are_refused_while_parameters_are_full(rank, world_size):
    model, plain = make_pair(by_hand, "orig")
    model.module.spy = lambda: copy.deepcopy(model)
    with pytest.raises(RuntimeError, match=r"copy.deepcopy\(\) must not run inside the forward"):
        model(batches_of(0)[rank])
    model.module.spy = None
    with FSDP.summon_full_params(model):
        with pytest.raises(RuntimeError, match="shown in full by summon_full_params; leave its context"):
            copy.deepcopy(model)
    train((model, plain), seed=1)
    assert_same(model, plain)


AVERAGES: dict[str, dict[str, Any]] = {
    "equal": {},
    "ema": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
    "ema_one_by_one": {"avg_fn": get_ema_avg_fn(0.9)},
    "ema_with_buffers": {"multi_avg_fn": get_ema_multi_avg_fn(0.9), "use_buffers": True},
}


@pytest.mark.parametrize(
    ("front", "strategy", "how"),
    [
        ("flat", "FULL_SHARD", "ema"),
        ("flat", "NO_SHARD", "equal"),
        ("orig", "SHARD_GRAD_OP", "ema_with_buffers"),
        ("orig", "offloaded", "ema_one_by_one"),
        ("composable", "offloaded", "ema"),
    ],
)
@ranks(2)
def test_average_of_parameters(rank, world_size, front, strategy, how):
    model, plain = make_pair(per_block, front, **STRATEGIES[strategy])
    averages = [AveragedModel(module, **AVERAGES[how]) for module in (model, plain)]
    for step in range(3):
        train((model, plain), seed=step)
        with count_collectives() as counts:
            averages[0].update_parameters(model)
        assert counts == {}
        averages[1].update_parameters(plain)
    assert_same(*averages)
    assert_same(model, plain)
    with torch.no_grad():
        batch = batches_of(9)[0]
        torch.testing.assert_close(averages[0].eval()(batch), averages[1].eval()(batch))
    resumed = AveragedModel(model, **AVERAGES[how])
    resumed.load_state_dict(averages[0].state_dict())
    assert_same(resumed, averages[1])


@either_front
@ranks(2)
def test_a_copy_of_a_compiled_module_computes_with_its_own_parameters(rank, world_size, front):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 3)).double()
    model, batch = shard(front, copy.deepcopy(plain)), torch.ones(1, WIDTH, dtype=torch.float64)
    model.compile(backend="eager")
    with torch.no_grad():
        torch.testing.assert_close(model(batch), plain(batch))
        twin = copy.deepcopy(model)
        for param in model.parameters():
            param.zero_()
        torch.testing.assert_close(twin(batch), plain(batch))
