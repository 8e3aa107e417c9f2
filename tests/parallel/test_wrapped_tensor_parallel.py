"""Tensor and sequence parallelism below the wrapper: training, clipping, state dicts and checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import tp_nets
from bed import ranks
from bed.sampling import few_fast
from fronts import accumulating
from fsdp_wrap import CPUOffload, MixedPrecision, ShardingStrategy, iter_full_params, set_gradients_in_place
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.wrap import ModuleWrapPolicy
from scenario import Scenario, pairwise

SPACE: dict[str, Any] = {
    "mesh": ["flat", "replicas", "shards", "long", "wide"],
    "plan": tp_nets.PLANS,
    "use_orig_params": [False, True],
    "kept": [False, True],
    "accumulation": ["T", "FT", "TT", "CT"],
    "precision": ["none", "float32", "reduced"],
    "frozen": ["nothing", "up", "blocks"],
    "offload": [False, True],
    "checkpointing": ["none", "reentrant", "early_stop"],
    "clip": [None, 1.0, 2.0, float("inf")],
    "sync": [False, True],
    "together": [0, None],
    "stays": [0, 1 << 20],
    "in_place": [False, True],
}


def freeze(model: tp_nets.Net, which: str) -> None:
    for name, param in model.named_parameters():
        param.requires_grad_({"nothing": "-", "up": ".up.", "blocks": "blocks."}[which] not in name)


def precision_of(name: str) -> MixedPrecision | None:
    if name == "none":
        return None
    reduced = torch.float64 if name == "reduced" else None
    return MixedPrecision(torch.float32, reduced, cast_root_forward_inputs=False)


def wrap(model: tp_nets.Net, mesh_name: str, plan: str, **options: Any) -> FSDP:
    _, data, tensor = tp_nets.mesh_of(mesh_name)
    tp_nets.parallelize(model, tensor, plan)
    freeze(model, options.pop("frozen", "nothing"))
    hybrid, kept = data.ndim > 1, options.pop("kept", False)
    if hybrid:
        strategy = ShardingStrategy._HYBRID_SHARD_ZERO2 if kept else ShardingStrategy.HYBRID_SHARD
    else:
        strategy = ShardingStrategy.SHARD_GRAD_OP if kept else ShardingStrategy.FULL_SHARD
    policy = ModuleWrapPolicy({tp_nets.Block})
    return FSDP(model, auto_wrap_policy=policy, device_mesh=data, sharding_strategy=strategy, **options)


def whole(model: FSDP) -> dict[str, torch.Tensor]:
    return dict(iter_full_params(model))


def check(scenario: Scenario) -> None:
    reference, exact = tp_nets.net_for(scenario["mesh"]), scenario["precision"] == "none"
    freeze(reference, scenario["frozen"])
    data = tp_nets.mesh_of(scenario["mesh"])[1]
    model = wrap(
        tp_nets.net_for(scenario["mesh"], scenario["checkpointing"]),
        scenario["mesh"],
        scenario["plan"],
        frozen=scenario["frozen"],
        kept=scenario["kept"],
        use_orig_params=scenario["use_orig_params"],
        sync_module_states=scenario["sync"],
        travel_together_bytes=scenario["together"],
        keep_unsharded_bytes=scenario["stays"],
        cpu_offload=CPUOffload(offload_params=scenario["offload"]),
        mixed_precision=precision_of(scenario["precision"]),
    )
    set_gradients_in_place(model, scenario["in_place"])
    near: dict[str, Any] = {"rtol": 0, "atol": 1e-12 if exact else 2e-5}
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.5, momentum=0.9) for each in (model, reference)]
    for step in range(2):
        for number, synced in enumerate(scenario["accumulation"]):
            tokens = tp_nets.batches(data.size(), 10 * step + number)
            with accumulating(model, {"F": "T", "T": "F"}.get(synced, synced)):
                tp_nets.loss_of(model, tp_nets.own_batch(tokens, data), scenario["plan"])
            for each in tokens:
                tp_nets.loss_of(reference, each)
        for param in reference.parameters():
            if param.grad is not None:
                param.grad /= data.size()
        if scenario["clip"] is not None:
            expected = nn.utils.clip_grad_norm_(reference.parameters(), 0.1, scenario["clip"])
            found = model.clip_grad_norm_(0.1, scenario["clip"])
            torch.testing.assert_close(found, expected, rtol=1e-10 if exact else 1e-4, atol=0)
        for each in optimizers:
            each.step()
            each.zero_grad()
    values = whole(model)
    for name, param in reference.named_parameters():
        torch.testing.assert_close(values[name], param.detach(), msg=name, **near)


@ranks(4)
@pytest.mark.parametrize("part", few_fast(range(6), 6))
def test_training_equals_a_plain_model(rank, world_size, part):
    for scenario in pairwise(SPACE, seed=23)[part::6]:
        try:
            check(scenario)
        except Exception as error:
            raise AssertionError(str(scenario)) from error
