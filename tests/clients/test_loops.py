"""Whole loops of clients, begun by their own launchers: losses and weights of torch's FSDP.

Several do not fit beside each other: they are not of the extra 'clients'; docs/clients.md tells how to run
them. What stands before each of their ranks is `in_front/sitecustomize.py`. All are equal to the bit.
"""

from __future__ import annotations

import functools
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bed.ports import free_port
from bed.scripts import here, run
from launch import needs
from tiny_models import VOCABULARY, llama, text, tokenizer

FOLDER = Path(__file__).parent
STEPS = 3


def _client(*packages: str) -> Callable[[Any], Any]:
    """Marks a test as `needs` does."""
    return lambda test: functools.reduce(lambda marked, mark: mark(marked), needs(*packages), test)


Loop = Callable[[Path, Path, dict[str, str]], list[float]]
"""Of the folder of the model, that of the results, and the environment; returns the losses."""


def _environment(ours: bool) -> dict[str, str]:
    path = os.pathsep.join(map(str, (FOLDER / "in_front", FOLDER, FOLDER.parent)))
    variables = {
        "IN_FRONT": "ours" if ours else "torchs",
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "MASTER_PORT": str(free_port()),
    }
    environment = here(**variables)
    return {**environment, "PYTHONPATH": f"{path}{os.pathsep}{environment['PYTHONPATH']}"}


def _equal_torchs(loop: Loop, tmp_path: Path, file: str) -> None:
    """Runs a loop on torch's FSDP and on ours; compares losses, and the weights in a file that it saves."""
    from safetensors.torch import load_file

    model = llama()
    model.save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    results = {}
    for ours in (False, True):
        folder = tmp_path / f"ours {ours}".replace(" ", "-")
        folder.mkdir()
        began = folder / "torchs began"
        variables = _environment(ours) | {"TORCHS_BEGAN": str(began)}
        losses = torch.tensor(loop(tmp_path / "model", folder, variables))
        assert began.exists() is not ours, "what it runs on"
        (saved,) = folder.rglob(file)
        results[ours] = losses, load_file(saved)
    losses, weights = results[True]
    assert len(losses) == STEPS and len(set(losses.tolist())) == STEPS, "the losses move"
    torch.testing.assert_close(losses, results[False][0], rtol=0, atol=0)
    torch.testing.assert_close(weights, results[False][1], rtol=0, atol=0)


def _tune(recipe: str, *given: str) -> Loop:
    """Returns a loop of one of torchtune's recipes, by `tune run`, for which torchrun starts the ranks."""

    def loop(model: Path, folder: Path, environment: dict[str, str]) -> list[float]:
        log = folder / "log.txt"
        settings = {
            "output_dir": str(folder),
            "device": "cpu",
            "dtype": "fp32",
            "seed": 0,
            "shuffle": False,
            "tokenizer": {"_component_": "tune_parts.Numbers"},
            "dataset": {"_component_": "tune_parts.Texts", "size": 4 * STEPS * 2},
            "checkpointer": {
                "_component_": "torchtune.training.FullModelHFCheckpointer",
                "checkpoint_dir": str(model),
                "checkpoint_files": ["model.safetensors"],
                "output_dir": str(folder),
                "model_type": "LLAMA3",
            },
            "resume_from_checkpoint": False,
            "batch_size": 2,
            "epochs": 1,
            "max_steps_per_epoch": STEPS,
            "gradient_accumulation_steps": 2,
            "clip_grad_norm": 1.0,
            "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-2},
            "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
            "compile": False,
            "metric_logger": {
                "_component_": "torchtune.training.metric_logging.DiskLogger",
                "log_dir": str(folder),
                "filename": log.name,
            },
            "log_every_n_steps": 1,
            "log_peak_memory_stats": False,
            "enable_activation_checkpointing": False,
            "enable_activation_offloading": False,
        }
        config = folder / "config.yaml"
        config.write_text(json.dumps(settings))  # which is YAML, too
        tune = [sys.executable, "-m", "torchtune._cli.tune", "run"]
        ranks = ["--nnodes", 1, "--nproc_per_node", 2, "--master_port", environment["MASTER_PORT"]]
        run(*tune, *ranks, recipe, "--config", config, *given, env=environment)
        return [float(loss) for loss in re.findall(r"loss:([\d.]+)", log.read_text())]

    return loop


LLAMA = {
    "vocab_size": VOCABULARY,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "embed_dim": 32,
    "max_seq_len": 32,
    "intermediate_dim": 48,
    "rope_base": 10_000,
}
FULL = ["model._component_=torchtune.models.llama3.llama3", *(f"model.{k}={v}" for k, v in LLAMA.items())]
LORA = [
    "model._component_=torchtune.models.llama3.lora_llama3",
    *(f"model.{name}={value}" for name, value in LLAMA.items()),
    "model.lora_attn_modules=[q_proj,v_proj]",
    "model.lora_rank=4",
    "model.apply_lora_to_mlp=False",
    "model.lora_alpha=8",
    "save_adapter_weights_only=False",
    "lr_scheduler._component_=torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
    "lr_scheduler.num_warmup_steps=1",
]


@_client("torchtune", "torchao")
@pytest.mark.parametrize(
    "recipe, given",
    [
        ("full_finetune_distributed", FULL),
        ("full_finetune_distributed", [*FULL, "enable_activation_checkpointing=True"]),
        ("lora_finetune_distributed", LORA),
    ],
)
def test_torchtunes_recipes(tmp_path: Path, recipe: str, given: list[str]) -> None:
    _equal_torchs(_tune(recipe, *given), tmp_path, "model*.safetensors")


def _axolotl(**given: Any) -> Loop:
    """Returns a loop of axolotl's command, for which torchrun starts the ranks."""

    def loop(model: Path, folder: Path, environment: dict[str, str]) -> list[float]:
        rows = [
            {"instruction": text(seed, 4), "input": "", "output": text(seed + 100, 5)} for seed in range(16)
        ]
        (folder / "texts.jsonl").write_text("\n".join(map(json.dumps, rows)))
        settings = {
            "base_model": str(model),
            "datasets": [{"path": str(folder / "texts.jsonl"), "ds_type": "json", "type": "alpaca"}],
            "dataset_prepared_path": str(folder / "prepared"),
            "output_dir": str(folder / "out"),
            "sequence_len": 64,
            "micro_batch_size": 2,
            "gradient_accumulation_steps": 1,
            "max_steps": STEPS,
            "num_epochs": 1,
            "optimizer": "adamw_torch",
            "lr_scheduler": "constant",
            "learning_rate": 1e-2,
            "bf16": False,
            "tf32": False,
            "fsdp_version": 2,
            "fsdp_config": {
                "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
                "transformer_layer_cls_to_wrap": "LlamaDecoderLayer",
                "state_dict_type": "FULL_STATE_DICT",
                "reshard_after_forward": True,
            },
            "save_strategy": "no",
            "logging_steps": 1,
            "seed": 0,
            "ddp_backend": "gloo",
            "attn_implementation": "sdpa",
            **given,
        }
        config = folder / "config.yaml"
        config.write_text(json.dumps(settings))
        variables = {"AXOLOTL_DO_NOT_TRACK": "1", "HF_DATASETS_OFFLINE": "1"}
        command = [sys.executable, "-m", "axolotl.cli.main", "train", config, "--launcher", "torchrun", "--"]
        ranks = ["--nproc_per_node", 2, "--master_port", environment["MASTER_PORT"]]
        done = run(*command, *ranks, env={**environment, **variables})
        return [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", done.out)]

    return loop


LORA_OF_AXOLOTL = {
    "adapter": "lora",
    "lora_r": 4,
    "lora_alpha": 8,
    "lora_target_modules": ["q_proj", "v_proj"],
}


@_client("axolotl", "transformers", "accelerate", "peft")
@pytest.mark.parametrize(
    "given, saved",
    [({}, "model.safetensors"), (LORA_OF_AXOLOTL, "adapter_model.safetensors")],
    ids=["full", "lora"],
)
def test_axolotl_trains(tmp_path: Path, given: dict[str, Any], saved: str) -> None:
    _equal_torchs(_axolotl(**given), tmp_path, saved)


def _ray(way: str) -> Loop:
    """Returns a loop of ray train's workers."""

    def loop(model: Path, folder: Path, environment: dict[str, str]) -> list[float]:
        which = environment.pop("IN_FRONT")
        program = [sys.executable, FOLDER / "ray_program.py", which, way, folder]
        run(*program, env={**environment, "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"})
        losses: list[float] = json.loads((folder / "losses.json").read_text())
        return losses

    return loop


@_client("ray", "transformers", "accelerate")
@pytest.mark.parametrize("way", ["plain", "accelerate"])
def test_ray_trains_fsdp2(tmp_path: Path, way: str) -> None:
    _equal_torchs(_ray(way), tmp_path, "model.safetensors")
