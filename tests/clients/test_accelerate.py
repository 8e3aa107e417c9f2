"""HF accelerate, unmodified, on our wrapper and our `fully_shard`: losses of its DDP.

Its checkpoints are those of transformers' `Trainer`, which `test_transformers.py` resumes.
A `front` is "flat" or "orig", `fsdp_version=1` without and with `use_orig_params`, or "composable", 2.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fsdp_wrap import FSDPModule
from launch import client_rank, needs
from models import Transformer, loss_of, tokens

pytestmark = needs("accelerate")

STEPS = 4


def _accelerator(front, accumulation=1, precision="no", **options):
    """Returns an accelerator: for the front-end, or for DDP where there is none."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    version = {"fsdp_version": 2} if front == "composable" else {"use_orig_params": front == "orig"}
    plugin = FullyShardedDataParallelPlugin(
        **{"fsdp_version": 1, **version, **options},
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
    )
    return Accelerator(
        cpu=front is None,
        fsdp_plugin=plugin if front else None,
        gradient_accumulation_steps=accumulation,
        mixed_precision=precision,
    )


def _prepare(accelerator, front):
    """Model and optimizer in one call for FSDP2, and one after the other for FSDP1, as accelerate demands."""
    torch.manual_seed(0)
    model: Any = Transformer()
    data = torch.cat([tokens(rank, step) for step in range(STEPS) for rank in range(2)])
    loader: Any = torch.utils.data.DataLoader(data, batch_size=2)  # type: ignore[arg-type]
    if front == "composable":
        return accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader)
    model = accelerator.prepare(model)
    return model, *accelerator.prepare(torch.optim.AdamW(model.parameters(), lr=1e-2), loader)


def _step(accelerator, model, optimizer, batch):
    with accelerator.accumulate(model):
        loss = loss_of(model, batch)
        accelerator.backward(loss)
        norm = accelerator.clip_grad_norm_(model.parameters(), 0.5) if accelerator.sync_gradients else None
        optimizer.step()
        optimizer.zero_grad()
    norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    return accelerator.gather(loss.detach()).tolist(), None if norm is None else norm.item()


def _train(rank, world_size, port, front, options, accumulation=1, precision="no"):
    """Trains as accelerate's own examples do; returns losses and norms."""
    with client_rank(rank, port, front is not None, front == "composable"):
        accelerator = _accelerator(front, accumulation, precision, **options)
        model, optimizer, batches = _prepare(accelerator, front)
        if front == "composable":
            units = [module for module in model.modules() if isinstance(module, FSDPModule)]
            assert len(units) >= 5, "the root, each block, and the norm in front of the head"
        return [_step(accelerator, model, optimizer, batch) for batch in batches]


@pytest.mark.parametrize(
    "front, options, accumulation, precision",
    [
        ("flat", {}, 2, "no"),
        ("orig", {}, 1, "no"),
        ("composable", {}, 2, "no"),
        ("composable", {"reshard_after_forward": False, "cpu_ram_efficient_loading": True}, 1, "no"),
        ("composable", {"cpu_offload": True, "activation_checkpointing": True}, 2, "no"),
        ("orig", {}, 1, "bf16"),
        ("composable", {}, 1, "bf16"),
    ],
)
def test_training_equals_accelerates_ddp(run, front, options, accumulation, precision):
    """Losses, and the norms by which it clips; where DDP's autocast casts operands, ours casts parameters."""
    expected = run(_train, None, {}, accumulation, precision)
    ours = run(_train, front, options, accumulation, precision)
    assert len({tuple(losses) for losses, _ in expected[0]}) == STEPS, "the losses move"
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5 if precision == "no" else 3e-2)
