"""Libraries with which a loop keeps its state: programs that give the same on torch's FSDP and on ours.

torchdata's loader in the middle of an epoch, metrics of torchmetrics over all ranks, torch's own asynchronous
checkpoints written by a process of their own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from launch import client_rank, needs

pytestmark = needs("torchdata", "torchmetrics")

WIDTH, CLASSES, SAMPLES = 8, 4, 16
FRONTS = ["flat", "orig", "composable"]


def _sharded(front: str) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(WIDTH, 6), nn.ReLU(), nn.Linear(6, CLASSES))
    if front == "composable":
        return fully_shard(model)
    return FSDP(model, use_orig_params=front == "orig", device_id=torch.device("cpu"))


def _loader(rank: int, world_size: int, workers: int) -> Any:
    """Half of the samples for each rank, shuffled by a generator whose state the loader keeps."""
    from torch.utils.data import DistributedSampler
    from torchdata.stateful_dataloader import StatefulDataLoader

    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(WIDTH, generator=generator), number % CLASSES) for number in range(SAMPLES)]
    sampler: Any = DistributedSampler(data, world_size, rank, shuffle=True)  # type: ignore[arg-type]
    return StatefulDataLoader(data, batch_size=2, sampler=sampler, num_workers=workers)


def _steps(
    model: Any, optimizer: Any, batches: Any, see: Callable[..., None] = lambda *_: None
) -> list[float]:
    losses = []
    for inputs, labels in batches:
        outputs = model(inputs)
        loss = nn.functional.cross_entropy(outputs, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        see(outputs.detach(), labels)
        losses.append(loss.item())
    return losses


def _resume(rank: int, world_size: int, port: int, ours: bool, front: str, folder: str, workers: int) -> Any:
    """Trains half of an epoch, saves by a process, and goes on in another model, loader and optimizer."""
    with client_rank(rank, port, ours, fully_shard=True):
        from torch.distributed.checkpoint import async_save, load
        from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        dist.init_process_group("cpu:gloo")
        model, loader = _sharded(front), _loader(rank, world_size, workers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        batches = iter(loader)
        before = _steps(model, optimizer, (next(batches) for _ in range(2)))
        key = f"loader of {rank}"
        parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
        state: dict[str, Any] = {**parts, key: loader.state_dict()}
        by_process = AsyncCheckpointerType.PROCESS
        saved: Any = async_save(state, checkpoint_id=folder, async_checkpointer_type=by_process)
        after = _steps(model, optimizer, batches)  # changes what is being saved
        saved.result()

        model, loader = _sharded(front), _loader(rank, world_size, workers)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        parts = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
        state = {**parts, key: loader.state_dict()}
        load(state, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        loader.load_state_dict(state[key])
        resumed = _steps(model, optimizer, loader)
        dist.destroy_process_group()
        return before, after, resumed


@pytest.mark.shows("equal to torch's fully_shard; the pieces of torch's wrapper cannot be saved so")
@pytest.mark.parametrize(("front", "workers"), [("flat", 0), ("orig", 1), ("composable", 0)])
def test_resuming_in_the_middle_of_an_epoch_from_what_a_process_saved(run, tmp_path, front, workers):
    torchs = run(_resume, False, "composable", str(tmp_path / "torchs"), 0)
    ours = run(_resume, True, front, str(tmp_path / "ours"), workers)
    torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-6)
    for _, after, resumed in ours:
        assert len(after) == 2
        torch.testing.assert_close(resumed, after, rtol=0, atol=0)


def _measure(rank: int, world_size: int, port: int, ours: bool, front: str) -> list[float]:
    """Metrics over all ranks, one of them a part of the sharded model."""
    with client_rank(rank, port, ours, fully_shard=True):
        from torchmetrics import MeanMetric
        from torchmetrics.classification import MulticlassAccuracy

        dist.init_process_group("gloo")
        model = _sharded(front)
        accuracy = MulticlassAccuracy(CLASSES)
        inner = model.module if front != "composable" else model
        inner[1].register_module("mean", MeanMetric())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

        def see(outputs: torch.Tensor, labels: torch.Tensor) -> None:
            accuracy.update(outputs, labels)
            inner[1].mean.update(outputs.square().sum())

        _steps(model, optimizer, _loader(rank, world_size, 0), see)
        told = [accuracy.compute().item(), inner[1].mean.compute().item()]
        dist.destroy_process_group()
        return told


@pytest.mark.parametrize("front", FRONTS)
def test_metrics_over_ranks(run, front):
    torchs, ours = (run(_measure, own, front) for own in (False, True))
    torch.testing.assert_close(ours, torchs, rtol=1e-5, atol=1e-6)
    assert ours[0] == ours[1] and 0 < ours[0][1]
