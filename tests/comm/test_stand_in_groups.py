"""Stand-ins for a process group, with a rank and a size: a module is wrapped as that rank would wrap it."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fronts import assert_same_values
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import ShardingStrategy
from fsdp_wrap.wrap import ModuleWrapPolicy


class _Place:
    """One rank among some that are not there."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2)))


def test_each_rank_alone_holds_the_part_that_it_would_hold_among_others():
    assert not dist.is_initialized()
    plain, places = _model(), [_Place(rank, 3) for rank in range(3)]
    policy = ModuleWrapPolicy({nn.Linear})
    ranks = [
        FSDP(copy.deepcopy(plain), place, use_orig_params=True, auto_wrap_policy=policy)  # type: ignore[arg-type]
        for place in places
    ]
    for rank, wrapped in enumerate(ranks):
        assert (wrapped.rank, wrapped.world_size) == (rank, 3) and wrapped.process_group is places[rank]
        assert [type(each) for each in (wrapped[0], wrapped[2][0], wrapped[2][1])] == [FSDP] * 3
    for name in ("0", "2.0", "2.1"):
        layer, units = plain.get_submodule(name), [each.module.get_submodule(name) for each in ranks]
        for kind, whole in layer.named_parameters():
            pieces = [unit.get_parameter(f"_fsdp_wrapped_module.{kind}") for unit in units]
            assert torch.equal(torch.cat(pieces), whole.flatten()), (name, kind)  # type: ignore[arg-type]
        held = [sum(param.numel() for param in unit.parameters()) for unit in units]
        assert max(held) <= sum(map(torch.numel, layer.parameters())) / 3 + 4


def test_what_needs_the_others_is_refused_by_name():
    wrapped = FSDP(_model(), _Place(1, 2))  # type: ignore[arg-type]
    for needs_them in (
        lambda: wrapped(torch.ones(1, 5)),
        lambda: wrapped.clip_grad_norm_(1.0),
        lambda: FSDP.summon_full_params(wrapped).__enter__(),
        wrapped.state_dict,
    ):
        with pytest.raises(RuntimeError, match="rank 1 of 2 with a _Place as process_group"):
            needs_them()


@pytest.mark.parametrize("strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.NO_SHARD])
def test_one_of_one_trains_as_a_plain_module(strategy):
    plain = _model().double()
    wrapped = FSDP(copy.deepcopy(plain), _Place(0, 1), strategy, use_orig_params=True)  # type: ignore[arg-type]
    for model in (plain, wrapped):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            torch.manual_seed(step)
            model(torch.randn(4, 5, dtype=torch.float64)).square().sum().backward()
            optimizer.step()
    assert wrapped.state_dict().keys() == plain.state_dict().keys()
    assert_same_values(wrapped, plain)


def test_what_is_neither_a_group_nor_a_place_is_refused():
    for other in (3, object(), "gloo"):
        with pytest.raises(TypeError, match="rank.. and size"):
            FSDP(nn.Linear(2, 2), other)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs a process group"):
        FSDP(nn.Linear(2, 2))
