"""Checkpoints of what lies on CUDA devices, over NCCL. Skipped where there is no GPU; one rank per GPU."""

from __future__ import annotations

import copy

import pytest
import torch

from bed import ranks
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import checkpoint
from models import Transformer, loss_of, tokens
from on_cuda import SIZES, needs_cuda
from optim_states import assert_same

pytestmark = needs_cuda


def train(model, optimizer, rank, steps):
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, tokens(rank, step).to("cuda")).backward()
        optimizer.step()


@pytest.mark.parametrize("in_background", [False, True])
@ranks(*SIZES, backend="nccl")
def test_what_was_saved_comes_back_to_the_device(rank, world_size, in_background, tmp_path):
    torch.cuda.set_device(rank)
    model = FSDP(Transformer(), device_id=rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, rank, range(2))
    expected, state = copy.deepcopy(model.state_dict()), FSDP.optim_state_dict(model, optimizer)
    state = copy.deepcopy(state)
    if in_background:
        pending = checkpoint.async_save(tmp_path, model, optimizer)
    else:
        checkpoint.save(tmp_path, model, optimizer)
    drawn = torch.rand(3, device="cuda")
    train(model, optimizer, rank, range(2, 4))
    if in_background:
        pending.result()
    checkpoint.load(tmp_path, model, optimizer)
    assert torch.equal(torch.rand(3, device="cuda"), drawn)
    for name, value in model.state_dict().items():
        assert value.is_cuda and torch.equal(value, expected[name]), name
    assert_same(FSDP.optim_state_dict(model, optimizer), state)
