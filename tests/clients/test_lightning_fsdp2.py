"""Lightning's `ModelParallelStrategy`, unmodified, on our `fully_shard`: its DDP's losses, checkpoints."""

from __future__ import annotations

import pytest
import torch

from launch import client_rank, needs
from lightning_runs import STEPS, fit
from models import Transformer, loss_of, tokens

pytestmark = needs("lightning")


def _fit(rank, world_size, port, ours, folder, options=None, resume=None):
    """Fits as a user of Lightning does, with evaluations in between; returns the losses of both."""
    options = dict(options or {})
    names = ("precision", "accumulate_grad_batches", "gradient_clip_val")
    trainer_options = {name: options.pop(name) for name in names if name in options}
    with client_rank(rank, port, ours, fully_shard=True):
        from lightning.pytorch.strategies import ModelParallelStrategy

        sizes = {"data_parallel_size": world_size, "tensor_parallel_size": 1}
        strategy = ModelParallelStrategy(**sizes, **options) if ours else "ddp"
        return fit(world_size, strategy, folder, resume, _shard if ours else None, **trainer_options)


def _shard(model, mesh):
    from torch.distributed._composable.fsdp import fully_shard

    import fsdp_wrap

    assert fully_shard is fsdp_wrap.fully_shard
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


@pytest.mark.parametrize(
    "options", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}], ids=["plain", "accumulating"]
)
def test_fitting_equals_lightnings_ddp(run, tmp_path, options):
    expected = run(_fit, False, str(tmp_path / "ddp"), options)
    found = run(_fit, True, str(tmp_path / "ours"), options)
    assert len(expected[0][0]) == STEPS * options.get("accumulate_grad_batches", 1)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_fitting_in_bf16_is_close_to_lightnings_ddp(run, tmp_path):
    options = {"precision": "bf16-mixed"}
    expected = run(_fit, False, str(tmp_path / "ddp"), options)
    torch.testing.assert_close(run(_fit, True, str(tmp_path), options), expected, rtol=0, atol=3e-2)


@pytest.mark.parametrize("distributed", [False, True], ids=["full", "sharded"])
def test_resuming_equals_lightnings_ddp(run, tmp_path, distributed):
    """The loader starts anew in the middle of an epoch, in Lightning's DDP as well."""
    options = {"save_distributed_checkpoint": distributed}
    run(_fit, False, str(tmp_path / "ddp"))
    expected = run(_fit, False, str(tmp_path), {}, str(tmp_path / "ddp" / "step=2.ckpt"))
    run(_fit, True, str(tmp_path / "ours"), options)
    found = run(_fit, True, str(tmp_path), options, str(tmp_path / "ours" / "step=2.ckpt"))
    assert [len(losses) for losses, _ in found] == [STEPS - 2] * 2
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    if not distributed:  # a file that DDP reads, and we read DDP's
        folders = {False: tmp_path / "ddp", True: tmp_path / "ours"}
        for reader, writer in ((False, True), (True, False)):
            swapped = run(_fit, reader, str(tmp_path), {}, str(folders[writer] / "step=2.ckpt"))
            torch.testing.assert_close(swapped, expected, rtol=0, atol=1e-5)


def _fabric(rank, world_size, port, ours, folder):
    """Trains by `Fabric`: accumulates, clips, saves, goes on, loads, goes on; returns losses and norms."""
    with client_rank(rank, port, ours, fully_shard=True):
        from lightning.fabric import Fabric
        from lightning.fabric.strategies import ModelParallelStrategy

        def parallelize(model, mesh):
            _shard(model, mesh["data_parallel"])
            return model

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
    found = run(_fabric, True, str(tmp_path / "ours"))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert found[0][1] == found[0][2], "what was loaded goes on as it did before"
