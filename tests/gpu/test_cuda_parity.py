"""The CUDA code path against DDP there: streams, events, NCCL, one rank for each GPU."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from composable import shard_blocks
from fsdp_wrap import CPUOffload, CPUOffloadPolicy, OffloadPolicy
from models import Transformer, full_grads, loss_of, named_state, tokens, transformer_twins
from on_cuda import on_devices, over_the_group, place_of, train


@pytest.mark.parametrize("offload", [False, True], ids=["resident", "offloaded"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
@on_devices
def test_wrapper_equals_ddp(rank, world_size, device, use_orig_params, strategy, offload):
    for alone in (False, True):
        _compare_with_ddp(rank, device, use_orig_params, strategy, offload, alone)


def _compare_with_ddp(rank, device, use_orig_params, strategy, offload, alone):
    place = place_of(device, rank)
    with over_the_group(alone):
        plain, model = transformer_twins(
            use_orig_params, strategy, cpu_offload=CPUOffload(offload_params=offload), device_id=place
        )
        ddp = DDP(plain.to(place))
        for module in (ddp, model):
            train(module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), rank, place, 4)
        state, grads = model.state_dict(), full_grads(model)
    for name, param in named_state(ddp):
        torch.testing.assert_close(state[name].to(place), param.detach(), rtol=0, atol=1e-10)
        torch.testing.assert_close(grads[name].to(place), param.grad, rtol=0, atol=1e-10)


POLICIES = {
    "resident": OffloadPolicy,
    "offloaded": CPUOffloadPolicy,
    "not_pinned": lambda: CPUOffloadPolicy(pin_memory=False),
}


@pytest.mark.parametrize("reshard", [True, False], ids=["reshards", "keeps"])
@pytest.mark.parametrize("offload", POLICIES)
@on_devices
def test_fully_shard_equals_ddp(rank, world_size, device, offload, reshard):
    place = place_of(device, rank)
    torch.manual_seed(0)
    plain = Transformer().double()
    torch.manual_seed(0)
    model = shard_blocks(
        Transformer().double(), offload_policy=POLICIES[offload](), reshard_after_forward=reshard
    )
    at_home = device if offload == "resident" else "cpu"
    assert {param.device.type for param in model.parameters()} == {at_home}
    assert all(param.to_local().is_pinned() for param in model.parameters()) == (
        device == "cuda" and offload == "offloaded"
    )
    ddp = DDP(plain.to(place))
    for one in (ddp, model):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)
        for step in range(4):
            optimizer.zero_grad()
            loss_of(one, tokens(rank, step).to(place)).backward()
            nn.utils.clip_grad_norm_(one.parameters(), 0.5)
            optimizer.step()
    for (name, found), expected in zip(model.named_parameters(), plain.parameters()):
        whole = found.detach().to(place).full_tensor()
        torch.testing.assert_close(whole, expected.detach(), rtol=0, atol=1e-9, msg=name)
