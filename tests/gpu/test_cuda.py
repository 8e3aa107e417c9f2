"""The CUDA code path: streams, events, NCCL. Skipped where there is no GPU; one rank per GPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from bed import ranks
from fsdp_wrap import CPUOffload, ShardingStrategy
from models import WRAPPINGS, Transformer, full_grads, loss_of, named_state, tokens, twins

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
SIZES = [1] + ([2] if torch.cuda.device_count() > 1 else [])


def _device(rank: int) -> torch.device:
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def _train(model, optimizer, rank, device, steps):
    for step in range(steps):
        loss = loss_of(model, tokens(rank, step).to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
@ranks(*SIZES, backend="nccl")
def test_training_equals_ddp(rank, world_size, use_orig_params, strategy, offload):
    device = _device(rank)
    plain, model = twins(
        Transformer,
        torch.float64,
        auto_wrap_policy=WRAPPINGS["block"](),
        use_orig_params=use_orig_params,
        sharding_strategy=ShardingStrategy[strategy],
        cpu_offload=CPUOffload(offload_params=offload),
        device_id=device,
    )
    ddp = DDP(plain.to(device))
    for module in (ddp, model):
        _train(module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), rank, device, 4)
    state, grads = model.state_dict(), full_grads(model)
    for name, param in named_state(ddp):
        torch.testing.assert_close(state[name].to(device), param.detach(), rtol=0, atol=1e-10)
        torch.testing.assert_close(grads[name].to(device), param.grad, rtol=0, atol=1e-10)


@ranks(*SIZES, backend="nccl")
def test_peak_memory_is_the_same_in_every_step(rank, world_size):
    device = _device(rank)
    policy = WRAPPINGS["block"]()
    _, model = twins(Transformer, auto_wrap_policy=policy, device_id=device, use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters())
    peaks = []
    for _ in range(6):
        torch.cuda.reset_peak_memory_stats()
        _train(model, optimizer, rank, device, 1)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
    assert len(set(peaks[2:])) == 1, peaks
