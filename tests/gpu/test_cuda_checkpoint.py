"""Checkpoints of what lies on CUDA devices, over NCCL."""

from __future__ import annotations

import copy

import pytest
import torch

from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import checkpoint
from models import Transformer
from on_cuda import on_devices, place_of, train
from optim_states import assert_same


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
