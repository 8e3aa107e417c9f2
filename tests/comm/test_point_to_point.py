"""Messages between every two ranks in place of gloo's own collectives: the same numbers, whatever the way."""

import copy
import functools
import os
import threading
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils._python_dispatch import TorchDispatchMode

from bed import ranks
from bed.references import count_collectives
from collectives import FLOATS, check_gathers_and_sums, check_others
from fronts import assert_same_values, full_grads, full_state, no_sync, shard
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import MixedPrecision, ShardingStrategy
from fsdp_wrap._comm import messages as _exchange
from fsdp_wrap._comm import select as _communicators
from fsdp_wrap._comm.groups import Ranks
from fsdp_wrap._comm.messages import (
    Messages,
    all_reduce_at_once,
    exchange_gather,
    exchange_reduce,
    reduce_at_once,
)
from fsdp_wrap._comm.select import make_communicator
from fsdp_wrap.wrap import ModuleWrapPolicy
from models import Block, Transformer, gather_objects, loss_of, tokens

SETTING = "FSDP_WRAP_GLOO"
CPU = torch.device("cpu")
BLOCKS = ModuleWrapPolicy({Block})


@pytest.fixture(autouse=True)
def unset(monkeypatch):
    monkeypatch.delenv(SETTING, raising=False)
    monkeypatch.setenv(_communicators._SHARED_MEMORY, "0")  # without that no message is sent


def choose(monkeypatch, way):
    """Chooses the way to send for what is wrapped next; "by size", a `Transformer`'s blocks are large."""
    monkeypatch.setattr(_communicators, "_LEAST_EXCHANGED", 16_000)
    monkeypatch.setenv(_communicators._SHARED_MEMORY, "0")
    if way == "by size":
        monkeypatch.delenv(SETTING, raising=False)
    else:
        monkeypatch.setenv(SETTING, way)


def over_gloo():
    with mock.patch.dict(os.environ, {_communicators._SHARED_MEMORY: "0"}):
        return make_communicator(Ranks(dist.group.WORLD, dist.get_rank(), dist.get_world_size()), CPU)


def train(model, rank, steps=3):
    """Accumulates two batches per step, the first of them unreduced; returns the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for index in range(steps):
        optimizer.zero_grad()
        with no_sync(model):
            loss_of(model, tokens(rank, 2 * index)).backward()
        loss = loss_of(model, tokens(rank, 2 * index + 1))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses


@pytest.mark.parametrize(("front", "dtype"), [("orig", torch.bfloat16), ("composable", torch.float32)])
@ranks(2)
def test_training_is_bit_equal_to_ddp(rank, world_size, front, dtype):
    torch.manual_seed(0)
    plain = Transformer().to(dtype)
    models, traffics, exchanged, at_once = {}, {}, {}, {}
    for way in ("plain", "by size", "exchange"):
        with pytest.MonkeyPatch.context() as patch, count_collectives() as traffic:
            choose(patch, way)
            spy = mock.Mock(wraps=exchange_reduce)
            patch.setattr(_exchange, "exchange_reduce", spy)
            small = mock.Mock(wraps=reduce_at_once)
            patch.setattr(_exchange, "reduce_at_once", small)
            models[way] = shard(front, copy.deepcopy(plain), auto_wrap_policy=BLOCKS, travel_together_bytes=0)
            losses = train(models[way], rank)
        traffics[way], exchanged[way], at_once[way] = (traffic, losses), spy.call_count, small.call_count
    ddp = DDP(plain)
    losses = train(ddp, rank)
    for way, model in models.items():
        assert traffics[way] == (traffics["plain"][0], losses)
        assert_same_values(model, ddp)
    assert exchanged == {"plain": 0, "by size": 3 * 3, "exchange": 3 * (3 + 1)}
    assert at_once == {"plain": 0, "by size": 3, "exchange": 0}


class DtypesOfSums(TorchDispatchMode):
    """Notes the dtypes of what is added in place."""

    def __init__(self) -> None:
        super().__init__()
        self.pairs: list[tuple[torch.dtype, torch.dtype]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.add_.Tensor:
            self.pairs.append((args[0].dtype, args[1].dtype))
        return func(*args, **(kwargs or {}))


@ranks(3)
def test_no_sum_makes_a_copy_that_a_plan_does_not_see(rank, world_size):
    """On the CPU torch widens a narrower addend in memory of its own."""
    parts = {peer: torch.full((8,), 1.0 + rank, dtype=torch.bfloat16) for peer in range(world_size)}
    shard = torch.empty(8)
    messages = exchange_reduce(dist.group.WORLD, rank, shard, parts)
    with DtypesOfSums() as seen:
        messages.wait()
    assert seen.pairs == [(torch.float32, torch.float32)] * 2 and shard.tolist() == [6.0] * 8


def trained(rank, **options):
    torch.manual_seed(0)
    model = FSDP(Transformer(), auto_wrap_policy=BLOCKS, use_orig_params=True, **options)
    return train(model, rank), full_state(model)


@ranks(2, 3)
def test_all_dtypes_and_several_at_once(rank, world_size):
    """Small ones at once, and large ones by messages; sums of two are rounded once."""
    with mock.patch.object(_communicators, "_LEAST_EXCHANGED", 4000):
        ours = over_gloo()
    check_gathers_and_sums(ours)
    if world_size == 3:
        check_others(ours)
    for numel in (1, 77, 5000):
        for dtype in FLOATS:
            value, result = (100 * torch.randn(numel * world_size)).to(dtype), ours.empty(numel, dtype)
            of_all = torch.stack([ours.own_part(gathered) for gathered in gather_objects(value)]).double()
            ours.reduce_scatter([result], [value]).wait()
            wanted = of_all.sum(0)
            if world_size == 2:
                assert torch.equal(result, wanted.to(dtype))
            bound = torch.finfo(dtype).eps * of_all.abs().sum(0)
            assert torch.all((result.double() - wanted).abs() <= 2 * bound)


@ranks(3)
def test_small_tensors_are_reduced_at_once(rank, world_size):
    """By every operation, in the order of the ranks: all have the same bits, and zeros keep their sign."""
    ours = over_gloo()
    operations = {
        dist.ReduceOp.SUM: lambda rows: functools.reduce(torch.add, rows),
        dist.ReduceOp.MAX: lambda rows: rows.amax(0),
        dist.ReduceOp.MIN: lambda rows: rows.amin(0),
        dist.ReduceOp.PRODUCT: lambda rows: functools.reduce(torch.mul, rows),
    }
    spy = mock.Mock(wraps=all_reduce_at_once)
    torch.manual_seed(rank)  # else the order would not matter
    with mock.patch.object(_exchange, "all_reduce_at_once", spy), count_collectives() as traffic:
        for dtype in (*FLOATS, torch.int64):
            for op, reference in operations.items():
                own = (10 * torch.randn(100)).to(dtype)
                reduced, scalar = own.clone().view(5, 20), own[0].clone()
                ours.all_reduce([reduced, scalar], op).wait()
                rows = torch.stack(gather_objects(own))
                wanted = reference(rows)
                assert torch.equal(reduced.view(-1), wanted), (dtype, op)
                assert scalar == wanted[0]
                assert len({*map(str, gather_objects(reduced))}) == 1
        assert spy.call_count == 5 * 4 * 2
        large = torch.full((1 << 18,), rank + 1.0)
        ours.all_reduce([large]).wait()
        ours.all_reduce([own], dist.ReduceOp.BXOR).wait()  # no bytes of floats: gloo's own
    assert spy.call_count == 5 * 4 * 2 and large[-1] == sum(range(1, world_size + 1))
    assert traffic["all_reduce"].calls == 5 * 4 * 2 + 2
    zeros, shard = torch.full((world_size,), -0.0), torch.ones(1)
    ours.reduce_scatter([shard], [zeros]).wait()
    ours.all_reduce([zeros]).wait()
    assert torch.signbit(zeros).all() and torch.signbit(shard).all()


@pytest.mark.parametrize("numel", [3000, 3 << 20])
@ranks(3)
def test_copies_are_freed_when_they_have_travelled(rank, world_size, numel):
    """Even while gloo's threads still hold them, so that the peak of a step does not vary."""
    ours, full, shard = over_gloo(), torch.ones(numel), torch.ones(numel // 3)
    copies: list[torch.Tensor] = []
    repeat, empty_like, new_empty = torch.Tensor.repeat, torch.empty_like, torch.Tensor.new_empty

    def held(make: Any) -> Any:
        def kept(*args: Any, **options: Any) -> torch.Tensor:
            copies.append(make(*args, **options))
            return copies[-1]

        return kept

    with (
        mock.patch.object(torch, "empty_like", held(empty_like)),
        mock.patch.object(torch.Tensor, "repeat", held(repeat)),
        mock.patch.object(torch.Tensor, "new_empty", held(new_empty)),
    ):
        pending = [ours.all_gather([full], lambda: None), ours.reduce_scatter([shard], [full])]
        pending.append(ours.all_reduce([torch.ones(100)]))
        assert [tensor.untyped_storage().nbytes() > 0 for tensor in copies] == [True] * len(copies)
        for work in pending:
            work.wait()
    assert len(copies) == (4 if numel == 3000 else 3)
    assert [tensor.untyped_storage().nbytes() for tensor in copies] == [0] * len(copies)
    assert torch.equal(shard, torch.full((numel // 3,), 3.0)) and torch.equal(full, torch.ones(numel))


@ranks(3)
def test_who_has_issued_need_not_wait_for_others(rank, world_size):
    """Gathers and reductions of the first rank complete while others are elsewhere, and only once."""
    ours = over_gloo()
    full, shard, total = torch.full((6,), float(rank)), torch.empty(2), torch.ones(3)
    parts = dict(enumerate(torch.full((3 << 16,), float(rank)).chunk(world_size)))
    large = torch.empty_like(parts[0])
    gathered = {peer: torch.full((1 << 16,), float(rank)) for peer in range(world_size)}
    works = [
        ours.all_gather([full], lambda: None),
        ours.reduce_scatter([shard], [torch.full((6,), rank + 1.0)]),
        ours.all_reduce([total]),
        exchange_reduce(dist.group.WORLD, rank, large, parts),
        exchange_gather(dist.group.WORLD, rank, gathered),
    ]
    if rank == 0:
        dist.barrier()  # the others are done before it waits
    for work in works:
        work.wait()
        work.wait()  # without effect
    if rank != 0:
        dist.barrier()
    assert full.tolist() == [0, 0, 1, 1, 2, 2]
    assert shard.tolist() == [6, 6] and total.tolist() == [3, 3, 3]
    assert [part[-1].item() for part in gathered.values()] == list(range(world_size))
    assert torch.all(large == sum(range(world_size)))


@ranks(4)
def test_subgroups_and_sums_that_are_the_same_every_time(rank, world_size):
    """Copies of two ranks each: the same bits as by gloo's own collectives, which run beside the messages."""
    once, again = [], []
    mesh = dist.device_mesh.init_device_mesh("cpu", (2, 2))
    for way in ("plain", "by size", "exchange"):
        with pytest.MonkeyPatch.context() as patch:
            choose(patch, way)
            once.append(trained(rank, device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD))
            again += [trained(rank) for _ in range(2 * (way == "exchange"))]
    assert again[0][0] == pytest.approx(once[0][0], rel=1e-4)
    for one, other in (once[:2], once[::2], again):
        assert one[0] == other[0]
        assert all(torch.equal(value, other[1][name]) for name, value in one[1].items())


@ranks(2)
def test_messages_of_the_user_are_not_taken(rank, world_size):
    """The user's own come in between, on the same group, in another order on each rank."""
    with pytest.MonkeyPatch.context() as patch:
        choose(patch, "exchange")
        ours = over_gloo()
    full, shard, sent, received = torch.full((8,), rank + 1.0), torch.empty(4), torch.ones(4), torch.empty(4)
    spoiled = torch.arange(8.0)

    def theirs():
        return [dist.irecv(received, 1 - rank), dist.isend(sent, 1 - rank)]

    works = theirs() if rank == 0 else []
    gather = ours.all_gather([full], lambda: None)
    works = works or theirs()
    ours.reduce_scatter([shard], [spoiled]).wait()
    gather.wait()
    for work in works:
        work.wait()
    assert full.tolist() == [1.0] * 4 + [2.0] * 4
    assert shard.tolist() == [2.0 * (4 * rank + index) for index in range(4)]
    assert received.tolist() == [1.0] * 4


class Message:
    """One that must not be waited for twice, as it would never end; or whose connection was closed."""

    def __init__(self, closed: bool = False):
        self.closed, self.waited = closed, False

    def wait(self):
        if self.closed:
            raise RuntimeError("closed by peer")
        assert not self.waited
        self.waited = True


def test_a_failed_exchange_stays_failed():
    """Nobody may take the rest of it for complete, or free what messages may still be written to."""

    def add():
        raise RuntimeError("no memory for the sum")

    group: Any = mock.Mock()
    group.recv.side_effect = lambda tensors, peer, tag: Message(closed=peer != 2)
    group.send.side_effect = lambda *_: Message()
    parts = dict(enumerate(torch.zeros(6).chunk(3)))
    for messages, said in (
        (exchange_gather(group, 0, parts), "closed by peer"),
        (exchange_reduce(group, 0, torch.zeros(2), parts), "closed by peer"),
        (Messages([(1, Message())], lambda rank: True, add), "no memory for the sum"),
    ):
        for _ in range(2):
            with pytest.raises(RuntimeError, match=said):
                messages.wait()


class Stuck:
    def __init__(self):
        self.freed = threading.Event()

    def wait(self):
        self.freed.wait()
        raise RuntimeError("timed out")


def test_messages_of_a_dead_rank_are_given_up_and_stay_so():
    lives = {1: True}
    stuck = Stuck()
    messages = Messages([(1, stuck)], lives.__getitem__)
    moment = timedelta(milliseconds=10)
    for alive in (True, False, True, False):  # a single look may come between a message and its arrival
        lives[1] = alive
        with pytest.raises(RuntimeError, match="still on their way"):
            messages.wait(moment)
        assert not messages.is_completed()
    with pytest.raises(RuntimeError, match="a rank died"):
        messages.wait(moment)
    assert messages.is_completed()
    with pytest.raises(RuntimeError, match="a rank died"):
        messages.wait()
    stuck.freed.set()


class Branches(nn.ModuleList):
    """Units that all ranks run; the loss takes those outputs that it is told."""

    def forward(self, x: torch.Tensor, used: list[int]) -> torch.Tensor:
        outputs = [branch(x).square().sum() for branch in self]
        return sum(outputs[index] for index in used)


def fail(gradient: torch.Tensor) -> None:
    raise ValueError("on purpose")


@pytest.mark.parametrize(("way", "failing"), [("plain", True), ("exchange", False)])
@ranks(2)
def test_ranks_that_accumulate_in_different_units_send_one_dtype(rank, world_size, way, failing):
    """Gradients travel narrow if nothing is accumulated: not what a rank, but what all ranks did decides."""
    torch.manual_seed(0)
    plain = Branches(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch:
        choose(patch, way)
        model = FSDP(
            copy.deepcopy(plain),
            auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
            mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            sharding_strategy=ShardingStrategy.SHARD_GRAD_OP,  # else backward would gather what it uses
            use_orig_params=True,
        )
    x = torch.ones(4, 16)
    with no_sync(model):
        model(x, [rank]).backward()
    if failing:
        with pytest.raises(ValueError, match="on purpose"):
            output = model(x, [0, 1])
            output.register_hook(fail)
            output.backward()
    model(x, [0, 1]).backward()
    expected = copy.deepcopy(plain).bfloat16()
    for used in ([0], [1], [0, 1], [0, 1]):  # by all ranks
        expected(x.bfloat16(), used).backward()
    grads = full_grads(model)
    for name, param in expected.named_parameters():
        torch.testing.assert_close(grads[name], param.grad.float() / world_size, rtol=0.02, atol=0.02)
