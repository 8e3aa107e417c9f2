"""A rank that was killed before a state dict or a checkpoint: the others name it, and where all stood."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bed import run_isolated
from fronts import shard
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import StateDictType, checkpoint, iter_full_params
from fsdp_wrap.distributed_state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

FULL = StateDictOptions(full_state_dict=True)
FROM_FIRST = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def local(model: nn.Module) -> Any:
    if not isinstance(model, FSDP):
        return model.state_dict()
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        return model.state_dict()


CALLS: dict[str, Callable[..., object]] = {
    "save": lambda model, optim, path: checkpoint.save(path, model, optim),
    "async_save": lambda model, optim, path: checkpoint.async_save(path, model, optim).result(),
    "load": lambda model, optim, path: checkpoint.load(path, model, optim),
    "get_model": lambda model, optim, path: get_model_state_dict(model, options=FULL),
    "get_optimizer": lambda model, optim, path: get_optimizer_state_dict(model, optim, options=FULL),
    "set_model": lambda model, optim, state: set_model_state_dict(model, state, options=FROM_FIRST),
    "set_optimizer": lambda model, optim, state: set_optimizer_state_dict(
        model, optim, state, options=FROM_FIRST
    ),
    "full_tensor": lambda model, optim, path: [value.full_tensor() for value in local(model).values()],
    "iter_full_params": lambda model, optim, path: list(iter_full_params(model)),
}


def die_before(rank: int, world_size: int, front: str, call: str, path: Path) -> str:
    """The last rank is killed before the call; returns what another one is told."""
    model = shard(front, nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    optim = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optim.step()
    state: Any = path
    if call == "load":
        checkpoint.save(path, model, optim)
    elif call == "set_model":
        state = get_model_state_dict(model, options=FULL)
    elif call == "set_optimizer":
        state = get_optimizer_state_dict(model, optim, options=FULL)
    if rank == world_size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as failed:
        CALLS[call](model, optim, state)
    return str(failed.value)


def survivor_of(front: str, call: str, path: Path) -> str:
    survivor, killed = run_isolated(die_before, front, call, path, world_size=2)
    assert killed.kind == "died" and survivor.kind == "passed", survivor
    return str(survivor.value)


def check(front: str, call: str, path: Path) -> None:
    told = survivor_of(front, call, path).splitlines()
    assert "a collective failed: " in told[0]
    if call in ("save", "async_save", "load"):
        assert told[0].startswith(f"checkpoint.{call} failed, since rank 1 died: ")
    assert told[1] == "Where the ranks stand:"
    assert told[3].startswith("  rank 1 (dead): in or after the root unit ("), told


OVER_GLOO = ["load", "get_optimizer", "set_model"]  # beside those of the slow tier


@pytest.mark.parametrize("call", OVER_GLOO)
def test_a_rank_that_died_is_named(tmp_path, monkeypatch, call):
    monkeypatch.setenv("FSDP_WRAP_SHARED_MEMORY", "0")
    check("orig", call, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(("front", "shared"), [("orig", "0"), ("flat", "1"), ("composable", "1")])
def test_a_rank_that_died_is_named_whatever_is_called(tmp_path, monkeypatch, front, shared, call):
    if (front, call) == ("composable", "full_tensor"):  # torch's own, of a DTensor
        return
    monkeypatch.setenv("FSDP_WRAP_SHARED_MEMORY", shared)
    check(front, call, tmp_path)
