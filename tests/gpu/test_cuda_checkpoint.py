"""Checkpoints, full parameters, gradients and copies of what lies on CUDA devices, over NCCL."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from fsdp_wrap import CPUOffload, checkpoint
from fsdp_wrap import FullyShardedDataParallel as FSDP
from models import Transformer, full_grads, loss_of, tokens, transformer_twins
from on_cuda import on_devices, place_of, train
from optim_states import assert_same
from state_nets import assert_equal


@pytest.mark.parametrize("in_background", [False, True])
@on_devices
def test_what_was_saved_comes_back_to_the_device(rank, world_size, device, in_background, tmp_path):
    place = place_of(device, rank)
    model = FSDP(Transformer(), device_id=place, use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, rank, place, 2)
    expected, state = copy.deepcopy(model.state_dict()), FSDP.optim_state_dict(model, optimizer)
    state = copy.deepcopy(state)
    if in_background:
        pending = checkpoint.async_save(tmp_path, model, optimizer)
    else:
        checkpoint.save(tmp_path, model, optimizer)
    drawn = torch.rand(3, device=place)
    train(model, optimizer, rank, place, 2)
    if in_background:
        pending.result()
    checkpoint.load(tmp_path, model, optimizer)
    assert torch.equal(torch.rand(3, device=place), drawn)
    for name, value in model.state_dict().items():
        assert value.device == place and torch.equal(value, expected[name]), name
    assert_same(FSDP.optim_state_dict(model, optimizer), state)


@pytest.mark.parametrize("offloaded", [False, True], ids=["on_device", "offloaded"])
@pytest.mark.parametrize(
    ("use_orig_params", "to_cpu", "rank0_only"),
    [(False, False, False), (False, True, True), (True, False, True), (True, True, False)],
)
@on_devices
def test_summoned_parameters_and_gradients(
    rank, world_size, device, use_orig_params, to_cpu, rank0_only, offloaded
):
    place = place_of(device, rank)
    plain, model = transformer_twins(
        use_orig_params, cpu_offload=CPUOffload(offload_params=offloaded), device_id=place
    )
    ddp = DDP(plain.to(place))
    for module in (ddp, model):
        loss_of(module, tokens(rank, 0).to(place)).backward()
    with FSDP.summon_full_params(model, True, True, rank0_only, to_cpu, True):
        if rank == 0 or not rank0_only:
            shown = dict(model.named_parameters())
            for name, expected in plain.named_parameters():
                for tensor in (shown[name], shown[name].grad):
                    assert tensor.device == (torch.device("cpu") if to_cpu else place)
                torch.testing.assert_close(shown[name].to(place), expected, rtol=0, atol=1e-10)
                torch.testing.assert_close(shown[name].grad.to(place), expected.grad, rtol=0, atol=1e-10)
                shown[name].data.mul_(0.5)
                shown[name].grad.mul_(2)
    for param in plain.parameters():
        param.data.mul_(0.5)
        param.grad.mul_(2)
    grads = full_grads(model)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(grads[name].to(place), param.grad, rtol=0, atol=1e-10)
    for module in (ddp, model):
        train(module, torch.optim.SGD(module.parameters(), lr=0.1), rank, place, 2)
    state = model.state_dict()
    for name, param in plain.named_parameters():
        torch.testing.assert_close(state[name].to(place), param.detach(), rtol=0, atol=1e-10)


@pytest.mark.parametrize(("use_orig_params", "offloaded"), [(False, True), (True, False), (True, True)])
@on_devices
def test_deep_copy_trains_on_its_own(rank, world_size, device, use_orig_params, offloaded):
    place = place_of(device, rank)
    _, model = transformer_twins(
        use_orig_params, cpu_offload=CPUOffload(offload_params=offloaded), device_id=place
    )
    second = copy.deepcopy(model)
    before = copy.deepcopy(model.state_dict())
    assert [param.device for param in second.parameters()] == [param.device for param in model.parameters()]
    train(second, torch.optim.SGD(second.parameters(), lr=0.1), rank, place, 2)
    assert_equal(model.state_dict(), before)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, place, 2)
    torch.testing.assert_close(second.state_dict(), model.state_dict(), rtol=0, atol=1e-10)
