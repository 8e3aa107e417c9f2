"""Wrappers in wrappers: what state dicts, loading and full parameters cost grows as the depth, no faster."""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import fsdp_wrap
from bed import ranks
from fronts import each_front, shard
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import StateDictType

PACKAGE = str(Path(fsdp_wrap.__file__).parent)
WAITS = f"{PACKAGE}/_comm/"
"""Looks at other ranks: the longer a wait takes, the more there are."""


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


def calls(act: Callable[[], object]) -> int:
    """Calls of the library's functions; generators, which torch's walks resume, and communication aside."""
    count = 0

    def look(frame: FrameType, event: str, _: Any) -> None:
        nonlocal count
        code = frame.f_code
        own = event == "call" and code.co_filename.startswith(PACKAGE)
        own = own and not code.co_filename.startswith(WAITS)
        count += own and not code.co_flags & inspect.CO_GENERATOR

    gc.collect()  # what earlier tests have left, whose ends would be counted here
    sys.setprofile(look)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count


def acts(model: nn.Module) -> dict[str, Callable[[], object]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.randn(3, 2)).sum().backward()
    optimizer.step()
    above = nn.Sequential(model)
    state, state_above = model.state_dict(), above.state_dict()
    by_name: dict[str, Callable[[], object]] = {
        "state_dict": model.state_dict,
        "state_dict of a plain module above": above.state_dict,
        "load_state_dict": lambda: model.load_state_dict(state),
        "load_state_dict of a plain module above": lambda: above.load_state_dict(state_above),
        "load_state_dict of parts": lambda: model.load_state_dict({"own.weight": state["own.weight"]}, False),
        "named_parameters": lambda: list(model.named_parameters()),
    }
    if not isinstance(model, FSDP):
        return by_name

    def load(kind: StateDictType) -> None:
        with FSDP.state_dict_type(model, kind):
            model.load_state_dict(model.state_dict())

    def summon() -> None:
        with FSDP.summon_full_params(model, writeback=False):
            pass

    saved = FSDP.optim_state_dict(model, optimizer)
    return by_name | {
        "sharded": lambda: load(StateDictType.SHARDED_STATE_DICT),
        "local": lambda: load(StateDictType.LOCAL_STATE_DICT),
        "summon_full_params": summon,
        "optim_state_dict": lambda: FSDP.optim_state_dict(model, optimizer),
        "optim_state_dict_to_load": lambda: FSDP.optim_state_dict_to_load(model, optimizer, saved),
    }


@each_front
@ranks(2)
def test_calls_grow_with_the_depth(rank, world_size, front):
    by_depth = [acts(nested(front, depth)) for depth in (4, 8, 16)]
    for name in by_depth[0]:
        few, more, most = (calls(by_name[name]) for by_name in by_depth)
        assert most - more <= 2.1 * (more - few), (name, few, more, most)

    # Forty levels would take a doubling for each for ever.
    model, plain = nested(front, 41), Chain(41)
    for act in acts(model).values():
        act()
    state = model.state_dict()
    assert len(state._metadata) <= 3 * len([*plain.modules()])
    for name, module in plain.named_modules():
        assert state._metadata[name] == module.state_dict()._metadata[""]
