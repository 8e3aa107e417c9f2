"""`replicate`, the composable front-end that keeps parameters whole on each rank, as DDP does."""

from __future__ import annotations

from functools import partial
from typing import Any, TypeVar, overload

from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import DeviceMesh

from fsdp_wrap._comm import default_mesh
from fsdp_wrap._composable import (
    ON_DEVICE,
    OWN_DTYPES,
    Composition,
    Location,
    check_mesh,
    checked_policies,
    compose,
    outermost,
    without_dimensions,
)
from fsdp_wrap._core import DataParallelMeshDims, OffloadPolicy, ParamSlot, check_own
from fsdp_wrap._fsdp_module import FSDPModule
from fsdp_wrap._params import DataMesh, to_local
from fsdp_wrap._runtime import UnitOptions

__all__ = ["ReplicateModule", "replicate"]

_Module = TypeVar("_Module", bound=nn.Module)


class ReplicateModule(FSDPModule):
    """A module after `replicate`: an instance of a subclass of its former class, run as an unsharded unit.

    It has all methods of `FSDPModule`. Parameters are not gathered. The methods about gathers only affect
    copies of parameters in another dtype, or from host memory.
    """


@overload
def replicate(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = ...,
    mp_policy: torch_fsdp.MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy | None = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
    shared_memory: bool = ...,
    travel_together_bytes: int | None = ...,
) -> ReplicateModule: ...


@overload
def replicate(
    module: list[_Module],
    *,
    mesh: DeviceMesh | None = ...,
    mp_policy: torch_fsdp.MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy | None = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
    shared_memory: bool = ...,
    travel_together_bytes: int | None = ...,
) -> list[ReplicateModule]: ...


def replicate(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: torch_fsdp.MixedPrecisionPolicy = OWN_DTYPES,
    offload_policy: OffloadPolicy | None = ON_DEVICE,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    shared_memory: bool = True,
    travel_together_bytes: int | None = None,
) -> Any:
    """Makes a unit of a module in place: each rank keeps its parameters whole, and gradients are averaged.

    Parameters become `DTensor`s that are `Replicate()` on the mesh. A model may also have modules sharded by
    `fully_shard`. The unit owns the parameters that no unit below it owns, so call this on the inner modules
    first. The gradients of each unit are reduced while backward goes on, in batches of small units. The
    module gets the methods of `FSDPModule`. Build the optimizer afterwards. Ranks must begin with the same
    values, since no values are broadcast.

    Args:
        module: The module, or a list of modules for one unit.
        mesh: A mesh of one dimension; by default all ranks, in a dimension named "replicate". Parameters of
            tensor parallelism must be `DTensor`s on another part of the same mesh.
        mp_policy: Dtypes of computation and communication: a `MixedPrecisionPolicy`, ours or torch's. A
            parameter that computes in another dtype has a copy from forward to backward.
        offload_policy: A `CPUOffloadPolicy`, ours or torch's, keeps parameters in host memory; ours may also
            keep optimizer state alone there. None, or an `OffloadPolicy`, offloads nothing.
        ignored_params: Parameters to leave alone.
        dp_mesh_dims: The dimensions of `mesh` to replicate over, if all parameters are `DTensor`s on that
            mesh. It must not name dimensions to shard over.
        shared_memory: Let ranks on one host communicate through its memory, if they compute on the CPU in a
            gloo group. Not one of torch's arguments.
        travel_together_bytes: Bytes of memory for batches: one collective reduces several small units, from
            the second iteration on; as in `fully_shard`. Not one of torch's arguments.

    Returns:
        `module` itself.

    Raises:
        TypeError: If an argument is of the wrong type, a parameter is of a class that would be lost, or a
            module was made by TorchScript.
        ValueError: If there is no process group, this rank is not in the mesh, the mesh or `dp_mesh_dims` is
            not for replicas alone, a module is in a unit already (also a `RuntimeError`) or has no forward, a
            parameter has no dimension, or a dtype of `mp_policy` is not allowed.

    The API is that of `torch.distributed._composable.replicate_with_fsdp.replicate`.
    """
    parts = outermost(module, "replicate")
    precision, offload = checked_policies(mp_policy, offload_policy)
    check_own(shared_memory, travel_together_bytes)
    data = _data_mesh(default_mesh("replicate", "replicate") if mesh is None else mesh, dp_mesh_dims)
    wanted = Composition(
        by="replicate",
        kind=ReplicateModule,
        data=data,
        location_of=partial(_location_of, data=data),
        mp_policy=precision,
        offload=offload,
        ignored_params=ignored_params,
        options=UnitOptions(reshard_after_forward=False, travel_together_bytes=travel_together_bytes),
        shared_memory=shared_memory is not False,
    )
    compose(module, parts, wanted)
    return module


def _data_mesh(mesh: DeviceMesh, dims: DataParallelMeshDims | None) -> DataMesh:
    check_mesh(mesh, dims)
    if dims is None:
        if mesh.ndim != 1:
            raise ValueError(
                f"replicate takes a mesh of one dimension, and {mesh} has {mesh.ndim}: pass a part of it, "
                "such as mesh['dp'], or call fully_shard to shard over the other"
            )
        return DataMesh(mesh, only_copies=True)
    if dims.shard_names:
        raise ValueError(
            f"replicate shards over nothing, and dp_mesh_dims names {dims.shard_names} to shard over: name "
            "dimensions to replicate over alone, or use fully_shard"
        )
    return DataMesh.within(mesh, dims)


def _location_of(slot: ParamSlot, data: DataMesh) -> Location:
    """Checks one parameter; returns its location."""
    if not to_local(slot.param).shape:
        raise without_dimensions(slot)
    data.check(slot.fqn, slot.param)
    return Location(data, 0)
