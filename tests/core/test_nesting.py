"""Wrappers in wrappers: state dicts, loading and full parameters cost no doubling for each level."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from bed import ranks
from fronts import each_front, shard
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import StateDictType


class Chain(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.own, self.norm = nn.Linear(2, 2), nn.BatchNorm1d(2)
        self.inner: nn.Module = Chain(depth - 1) if depth > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.norm(self.own(x)))


def nested(front: str, depth: int) -> nn.Module:
    chain = Chain(depth)
    levels = [module for module in chain.modules() if isinstance(module, Chain)]
    for above, below in reversed(list(zip(levels, levels[1:]))):
        above.inner = shard(front, below)
    return shard(front, chain)


def acts(model: nn.Module) -> list[Callable[[], object]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(3, 2)).sum().backward()
    optimizer.step()
    above = nn.Sequential(model)
    state, state_above = model.state_dict(), above.state_dict()
    found: list[Callable[[], object]] = [
        model.state_dict,
        above.state_dict,
        lambda: model.load_state_dict(state),
        lambda: above.load_state_dict(state_above),
        lambda: model.load_state_dict({"own.weight": state["own.weight"]}, False),
        lambda: list(model.named_parameters()),
    ]
    if not isinstance(model, FSDP):
        return found

    def load(kind: StateDictType) -> None:
        with FSDP.state_dict_type(model, kind):
            model.load_state_dict(model.state_dict())

    def summon() -> None:
        with FSDP.summon_full_params(model, writeback=False):
            pass

    saved = FSDP.optim_state_dict(model, optimizer)
    return [
        *found,
        lambda: load(StateDictType.SHARDED_STATE_DICT),
        lambda: load(StateDictType.LOCAL_STATE_DICT),
        summon,
        lambda: FSDP.optim_state_dict(model, optimizer),
        lambda: FSDP.optim_state_dict_to_load(model, optimizer, saved),
    ]


@each_front
@ranks(2)
def test_forty_levels_come_to_an_end(rank, world_size, front):
    """A doubling for each level would take for ever."""
    model, plain = nested(front, 41), Chain(41)
    for act in acts(model):
        act()
    state = model.state_dict()
    assert len(state._metadata) <= 3 * len([*plain.modules()])
    for name, module in plain.named_modules():
        assert state._metadata[name] == module.state_dict()._metadata[""]
