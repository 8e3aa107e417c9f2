"""Units beside torch's other ways to parallelise a model: `replicate()` and DDP, around and inside."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed._composable.replicate_with_fsdp import replicate as replicate_by_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

from bed import ranks
from fronts import each_front, full, full_state, shard
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import fully_shard

RANKS = 2


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 3)).double()


def losses(model: Callable[..., Any], batches: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    """Trains by some batches a step, of which the model gets the mean gradient."""
    found = []
    for several in batches:
        loss = sum(model(batch).square().sum() for batch in several) / len(several)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def assert_trains_like(plain: nn.Module, model: nn.Module, rank: int, around: Any = None) -> None:
    """Compares training with that of a plain model that sees all ranks' batches, in float64."""
    batches = torch.randn(3, RANKS, 5, 4, dtype=torch.double, generator=torch.Generator().manual_seed(1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses(around or model, batches[:, rank : rank + 1], optimizer)
    losses(plain, batches, torch.optim.AdamW(plain.parameters(), lr=0.1))
    with torch.no_grad():
        expected, found = plain(batches[0, 0]), model(batches[0, 0])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def replicated_by(way: str, module: nn.Module) -> None:
    if way == "ddp":
        replicate(module)
    else:
        replicate_by_fsdp(module, mesh=init_device_mesh("cpu", (RANKS,), mesh_dim_names=("replicate",)))


@each_front
@ranks(RANKS)
def test_replicate_around_units_and_inside_of_one(rank, world_size, front):
    for way in ("ddp", "fsdp"):
        plain, inside = net(), net()
        model = copy.deepcopy(plain)
        for index in (0, 2):
            model[index] = shard(front, model[index])
        replicated_by(way, model)
        assert_trains_like(plain, model, rank)

        replicated_by(way, inside[2])
        theirs = [*inside[2].parameters()]
        model = shard(front, inside)
        assert all(one is other for one, other in zip(theirs, model[2].parameters())), "left alone"
        assert_trains_like(net(), model, rank)


@each_front
@ranks(RANKS)
def test_ddp_around_units_that_it_ignores(rank, world_size, front):
    plain = net()
    model = copy.deepcopy(plain)
    model[2] = shard(front, model[2])
    names = [name for name, _ in model.named_parameters() if name.startswith("2.")]
    DDP._set_params_and_buffers_to_ignore_for_model(model, names)
    assert_trains_like(plain, model, rank, DDP(model))
    with pytest.raises(RuntimeError, match="already managed by `fully_shard`"):
        replicate(shard("composable", net()))


@ranks(RANKS)
def test_a_module_whose_unit_has_no_parameters_is_wrapped_again(rank, world_size):
    plain = net()
    inner = nn.Sequential(*(FSDP(copy.deepcopy(each), use_orig_params=True) for each in plain))
    first = FSDP(inner, use_orig_params=True)
    assert_trains_like(plain, first, rank)
    again = FSDP(inner, use_orig_params=True)
    assert_trains_like(plain, again, rank)
    assert_trains_like(plain, first, rank)
    with pytest.raises(ValueError, match="already wrapped"):
        FSDP(inner[0].module)


class Slice(nn.Parameter):
    """A part of a table that a module shows as a parameter, but has not registered."""


class Tables(nn.Module):
    """Keeps all its embeddings in one tensor, as TorchRec does, and gives names to parts of it."""

    def __init__(self) -> None:
        super().__init__()
        self.all = torch.linspace(-1, 1, 48, dtype=torch.double)
        self.parts = {name: Slice(part) for name, part in zip("ab", self.all.view(2, 6, 4))}

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Any:
        return ((f"{prefix}.{name}".lstrip("."), part) for name, part in self.parts.items())

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.parts["a"][numbers] * self.parts["b"][numbers]

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", **kwargs: Any) -> Any:
        found = {f"{prefix}{name}": part.detach() for name, part in self.parts.items()}
        return found if destination is None else destination.update(found)


class Ranking(nn.Module):
    """Embeddings that are never sharded, below layers that are."""

    def __init__(self) -> None:
        super().__init__()
        self.tables, self.dense = Tables(), net()

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.dense(self.tables(numbers))


@each_front
@ranks(RANKS)
def test_modules_that_keep_their_parameters_by_themselves(rank, world_size, front):
    plain = Ranking()
    model: Any = copy.deepcopy(plain)
    kept = list(model.tables.parameters())
    if front == "composable":
        fully_shard(model.dense)
        fully_shard(model, ignored_params=set(kept))
    else:
        model.dense = FSDP(model.dense, use_orig_params=front == "orig")
        model = FSDP(model, ignored_modules=[model.tables], use_orig_params=front == "orig")
    assert all(one is other for one, other in zip(kept, model.tables.parameters()))
    for step in range(2):
        numbers = torch.tensor([[0, 1, 2], [3, 4, 5]]) - step
        loss = model(numbers[rank].relu()).square().sum()
        sum(plain(each.relu()).square().sum() for each in numbers).div(RANKS).backward()
        loss.backward()
        for part, expected in zip(kept, plain.tables.parameters()):
            dist.all_reduce(part.grad.div_(RANKS))  # what DMP would have done
            torch.testing.assert_close(part.grad, expected.grad)
        for one in (model, plain):
            torch.optim.SGD([*one.tables.parameters(), *one.dense.parameters()], 0.1).step()
            one.zero_grad()
            one.tables.zero_grad()
    found = model.state_dict()
    assert {"tables.a", "tables.b"} <= set(found) and torch.equal(found["tables.a"], kept[0])
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(full(found[name]), value, rtol=1e-12, atol=1e-12)


@each_front
@ranks(RANKS)
def test_channels_last(rank, world_size, front):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Conv2d(4, 6, 3), nn.Conv2d(6, 3, 1, bias=False)).double()
    model = shard(front, copy.deepcopy(plain).to(memory_format=torch.channels_last))  # type: ignore[call-overload]
    images = torch.randn(3, RANKS, 2, 4, 5, 5, dtype=torch.double)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    mine = images[:, rank : rank + 1].to(copy=True)
    losses(lambda each: model(each.to(memory_format=torch.channels_last)), mine, optimizer)
    losses(plain, images, torch.optim.AdamW(plain.parameters(), lr=0.1))
    for name, value in full_state(model).items():
        torch.testing.assert_close(value, plain.state_dict()[name], rtol=1e-12, atol=1e-12)
