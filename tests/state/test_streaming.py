"""Full parameters and optimizer state one by one: names, values, memory, and callers that break off."""

import copy
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
import torch
from torch import nn

from bed import ranks
from bed.memory import Peak, only_new_objects, settled_bytes
from bed.references import count_collectives
from fronts import ONE, SIDE, each_form, each_front, either_front, shard, squares
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import MixedPrecision, iter_full_optim_state, iter_full_params, param_aliases
from fsdp_wrap.wrap import ModuleWrapPolicy
from optim_states import by_name
from state_nets import (
    WIDTH,
    Block,
    Buffered,
    Mixed,
    Net,
    Shared,
    Tied,
    adamw,
    assert_close,
    assert_equal,
    below_plain,
    by_hand,
    new_batches,
    per_block,
    train_side_by_side,
    whole,
    wrapped_and_plain,
)

WAYS = [(whole, False), (per_block, True), (by_hand, True), (below_plain, False)]
"""Of wrapping, with a form of the wrapper."""
BUDGETS = [None, 1, 200, 10**9]


def parameters(plain: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.detach() for name, param in plain.named_parameters()}


def assert_streams(model: nn.Module, plain: nn.Module, all_sent: bool) -> None:
    """Parameters, their other names and buffers come as a plain module has them, in memory of their own."""
    for budget in BUDGETS:
        with count_collectives() as traffic:
            streamed = dict(iter_full_params(model, budget=budget))
        if all_sent:
            assert set(traffic) == {"broadcast"}
            assert traffic["broadcast"].bytes == sum(value.nbytes for value in streamed.values())
        assert_equal(streamed, parameters(plain))
        storages = {value.untyped_storage().data_ptr() for value in streamed.values()}
        assert len(storages) == len(streamed)  # nobody else's memory
        assert all(value.untyped_storage().nbytes() == value.nbytes for value in streamed.values())
    every = plain.named_parameters(remove_duplicate=False)
    buffers = {name for name, _ in plain.named_buffers(remove_duplicate=False)}
    aliases = param_aliases(model)
    names = [name for first in streamed for name in (first, *aliases.pop(first, ()))]
    assert sorted(names) == sorted(name for name, _ in every)
    assert {name for first, others in aliases.items() for name in (first, *others)} <= buffers
    with_buffers = dict(iter_full_params(model, buffers=True))
    kept = [name for name in plain.state_dict() if name in buffers]
    assert list(with_buffers) == [*streamed, *kept]
    assert_equal({name: with_buffers[name] for name in kept}, {n: plain.state_dict()[n] for n in kept})


each_class = pytest.mark.parametrize("cls", [Net, Tied, Shared, Buffered, Mixed])


@each_class
@ranks(1, 3)
def test_parameters_come_as_the_plain_module_has_them(rank, world_size, cls):
    for wrap, use_orig_params in WAYS[:3] if cls in (Tied, Shared) else WAYS:
        model, plain = wrapped_and_plain(cls, wrap, use_orig_params)
        assert_streams(model, plain, world_size > 1 and wrap is not below_plain)
        blocks = model.blocks if wrap is below_plain else model.module.blocks
        if wrap is whole or (wrap is per_block and cls in (Tied, Shared)):
            with pytest.raises(ValueError, match="belongs to a unit around"):
                iter_full_params(blocks)
        else:
            assert_equal(dict(iter_full_params(blocks)), parameters(plain.blocks))


@each_class
@ranks(3)
def test_parameters_of_fully_shard_come_alike(rank, world_size, cls):
    for policy in (None, ModuleWrapPolicy({Block, nn.BatchNorm1d})):
        torch.manual_seed(0)
        plain = cls() if cls is Mixed else cls().double()
        for module in plain.modules():
            for name, param in list(module.named_parameters(recurse=False)):
                if not param.shape:  # cannot be cut
                    setattr(module, name, nn.Parameter(param.detach().reshape(1)))
        model = shard("composable", copy.deepcopy(plain), policy)
        for number, _ in enumerate(iter_full_params(model)):
            if number == 3 * rank:  # the ranks stop at different places
                break
        assert_streams(model, plain, True)


@ranks(1)
def test_a_plain_module_streams_copies_also_without_process_groups(rank, world_size):
    plain = Tied()
    streamed = dict(iter_full_params(plain))
    assert_equal(streamed, parameters(plain))
    streamed["shift"].zero_()
    assert plain.shift.any() and "head.weight" not in streamed


@ranks(2)
def test_dtypes_are_master_ones_or_as_asked_for(rank, world_size):
    policy = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    plain = Buffered()
    model = per_block(copy.deepcopy(plain), use_orig_params=True, mixed_precision=policy)
    assert_equal(dict(iter_full_params(model)), parameters(plain))
    model.eval()(torch.randn(4, WIDTH))
    kept = dict(iter_full_params(model, buffers=True))
    assert kept["norm.running_var"].dtype == torch.float32
    assert_equal({name: kept[name] for name in parameters(plain)}, parameters(plain))
    half = {name: value.half() for name, value in parameters(plain).items()}
    with count_collectives() as traffic:
        assert_equal(dict(iter_full_params(model, dtype=torch.float16)), half)
    assert traffic["broadcast"].bytes == sum(value.nbytes for value in half.values())  # cast, then sent
    mixed, plain = wrapped_and_plain(Mixed, whole, True)
    streamed = dict(iter_full_params(mixed, dtype=torch.float64))
    assert streamed.pop("blocks.0.table").dtype == torch.int64
    assert {value.dtype for value in streamed.values()} == {torch.float64}


@each_form
@ranks(3)
def test_optimizer_state_comes_value_by_value(rank, world_size, use_orig_params):
    model, plain = wrapped_and_plain(Tied, per_block, use_orig_params)
    ours, theirs = adamw(model), adamw(plain)
    assert list(iter_full_optim_state(model, ours)) == []
    train_side_by_side(2, model, ours, plain, theirs)
    expected = {
        (name, key): value
        for name, entry in by_name(theirs, plain)["state"].items()
        for key, value in sorted(entry.items())
    }
    for budget in BUDGETS:
        streamed = {
            (name, key): value for name, key, value in iter_full_optim_state(model, ours, budget=budget)
        }
        assert_close(streamed, expected)
    on_first = list(iter_full_optim_state(model, ours, rank0_only=True, offload_to_cpu=True))
    assert [(name, key) for name, key, _ in on_first] == list(expected)
    assert {value.is_meta for _, _, value in on_first} == {rank != 0}
    partly, _ = wrapped_and_plain(Net, below_plain, use_orig_params)
    first = adamw(partly)
    partly(new_batches()[rank]).sum().backward()
    first.step()
    for module, optimizer in ((model, ours), (partly, first)):
        for number, _ in enumerate(iter_full_optim_state(module, optimizer)):
            if number == 2 * rank:  # the ranks stop at different places; of `partly` nothing was gathered yet
                break
    train_side_by_side(1, model, ours, plain, theirs)
    assert_close(dict(iter_full_params(model)), parameters(plain))


def held(values: Iterator[Any], most: int, one: int = ONE) -> float:
    """How many matrices are alive at most while a loop passes over values."""
    before = settled_bytes()
    with Peak(before + 1.02 * most * one) as peak:
        for _ in values:
            pass
    return (peak.value - before) / one


@each_front
@ranks(2)
def test_no_more_is_alive_than_the_budget(rank, world_size, front):
    model = squares(front)
    optimizer = adamw(model)
    model(torch.ones(1, SIDE)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()

    with only_new_objects():
        # The default is twice a unit of two; at least one is gathered, while the loop holds the one before.
        for budget, most in ((None, 4), (1, 2), (3 * ONE + 1, 3)):
            assert 0.95 * most <= held(iter_full_params(model, budget=budget), most) <= 1.02 * most
            if front != "composable":  # whose optimizer state has no full form here
                state = iter_full_optim_state(model, optimizer, budget=budget)
                assert 0.95 * most <= held(state, most) <= 1.02 * most
        least, most = (3, 3) if rank == 0 else (1.5, 2)  # the others have memory for what they send alone
        only = held(iter_full_params(model, budget=3 * ONE, rank0_only=True), most)
        assert 0.95 * least <= only <= 1.02 * most


@either_front
@ranks(2)
def test_the_next_parameters_are_on_their_way_while_one_is_used(rank, world_size, front):
    model = squares(front, per_unit=1)
    for budget, ahead in ((1, 0), (2 * ONE, 1), (None, 1), (4 * ONE, 3)):
        with count_collectives() as traffic, closing(iter_full_params(model, budget=budget)) as params:
            name, _ = next(params)
            # A matrix is split over both ranks: two messages each.
            assert traffic["broadcast"].calls == 2 * (1 + ahead), (budget, name)


class Many(nn.Module):
    """Small tensors of two dtypes among larger ones, and one of no elements."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (3, 700, 1, 70_000, 0, 5, 2_000, 2_000, 40_000, 11)
        self.values = nn.ParameterList(torch.randn(size) for size in sizes)
        self.halves = nn.ParameterList(torch.randn(size).half() for size in (4, 9))


@ranks(3)
def test_small_tensors_travel_together(rank, world_size):
    plain = Many()
    model = FSDP(copy.deepcopy(plain), use_orig_params=True, sync_module_states=True)
    expected = dict(iter_full_params(model, budget=1))  # each alone
    assert {name: (value.shape, value.dtype) for name, value in expected.items()} == {
        name: (value.shape, value.dtype) for name, value in parameters(plain).items()
    }
    total = sum(value.nbytes for value in expected.values())
    calls = {}
    for budget in (1, 9_000, 50_000, None):
        with count_collectives() as traffic:
            streamed = dict(iter_full_params(model, budget=budget))
        assert_equal(streamed, expected)
        assert all(value.untyped_storage().nbytes() == value.nbytes for value in streamed.values())
        assert traffic["broadcast"].bytes == total
        calls[budget] = traffic["broadcast"].calls
    # Three before the large one, four behind it, the next large one, the last, those of another dtype:
    # at most one message of each rank a batch.
    assert calls[None] <= 6 * world_size
    assert calls[1] > calls[9_000] > calls[None]
    with count_collectives() as traffic:  # what a rank keeps must not decide what travels together
        for number, _ in enumerate(iter_full_params(model, rank0_only=True)):
            if number == 2 * rank:
                break
    assert traffic["all_to_all_single"].calls == 6 and "broadcast" not in traffic, traffic
    on_first = dict(iter_full_params(model, rank0_only=True))
    assert {value.is_meta for value in on_first.values()} == {rank > 0}
    if rank == 0:
        assert_equal(on_first, expected)
    assert_equal(dict(iter_full_params(model)), expected)


@either_front
@ranks(2)
def test_small_tensors_that_travel_together_stay_within_the_budget(rank, world_size, front):
    one = 64 * 64 * 4
    with only_new_objects():
        parts = (nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8))) for _ in range(4))
        model = shard(front, nn.Sequential(*parts), ModuleWrapPolicy({nn.Sequential}))
        for most in (4, 7, 12, 40):
            assert held(iter_full_params(model, budget=most * one), most, one) <= 1.02 * most
        assert settled_bytes() > 15 * one, "the shards"


@ranks(2)
def test_wrong_arguments_are_refused(rank, world_size):
    model, plain = wrapped_and_plain(Net, per_block, True)
    optimizer = adamw(model)
    every = (
        (lambda **given: iter_full_params(model, **given)),
        (lambda **given: iter_full_optim_state(model, optimizer, **given)),
    )
    with FSDP.summon_full_params(model.module.blocks[1]):
        for begin in every:
            with pytest.raises(RuntimeError, match=r"'blocks.1' are shown in full by summon_full_params"):
                begin()
    for budget, error in ((0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)):
        for begin in every:
            with pytest.raises(error, match="budget must be a"):
                begin(budget=budget)
    for dtype, error in ((torch.int64, ValueError), ("float16", TypeError)):
        with pytest.raises(error, match="dtype must be a"):
            iter_full_params(model, dtype=dtype)  # type: ignore[arg-type]
    for given in ({"dtype": torch.bfloat16}, {"buffers": True}, {"budget": 7}):
        told = rf"with the same arguments: rank 0 chose .*{[*given][0]}.*; rank 1 chose"
        with pytest.raises(ValueError, match=told):
            iter_full_params(model, **(given if rank else {}))
    with pytest.raises(RuntimeError, match="'1.weight' is on the meta device"):
        iter_full_params(nn.Sequential(model, nn.Linear(3, 3, device="meta")))
    with pytest.raises(TypeError, match="optim must be"):
        iter_full_optim_state(model, model)
    other = shard("composable", nn.Linear(4, 4))
    with pytest.raises(ValueError, match=r"'weight' was sharded by fully_shard"):
        iter_full_optim_state(other, adamw(other))
    assert_equal(dict(iter_full_params(model)), parameters(plain))
