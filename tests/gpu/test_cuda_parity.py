"""The CUDA code path against DDP there: streams, events, NCCL, one rank for each GPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from composable import shard_blocks
from fronts import FULL, KEPT, clip, full, full_grads, shard
from fsdp_wrap import CPUOffload, CPUOffloadPolicy, OffloadPolicy, ShardingStrategy
from models import WRAPPINGS, Transformer, loss_of, named_state, tokens
from on_cuda import on_devices, over_the_group, place_of

CHOICES = [
    *(
        (front, strategy)
        for front in ("flat", "orig")
        for strategy in (FULL, KEPT, ShardingStrategy.NO_SHARD)
    ),
    *(("composable", strategy) for strategy in (FULL, KEPT)),
]


@pytest.mark.parametrize("alone", [True, False], ids=["copies", "group"])
@pytest.mark.parametrize("offload", [False, True], ids=["resident", "offloaded"])
@on_devices
def test_training_equals_ddp(rank, world_size, device, offload, alone):
    place = place_of(device, rank)
    for front, strategy in CHOICES:
        with over_the_group(not alone):
            _compare_with_ddp(rank, place, front, strategy, offload)


def _compare_with_ddp(rank, place, front, strategy, offload):
    torch.manual_seed(0)
    plain = Transformer().double()
    options = {"sharding_strategy": strategy, "cpu_offload": CPUOffload(offload_params=offload)}
    if front != "composable":
        options["device_id"] = place
    model = shard(front, copy.deepcopy(plain), WRAPPINGS["block"](), **options)
    ddp = DDP(plain.to(place))
    for each in (ddp, model):
        optimizer = torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(each, tokens(rank, step).to(place)).backward()
            clip(each, 0.5)
            optimizer.step()
    state, grads = model.state_dict(), {name: param.grad for name, param in model.named_parameters()}
    if front != "composable":
        grads = full_grads(model)
    for name, param in named_state(ddp):
        for found, expected in ((state[name], param.detach()), (grads[name], param.grad)):
            told = f"{name}: {{}}, {front} {strategy}".format
            torch.testing.assert_close(full(found.to(place)), expected, rtol=0, atol=1e-10, msg=told)


POLICIES = {
    "resident": OffloadPolicy,
    "offloaded": CPUOffloadPolicy,
    "not_pinned": lambda: CPUOffloadPolicy(pin_memory=False),
}


@on_devices
def test_shards_lie_where_the_policy_says(rank, world_size, device):
    place_of(device, rank)
    for name, policy in POLICIES.items():
        model = shard_blocks(Transformer(), offload_policy=policy())
        at_home = device if name == "resident" else "cpu"
        assert {param.device.type for param in model.parameters()} == {at_home}
        pinned = device == "cuda" and name == "offloaded"
        assert all(param.to_local().is_pinned() for param in model.parameters()) == pinned
