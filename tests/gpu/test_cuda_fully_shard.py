"""`fully_shard` on CUDA: streams, NCCL, offload. Skipped where there is no GPU; one rank per GPU."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from bed import ranks
from fsdp_wrap import CPUOffloadPolicy, OffloadPolicy, fully_shard
from models import Transformer, loss_of, tokens
from on_cuda import SIZES, needs_cuda

pytestmark = needs_cuda


@pytest.mark.parametrize("pin", [None, False, True])
@ranks(*SIZES, backend="nccl")
def test_training_equals_ddp(rank, world_size, pin):
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    torch.manual_seed(0)
    plain = Transformer().double()
    model = copy.deepcopy(plain)
    policy = OffloadPolicy() if pin is None else CPUOffloadPolicy(pin_memory=pin)
    for part in (*model.blocks, model):
        fully_shard(part, offload_policy=policy)
    assert {param.device.type for param in model.parameters()} == {"cuda" if pin is None else "cpu"}
    ddp = DDP(plain.to(device))
    peaks = []
    for one in (ddp, model):
        optimizer = torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9)
        for step in range(4):
            torch.cuda.reset_peak_memory_stats()
            optimizer.zero_grad()
            loss_of(one, tokens(rank, step).to(device)).backward()
            nn.utils.clip_grad_norm_(one.parameters(), 0.5)
            optimizer.step()
            torch.cuda.synchronize()
            peaks.append(torch.cuda.max_memory_allocated())
    for (name, found), expected in zip(model.named_parameters(), plain.parameters()):
        whole = found.to_local() if world_size == 1 else found.to(device).full_tensor()
        torch.testing.assert_close(whole.to(device), expected.detach(), rtol=0, atol=1e-9, msg=name)
    assert len(set(peaks[-2:])) == 1, peaks
