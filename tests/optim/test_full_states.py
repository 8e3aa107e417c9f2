"""States of optimizers on several ranks, full and sharded, beside those of a plain model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as theirs
from torch.distributed.checkpoint.state_dict import StateDictOptions

import fronts
import tp_nets
from bed import ranks
from fronts import full
from fsdp_wrap import distributed_state_dict as ours
from fsdp_wrap.optim import Muon, on_shards
from fsdp_wrap.wrap import ModuleWrapPolicy
from models import gather_objects

FULL = StateDictOptions(full_state_dict=True)


class Net(tp_nets.Net):
    """With heads of which ranks have uneven parts, or none; one is of no use at first."""

    def __init__(self) -> None:
        super().__init__()
        self.late, self.gain = nn.Linear(tp_nets.WIDTH, tp_nets.VOCABULARY), nn.Parameter(torch.ones(1))
        self.used = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        x = self.norm(x)
        return self.gain * (self.head(x) + self.late(x) if self.used else self.head(x))


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, foreach=True)


MAKE: dict[str, Any] = {
    "on_shards": lambda model: on_shards(adamw(model.parameters())),
    "muon": lambda model: Muon(model, lr=0.01, other=adamw, ns_dtype=torch.float64),
}


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range, seen: range, late: int) -> None:
    """Steps with the batches of some ranks; the late head is used from one of the steps on."""
    for at in steps:
        fronts.inner(model).used = at >= late
        for rank in seen:
            (model(tp_nets.batches(4, at)[rank]).square().mean() / len(seen)).backward()
        optimizer.step()
        optimizer.zero_grad()


def assert_state(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """All ranks have the names and keys in one order."""
    assert sorted(found["state"]) == sorted(expected["state"])
    for name, entry in found["state"].items():
        for key, value in entry.items():
            told = f"{name} {key} on rank {dist.get_rank()}"
            torch.testing.assert_close(
                full(value), expected["state"][name][key], rtol=0, atol=1e-12, msg=told
            )
    everywhere = gather_objects([(name, [*entry]) for name, entry in found["state"].items()])
    assert all(each == everywhere[0] for each in everywhere)


@pytest.mark.parametrize("kind", MAKE)
@fronts.each_front
@ranks(3)
def test_states_are_those_of_a_plain_model(rank, world_size, front, kind):
    policy = ModuleWrapPolicy({tp_nets.Block})
    plain, model = fronts.twins(front, Net, torch.float64, auto_wrap_policy=policy)
    reference, optimizer = MAKE[kind](plain), MAKE[kind](model)
    own, everyone = range(rank, rank + 1), range(world_size)
    late = 0 if front == "flat" else 1  # a FlatParameter has one count for all that it stands for
    train(plain, reference, range(2), everyone, late)
    train(model, optimizer, range(2), own, late)
    expected = theirs.get_optimizer_state_dict(plain, reference)
    for functions in (ours, theirs):
        for options in (FULL, None):
            state = functions.get_optimizer_state_dict(model, optimizer, options=options)
            assert_state(state, expected)
            fresh = MAKE[kind](model)
            functions.set_optimizer_state_dict(model, fresh, copy.deepcopy(state), options=options)
            assert_state(functions.get_optimizer_state_dict(model, fresh, options=FULL), expected)
    again = MAKE[kind](model)
    fresh.param_groups[0]["lr"] = reference.param_groups[0]["lr"] = 0.07
    again.load_state_dict(copy.deepcopy(fresh.state_dict()))
    train(plain, reference, range(2, 3), everyone, late)
    train(model, again, range(2, 3), own, late)
    fronts.assert_same_values(model, plain, rtol=0, atol=1e-12)
