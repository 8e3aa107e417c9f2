"""A program for ray train, whose workers shard a model plainly or by accelerate, on torch's FSDP or ours.

python ray_program.py (torchs|ours) (plain|accelerate) FOLDER
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

STEPS, LENGTH = 3, 12


def train(settings: dict[str, Any]) -> None:
    """Trains on one worker; the first reports losses, and saves the weights."""
    if settings["ours"]:
        from fsdp_wrap import compat

        compat.install(cpu=True, fully_shard=True)
    else:
        from fsdp_wrap.compat.clients import _open_accelerate
        from fsdp_wrap.compat.installation import Installation

        Installation().when_imported("accelerate.state", _open_accelerate)
    import ray.train
    from safetensors.torch import save_file
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
    from torch.distributed.fsdp import FSDPModule

    from tiny_models import VOCABULARY, llama

    rank = ray.train.get_context().get_world_rank()
    prepare = _by_accelerate if settings["way"] == "accelerate" else _plainly
    model, optimizer, backward = prepare(llama())
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    package = "fsdp_wrap" if settings["ours"] else "torch"
    assert {type(unit).__mro__[1].__module__.partition(".")[0] for unit in units} == {package}
    if not settings["ours"]:
        Path(os.environ["TORCHS_BEGAN"]).touch()
    generator = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(STEPS):
        text = torch.randint(3, VOCABULARY, (2, LENGTH), generator=generator)
        loss = model(input_ids=text, labels=text, use_cache=False).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        ray.train.report({"loss": loss.item()})
    weights: Any = get_model_state_dict(
        model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if rank == 0:
        save_file(weights, f"{settings['folder']}/model.safetensors")
        Path(settings["folder"], "losses.json").write_text(json.dumps(losses))


def _plainly(model: Any) -> tuple[Any, ...]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2), torch.Tensor.backward


def _by_accelerate(model: Any) -> tuple[Any, ...]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["LlamaDecoderLayer"],
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    return model, optimizer, accelerator.backward


def main(which: str, way: str, folder: str) -> None:
    """Starts a ray of its own, and in it two workers."""
    import ray
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchConfig, TorchTrainer

    ray.init(num_cpus=2, include_dashboard=False, _temp_dir=None)
    settings = {"ours": which == "ours", "way": way, "folder": folder}
    trainer = TorchTrainer(
        train,
        train_loop_config=settings,
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(storage_path=folder, name="run"),
    )
    trainer.fit()
    ray.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
