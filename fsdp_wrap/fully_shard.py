"""`fully_shard`, the composable front-end: parameters are `DTensor`s, and modules change class in place."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast, overload

import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fsdp_wrap._attributes import GONE
from fsdp_wrap._building import over_replicas
from fsdp_wrap._comm import Communicator, default_mesh, device_of, make_communicator, neighbours
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
from fsdp_wrap._core import (
    DataParallelMeshDims,
    NoDimensionError,
    OffloadPolicy,
    ParamSlot,
    ShardAlignment,
    ShardPlacementResult,
    UnevenCutError,
    WrongKindError,
    check_own,
    tells_keywords,
    warn_caller,
)
from fsdp_wrap._fsdp_module import FSDPModule, GradientReductionHandle, UnshardHandle, share_comm_ctx
from fsdp_wrap._params import DataMesh, check_parts, chunk_numel, is_extension, to_local
from fsdp_wrap._runtime import UnitOptions

__all__ = ["FSDPModule", "GradientReductionHandle", "UnshardHandle", "fully_shard", "share_comm_ctx"]

_Module = TypeVar("_Module", bound=nn.Module)
_Placements = Callable[[nn.Parameter], Shard | ShardPlacementResult | None]


_INSTEAD = {
    "device_mesh": "pass it as mesh",
    "process_group": "pass mesh=DeviceMesh.from_group(process_group, device_type)",
    "mixed_precision": "pass mp_policy=MixedPrecisionPolicy(...)",
    "cpu_offload": "pass offload_policy=CPUOffloadPolicy()",
    "sharding_strategy": (
        "pass reshard_after_forward, True as FULL_SHARD, or False as SHARD_GRAD_OP; a mesh of two dimensions "
        "shards as HYBRID_SHARD"
    ),
    "auto_wrap_policy": "apply fully_shard to the inner modules first, such as each block, then to the model",
    "ignored_modules": "pass their parameters as ignored_params",
    "ignored_states": "pass parameters as ignored_params",
    "use_orig_params": "leave it out, parameters are always DTensors",
    "device_id": "the mesh chooses the device",
    "sync_module_states": "load by set_model_state_dict with broadcast_from_rank0, or use equal seeds",
    "param_init_fn": "call model.to_empty(device=...) after fully_shard, and initialise then",
    "backward_prefetch": "call set_modules_to_backward_prefetch afterwards",
    "forward_prefetch": "call set_modules_to_forward_prefetch afterwards",
    "limit_all_gathers": "leave it out, at most two gathers are in flight",
    **GONE,
}
"""What stands for arguments of the wrapper, and of the last release."""


@overload
def fully_shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: _Placements | None = ...,
    mp_policy: torch_fsdp.MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy | None = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
    shared_memory: bool = ...,
    travel_together_bytes: int | None = ...,
    shard_alignment: int | str | None = ...,
    state_over_replicas: bool = ...,
) -> FSDPModule: ...


@overload
def fully_shard(
    module: list[_Module],
    *,
    mesh: DeviceMesh | None = ...,
    reshard_after_forward: bool | int | None = ...,
    shard_placement_fn: _Placements | None = ...,
    mp_policy: torch_fsdp.MixedPrecisionPolicy = ...,
    offload_policy: OffloadPolicy | None = ...,
    ignored_params: set[nn.Parameter] | None = ...,
    dp_mesh_dims: DataParallelMeshDims | None = ...,
    shared_memory: bool = ...,
    travel_together_bytes: int | None = ...,
    shard_alignment: int | str | None = ...,
    state_over_replicas: bool = ...,
) -> list[FSDPModule]: ...


@tells_keywords(_INSTEAD)
def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: _Placements | None = None,
    mp_policy: torch_fsdp.MixedPrecisionPolicy = OWN_DTYPES,
    offload_policy: OffloadPolicy | None = ON_DEVICE,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    shared_memory: bool = True,
    travel_together_bytes: int | None = None,
    shard_alignment: int | str | None = None,
    state_over_replicas: bool = False,
) -> Any:
    """Makes a unit of a module in place: its parameters become `DTensor`s that are sharded over the ranks.

    The unit owns the parameters that no unit below it owns, so call this on the inner modules first. Each
    parameter is cut as by `torch.chunk`. The module gets the methods of `FSDPModule`. Build the optimizer
    afterwards. Tensors on the meta device stay there: call `to_empty(device=...)`, then initialise or load
    them.

    Args:
        module: The module, or a list of modules for one unit: unsharded before the first of them runs,
            resharded after the last.
        mesh: A mesh of one dimension, or of two (replicate, shard); by default all ranks. Parameters of
            tensor parallelism must already be `DTensor`s on another part of the same mesh, since
            `parallelize_module` cannot distribute sharded parameters.
        reshard_after_forward: Whether the full parameters are freed between forward and backward; by default
            True for all units but the root. A number lets groups of so many neighbouring ranks keep the full
            parameters between them. The number of all ranks means True. 1 means False, with a warning, since
            it is easily taken for True.
        shard_placement_fn: Returns for a parameter the `Shard(dim)` to cut it along; None is `Shard(0)`. The
            size of any dimension but the first must be a multiple of the ranks. A `ShardPlacementResult` also
            chooses a mesh for the parameter: its gathers and reductions run there, and its gradient is
            divided by the number of ranks there. If experts see the tokens of more ranks, give that number to
            `set_gradient_divide_factor`.
        mp_policy: Dtypes of computation and communication: a `MixedPrecisionPolicy`, ours or torch's.
        offload_policy: A `CPUOffloadPolicy`, ours or torch's, keeps shards in host memory; ours may also keep
            optimizer state alone there. None, or an `OffloadPolicy`, offloads nothing.
        ignored_params: Parameters to leave alone.
        dp_mesh_dims: The dimensions of `mesh` to shard and replicate over, if all parameters are `DTensor`s
            on that mesh, or have types of the package `spmd_types` that say how they lie on it. Gradients are
            averaged over these dimensions.
        shared_memory: Let ranks on one host communicate through its memory, if they compute on the CPU in a
            gloo group. Not one of torch's arguments.
        travel_together_bytes: Bytes of memory for batches: one collective gathers or reduces several small
            units, from the second iteration on. 0 switches batches off; None is the default of the device.
            The root's value holds for the model, and `set_travel_together_bytes` changes it. Not one of
            torch's arguments.
        shard_alignment: Alignment of the boundaries between shards within a parameter: a number of elements,
            or "rows" for indices of the first dimension. Shards along the first dimension are always aligned
            to rows. None for no alignment. The boundaries of a `DTensor` cannot be moved, so a parameter
            with other boundaries stays unsharded on every rank if it has one dimension, or fewer elements
            than the alignment times the ranks; `repr` names it. Any other parameter is refused. Not one of
            torch's arguments.
        state_over_replicas: On a mesh of two dimensions, shard parameters, gradients and optimizer state over
            the replicas too: each copy computes by itself as before, and all ranks hold one state between
            them, as `DTensor`s on the flattened mesh. Each rank also keeps its part of the copy, as gathered,
            and gathers it over the replicas when the state has changed. Not one of torch's arguments.

    Returns:
        `module` itself.

    Raises:
        TypeError: If an argument is of the wrong type, a parameter is of a class that sharding would lose, or
            a module was made by TorchScript.
        ValueError: If there is no process group, this rank is not in the mesh, a module is in a unit already
            or has no forward, a parameter cannot be cut, or not with this `shard_alignment`, or a dtype of
            `mp_policy` or the override of a parameter's dtype is not allowed.

    The API is that of `torch.distributed.fsdp.fully_shard`.
    """
    parts = outermost(module, "fully_shard")
    precision, offload = checked_policies(mp_policy, offload_policy)
    check_own(shared_memory, travel_together_bytes, state_over_replicas)
    alignment = ShardAlignment.of(shard_alignment)
    mesh = default_mesh("fully_shard") if mesh is None else mesh
    check_mesh(mesh, dp_mesh_dims)
    data = DataMesh(mesh) if dp_mesh_dims is None else DataMesh.within(mesh, dp_mesh_dims)
    if state_over_replicas:
        data = over_replicas.needed("state_over_replicas=True").flat_mesh(data, type(parts[0]).__name__)
    reshard_after_forward = _resolved(reshard_after_forward)
    few = None if isinstance(reshard_after_forward, bool) else reshard_after_forward
    shares = shared_memory is not False

    def location_of(slot: ParamSlot) -> Location:
        location = _location_of(slot, shard_placement_fn, data)
        return location if alignment is None else _aligned(slot, location, alignment)

    wanted = Composition(
        by="fully_shard",
        kind=FSDPModule,
        data=data,
        location_of=location_of,
        mp_policy=precision,
        offload=offload,
        ignored_params=ignored_params,
        options=UnitOptions(
            reshard_after_forward=reshard_after_forward is not False,
            keeps_as_root=not reshard_after_forward,
            travel_together_bytes=travel_together_bytes,
        ),
        kept_within=None if few is None else partial(_kept_within, few, data=data, shared_memory=shares),
        shared_memory=shares,
        alignment=alignment,
    )
    compose(module, parts, wanted)
    return module


def _location_of(slot: ParamSlot, placement_of: _Placements | None, data: DataMesh) -> Location:
    """Checks one parameter; returns its location, by default on the mesh `data`."""
    shape = to_local(slot.param).shape
    if not shape:
        raise without_dimensions(slot)
    placement = placement_of(slot.param) if placement_of is not None else None
    over = data
    if type(placement).__name__ == ShardPlacementResult.__name__:  # ours, or torch's
        result = cast(ShardPlacementResult, placement)
        over, placement = _mesh_of(slot, result.mesh_info, data), result.placement
    over.check(slot.fqn, slot.param)
    if over.ranks.shard is not None:
        check_parts(slot.fqn, slot.param, over.ranks.shard.size)
    if placement is None:
        return Location(over, 0)
    if is_extension(slot.param) and placement != Shard(0):
        raise UnevenCutError(
            f"parameter '{slot.fqn}' is a {type(slot.param).__name__}, which decides what is gathered: it is "
            f"cut along dimension 0 only, not by {placement!r}"
        )
    if not isinstance(placement, Shard):
        raise WrongKindError(
            "shard_placement_fn must return a Shard, a ShardPlacementResult with one or None in it, or None, "
            f"not {placement!r} (for parameter '{slot.fqn}')"
        )
    if over.only_copies:
        raise ValueError(
            f"parameter '{slot.fqn}' cannot be cut by {placement} over {over.mesh}, which replicates only; "
            "its placement must be None"
        )
    return Location(over, _dim_of(slot.fqn, placement, shape, over))


def _aligned(slot: ParamSlot, location: Location, alignment: ShardAlignment) -> Location:
    """Returns a parameter's location if it is aligned, or else an unsharded one if it is small enough."""
    over, dim = location
    shape, ranks = to_local(slot.param).shape, over.ranks.shard
    if ranks is None or not shape.numel():
        return location
    grain, part = alignment.grain(shape), chunk_numel(shape, dim, ranks.size)
    if dim == 0 and (part % grain == 0 or part >= shape.numel()):
        return location
    small = len(shape) == 1 or shape.numel() < grain * ranks.size
    if dim == 0 and small and over.dims is None and not is_extension(slot.param):
        return Location(over.copied_everywhere(), 0)
    lie, choose = f"are of {part} elements", f"Choose a divisor of {part}"
    if dim:
        lie, choose = f"are cut along dimension {dim}", "Place it by Shard(0)"
    raise UnevenCutError(
        f"shard_alignment={alignment.argument!r} cannot hold for parameter '{slot.fqn}' of shape "
        f"{tuple(shape)}: its parts on {ranks.size} ranks {lie}, which a DTensor settles. {choose}, shard "
        "its module by a call of its own without shard_alignment, or use FullyShardedDataParallel, which "
        "moves parameters apart"
    )


def _mesh_of(slot: ParamSlot, info: Any, data: DataMesh) -> DataMesh:
    try:
        return DataMesh.of(info, data.mesh.device_type)
    except (TypeError, ValueError) as error:
        error.args = (f"the mesh of parameter '{slot.fqn}' does not fit: {error}",)
        raise


def _dim_of(fqn: str, placement: Shard, shape: torch.Size, over: DataMesh) -> int:
    dim = placement.dim + len(shape) if placement.dim < 0 else placement.dim
    if not 0 <= dim < len(shape):
        raise NoDimensionError(
            f"parameter '{fqn}' of shape {tuple(shape)} has no dimension {placement.dim}: let "
            f"shard_placement_fn choose one from {-len(shape)} to {len(shape) - 1}"
        )
    ranks = 1 if over.ranks.shard is None else over.ranks.shard.size
    if dim and shape[dim] % ranks:
        raise UnevenCutError(
            f"parameter '{fqn}' of shape {tuple(shape)} cannot be cut along dimension {dim}: its size "
            f"must be a multiple of the {ranks} ranks (only dimension 0 can be cut unevenly)"
        )
    return dim


def _resolved(reshard_after_forward: Any) -> bool | int | None:
    """Checks the argument; returns a number only for part of the ranks."""
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return reshard_after_forward
    if not isinstance(reshard_after_forward, int):
        raise WrongKindError(
            f"reshard_after_forward is a bool, an int or None, not {reshard_after_forward!r}"
        )
    if reshard_after_forward == 1:
        warn_caller(
            "reshard_after_forward=1 lets each rank keep all of the unit's parameters, as False does; pass "
            "True if they are to be freed"
        )
        return False
    return reshard_after_forward


def _kept_within(
    reshard_after_forward: int, over: DataMesh, *, data: DataMesh, shared_memory: bool
) -> Communicator | None:
    """Returns the communicator of so many ranks that keep full parameters between them, or None."""
    shard = over.ranks.shard
    if over != data and (shard is None or shard.size == 1):  # unsharded there: no gather
        return None
    if shard is None:
        raise ValueError(
            f"reshard_after_forward={reshard_after_forward} shards over that many ranks, and dp_mesh_dims "
            "names no dimension to shard over: pass True or False"
        )
    if shard.size == reshard_after_forward:
        return None
    return make_communicator(neighbours(shard, reshard_after_forward), device_of(data.mesh), shared_memory)
