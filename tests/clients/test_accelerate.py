"""HF accelerate, unmodified, on our wrapper and our `fully_shard`: losses of its DDP.

Its checkpoints are those of transformers' `Trainer`, which `test_transformers.py` resumes; here with dropout.
A `front` is "flat" or "orig", `fsdp_version=1` without and with `use_orig_params`, or "composable", 2.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from fsdp_wrap import FSDPModule
from launch import client_rank, needs
from models import Transformer, loss_of, tokens

pytestmark = needs("accelerate")

STEPS = 4


def _accelerator(front, accumulation=1, precision="no", **options):
    """Of DDP where there is no front."""
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


def _prepare(accelerator, front, dropout=0.0):
    """Model and optimizer in one call for FSDP2, and one after the other for FSDP1, as accelerate demands.

    With dropout the order of the batches is random, too.
    """
    torch.manual_seed(0)
    model: Any = Transformer()
    if dropout:
        model = nn.Sequential(model, nn.Dropout(dropout))
    data = torch.cat([tokens(rank, step) for step in range(STEPS) for rank in range(2)])
    order: Any = {"shuffle": True, "generator": torch.Generator().manual_seed(0)} if dropout else {}
    loader: Any = torch.utils.data.DataLoader(data, batch_size=2, **order)  # type: ignore[arg-type]
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
    found = run(_train, front, options, accumulation, precision)
    assert len({tuple(losses) for losses, _ in expected[0]}) == STEPS, "the losses move"
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 if precision == "no" else 3e-2)


def _resume(rank, world_size, port, front, folder, kind, resumes):
    """Trains an epoch in random order with dropout, saves after half or resumes there; returns losses."""
    with client_rank(rank, port, front is not None, front == "composable"):
        accelerator = _accelerator(front, **({"state_dict_type": kind} if front else {}))
        model, optimizer, batches = _prepare(accelerator, front, dropout=0.2)
        schedule = accelerator.prepare(torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5))
        torch.manual_seed(rank)
        half, losses = STEPS // 2, []
        if resumes:
            accelerator.load_state(folder)
            batches = accelerator.skip_first_batches(batches, half)
        for number, batch in enumerate(batches, half if resumes else 0):
            if number == half and not resumes:
                accelerator.save_state(folder)
            losses += _step(accelerator, model, optimizer, batch)[0]
            schedule.step()
        return losses


@pytest.mark.parametrize(
    "front, kind", [("flat", "FULL"), ("orig", "SHARDED"), ("composable", "FULL"), ("composable", "SHARDED")]
)
def test_a_resumed_epoch_has_the_random_numbers_and_batches_of_one(run, tmp_path, front, kind):
    """As in its DDP: order of the batches, dropout, moments and the rate of learning."""
    whole = run(_resume, front, str(tmp_path), f"{kind}_STATE_DICT", False)
    half = len(whole[0]) // 2
    assert run(_resume, front, str(tmp_path), f"{kind}_STATE_DICT", True) == [
        losses[half:] for losses in whole
    ]
    by_ddp = run(_resume, None, str(tmp_path / "ddp"), "", False)
    torch.testing.assert_close(whole, by_ddp, rtol=0, atol=1e-5)
