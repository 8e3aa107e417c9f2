"""HF accelerate, unmodified, on our wrapper and our `fully_shard`: losses of its DDP, checkpoints, resuming.

A `front` is "flat" or "orig", `fsdp_version=1` without and with `use_orig_params`, or "composable", 2.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fronts import each_front
from launch import client_rank, load_over_zeros, needs
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


def _prepare(accelerator, front):
    """Model and optimizer in one call for FSDP2, and one after the other for FSDP1, as accelerate demands."""
    torch.manual_seed(0)
    model = Transformer()
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
            _check_ours(model)
        return [_step(accelerator, model, optimizer, batch) for batch in batches]


def _check_ours(model):
    """Also by the class that torch had before anything was installed."""
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.fsdp._fully_shard import _fully_shard as private

    import fsdp_wrap

    sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
    assert FSDPModule is fsdp_wrap.FSDPModule is not private.FSDPModule
    assert len(sharded) >= 5, "the root, each block, and the norm in front of the head"
    assert all(isinstance(module, private.FSDPModule) for module in sharded)


@pytest.mark.parametrize(
    "front, options, accumulation",
    [
        ("flat", {}, 2),
        ("orig", {}, 1),
        ("composable", {}, 1),
        ("composable", {}, 2),
        ("composable", {"reshard_after_forward": False, "cpu_ram_efficient_loading": True}, 1),
        ("composable", {"cpu_offload": True, "activation_checkpointing": True}, 2),
    ],
)
def test_training_equals_accelerates_ddp(run, front, options, accumulation):
    """Losses, and the norms by which it clips."""
    expected = run(_train, None, {}, accumulation)
    found = run(_train, front, options, accumulation)
    assert len({tuple(losses) for losses, _ in expected[0]}) == STEPS, "the losses move"
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("front", ["orig", "composable"])
def test_training_in_bf16_is_close_to_ddp_under_autocast(run, front):
    """Parameters are cast where DDP's autocast casts operands, so they agree to bf16's precision."""
    expected = run(_train, None, {}, 1, "bf16")
    found = run(_train, front, {}, 1, "bf16")
    torch.testing.assert_close(found, expected, rtol=0, atol=3e-2)


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
@each_front
def test_saving_and_resuming(run, tmp_path, front, kind):
    """Interrupted half-way and resumed by other objects, training goes on as it would have."""
    options = {"state_dict_type": kind}
    whole = run(_train, front, options)
    first = run(_train_and_save, front, options, str(tmp_path))
    rest = run(_load_and_train, front, options, str(tmp_path))
    assert [a + b for a, b in zip(first, rest)] == whole


def _train_and_save(rank, world_size, port, front, options, folder):
    with client_rank(rank, port, True, front == "composable"):
        accelerator = _accelerator(front, **options)
        model, optimizer, batches = _prepare(accelerator, front)
        log = [_step(accelerator, model, optimizer, batch) for batch in list(batches)[: STEPS // 2]]
        accelerator.save_state(folder)
        if front == "composable":
            full, plain = accelerator.get_state_dict(model), Transformer().state_dict()
            if rank == 0:
                assert full.keys() == plain.keys()
                assert all(full[name].shape == value.shape for name, value in plain.items())
        return log


def _load_and_train(rank, world_size, port, front, options, folder):
    with client_rank(rank, port, True, front == "composable"):
        accelerator = _accelerator(front, **options)
        model, optimizer, batches = _prepare(accelerator, front)
        load_over_zeros(accelerator, model, folder)
        return [_step(accelerator, model, optimizer, batch) for batch in list(batches)[STEPS // 2 :]]
