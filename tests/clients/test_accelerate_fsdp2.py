"""HF accelerate with `fsdp_version=2`, unmodified, on our `fully_shard`: its DDP runs, checkpoints, resuming."""

from __future__ import annotations

import pytest
import torch

from launch import client_rank, needs
from models import Transformer, loss_of, tokens

pytestmark = needs("accelerate")

STEPS = 4


def _accelerator(ours, accumulation=1, precision="no", **options):
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        **options,
    )
    return Accelerator(
        cpu=not ours,
        fsdp_plugin=plugin if ours else None,
        gradient_accumulation_steps=accumulation,
        mixed_precision=precision,
    )


def _prepare(accelerator):
    """Model and optimizer in one call, as accelerate demands for FSDP2."""
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.cat([tokens(rank, step) for step in range(STEPS) for rank in range(2)])
    return accelerator.prepare(model, optimizer, torch.utils.data.DataLoader(data, batch_size=2))


def _step(accelerator, model, optimizer, batch):
    with accelerator.accumulate(model):
        loss = loss_of(model, batch)
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5) if accelerator.sync_gradients else None
        optimizer.step()
        optimizer.zero_grad()
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return accelerator.gather(loss.detach()).tolist(), None if norm is None else norm.item()


def _train(rank, world_size, port, ours, accumulation=1, precision="no", **options):
    """Trains as accelerate's own examples do; returns losses and norms."""
    with client_rank(rank, port, ours, fully_shard=True):
        accelerator = _accelerator(ours, accumulation, precision, **options)
        model, optimizer, batches = _prepare(accelerator)
        if ours:
            _check_ours(model)
        return [_step(accelerator, model, optimizer, batch) for batch in batches]


def _check_ours(model):
    """Also by the class that torch had before anything was installed."""
    import fsdp_wrap
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard import _fully_shard as private

    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    assert FSDPModule is fsdp_wrap.FSDPModule is not private.FSDPModule
    assert len(sharded) == 1 + len(model.blocks)
    assert all(isinstance(module, private.FSDPModule) for module in sharded)


def test_training(run):
    print(run(_train, False))
    print(run(_train, True))
