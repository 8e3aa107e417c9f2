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
from bed import ranks
from fsdp_wrap import distributed_state_dict as ours
from fsdp_wrap.optim import Muon, on_shards
from fsdp_wrap.wrap import ModuleWrapPolicy

FULL = StateDictOptions(full_state_dict=True)


class Block(nn.Module):
    """A layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(6, 10), nn.Linear(10, 6, bias=False), nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Blocks and heads of which ranks have uneven parts, or none; one head is of no use at first."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.late, self.head, self.gain = nn.Linear(6, 3), nn.Linear(6, 3), nn.Parameter(torch.ones(1))

    def forward(self, tokens: torch.Tensor, late: bool) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.gain * (self.head(x) + self.late(x) if late else self.head(x))


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01, foreach=True)


MAKE: dict[str, Any] = {
    "on_shards": lambda model: on_shards(adamw(model.parameters())),
    "muon": lambda model: Muon(model, lr=0.01, other=adamw, ns_dtype=torch.float64),
}


def train(model: Any, optimizer: torch.optim.Optimizer, steps: range, seen: range, late: int) -> None:
    """Steps with the batches of some ranks; the late head is used from one of the steps on."""
    for at in steps:
        optimizer.zero_grad()
        for rank in seen:
            tokens = torch.randint(11, (2, 5), generator=torch.Generator().manual_seed(10 * at + rank))
            (model(tokens, at >= late).square().mean() / len(seen)).backward()
        optimizer.step()
    optimizer.zero_grad()  # else torch's functions make no state to load to


def twins(front: str, kind: str) -> tuple[nn.Module, Any, nn.Module, Any]:
    policy = ModuleWrapPolicy({Block})
    plain, model = fronts.twins(front, Net, torch.float64, auto_wrap_policy=policy)
    return plain, MAKE[kind](plain), model, MAKE[kind](model)


def assert_state(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert sorted(found["state"]) == sorted(expected["state"])
    for name, entry in found["state"].items():
        for key, value in entry.items():
            value = value.full_tensor() if hasattr(value, "full_tensor") else value
            told = f"{name} {key} on rank {dist.get_rank()}"
            torch.testing.assert_close(value, expected["state"][name][key], rtol=0, atol=1e-12, msg=told)


def assert_one_order(state: dict[str, Any]) -> None:
    """All ranks have the same names and keys in the same order."""
    listed = [(name, [*entry]) for name, entry in state["state"].items()]
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, listed)
    assert all(each == everywhere[0] for each in everywhere)


@pytest.mark.parametrize("kind", MAKE)
@fronts.each_front
@ranks(2, 4)
def test_states_are_those_of_a_plain_model(rank, world_size, front, kind):
    plain, reference, model, optimizer = twins(front, kind)
    own, everyone = range(rank, rank + 1), range(world_size)
    late = 0 if front == "flat" else 1  # a FlatParameter has one count for all that it stands for
    train(plain, reference, range(2), everyone, late)
    train(model, optimizer, range(2), own, late)
    expected = theirs.get_optimizer_state_dict(plain, reference)
    for functions in (ours, theirs):
        whole = functions.get_optimizer_state_dict(model, optimizer, options=FULL)
        pieces = functions.get_optimizer_state_dict(model, optimizer)
        assert_one_order(pieces)
        for state, options in ((whole, FULL), (pieces, None)):
            assert_state(state, expected)
            fresh = MAKE[kind](model)
            functions.set_optimizer_state_dict(model, fresh, copy.deepcopy(state), options=options)
            assert_state(functions.get_optimizer_state_dict(model, fresh, options=FULL), expected)
    train(plain, reference, range(2, 3), everyone, late)
    train(model, fresh, range(2, 3), own, late)
    fronts.assert_same_values(model, plain, rtol=0, atol=1e-12)
