"""`fully_shard`: backwards that the user ends, and unsharded memory that stays where it is.

Gradients are compared, in float64, with those of a plain model that sees the batches of all ranks, and with
torch's own `fully_shard` where that has the same methods (from 2.15 on).
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from bed import ranks
from beside import mean_backward
from fsdp_wrap import GradientReductionHandle, MixedPrecisionPolicy, fully_shard

HAS_TORCHS = hasattr(torch_fsdp, "GradientReductionHandle")


class Net(nn.Module):
    """Two units in a root, none of which uses all of its parameters each time."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Sequential(nn.Linear(6, 6), nn.Tanh()), nn.Sequential(nn.Linear(6, 6))
        self.head, self.spare = nn.Linear(6, 2), nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(x)))


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def shard(model: Net, shard: Any = fully_shard, **options: Any) -> Any:
    for unit in (model.first, model.second):
        shard(unit, **options)
    return shard(model, **options)


def ended_by_hand(**options: Any) -> Any:
    model = shard(net(), **options)
    model.set_manual_backward_finalization(True)
    return model


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).pow(2).mean()


def assert_grads(model: nn.Module, *steps: int) -> None:
    """They are a plain model's, averaged over ranks and added over steps; None where that has none."""
    plain = net()
    for step in steps:
        mean_backward(lambda rank: loss(plain, batch(rank, step)))  # noqa: B023
    wanted = dict(plain.named_parameters())
    for name, param in model.named_parameters():
        assert (param.grad is None) == (wanted[name].grad is None), name
        if param.grad is not None:
            found = param.grad.full_tensor()
            torch.testing.assert_close(found, wanted[name].grad, rtol=0, atol=1e-12, msg=name)


def train(model: Any, rank: int, way: str, asynchronous: bool) -> None:
    """Two batches, whose backwards are ended each, or at last: after both graphs, or without reductions."""

    def end() -> None:
        ended = model.finalize_backward(async_op=asynchronous)
        assert (ended is None) is not asynchronous
        for _ in range(2 * asynchronous):
            ended.wait()

    model.set_requires_gradient_sync(way != "accumulated")
    graphs = [loss(model, batch(rank, step)) for step in range(2 * (way == "together"))]
    for step in (0, 1):
        (graphs[step] if graphs else loss(model, batch(rank, step))).backward()
        if way == "again" and step == 0:
            end()
    model.set_requires_gradient_sync(True)
    end()


@pytest.mark.parametrize("keep", [None, "forward", "backward"])
@ranks(3)
def test_gradients_of_backwards_ended_by_hand(rank, world_size, keep):
    model = ended_by_hand(reshard_after_forward=keep != "forward")
    model.set_reshard_after_backward(keep != "backward")
    model.set_is_last_backward(False)  # without effect
    for way, asynchronous in itertools.product(("again", "accumulated", "together"), (False, True)):
        train(model, rank, way, asynchronous)
        assert_grads(model, 0, 1)
        model.zero_grad()
        if HAS_TORCHS:
            theirs = shard(net(), torch_fsdp.fully_shard)
            theirs.set_manual_backward_finalization(True)
            train(theirs, rank, way, asynchronous)
            assert_grads(theirs, 0, 1)


@ranks(4)
def test_replicas_are_summed_completely_or_refused(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = ended_by_hand(mesh=mesh)
    model.set_requires_all_reduce(False)
    loss(model, batch(rank, 0)).backward()
    with pytest.raises(RuntimeError, match=r"set_requires_all_reduce\(True\)"):
        model.finalize_backward()
    model.set_requires_all_reduce(True)
    loss(model, batch(rank, 1)).backward()
    model.finalize_backward()
    assert_grads(model, 0, 1)


@ranks(2)
def test_what_is_to_be_waited_for(rank, world_size):
    model = shard(net())
    assert model.finalize_backward() is None  # before the first forward
    model.finalize_backward(async_op=True).wait()
    model.set_manual_backward_finalization(True)
    output = loss(model, batch(rank, 0))
    errors = []

    def end_inside(grad: torch.Tensor) -> None:
        for act in (model.finalize_backward, lambda: model.set_manual_backward_finalization(False)):
            with pytest.raises(RuntimeError) as error:
                act()
            errors.append(str(error.value))

    output.register_hook(end_inside)
    output.backward()
    assert "inside a backward" in errors[0] and "had begun" in errors[1]
    with pytest.raises(RuntimeError, match="had begun"):
        model.set_manual_backward_finalization(False)
    handle = model.finalize_backward(async_op=True)
    assert isinstance(handle, GradientReductionHandle)
    for too_early in (lambda: model(batch(rank, 1)), model.finalize_backward):
        with pytest.raises(RuntimeError, match=r"before wait\(\)"):
            too_early()
    handle.wait()
    assert_grads(model, 0)
    model.set_manual_backward_finalization(False)
    loss(model, batch(rank, 1)).backward()
    assert_grads(model, 0, 1)
    with pytest.raises(RuntimeError, match="end by themselves"):
        model.finalize_backward()


@ranks(2)
def test_only_the_root_ends_backwards_and_reset_drops_what_they_left(rank, world_size):
    model = shard(net())
    for act in (model.first.finalize_backward, lambda: model.first.set_manual_backward_finalization(True)):
        with pytest.raises(RuntimeError, match="must be called on the root, and this is unit 'first'"):
            act()
    inner = net()
    fully_shard(inner.first).set_manual_backward_finalization(True)
    fully_shard(inner)
    with pytest.raises(RuntimeError, match="unit 'first', which another unit encloses"):
        inner(batch(rank, 0))
    model.set_manual_backward_finalization(True)
    loss(model, batch(rank, 0)).backward()
    handle = model.finalize_backward(async_op=True)
    model.reset_iter_state()
    with pytest.raises(RuntimeError, match="has dropped"):
        handle.wait()
    model.zero_grad()
    loss(model, batch(rank, 1)).backward()
    model.finalize_backward()
    assert_grads(model, 1)


# memory


@ranks(1, 4)
def test_unsharded_memory_stays_where_it_is(rank, world_size):
    for precision, reshard in ((None, True), (torch.float32, 2 if world_size == 4 else True)):
        model = shard(net(), mp_policy=MixedPrecisionPolicy(precision), reshard_after_forward=reshard)
        model.set_keep_unsharded_storage(True)
        plain = copy.deepcopy(model)
        plain.set_keep_unsharded_storage(False)
        both = [(each, torch.optim.SGD(each.parameters(), lr=0.1)) for each in (model, plain)]
        seen: list[list[int]] = []
        for layer in (model.first[0], model.second[0], model.head):
            layer.register_forward_pre_hook(lambda layer, args: seen[-1].append(layer.weight.data_ptr()))  # noqa: B023
        blockers = []
        for step in range(4):
            seen.append([])
            for each, optimizer in both:
                optimizer.zero_grad()
                loss(each, batch(rank, step)).backward()
                optimizer.step()
            blockers += [torch.empty(48, dtype=torch.float64) for _ in range(50)]  # takes what is freed
            assert all(isinstance(param, DTensor) for param in model.parameters())
        assert seen[0] == seen[1] == seen[2] == seen[3], precision
        for one, two in zip(model.parameters(), plain.parameters()):
            assert torch.equal(one.full_tensor(), two.full_tensor())
