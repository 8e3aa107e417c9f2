"""Lightning, unmodified, on our wrapper and our `fully_shard`: losses of its DDP, checkpoints, resuming.

A `front` is "flat" or "orig", the wrapper without and with `use_orig_params`, or "composable", `fully_shard`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fronts import each_front
from launch import client_rank, needs
from models import Block, Transformer, loss_of, tokens

pytestmark = needs("lightning")

STEPS = 4


def _fit(rank, world_size, port, front, folder, options=None, resume=None):
    """Fits as a user of Lightning does, with evaluations in between; returns the losses of both."""
    options = dict(options or {})
    names = ("precision", "accumulate_grad_batches", "gradient_clip_val")
    of_trainer = {name: options.pop(name) for name in names if name in options}
    with client_rank(rank, port, front is not None, front == "composable"):
        import lightning.pytorch as lightning
        from lightning.pytorch.callbacks import ModelCheckpoint

        trainer = lightning.Trainer(
            accelerator="cpu",
            devices=world_size,
            strategy=_strategy(front, world_size, options),
            max_steps=STEPS,
            val_check_interval=2,
            limit_val_batches=2,
            num_sanity_val_steps=0,
            default_root_dir=folder,
            callbacks=[ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=2)],
            enable_progress_bar=False,
            enable_model_summary=False,
            logger=False,
            **of_trainer,
        )
        module = _module(lightning, front)
        trainer.fit(module, _loader(), _loader(), ckpt_path=resume)
        return module.losses, module.evaluated


def _strategy(front, world_size, options):
    from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy

    if front is None:
        return "ddp"
    if front == "composable":
        return ModelParallelStrategy(data_parallel_size=world_size, tensor_parallel_size=1, **options)
    return FSDPStrategy(auto_wrap_policy={Block}, use_orig_params=front == "orig", **options)


def _loader():
    data = torch.cat([tokens(rank, step) for step in range(STEPS) for rank in range(2)])
    return torch.utils.data.DataLoader(data, batch_size=2)  # type: ignore[arg-type]


def _module(lightning: Any, front):
    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.losses, self.evaluated = [], []

        def configure_model(self):
            torch.manual_seed(0)
            self.model = Transformer()
            if front == "composable":
                _shard(self.model, self.device_mesh["data_parallel"])

        def training_step(self, batch):
            loss = loss_of(self.model, batch)
            self.losses.append(loss.item())
            return loss

        def validation_step(self, batch):
            self.evaluated.append(loss_of(self.model, batch).item())

        def configure_optimizers(self):
            return torch.optim.AdamW(self.trainer.model.parameters(), lr=1e-2)

    return Module()


def _shard(model, mesh):
    from torch.distributed._composable.fsdp import fully_shard

    import fsdp_wrap

    assert fully_shard is fsdp_wrap.fully_shard
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@pytest.mark.parametrize(
    "front, options",
    [
        ("flat", {}),
        ("orig", {}),
        ("composable", {}),
        ("composable", {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}),
        ("composable", {"precision": "bf16-mixed"}),
    ],
)
def test_fitting_equals_lightnings_ddp(run, tmp_path, front, options):
    expected = run(_fit, None, str(tmp_path / "ddp"), options)
    ours = run(_fit, front, str(tmp_path / "ours"), options)
    assert len(expected[0][0]) == STEPS * options.get("accumulate_grad_batches", 1)
    torch.testing.assert_close(ours, expected, rtol=0, atol=3e-2 if "precision" in options else 1e-5)


@pytest.mark.parametrize("kind", ["full", "sharded"])
@each_front
def test_resuming_equals_lightnings_ddp(run, tmp_path, front, kind):
    """The loader starts anew in the middle of an epoch, in Lightning's DDP as well."""
    options = {"state_dict_type": kind}
    if front == "composable":
        options = {"save_distributed_checkpoint": kind == "sharded"}
    files = {saver: str(tmp_path / str(saver) / "step=2.ckpt") for saver in (None, front)}
    run(_fit, None, str(tmp_path / "None"))
    expected = run(_fit, None, str(tmp_path), {}, files[None])
    run(_fit, front, str(tmp_path / front), options)
    ours = run(_fit, front, str(tmp_path), options, files[front])
    assert [len(losses) for losses, _ in ours] == [STEPS - 2] * 2
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
    if kind == "full":  # a file that DDP reads, and we read DDP's: model and optimizer
        for reader, writer in ((None, front), (front, None)):
            swapped = run(_fit, reader, str(tmp_path), options if reader else {}, files[writer])
            torch.testing.assert_close(swapped, expected, rtol=0, atol=1e-5)


def _fabric(rank, world_size, port, ours, folder):
    """Trains by `Fabric`: accumulates, clips, saves, goes on, loads, goes on; returns losses and norms."""
    with client_rank(rank, port, ours, fully_shard=True):
        from lightning.fabric import Fabric
        from lightning.fabric.strategies import ModelParallelStrategy

        def parallelize(model, mesh):
            return _shard(model, mesh["data_parallel"])

        ranks = {"data_parallel_size": world_size, "tensor_parallel_size": 1}
        strategy = ModelParallelStrategy(parallelize, **ranks) if ours else "ddp"
        fabric = Fabric(accelerator="cpu", devices=world_size, strategy=strategy)
        fabric.launch()
        torch.manual_seed(0)
        model = fabric.setup_module(Transformer())
        optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=1e-2))
        log = [_fabric_step(fabric, model, optimizer, (0, 1))]
        fabric.save(folder, {"model": model, "optimizer": optimizer})
        log.append(_fabric_step(fabric, model, optimizer, (2, 3)))
        fabric.load(folder, {"model": model, "optimizer": optimizer})
        return [*log, _fabric_step(fabric, model, optimizer, (2, 3))]


def _fabric_step(fabric, model, optimizer, batches):
    losses = []
    for batch in batches:
        with fabric.no_backward_sync(model, enabled=batch != batches[-1]):
            loss = loss_of(model, tokens(fabric.global_rank, batch)) / len(batches)
            fabric.backward(loss)
            losses.append(loss.item())
    norm = fabric.clip_gradients(model, optimizer, max_norm=0.5)
    optimizer.step()
    optimizer.zero_grad()
    return losses, (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item()


def test_fabric_equals_its_ddp(run, tmp_path):
    expected = run(_fabric, False, str(tmp_path / "ddp"))
    ours = run(_fabric, True, str(tmp_path / "ours"))
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-5)
    assert ours[0][1] == ours[0][2], "what was loaded goes on as it did before"
