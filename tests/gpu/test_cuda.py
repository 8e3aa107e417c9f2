"""The CUDA code path: streams, events, NCCL. Skipped where there is no GPU; one rank per GPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from bed import ranks
from fsdp_wrap import CPUOffload
from fsdp_wrap import FullyShardedDataParallel as FSDP
from models import WRAPPINGS, Transformer, full_grads, loss_of, named_state, tokens, transformer_twins, twins
from on_cuda import SIZES, device_of, needs_cuda, train

pytestmark = needs_cuda


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
@ranks(*SIZES, backend="nccl")
def test_training_equals_ddp(rank, world_size, use_orig_params, strategy, offload):
    device = device_of(rank)
    plain, model = transformer_twins(
        use_orig_params, strategy, cpu_offload=CPUOffload(offload_params=offload), device_id=device
    )
    ddp = DDP(plain.to(device))
    for module in (ddp, model):
        train(module, torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), rank, device, 4)
    state, grads = model.state_dict(), full_grads(model)
    for name, param in named_state(ddp):
        torch.testing.assert_close(state[name].to(device), param.detach(), rtol=0, atol=1e-10)
        torch.testing.assert_close(grads[name].to(device), param.grad, rtol=0, atol=1e-10)


@ranks(*SIZES, backend="nccl")
def test_peak_memory_is_the_same_in_every_step(rank, world_size):
    device = device_of(rank)
    policy = WRAPPINGS["block"]()
    _, model = twins(Transformer, auto_wrap_policy=policy, device_id=device, use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters())
    peaks = []
    for _ in range(6):
        torch.cuda.reset_peak_memory_stats()
        train(model, optimizer, rank, device, 1)
        torch.cuda.synchronize()
        peaks.append(torch.cuda.max_memory_allocated())
    assert len(set(peaks[2:])) == 1, peaks


@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
@ranks(*SIZES, backend="nccl")
def test_offload_trains_what_does_not_fit(rank, world_size, use_orig_params):
    """Parameters, gradients and Adam states take three times the memory that the process may allocate."""
    device = device_of(rank)
    model = Transformer(blocks=12, width=512)
    needed = 4 * sum(param.numel() * 4 for param in model.parameters()) / world_size
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(needed / 3 / total, device)
    try:
        wrapped = FSDP(
            model,
            auto_wrap_policy=WRAPPINGS["block"](),
            use_orig_params=use_orig_params,
            cpu_offload=CPUOffload(offload_params=True),
            device_id=device,
        )
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
        before = loss_of(wrapped, tokens(rank, 0).to(device)).item()
        train(wrapped, optimizer, rank, device, 5)
        wrapped.clip_grad_norm_(1.0)
        assert loss_of(wrapped, tokens(rank, 0).to(device)).item() < before
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
