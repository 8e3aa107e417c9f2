"""Tensor and sequence parallelism below `fully_shard`: training as a plain model in float64."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

import tp_nets
from bed import ranks
from bed.sampling import few_fast
from fronts import full
from fsdp_wrap import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    set_gradients_in_place,
)
from scenario import Scenario, pairwise

SPACE: dict[str, Sequence[Any]] = {
    "mesh": ["flat", "replicas", "shards", "long", "wide"],
    "plan": tp_nets.PLANS,
    "accumulation": ["T", "FT", "TT", "CT"],
    "precision": ["none", "float32", "reduced"],
    "frozen": ["nothing", "up", "norms", "blocks"],
    "checkpointing": ["none", "reentrant", "early_stop"],
    "reshard": [None, True, False],
    "offload": [False, True],
    "columns": [False, True],
    "together": [0, None],
    "stays": [0, 1 << 20],
    "reducing": [1, 3],
    "in_place": [False, True],
}
""""C" stands for a backward that reduces within each copy, and does not sum over the replicas."""


def frozen_of(model: nn.Module, which: str) -> list[nn.Parameter]:
    wanted = {"nothing": "-", "up": ".up.", "norms": "norm.", "blocks": "blocks."}[which]
    return [param for name, param in model.named_parameters() if wanted in name]


def policy_of(precision: str) -> MixedPrecisionPolicy:
    if precision == "none":
        return MixedPrecisionPolicy()
    reduce_dtype = torch.float64 if precision == "reduced" else None
    return MixedPrecisionPolicy(torch.float32, reduce_dtype)


def place_over(size: int) -> Callable[[nn.Parameter], Shard | None]:
    """Matrices by their second dimension, where so many ranks divide what is left of it."""

    def place(param: nn.Parameter) -> Shard | None:
        local = param.to_local() if isinstance(param, DTensor) else param
        return Shard(1) if local.ndim == 2 and local.shape[1] % size == 0 else None

    return place


def check(scenario: Scenario) -> None:
    _, data, tensor = tp_nets.mesh_of(scenario["mesh"])
    reference = tp_nets.net_for(scenario["mesh"])
    model = tp_nets.net_for(scenario["mesh"], scenario["checkpointing"])
    tp_nets.parallelize(model, tensor, scenario["plan"])
    for each in (reference, model):  # afterwards: what it distributes needs gradients
        for param in frozen_of(each, scenario["frozen"]):
            param.requires_grad_(False)
    tp_nets.shard_blocks(
        model,
        fully_shard,
        mesh=data,
        reshard_after_forward=scenario["reshard"],
        mp_policy=policy_of(scenario["precision"]),
        offload_policy=CPUOffloadPolicy() if scenario["offload"] else OffloadPolicy(),
        shard_placement_fn=place_over(data.shape[-1]) if scenario["columns"] else None,
        travel_together_bytes=scenario["together"],
        keep_unsharded_bytes=scenario["stays"],
    )
    model.set_reduce_scatter_max_input_buffers(scenario["reducing"])
    set_gradients_in_place(model, scenario["in_place"])
    exact = scenario["precision"] == "none"
    near: dict[str, Any] = {"rtol": 0, "atol": 1e-12 if exact else 2e-5}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5, momentum=0.9)
    plain = torch.optim.SGD([p for p in reference.parameters() if p.requires_grad], lr=0.5, momentum=0.9)
    for step in range(2):
        for number, synced in enumerate(scenario["accumulation"]):
            tokens = tp_nets.batches(data.size(), 10 * step + number)
            model.set_requires_gradient_sync(synced != "F")
            model.set_requires_all_reduce(synced != "C")
            found = tp_nets.loss_of(model, tp_nets.own_batch(tokens, data), scenario["plan"])
            losses = [tp_nets.loss_of(reference, each) for each in tokens]
            assert len(losses) == data.size()
            own = tp_nets.own_batch(torch.stack(losses), data)
            torch.testing.assert_close(found.double(), own, **near)
        for (name, param), other in zip(model.named_parameters(), reference.parameters()):
            assert (param.grad is None) == (other.grad is None), name
            if param.grad is not None:
                torch.testing.assert_close(full(param.grad), other.grad / data.size(), msg=name, **near)
                other.grad /= data.size()
        for one in (optimizer, plain):
            one.step()
            one.zero_grad()
    for (name, param), other in zip(model.named_parameters(), reference.parameters()):
        torch.testing.assert_close(full(param.detach()), other.detach(), msg=name, **near)


@ranks(4)
@pytest.mark.parametrize("part", few_fast(range(6), 3))
def test_training_equals_a_plain_model(rank, world_size, part):
    for scenario in pairwise(SPACE, seed=22)[part::6]:
        try:
            check(scenario)
        except Exception as error:
            raise AssertionError(str(scenario)) from error
