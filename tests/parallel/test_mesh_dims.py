"""`dp_mesh_dims`: all parameters are `DTensor`s on a mesh before they are sharded over a part of it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from bed import ranks
from fsdp_wrap import DataParallelMeshDims, fully_shard

CASES: dict[str, tuple[tuple[int, ...], tuple[str, ...], dict[str, Any]]] = {
    "shard": ((2, 2), ("dp", "tp"), {"shard": "dp"}),
    "tp_first": ((2, 2), ("tp", "dp"), {"shard": "dp"}),
    "hybrid": ((2, 1, 2), ("rep", "dp", "tp"), {"shard": "dp", "replicate": "rep"}),
    "replicate": ((2, 2), ("rep", "tp"), {"replicate": "rep"}),
    "two": ((2, 1, 2), ("dp", "cp", "tp"), {"shard": ("dp", "cp")}),
    "two_hybrid": ((1, 2, 2), ("rep", "dp", "cp"), {"shard": ("dp", "cp"), "replicate": "rep"}),
}


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5)).double()


def distribute(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Cuts the first layer by rows and the second by columns over "tp"; all else is replicated."""
    names = mesh.mesh_dim_names or ()
    for layer, dims in ((model[0], {"weight": 0, "bias": 0}), (model[2], {"weight": 1})):
        for name, param in [*layer.named_parameters()]:
            placements: list[Any] = [Replicate()] * mesh.ndim
            if name in dims and "tp" in names:
                placements[names.index("tp")] = Shard(dims[name])
            setattr(layer, name, nn.Parameter(distribute_tensor(param.detach(), mesh, placements)))
    return model


def input_of(batch: torch.Tensor, mesh: DeviceMesh, names: tuple[str, ...]) -> DTensor:
    """The batch, cut over the dimensions of data parallelism."""
    cut = [Shard(0) if name in names else Replicate() for name in mesh.mesh_dim_names or ()]
    return distribute_tensor(batch, mesh, cut)


@ranks(4)
@pytest.mark.parametrize("case", CASES)
def test_training_equals_a_plain_model_and_upstream(rank, world_size, case):
    shape, names, given = CASES[case]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    dims = DataParallelMeshDims(**given)
    plain, model = net(), distribute(net(), mesh)
    others = []
    if hasattr(torch_fsdp, "DataParallelMeshDims"):
        others.append(distribute(net(), mesh))
        torch_fsdp.fully_shard(others[0], mesh=mesh, dp_mesh_dims=torch_fsdp.DataParallelMeshDims(**given))
    fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    own = (*dims.shard_names, *dims.replicate_names)
    parts = 1
    for name in own:
        parts *= mesh[name].size()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model, *others)]
    for step in range(3):
        batch = torch.randn(8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        plain(batch).square().sum().backward()
        for param in plain.parameters():
            param.grad /= parts  # as with torch, the sum over the ranks is divided by their number
        for each in (model, *others):
            out = each(input_of(batch, mesh, own))
            assert isinstance(out, DTensor)
            out.square().sum().backward()
        for (name, param), expected in zip(model.named_parameters(), plain.parameters()):
            found = param.grad.full_tensor()
            torch.testing.assert_close(found, expected.grad, rtol=0, atol=1e-12, msg=name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for other in others:
        for (name, param), theirs in zip(model.named_parameters(), other.parameters()):
            assert param.placements == theirs.placements and param.device_mesh == theirs.device_mesh, name
            torch.testing.assert_close(param.to_local(), theirs.to_local(), rtol=0, atol=1e-12, msg=name)
    for (name, value), expected in zip(model.state_dict().items(), plain.parameters()):
        torch.testing.assert_close(value.full_tensor(), expected.detach(), rtol=0, atol=1e-12, msg=name)


@ranks(4)
def test_what_does_not_fit_is_refused_before_anything_changes(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dims = DataParallelMeshDims(shard="dp")
    cases: list[tuple[nn.Module, Any, str]] = [
        (net(), {"mesh": mesh, "dp_mesh_dims": dims}, "'0.weight' is a plain tensor"),
        (net(), {"mesh": mesh, "dp_mesh_dims": DataParallelMeshDims(shard="data")}, r"names \('data',\)"),
        (net(), {"mesh": mesh, "dp_mesh_dims": DataParallelMeshDims("dp", "dp")}, "each once"),
        (
            distribute(net(), mesh),
            {"mesh": mesh, "dp_mesh_dims": DataParallelMeshDims("tp")},
            "must be Replicate",
        ),
        (
            distribute(net(), mesh),
            {"mesh": mesh, "dp_mesh_dims": DataParallelMeshDims(None, "dp"), "reshard_after_forward": 2},
            "shards over that many ranks",
        ),
        (distribute(net(), mesh), {"mesh": mesh["dp"]}, "both must be slices of one mesh"),
        (distribute(net(), mesh), {}, "both must be slices of one mesh"),
    ]
    for model, options, message in cases:
        before = copy.copy(dict(model.named_parameters()))
        with pytest.raises(ValueError, match=message):
            fully_shard(model, **options)
        assert all(param is before[name] for name, param in model.named_parameters())
        assert type(model) is nn.Sequential
    with pytest.raises(TypeError, match="dp_mesh_dims must be a"):
        fully_shard(distribute(net(), mesh), mesh=mesh, dp_mesh_dims="dp")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="at least one of shard and replicate"):
        DataParallelMeshDims()
