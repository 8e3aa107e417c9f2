"""Parameters with types of `spmd_types`, sharded by `fully_shard`: beside a plain model in float64."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from bed import ranks
from beside import assert_close_grads, assert_same_gradients, train_beside
from fronts import clip
from fsdp_wrap import DataParallelMeshDims, fully_shard
from launch import needs

pytestmark = needs("spmd_types")

WIDTH, HIDDEN, ROWS = 4, 6, 3


class Enter(torch.autograd.Function):
    """Enters the computation on parts: the gradients of the ranks are summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        total = grad.clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class Leave(torch.autograd.Function):
    """Leaves it: the results of the ranks are summed."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: Any) -> torch.Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return grad, None


class Mixer(nn.Module):
    """Cut over `group`, if there is one: each rank has a part of the hidden features."""

    def __init__(self, group: Any = None) -> None:
        super().__init__()
        self.group = group
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float64))
        self.shift = nn.Parameter(torch.linspace(-1, 1, WIDTH, dtype=torch.float64))
        self.up = nn.Parameter(torch.randn(HIDDEN, WIDTH, dtype=torch.float64))
        self.down = nn.Parameter(torch.randn(WIDTH, HIDDEN, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert not isinstance(self.up, DTensor)
        y = x * self.scale
        y = y if self.group is None else Enter.apply(y, self.group)
        y = torch.tanh((y + self.shift) @ self.up.T) @ self.down.T
        return x + (y if self.group is None else Leave.apply(y, self.group))


def annotated(mesh: DeviceMesh) -> Mixer:
    """Returns a model of which this rank has its part over "tp", with types that say so."""
    import spmd_types as spmd

    torch.manual_seed(0)
    model, axis = Mixer(mesh.get_group("tp")), spmd.MeshAxis.of(mesh.get_group("tp"))
    part, parts = mesh["tp"].get_local_rank(), mesh["tp"].size()
    model.up = nn.Parameter(model.up.detach().chunk(parts, 0)[part].clone())
    model.down = nn.Parameter(model.down.detach().chunk(parts, 1)[part].clone())
    kinds: dict[str, Any] = {"scale": spmd.I, "shift": spmd.R, "up": spmd.S(0), "down": spmd.S(1)}
    for name, param in model.named_parameters():
        spmd.assert_type(param, {axis: kinds[name]})
    return model


def plain() -> Mixer:
    torch.manual_seed(0)
    return Mixer()


CASES: dict[str, tuple[tuple[int, ...], tuple[str, ...], dict[str, Any]]] = {
    "shard": ((2, 2), ("dp", "tp"), {"shard": "dp"}),
    "tp_first": ((2, 2), ("tp", "dp"), {"shard": "dp"}),
    "replicate": ((2, 2), ("rep", "tp"), {"replicate": "rep"}),
    "hybrid": ((2, 2, 1), ("rep", "dp", "tp"), {"shard": "dp", "replicate": "rep"}),
    "two": ((2, 1, 2), ("dp", "cp", "tp"), {"shard": ("dp", "cp")}),
}


def batches(number: int, parts: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return list(torch.randn(parts, ROWS, WIDTH, dtype=torch.float64, generator=generator))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    loss = model(batch).square().sum()
    loss.backward()
    return loss.detach()


@ranks(4)
@pytest.mark.parametrize("case", CASES)
def test_training_equals_a_plain_model(rank, world_size, case):
    shape, names, given = CASES[case]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = annotated(mesh)
    resharding = case in ("shard", "hybrid")
    dims = DataParallelMeshDims(**given)
    fully_shard(model, mesh=mesh, dp_mesh_dims=dims, reshard_after_forward=resharding)
    assert all(isinstance(param, DTensor) for param in model.parameters())
    parts = world_size // mesh["tp"].size()
    rows = mesh.mesh.movedim(names.index("tp"), -1).reshape(parts, -1)
    place = int(rows.eq(rank).any(1).nonzero())
    gather = partial(batches, parts=parts)
    clipped = partial(clip, max_norm=0.5)
    train_beside(model, plain(), loss_of, gather, place, steps=3, accumulation="TF", clip=clipped)


@ranks(4)
def test_a_parameter_used_outside_of_its_forward_gets_each_gradient_once(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, reference = annotated(mesh), plain()
    fully_shard(model, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))
    for step in range(2):
        every = batches(step, 2)
        loss = model(every[rank // 2]).square().sum() if step else 0
        penalty = sum(param.full_tensor().pow(3).sum() for param in model.parameters())
        (loss + penalty + (0 if step else model(every[rank // 2]).square().sum())).backward()
        expected = sum(param.pow(3).sum() for param in reference.parameters())
        (sum(reference(batch).square().sum() for batch in every) / 2 + expected).backward()
        assert_same_gradients(model, reference)


@ranks(4)
def test_leaves_carry_the_types_under_which_a_forward_is_checked(rank, world_size):
    """Under the strict checker, whose mesh has one axis where the storage has two."""
    import spmd_types as spmd
    from spmd_types.checker import typecheck

    storage = init_device_mesh("cpu", (2, 2), mesh_dim_names=("rep", "shard"))
    axis = spmd.MeshAxis.of(storage._flatten("dp").get_group())
    torch.manual_seed(0)
    model, reference = nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 2)
    reference.load_state_dict(model.state_dict())
    spmd.assert_type(model.weight, {axis: spmd.R})
    model.weight.note, model.weight.nothing = "kept", None
    spmd.assert_type(model.bias, {axis: spmd.R})
    fully_shard(model, mesh=storage, dp_mesh_dims=DataParallelMeshDims(shard="shard", replicate="rep"))
    assert (
        model.weight.note == "kept" and model.weight.nothing is None and not spmd.has_local_type(model.weight)
    )
    for step in range(2):
        every = [batch.float() for batch in batches(step, world_size)]
        x = spmd.assert_type(every[rank].clone(), {axis: spmd.S(0)})
        with spmd.set_current_mesh(frozenset({axis})), typecheck("strict"):
            y = model(x)
            assert spmd.get_local_type(y) == {axis: spmd.V}
        y.square().sum().backward()
        (sum(reference(batch).square().sum() for batch in every) / world_size).backward()
    near = {"rtol": 1e-5, "atol": 1e-5}
    assert_close_grads(model, reference, **near)


@ranks(4)
@pytest.mark.shows("refused: types without a placement")
def test_types_that_say_too_little_are_refused_before_anything_changes(rank, world_size):
    import spmd_types as spmd

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = (spmd.MeshAxis.of(mesh.get_group(name)) for name in ("dp", "tp"))
    shard = {"mesh": mesh, "dp_mesh_dims": DataParallelMeshDims(shard="dp")}
    cases: list[tuple[dict[Any, Any], dict[str, Any], str]] = [
        ({tp: spmd.R}, {"mesh": mesh["dp"]}, "'weight' has types of spmd_types: pass fully_shard the whole"),
        ({dp: spmd.R}, shard, r"none on \['tp'\]"),
        ({dp: spmd.I, tp: spmd.R}, shard, "must be R"),
        ({tp: spmd.V}, shard, "say no placement"),
        ({tp: spmd.P}, shard, "only sharded and replicated"),
    ]
    for types, options, message in cases:
        model = nn.Linear(WIDTH, 2, bias=False)
        spmd.assert_type(model.weight, types)
        before = model.weight
        with pytest.raises(ValueError, match=message):
            fully_shard(model, **options)
        assert model.weight is before and type(model) is nn.Linear
