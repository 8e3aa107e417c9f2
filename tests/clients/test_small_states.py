"""Optimizers with state in few bits, of torchao and bitsandbytes, over sharded parameters."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from bed import ranks
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import checkpoint, fully_shard
from fsdp_wrap.optim import on_shards

BLOCKS = 4096
"""Of so many elements parts are multiples: neither library keeps state of smaller tensors in few bits."""

KINDS = ["AdamW8bit", "AdamW4bit", "AdamWFp8"]


def net() -> nn.Sequential:
    """Matrices of four and two times as many elements, and a bias of which state has all its bits."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256, bias=False), nn.Tanh(), nn.Linear(256, 32, bias=False), nn.Tanh())


def sharded(front: str, group: dist.ProcessGroup, **options: Any) -> Any:
    model = net()
    if front == "composable":
        return fully_shard(model, mesh=DeviceMesh.from_group(group, "cpu"), **options)
    return FSDP(model, process_group=group, use_orig_params=front == "orig", **options)


def made(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "bitsandbytes":
        import bitsandbytes

        return on_shards(bitsandbytes.optim.AdamW8bit(model.parameters(), lr=1e-2))
    import torchao.optim

    return getattr(torchao.optim, kind)(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    """All ranks see the same batch: with 1, 2 and 4 of them, means of gradients have the bits of each."""
    for step in steps:
        batch = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        with torch.compiler.set_stance("force_eager"):
            optimizer.step()


def full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def assert_same_values(model: nn.Module, plain: nn.Module) -> None:
    found = {name: full(value) for name, value in model.state_dict().items()}
    for name, value in plain.state_dict().items():
        assert torch.equal(found[name], value), name


def run(kind: str, path: Path, before: str, after: str) -> None:
    """Trains at 1, 2 and 4 ranks as a plain model; what 4 saved is loaded by 1, 2 and 3, which go on."""
    plain = net()
    reference = made(kind, plain)
    train(plain, reference, range(3))
    groups: dict[int, Any] = {size: dist.new_group(range(size)) for size in (1, 2, 3, 4)}
    for size in (1, 2, 4):
        if dist.get_rank() < size:
            group = groups[size]
            model = sharded(before, group, shard_alignment=BLOCKS)
            optimizer = made(kind, model)
            train(model, optimizer, range(3))
            assert_same_values(model, plain)
    checkpoint.save(path, model, optimizer, step=3, process_group=groups[4])
    later = copy.deepcopy(plain)
    goes_on = made(kind, later)
    goes_on.load_state_dict(reference.state_dict())
    train(later, goes_on, range(3, 5))
    for size in (1, 2, 3):
        if dist.get_rank() < size:
            group = groups[size]
            aligned = None if (after, size) == ("composable", 3) else BLOCKS  # of which 3 rows are none
            model = sharded(after, group, shard_alignment=aligned)
            optimizer = made(kind, model)
            checkpoint.load(path, model, optimizer, process_group=group)
            train(model, optimizer, range(3, 5))
            if size < 3:
                assert_same_values(model, later)
    dist.barrier()


@pytest.mark.parametrize(
    ("kind", "before", "after"),
    [
        ("AdamW8bit", "flat", "orig"),
        ("AdamW4bit", "orig", "composable"),
        ("AdamWFp8", "composable", "flat"),
        ("AdamW8bit", "composable", "orig"),
    ],
)
@ranks(4)
def test_bits_do_not_depend_on_the_ranks(rank, world_size, tmp_path, kind, before, after):
    run(kind, tmp_path, before, after)


@pytest.mark.parametrize("front", ["flat", "orig", "composable"])
@ranks(4)
def test_bitsandbytes(rank, world_size, tmp_path, front):
    run("bitsandbytes", tmp_path, front, front)
