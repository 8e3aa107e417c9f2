"""torchtitan, unmodified: its trainer with its smallest models, on torch's `fully_shard` and on ours.

What of it asks for a GPU is in `titan_on_cpu.py`, as are fewer layers; all else is torchtitan's own.
Two things are left out that fail on a CPU with torch's `fully_shard`, too: context parallelism, since torch's
attention for the CPU takes no DTensors, and its offload, which wants a second backend for the CPU.
"""

from __future__ import annotations

import gc
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed import fsdp as torch_fsdp

import titan_on_cpu
from launch import Ranks, client_rank, needs

pytestmark = needs("torchtitan")

WORLD_SIZE, STEPS, LENGTH = 4, 4, 64


@pytest.fixture(scope="module")
def assets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer and texts, where torchtitan looks for its own.

    Each rank gets a part of the texts, in which two take turns: its batches of two are the same in every
    step, so that the loss falls whatever the initial values are, and other than those of other ranks.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("assets")
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    words = {f"w{n}": n for n in range(1000)} | {"<s>": 1000, "</s>": 1001}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(special))
    (folder / "texts").mkdir()
    drawn = torch.randint(1000, (2 * WORLD_SIZE, LENGTH - 1), generator=torch.Generator().manual_seed(0))
    texts = [json.dumps({"text": " ".join(f"w{n}" for n in row)}) for row in drawn.tolist()]
    parts = [texts[2 * rank : 2 * rank + 2] * 100 for rank in range(WORLD_SIZE)]
    (folder / "texts" / "all.json").write_text("\n".join(line for part in parts for line in part))
    return folder


@pytest.fixture
def options(assets: Path, tmp_path: Path) -> list[str]:
    """What every run is told."""
    return [
        f"--model.hf_assets_path={assets}",
        f"--training.dataset_path={assets / 'texts'}",
        f"--job.dump_folder={tmp_path}",
        f"--training.steps={STEPS}",
        "--training.local_batch_size=2",
        f"--training.seq_len={LENGTH}",
        "--training.mixed_precision_param=float32",
        "--activation_checkpoint.mode=none",
        "--optimizer.lr=2e-4",
        "--lr_scheduler.warmup_steps=1",
        "--metrics.log_freq=1",
        "--debug.seed=1",
    ]


class Records:
    """Takes the place of torchtitan's writer for TensorBoard."""

    def __init__(self) -> None:
        self.steps: list[tuple[float, float]] = []

    def log(self, metrics: dict[str, Any], step: int) -> None:
        self.steps.append((metrics["loss_metrics/global_avg_loss"], metrics["grad_norm"]))

    def close(self) -> None:
        pass


@contextmanager
def _sums() -> Iterator[None]:
    """Lets torch's `fully_shard` take torchtitan's factor, 1, over gloo, which cannot scale while it sums."""
    given = torch_fsdp.FSDPModule.set_gradient_divide_factor

    def set_factor(module: Any, factor: float) -> None:
        module.set_force_sum_reduction_for_comms(True)
        given(module, factor)

    with mock.patch.object(torch_fsdp.FSDPModule, "set_gradient_divide_factor", set_factor):
        yield


def _train(rank: int, world_size: int, port: int, ours: bool, given: list[str]) -> list[tuple[float, float]]:
    """Trains as `torchtitan.train.main` does; returns the loss and the norm of the gradients of each step."""
    titan_on_cpu.prepare()
    from torchtitan import train
    from torchtitan.config import ConfigManager

    logging.disable(logging.WARNING)
    restless = SimpleNamespace(**{**vars(train.time), "sleep": lambda seconds: None})
    with (
        client_rank(rank, port, ours, True, world_size),
        mock.patch.object(train, "time", restless),  # it sleeps two seconds at the end
        nullcontext() if ours else _sums(),
    ):
        trainer = train.Trainer(ConfigManager().parse_args(given))
        trainer.metrics_processor.logger = records = Records()
        trainer.train()
        trainer.close()
        _require_sharded(trainer.model_parts, "fsdp_wrap" if ours else "torch")
        del trainer
    dist.destroy_process_group()
    gc.enable()  # torchtitan collects by hand
    gc.collect()
    return records.steps


def _require_sharded(parts: list[Any], package: str) -> None:
    """Every layer is a unit, and all are of one package's `fully_shard`."""
    modules = [module for part in parts for module in part.modules()]
    units = [module for module in modules if isinstance(module, torch_fsdp.FSDPModule)]
    assert len(units) > sum(len(part.layers) for part in parts)
    assert {type(unit).__mro__[1].__module__.partition(".")[0] for unit in units} == {package}


def _on_all(ranks: list[list[tuple[float, float]]]) -> torch.Tensor:
    """Returns losses and norms; of a pipeline's stages the last knows the loss, the others say -1."""
    return torch.tensor(ranks, dtype=torch.float64).amax(0)


TP, PP = "--parallelism.tensor_parallel_degree=2", "--parallelism.pipeline_parallel_degree=2"
EP = "--parallelism.expert_parallel_degree=2"
HYBRID = "--parallelism.data_parallel_replicate_degree=2"
INTERLEAVED = "--parallelism.pipeline_parallel_schedule=Interleaved1F1B"
FULL, SELECTIVE = "--activation_checkpoint.mode=full", "--activation_checkpoint.mode=selective"
PER_OP = "--activation_checkpoint.selective_ac_option=op"
ACCUMULATED, KEPT = "--training.global_batch_size=8", "--parallelism.fsdp_reshard_after_forward=never"
HALF = "--training.mixed_precision_param=bfloat16"

MODELS = {
    "llama": ["--model.name=llama3", "--model.flavor=debugmodel"],
    "experts": ["--model.name=deepseek_v3", "--model.flavor=debugmodel"],
    "llama4": ["--model.name=llama4", "--model.flavor=debugmodel"],
}

WAYS = {
    "llama, hybrid, full checkpointing": [HYBRID, FULL],
    "llama, pipeline": [PP, INTERLEAVED],
    "experts, ep, tp, full checkpointing, kept": [EP, TP, FULL, KEPT],
    "llama4, ep, hybrid": [EP, HYBRID],
}


@pytest.mark.left_over(4)
@pytest.mark.parametrize("way", WAYS)
def test_losses_are_those_of_torch(run: Ranks, options: list[str], way: str) -> None:
    given = [*options, *MODELS[way.partition(",")[0]], *WAYS[way]]
    _beside_torchs(run, given)


def _beside_torchs(run: Ranks, given: list[str], folders: dict[bool, str] | None = None) -> torch.Tensor:
    """Trains on torch's and on ours, which learn the same; returns losses and norms of ours."""
    torchs, ours = (
        _on_all(run(_train, which, [*given, *([folders[which]] if folders else [])]))
        for which in (False, True)
    )
    assert ours.shape == (STEPS, 2) and ours[-1, 0] < ours[0, 0]
    torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-5)
    return ours


@pytest.mark.left_over(4)
@pytest.mark.parametrize(
    "model, way, other",
    [
        ("llama", [ACCUMULATED, HALF, TP, SELECTIVE, PER_OP], [ACCUMULATED, HALF, TP]),
        ("experts", [EP, SELECTIVE], [HYBRID, FULL]),
    ],
    ids=["llama, tp, selective checkpointing, accumulated, bf16", "experts, ep, selective checkpointing"],
)
def test_it_resumes_its_checkpoints(
    run: Ranks, options: list[str], tmp_path: Path, model: str, way: list[str], other: list[str]
) -> None:
    """Its own exactly; those of torch's `fully_shard`, and in another way, as close as those runs are."""
    half = STEPS // 2
    given = [*options, *MODELS[model], "--checkpoint.enable", f"--checkpoint.interval={half}"]
    folders = {which: f"--checkpoint.folder={which}" for which in (False, True)}
    ours = _beside_torchs(run, [*given, *way], folders)
    given.append(f"--checkpoint.load_step={half}")
    assert sorted(path.name for path in (tmp_path / "True").iterdir()) == [f"step-{half}", f"step-{STEPS}"]

    def resumed(which: bool, from_which: bool, way: list[str]) -> torch.Tensor:
        return _on_all(run(_train, which, [*given, *way, folders[from_which]]))

    assert torch.equal(resumed(True, True, way), ours[half:])
    torch.testing.assert_close(resumed(True, False, other), ours[half:], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(resumed(False, True, other), ours[half:], rtol=1e-4, atol=1e-5)
