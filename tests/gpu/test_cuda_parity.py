"""The CUDA code path against DDP and a plain model there, by every value of an option with every other."""

from __future__ import annotations

import copy
import itertools
import random

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from composable import shard_blocks
from fronts import FULL, KEPT, clip, full, full_grads, shard
from fsdp_wrap import CPUOffload, CPUOffloadPolicy, OffloadPolicy, ShardingStrategy
from models import WRAPPINGS, Transformer, loss_of, named_state, tokens
from on_cuda import by_device, mostly_on_cuda, on_devices, over_the_group, place_of
from scenario import COMPOSABLE_SPACE, SPACE, check, draw, name_of, pairwise

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


SCENARIOS = [*pairwise(SPACE, seed=5), *pairwise(COMPOSABLE_SPACE, seed=6)]
WALKS, IN_EACH = 5, 4


@mostly_on_cuda("scenario", SCENARIOS, 25, name_of)
@by_device
def test_every_pair_of_options(rank, world_size, device, scenario):
    """One rank alone copies; every third time it calls its group as well, as several do."""
    place = place_of(device, rank)
    for over in (False, True)[: 1 + (SCENARIOS.index(scenario) % 3 == 1)]:
        with over_the_group(over):
            check(scenario, rank, world_size, device=place)


@mostly_on_cuda("walk", range(WALKS), WALKS, str)
@by_device
def test_random_walk(rank, world_size, device, walk):
    generator = random.Random(7000 + walk)
    place = place_of(device, rank)
    for number, space in itertools.product(range(IN_EACH), (SPACE, COMPOSABLE_SPACE)):
        with over_the_group(number % 2 == 0):
            check(draw(space, generator), rank, world_size, device=place)


def test_scenarios_are_many_enough():
    """Each strategy, offload, tying and checkpointing is there."""
    for name in ("strategy", "offload", "tied", "checkpointing", "frozen", "fault", "accumulation"):
        assert {each[name] for each in SCENARIOS if name in each} == {*SPACE[name]}, name
    assert {each.get("front", "wrapper") for each in SCENARIOS} == {"wrapper", "fully_shard"}
