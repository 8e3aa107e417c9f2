"""Wrong uses of `reproducible` are refused by name; a step begins anew after an error."""

from __future__ import annotations

import builtins
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import told
import tp_nets
from bed import ranks, run_ranks
from composable import shard_blocks
from fronts import assert_tensors, each_front, full_grads, no_sync, shard
from fsdp_wrap import fully_shard, reproducible, uneven
from fsdp_wrap.comm_hooks import LowPrecisionState, bf16_compress_hook, compress, register_comm_hook
from fsdp_wrap.optim import HostAdamW, step_in_backward
from models import WRAPPINGS, Transformer, gather_objects, loss_of, tokens

COUNT = 4


def model_of(front: str = "orig") -> nn.Module:
    torch.manual_seed(0)
    return shard(front, Transformer(blocks=1), WRAPPINGS["block"]())


def run(model: nn.Module, indices: Any) -> None:
    for index in indices:
        loss_of(model, tokens(index, 0)).backward()


MISTAKES = told.read(r"""
a step too early
    > run(model, work.indices[:-1]); torch.optim.SGD(model.parameters(), lr=0.1).step()
    RuntimeError: a step came after 1 of this rank's 2 micro-batches
a backward too many
    > run(model, [*work.indices, 0])
    RuntimeError: while the gradients of a complete step are still there
no backward
    > [*work.micro_batches(0)]
    RuntimeError: micro-batch \d of step 0 had 0 backwards
fused
    > run(model, work.indices); torch.optim.AdamW(model.parameters(), fused=True).step()
    RuntimeError: this AdamW is fused
HostAdamW
    > run(model, work.indices); HostAdamW(model.parameters()).step()
    RuntimeError: this HostAdamW is fused
a norm
    > run(model, work.indices); model.clip_grad_norm_(1.0, 3.0)
    ValueError: takes norms of order 1, 2 and inf, not 3.0
a hook
    > register_comm_hook(model, LowPrecisionState(dist.group.WORLD), bf16_compress_hook)
    > run(model, work.indices)
    RuntimeError: has a hook of its reductions
compression
    > compress(model, gathers="int8", reductions=None); run(model, work.indices)
    RuntimeError: is compressed, or has collectives of the user's
step_in_backward
    > step_in_backward(model, lambda params: torch.optim.SGD(params, lr=0.1)); run(model, work.indices)
    RuntimeError: is updated in its backward
uneven
    > with uneven(model): pass
    RuntimeError: is reproducible, and uneven\(\) lets ranks
twice
    > reproducible(model, micro_batches=COUNT)
    RuntimeError: is reproducible already
""")


@ranks(2)
def test_a_compression_that_has_been_ended_does_not_count(rank, world_size):
    """The gradients are those without it, bit for bit."""
    grads = []
    for squeezed in (False, True):
        model = model_of()
        if squeezed:
            compress(model, gathers="int8", reductions="int8")
            compress(model)
        work = reproducible(model, micro_batches=COUNT)
        run(model, work.indices)
        grads.append(full_grads(model))
    assert_tensors(*grads)


@ranks(2)
def test_mistakes_are_named(rank, world_size):
    for mistake in MISTAKES.values():
        model = model_of()
        work = reproducible(model, micro_batches=COUNT)
        with pytest.raises(getattr(builtins, mistake.kind), match=mistake.says):
            exec(mistake.source, {**globals(), "model": model, "work": work})
        del work, model


def small(*modules: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), *modules)


@ranks(2)
def test_models_that_cannot_be_reproducible(rank, world_size):
    norms = fully_shard(small(nn.BatchNorm1d(4)))
    with pytest.raises(RuntimeError, match="'1' is a BatchNorm1d in training mode"):
        reproducible(norms, micro_batches=COUNT)
    norms.eval()
    reproducible(norms, micro_batches=COUNT)
    norms.train()
    with pytest.raises(RuntimeError, match="'1' is a BatchNorm1d in training mode"):
        norms(torch.ones(2, 4))
    partly = small()
    fully_shard(partly, ignored_params={partly[0].bias})
    with pytest.raises(RuntimeError, match=r"'0\.bias' trains and belongs to no wrapped or sharded module"):
        reproducible(partly, micro_batches=COUNT)
    model = model_of()
    for count, says in ((3, "cannot be dealt out evenly to 2 ranks"), (0, "positive whole number")):
        with pytest.raises(ValueError, match=says):
            reproducible(model, micro_batches=count)
    with pytest.raises(ValueError, match="with the same arguments: rank 0 chose .*'seed': 0.*; rank 1"):
        reproducible(model, micro_batches=COUNT, seed=rank)
    for seed in ("0", 0.5, None):
        with pytest.raises(TypeError, match="seed must be an int, not"):
            reproducible(model, micro_batches=COUNT, seed=seed)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no wrapped or sharded module"):
        reproducible(nn.Linear(2, 2), micro_batches=COUNT)
    with model.no_sync():
        loss_of(model, tokens(rank, 0)).backward()
    with pytest.raises(RuntimeError, match="that no_sync left wait for a backward"):
        reproducible(model, micro_batches=COUNT)


@ranks(4)
def test_tensor_parallelism_is_refused(rank, world_size):
    _, data, inner = tp_nets.mesh_of("flat")
    model = tp_nets.parallelize(tp_nets.net(), inner, "columns")
    shard_blocks(model, fully_shard, mesh=data)
    with pytest.raises(RuntimeError, match="is distributed by tensor or expert parallelism"):
        reproducible(model, micro_batches=COUNT)


@ranks(2)
def test_optimizers_that_nobody_knows_are_warned_of(rank, world_size):
    class Own(torch.optim.SGD):
        pass

    model = model_of()
    work = reproducible(model, micro_batches=COUNT)
    run(model, work.indices)
    optimizer = Own(model.parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="does not know whether Own updates"):
        optimizer.step()
    narrow = fully_shard(small().bfloat16())
    work = reproducible(narrow, micro_batches=COUNT)
    for _ in work.indices:
        narrow(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    with pytest.warns(UserWarning, match="updates parameters of torch.bfloat16"):
        torch.optim.SGD(narrow.parameters(), lr=0.1).step()


def gradients(model: nn.Module) -> list[list[float]]:
    return [value.flatten().tolist() for value in full_grads(model).values()]


@each_front
@ranks(2)
def test_no_sync_changes_nothing_and_is_the_users_again(rank, world_size, front):
    model = model_of(front)
    work = reproducible(model, micro_batches=COUNT)
    run(model, work.indices)
    expected = gradients(model)
    model.zero_grad()
    with no_sync(model):
        run(model, work.indices[:1])
        assert all(param.grad is None for param in model.parameters())
    run(model, work.indices[1:])
    assert gradients(model) == expected
    model.zero_grad()
    work.remove()
    with no_sync(model):
        run(model, work.indices[:1])
    run(model, work.indices[1:])
    for own, wanted in zip(gradients(model), expected):  # plain sums again: of two backwards, over two ranks
        torch.testing.assert_close(torch.tensor(own) / 2, torch.tensor(wanted))


@ranks(2)
def test_a_step_begins_anew_after_an_error(rank, world_size):
    model = model_of()
    work = reproducible(model, micro_batches=COUNT)
    run(model, work.indices)
    expected = gradients(model)
    model.zero_grad()
    run(model, work.indices[:1])
    loss = loss_of(model, tokens(0, 7))
    loss.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    middle = loss_of(model, tokens(0, 8))
    model.module.blocks[0].register_full_backward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, tokens(0, 9)).backward()
    with pytest.raises(RuntimeError, match="begin the step anew"):
        torch.optim.SGD(model.parameters(), lr=0.1).step()
    del middle
    model.module.blocks[0]._backward_pre_hooks.clear()
    run(model, work.indices)
    assert gradients(model) == expected


@ranks(2)
def test_sums_without_an_average(rank, world_size):
    model, other = model_of(), model_of()
    run(model, reproducible(model, micro_batches=COUNT).indices)
    run(other, reproducible(other, micro_batches=COUNT, average=False).indices)
    for mean, total in zip(gradients(model), gradients(other)):
        assert [COUNT * value for value in mean] == total  # a power of two


class Sparse(nn.Module):
    """Uses its second unit for some micro-batches only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, both: bool) -> torch.Tensor:
        x = self.first(x)
        return self.second(x) if both else x


def partly_used(rank: int, world_size: int) -> list[list[float]]:
    torch.manual_seed(0)
    model = Sparse()
    fully_shard(model.second)
    fully_shard(model)
    work = reproducible(model, micro_batches=8)
    for index in work.micro_batches(0):
        x = torch.randn(3, 4)
        model(x, both=index % 4 in (1, 2)).square().sum().backward()
    return gradients(model)


def test_a_unit_that_some_micro_batches_do_not_use():
    (expected,) = run_ranks(1, partly_used)
    assert run_ranks(2, partly_used) == [expected] * 2


@ranks(2)
def test_random_numbers_belong_to_micro_batches(rank, world_size):
    model = model_of()
    work = reproducible(model, micro_batches=COUNT, seed=3)
    assert work.indices == range(2 * rank, 2 * rank + 2)  # contiguous
    drawn = []
    for index in work.micro_batches(5):
        drawn.append((index, torch.rand(1).item(), random.random()))
        loss_of(model, tokens(index, 0)).backward()
    of_ranks = gather_objects(drawn)
    every = sorted(draw for of_rank in of_ranks for draw in of_rank)
    assert [index for index, *_ in every] == [*range(COUNT)]
    assert len({number for _, *numbers in every for number in numbers}) == 2 * COUNT
    for index, number, other in every:
        work.seed(5, index)
        assert (torch.rand(1).item(), random.random()) == (number, other)
    assert work.seed_of(5, 1) not in (work.seed_of(5, 2), work.seed_of(6, 1))


class Zeros(nn.Module):
    """Its gradients are negative zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight * x).sum()


@pytest.mark.parametrize("front", ["flat", "orig"])
@ranks(2)
def test_zeros_have_one_sign(rank, world_size, front):
    model = shard(front, Zeros())
    for _ in reproducible(model, micro_batches=2).indices:
        model(torch.tensor(-0.0)).backward()
    for grad in full_grads(model).values():
        assert not grad.any() and not grad.signbit().any()
