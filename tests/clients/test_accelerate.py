"""HF accelerate, unmodified, on our wrapper: the losses of its own DDP runs, checkpoints, resuming."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fronts import each_form
from launch import client_rank, load_over_zeros, needs
from models import Transformer, loss_of, tokens

pytestmark = needs("accelerate")

STEPS = 4


def _train(rank, world_size, port, wrapped, options, accumulation=1, precision="no"):
    """Trains as accelerate's own examples do; returns the losses."""
    with client_rank(rank, port, wrapped):
        from accelerate import Accelerator

        accelerator = Accelerator(
            cpu=not wrapped,
            fsdp_plugin=_plugin(**options) if wrapped else None,
            gradient_accumulation_steps=accumulation,
            mixed_precision=precision,
        )
        model, optimizer, batches = _prepare(accelerator)
        return [_step(accelerator, model, optimizer, batch) for batch in batches]


def _plugin(**options):
    from accelerate import FullyShardedDataParallelPlugin

    return FullyShardedDataParallelPlugin(
        fsdp_version=1,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Block"],
        **options,
    )


def _prepare(accelerator):
    torch.manual_seed(0)
    model = accelerator.prepare(Transformer())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = torch.cat([tokens(rank, step) for step in range(STEPS) for rank in range(2)])
    loader: Any = torch.utils.data.DataLoader(data, batch_size=2)  # type: ignore[arg-type]
    optimizer, loader = accelerator.prepare(optimizer, loader)
    return model, optimizer, loader


def _step(accelerator, model, optimizer, batch):
    with accelerator.accumulate(model):
        loss = loss_of(model, batch)
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return accelerator.gather(loss.detach()).tolist()


@pytest.mark.parametrize("accumulation", [1, 2])
@each_form
def test_training_equals_accelerates_ddp(run, use_orig_params, accumulation):
    options = {"use_orig_params": use_orig_params}
    expected = run(_train, False, {}, accumulation)
    found = run(_train, True, options, accumulation)
    assert len(set(map(tuple, expected[0]))) == STEPS, "the losses move"
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@each_form
def test_training_in_bf16_is_close_to_ddp_under_autocast(run, use_orig_params):
    """The wrapper casts parameters where DDP's autocast casts operands, so they agree to bf16's precision."""
    expected = run(_train, False, {}, 1, "bf16")
    found = run(_train, True, {"use_orig_params": use_orig_params}, 1, "bf16")
    torch.testing.assert_close(found, expected, rtol=0, atol=3e-2)


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
@each_form
def test_saving_and_resuming(run, tmp_path, use_orig_params, kind):
    """Interrupted half-way and resumed by other objects, training goes on as it would have."""
    options = {"use_orig_params": use_orig_params, "state_dict_type": kind}
    whole = run(_train, True, options)
    first = run(_train_and_save, options, str(tmp_path))
    rest = run(_load_and_train, options, str(tmp_path))
    assert [a + b for a, b in zip(first, rest)] == whole


def _train_and_save(rank, world_size, port, options, folder):
    with client_rank(rank, port, True):
        from accelerate import Accelerator

        accelerator = Accelerator(fsdp_plugin=_plugin(**options))
        model, optimizer, batches = _prepare(accelerator)
        losses = [_step(accelerator, model, optimizer, batch) for batch in list(batches)[: STEPS // 2]]
        accelerator.save_state(folder)
        return losses


def _load_and_train(rank, world_size, port, options, folder):
    with client_rank(rank, port, True):
        from accelerate import Accelerator

        accelerator = Accelerator(fsdp_plugin=_plugin(**options))
        model, optimizer, batches = _prepare(accelerator)
        load_over_zeros(accelerator, model, folder)
        return [_step(accelerator, model, optimizer, batch) for batch in list(batches)[STEPS // 2 :]]
