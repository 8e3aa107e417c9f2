"""Meshes of three dimensions at 8 ranks, beside torch's: shapes, placements, collectives and their bytes.

On a group that sends nothing each rank can be looked at by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore

import tp_nets
from bed import ranks
from bed.references import Traffic, count_collectives
from bed.sampling import few_fast
from fsdp_wrap import fully_shard

RANKS = 8
MESHES = {
    "hybrid": ((2, 2, 2), ("replicate", "shard", "tp")),
    "tall": ((4, 2), ("shard", "tp")),
    "wide": ((2, 4), ("shard", "tp")),
    "copies": ((4, 1, 2), ("replicate", "shard", "tp")),
}
BESIDE = 24
"""Bytes beside a part: it starts at a multiple of 16 bytes, and a number tells who has a gradient."""

ACCUMULATIONS = {"F": {"gradient_sync": False}, "C": {"all_reduce": False}, "T": {}}
"""Backwards: without reductions, within the copy, with all."""


@contextmanager
def on_fake_group(rank: int) -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
    yield


def made(way: Any, mesh_name: str, plan: str, checkpointing: str, **options: Any) -> nn.Module:
    shape, names = MESHES[mesh_name]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    data = names[:-1]
    model = tp_nets.parallelize(tp_nets.net(checkpointing, hidden=12), mesh["tp"], plan)
    return tp_nets.shard_blocks(model, way, mesh=mesh[data if len(data) > 1 else data[0]], **options)


def counted(model: Any, plan: str, letters: str) -> dict[str, dict[str, Traffic]]:
    """What each backward of the third step takes, forward and all; the first steps compare units."""
    found: dict[str, dict[str, Traffic]] = {}
    for _ in range(3):
        model.zero_grad()
        for number, letter in enumerate(letters):
            told = ACCUMULATIONS[letter]
            model.set_requires_gradient_sync(told.get("gradient_sync", True))
            model.set_requires_all_reduce(told.get("all_reduce", True))
            with count_collectives() as counts:
                tp_nets.loss_of(model, tp_nets.batches(1, 0)[0], plan)
            counts.pop("_wrap_tensor_autograd", None)  # which sends nothing
            found[f"{number}{letter}"] = dict(counts)
    return found


CASES = [
    (mesh, plan, reshard, letters)
    for number, mesh in enumerate(MESHES)
    for plan in tp_nets.PLANS
    for reshard, letters in [(True, "T"), (False, "FT"), (True, "CT"), (None, "T")][number % 2 :: 2]
]


@ranks(1, backend=None)
@pytest.mark.parametrize("place", [0, 5])
@pytest.mark.parametrize("case", few_fast(CASES, 12), ids=lambda case: "-".join(map(str, case)))
def test_shapes_and_collectives_are_at_most_those_of_upstream(rank, world_size, case, place):
    mesh, plan, reshard, letters = case
    with on_fake_group(place):
        ours, theirs = (
            made(way, mesh, plan, "none", reshard_after_forward=reshard)
            for way in (fully_shard, torch_fully_shard)
        )
        for (name, found), expected in zip(ours.named_parameters(), theirs.parameters()):
            assert found.device_mesh == expected.device_mesh and found.placements == expected.placements, name
            assert found.to_local().shape == expected.to_local().shape, name
        most = 2 if reshard else 1  # each gathers in backward once more
        beside = most * BESIDE * len(list(ours.parameters())) * MESHES[mesh][0][-2]
        counts = [counted(each, plan, letters) for each in (ours, theirs)]
        for backward, upstream in counts[1].items():
            ours_then = counts[0][backward]
            for kind in ours_then.keys() | upstream.keys():
                own, traffic = (each.get(kind, Traffic()) for each in (ours_then, upstream))
                assert own.calls <= traffic.calls, (backward, kind)
                assert own.bytes <= traffic.bytes + beside, (backward, kind)
        for (name, param), other in zip(ours.named_parameters(), theirs.parameters()):
            assert param.grad.placements == other.grad.placements, name
            assert param.grad.to_local().shape == other.grad.to_local().shape, name
