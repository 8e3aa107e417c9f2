"""Checkpoints of what lies on CUDA devices, over NCCL."""

from __future__ import annotations

import copy

import pytest
import torch

from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import checkpoint
from models import Transformer, loss_of, tokens
from on_cuda import on_devices, place_of
from optim_states import assert_same


def _train(model, optimizer, rank, place, steps):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, tokens(rank, step).to(place)).backward()
        optimizer.step()


@pytest.mark.parametrize("in_background", [False, True])
@on_devices
def test_what_was_saved_comes_back_to_the_device(rank, world_size, device, in_background, tmp_path):
    place = place_of(device, rank)
    model = FSDP(Transformer(), device_id=place, use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    _train(model, optimizer, rank, place, range(2))
    expected, state = copy.deepcopy(model.state_dict()), FSDP.optim_state_dict(model, optimizer)
    state = copy.deepcopy(state)
    if in_background:
        pending = checkpoint.async_save(tmp_path, model, optimizer)
    else:
        checkpoint.save(tmp_path, model, optimizer)
    drawn = torch.rand(3, device=place)
    _train(model, optimizer, rank, place, range(2, 4))
    if in_background:
        pending.result()
    checkpoint.load(tmp_path, model, optimizer)
    assert torch.equal(torch.rand(3, device=place), drawn)
    for name, value in model.state_dict().items():
        assert value.device == place and torch.equal(value, expected[name]), name
    assert_same(FSDP.optim_state_dict(model, optimizer), state)
