"""transformers' experts by configuration: `DistributedConfig(ep_size=...)` spreads them, FSDP2 shards all."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from typing import Any

import pytest
import torch

import fsdp_wrap
from fsdp_wrap import checkpoint
from launch import client_rank, needs, require_units
from tiny_models import LENGTH, QUIET, VOCABULARY, mixture

pytestmark = needs("transformers")

WORLD_SIZE, STEPS, NORM = 4, 3, 0.5
CLOSE: dict[str, Any] = {"rtol": 2e-5, "atol": 2e-6}
"""Bounds in float32: a process of its own adds up in another order."""


def _batch(part, step):
    generator = torch.Generator().manual_seed(100 * step + part)
    return torch.randint(3, VOCABULARY, (2, LENGTH), generator=generator)


@pytest.fixture(autouse=True)
def _experts_can_be_spread():
    distributed = pytest.importorskip("transformers.distributed")
    if "ep_implementation" not in distributed.DistributedConfig.__dataclass_fields__:
        pytest.skip("needs a transformers whose experts are spread by `ep_size`")


@contextlib.contextmanager
def _rank(rank, port, ours):
    """Makes a rank that imports transformers first: a module that is imported later keeps our names."""
    with client_rank(rank, port, False, True, WORLD_SIZE):
        importlib.import_module("transformers.distributed.fsdp")
    with client_rank(rank, port, ours, True, WORLD_SIZE):
        yield


def _model(folder, options) -> Any:
    from transformers import Qwen3MoeForCausalLM
    from transformers.distributed import DistributedConfig

    config: Any = DistributedConfig(**options)
    return Qwen3MoeForCausalLM.from_pretrained(folder, distributed_config=config)


def _optimizer(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


def _full(param):
    grad = param.grad
    return grad.full_tensor() if hasattr(grad, "full_tensor") else grad


def _clip(model, wrapped):
    """Clips gradients and returns their norm. torch's function takes no gradients on several meshes."""
    if wrapped:
        return fsdp_wrap.clip_grad_norm_(model, NORM)
    norm = torch.stack([_full(param).norm() for param in model.parameters()]).norm()
    for param in model.parameters():
        param.grad.mul_((NORM / (norm + 1e-6)).clamp(max=1).item())
    return norm


def _steps(model, optimizer, steps, part_of_batch, wrapped):
    """Returns of each step: loss, norm of the gradients, and each parameter's gradient's norm by its name."""
    log = []
    for step in steps:
        batch = part_of_batch(step)
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        norms = {name: _full(param).norm().item() for name, param in model.named_parameters()}
        norm = _clip(model, wrapped)
        optimizer.step()
        optimizer.zero_grad()
        log.append((loss.item(), norm.item(), norms))
    return log


def _own_part(rank, options):
    part = rank // options.get("tp_size", 1)
    return lambda step: _batch(part, step)


def _train(rank, world_size, port, ours, folder, options):
    """Returns what `_steps` does, and the weights that transformers saves."""
    with _rank(rank, port, ours):
        from safetensors.torch import load_file

        model = _model(folder / "model", options)
        require_units(model, "fsdp_wrap" if ours else "torch")
        log = _steps(model, _optimizer(model), range(STEPS), _own_part(rank, options), ours)
        saved = folder / f"saved-{'ours' if ours else 'torchs'}"
        model.save_pretrained(saved)
        torch.distributed.barrier()
        return log, load_file(saved / "model.safetensors")


def _alone(folder, parts):
    """Returns what one process has on the pooled batch."""
    from safetensors.torch import load_file

    model = mixture()
    log = _steps(
        model,
        _optimizer(model),
        range(STEPS),
        lambda step: torch.cat([_batch(part, step) for part in range(parts)]),
        wrapped=False,
    )
    model.save_pretrained(folder / "alone")
    return log, load_file(folder / "alone" / "model.safetensors")


SPREAD: dict[str, dict[str, Any]] = {
    "two of four ranks": {"fsdp_size": 4, "ep_size": 2},
    "all ranks": {"fsdp_size": 4, "ep_size": 4},
    "replicas": {"fsdp_size": 2, "dp_replicate_size": 2, "ep_size": 2},
    "tensor parallelism": {"fsdp_size": 2, "tp_size": 2, "tp_plan": "auto", "ep_size": 4},
}


@pytest.mark.parametrize("options", SPREAD.values(), ids=SPREAD.keys())
def test_experts_by_configuration_equal_torchs_and_one_process(run, tmp_path, options):
    mixture().save_pretrained(tmp_path / "model")
    alone = _alone(tmp_path, WORLD_SIZE // options.get("tp_size", 1))
    torchs, ours = (run(_train, own, tmp_path, options) for own in (False, True))
    torch.testing.assert_close(ours, torchs, **CLOSE)
    assert len({loss for loss, *_ in ours[0][0]}) == STEPS
    for step, (loss, norm, norms) in enumerate(alone[0]):
        mean = sum(log[step][0] for log, _ in ours) / WORLD_SIZE
        assert norm > NORM, "it is clipped"
        torch.testing.assert_close((mean, *ours[0][0][step][1:]), (loss, norm, norms), **CLOSE)
    torch.testing.assert_close(ours[0][1], alone[1], **CLOSE)


@pytest.mark.shows("equal to torch's without offload, which needs a GPU there")
def test_spread_experts_in_bf16_on_the_host(run, tmp_path):
    mixture().save_pretrained(tmp_path / "model")
    options = {**SPREAD["two of four ranks"], "fsdp_mixed_precision": True}
    torchs = run(_train, False, tmp_path, options)
    ours = run(_train, True, tmp_path, {**options, "fsdp_cpu_offload": True})
    torch.testing.assert_close(ours, torchs, **CLOSE)


def _save(rank, world_size, port, folder, options):
    """Returns what two more steps give after a checkpoint."""
    with _rank(rank, port, True):
        model = _model(folder / "model", options)
        optimizer = _optimizer(model)
        _steps(model, optimizer, range(2), _own_part(rank, options), True)
        checkpoint.save(folder / "steps", model, optimizer, step=2)
        model.save_pretrained(folder / "transformers", distributed_checkpoint=True)
        return _steps(model, optimizer, range(2, 4), _own_part(rank, options), True)


def _load(rank, world_size, port, folder, options):
    """Returns what two more steps give, and the differences of the weights that transformers loads."""
    with _rank(rank, port, True):
        model = _model(folder / "model", options)
        optimizer = _optimizer(model)
        checkpoint.load(folder / "steps", model, optimizer)
        by_transformers = _model(folder / "transformers", options)
        same = [
            torch.equal(own.full_tensor(), other.full_tensor())
            for own, other in zip(model.parameters(), by_transformers.parameters(), strict=True)
        ]
        return same, _steps(model, optimizer, range(2, 4), _own_part(rank, options), True)


@pytest.mark.parametrize(
    "options", [{"fsdp_size": 4, "ep_size": 4}, {"fsdp_size": 4}], ids=["all ranks", "none spread"]
)
def test_checkpoints_with_experts_spread_otherwise(run, tmp_path, options):
    mixture().save_pretrained(tmp_path / "model")
    gone_on = run(_save, tmp_path, SPREAD["two of four ranks"])
    for log, (same, resumed) in zip(gone_on, run(_load, tmp_path, options), strict=True):
        assert same and all(same)
        torch.testing.assert_close(resumed, log, **CLOSE)


def _fit(rank, world_size, port, ours, folder):
    """Trains by the `Trainer`, which accumulates and clips; returns losses and norms of gradients."""
    with _rank(rank, port, ours):
        from transformers import Trainer, TrainingArguments

        model = _model(folder / "model", SPREAD["two of four ranks"])
        arguments = TrainingArguments(
            output_dir=str(folder / "trainer"),
            use_cpu=True,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            max_grad_norm=NORM,
            learning_rate=1e-2,
            max_steps=STEPS,
            save_strategy="no",
            **QUIET,
        )
        tokens = torch.randint(3, VOCABULARY, (64, LENGTH), generator=torch.Generator().manual_seed(0))
        data: Any = [{"input_ids": row, "labels": row} for row in tokens]
        trainer = Trainer(model=model, args=arguments, train_dataset=data)
        trainer.train()
        require_units(model, "fsdp_wrap" if ours else "torch")
        return [(entry["loss"], entry["grad_norm"]) for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.client("transformers", "accelerate")
@pytest.mark.skipif(importlib.util.find_spec("accelerate") is None, reason="needs accelerate")
def test_trainer_of_spread_experts_equals_torchs(run, tmp_path):
    mixture().save_pretrained(tmp_path / "model")
    torchs, ours = (run(_fit, own, tmp_path) for own in (False, True))
    assert len({*ours[0]}) == STEPS and all(norm > NORM for _, norm in ours[0])
    torch.testing.assert_close(ours, torchs, **CLOSE)
