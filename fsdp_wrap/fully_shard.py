"""`fully_shard`, the composable front-end: parameters are `DTensor`s, and modules change class in place."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fsdp_wrap._comm import (
    Communicator,
    default_mesh,
    device_of,
    make_communicator,
    neighbours,
    ranks_of,
)
from fsdp_wrap._core import (
    UNIT_ATTR,
    AlreadyShardedError,
    Contents,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    Ignored,
    InputCasts,
    MixedPrecisionPolicy,
    NoDimensionError,
    OffloadPolicy,
    ParamSlot,
    SegmentPolicy,
    ShardPlacementResult,
    UnevenCutError,
    WrongKindError,
    check_flag,
    check_kind,
    check_nbytes,
    find_replicated,
)
from fsdp_wrap._fsdp_module import (
    FSDPModule,
    GradientReductionHandle,
    UnshardHandle,
    run_as_unit,
    share_comm_ctx,
)
from fsdp_wrap._params import (
    DataMesh,
    DTensorLayout,
    ExtensionLayout,
    Layout,
    held_by_this_rank,
    is_extension,
)
from fsdp_wrap._runtime import (
    REGISTRY,
    UnitOptions,
    UnitSpec,
    assemble_unit,
    check_tensors,
    is_container,
    move,
)
from fsdp_wrap._state import offload_optimizer_state

__all__ = ["FSDPModule", "GradientReductionHandle", "UnshardHandle", "fully_shard", "share_comm_ctx"]

_Placements = Callable[[nn.Parameter], Shard | ShardPlacementResult | None]

_OWN_DTYPES = MixedPrecisionPolicy()
_APPLIED_LATER = "apply it to model.parameters() after fully_shard"
_ON_DEVICE = OffloadPolicy()


def fully_shard(
    module: Any,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: _Placements | None = None,
    mp_policy: MixedPrecisionPolicy = _OWN_DTYPES,
    offload_policy: OffloadPolicy = _ON_DEVICE,
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    shared_memory: bool = True,
    travel_together_bytes: int | None = None,
    keep_unsharded_bytes: int = 0,
) -> Any:
    """Makes a unit of a module in place: its parameters become `DTensor`s that are sharded over the ranks.

    The unit owns what no unit below it owns, so call this on the inner modules first. Each parameter is cut
    as by `torch.chunk`. The module gets the methods of `FSDPModule`. Build the optimizer afterwards. What is
    on the meta device stays there: call `to_empty(device=...)`, then initialise or load it.

    Args:
        module: The module, or a list of modules which make one unit: unsharded before the first of them runs,
            resharded after the last.
        mesh: Of one dimension, or of two (replicate, shard); by default all ranks. Parameters that tensor
            parallelism has distributed must be `DTensor`s on another part of the same mesh, and be so before:
            `parallelize_module` cannot distribute what is sharded.
        reshard_after_forward: Whether the full parameters are freed between forward and backward; by default
            those of all but the root. A number lets so many neighbouring ranks keep them between them; that
            of all ranks is True, and 1 is False, with a warning, since it is easily taken for True.
        shard_placement_fn: Chooses for a parameter the `Shard(dim)` to cut it along; None is `Shard(0)`. The
            size of another dimension than the first must be a multiple of the ranks. A `ShardPlacementResult`
            chooses a mesh of its own as well: the parameter is gathered and reduced there, and its gradient
            divided by the number of the ranks there. Where experts see the tokens of more ranks than those,
            `set_gradient_divide_factor` says of how many.
        mp_policy: Dtypes of computation and communication.
        offload_policy: Whether shards, or optimizer state, live in host memory.
        ignored_params: Parameters to leave alone.
        dp_mesh_dims: Which dimensions of `mesh` to shard and replicate over, where all parameters are
            `DTensor`s on that mesh. Gradients are averaged over these.
        shared_memory: Let ranks that share a host communicate through its memory, where they compute on the
            CPU in a gloo group; not one of torch's arguments.
        travel_together_bytes: How much memory small units may take to be gathered and reduced together, in
            one collective for several, from the second iteration on; 0 for never, None for the default of the
            device. The root's counts, and `set_travel_together_bytes` changes it; not one of torch's
            arguments.
        keep_unsharded_bytes: So many bytes of full parameters may stay in memory on each rank, in all units
            of the tree together, once this unit's do; see `FSDPModule.set_keep_unsharded_bytes`, which sets
            it for all units. Not one of torch's arguments.

    Returns:
        `module` itself.

    Raises:
        TypeError: If an argument is of the wrong type, a parameter is of a class that sharding would lose, or
            a module was made by TorchScript.
        ValueError: If there is no process group, this rank is not in the mesh, a module is in a unit already
            or has no forward, a parameter cannot be cut, or an override of its dtype is none that is allowed.

    The API is that of `torch.distributed.fsdp.fully_shard`.
    """
    parts = _outermost(module)
    offload = _checked(mp_policy, offload_policy)
    _check_own(shared_memory, travel_together_bytes, keep_unsharded_bytes)
    data = _data_mesh(default_mesh() if mesh is None else mesh, dp_mesh_dims)
    device = device_of(data.mesh)
    reshard_after_forward = _resolved(reshard_after_forward)
    owner = module if isinstance(module, nn.Module) else nn.ModuleList(parts)
    contents = Contents.of(owner, _ignored(parts, ignored_params))
    slots = contents.slots
    check_tensors(contents, _APPLIED_LATER, distributed=True, extended=True)
    places = {slot.param: _place_of(slot, shard_placement_fn, data) for slot in slots}
    meshes = _meshes(places, data)
    policies = {slot.param: SegmentPolicy.of_param(slot.param, slot.fqn, mp_policy) for slot in slots}
    options = UnitOptions(
        reshard_after_forward=reshard_after_forward is not False,
        keeps_as_root=not reshard_after_forward,
        casts=_casts(mp_policy),
        travel_together_bytes=travel_together_bytes,
        stay_bytes=keep_unsharded_bytes or 0,
    )

    def spec_over(over: DataMesh, number: int) -> UnitSpec:
        within = _kept_within(reshard_after_forward, over, data, device, shared_memory is not False)
        return UnitSpec(
            mesh=over.ranks,
            device=device,
            make_layout=_makes_layouts(over, places, mp_policy, offload),
            policy_of=policies.__getitem__,
            options=replace(options, reshards_within=within, most_reducing=len(meshes)),
            parts=() if owner is module else tuple(parts),
            shared_memory=shared_memory is not False,
            only=frozenset(param for param, place in places.items() if place.over == over),
            over=f"(mesh {number}: {over.label})" if number > 1 else "",
        )

    first, *others = [spec_over(over, number) for number, over in enumerate(meshes, 1)]
    move([named for named in contents.tensors() if not named[1].is_meta], device)
    _offload_state(slots, offload)
    unit = assemble_unit(owner, contents, first, others)
    for part in parts:
        run_as_unit(part, unit)
    return module


def _makes_layouts(
    over: DataMesh,
    places: Mapping[nn.Parameter, _Place],
    mp_policy: MixedPrecisionPolicy,
    offload: CPUOffloadPolicy | None,
) -> Callable[[list[ParamSlot], Communicator, str], Layout]:
    """Returns what makes a layout of some parameters that lie on one mesh, and travel together."""
    on_host = _on_host(offload)

    def make_layout(segment: list[ParamSlot], allocator: Communicator, name: str) -> Layout:
        if is_extension(segment[0].param):
            return ExtensionLayout(segment, allocator, mesh=over, name=name, mp_policy=mp_policy, **on_host)
        dims = [places[slot.param].dim for slot in segment]
        return DTensorLayout(segment, allocator, mesh=over, dims=dims, name=name, **on_host)

    return make_layout


def _on_host(offload: CPUOffloadPolicy | None) -> dict[str, bool]:
    """What of a unit's shards lies in host memory, as a layout takes it."""
    return {
        "offload": offload is not None and offload.offload_params,
        "pin": offload is not None and offload.pin_memory,
    }


def _check_own(shared_memory: object, travel_together_bytes: object, keep_unsharded_bytes: object) -> None:
    """Checks the arguments that torch does not have."""
    check_flag("shared_memory", shared_memory)
    check_nbytes("travel_together_bytes", travel_together_bytes)
    check_nbytes("keep_unsharded_bytes", keep_unsharded_bytes)


def _ignored(modules: Iterable[nn.Module], params: Iterable[nn.Parameter] | None) -> Ignored:
    """What users and torch's `replicate()` keep for themselves."""
    replicated = find_replicated(modules)
    theirs = (param for module in replicated for param in module.parameters(recurse=False))
    return Ignored(modules=replicated, params=frozenset((*(params or ()), *theirs)))


def _outermost(modules: Any) -> list[nn.Module]:
    """Checks the argument; returns the modules that no other one encloses."""
    modules = list(modules) if isinstance(modules, (list, tuple)) else [modules]
    if not modules or not all(isinstance(module, nn.Module) for module in modules):
        found = ", ".join(type(module).__name__ for module in modules) or "an empty list"
        raise TypeError(f"fully_shard takes a torch.nn.Module or a list of them, not {found}")
    for module in modules:
        REGISTRY.refuse_taken(module)
        if UNIT_ATTR in module.__dict__:
            raise AlreadyShardedError(f"fully_shard was applied to this {type(module).__name__} before")
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"fully_shard changes a module's class, and that of a {type(module).__name__} "
                "(torch.jit.script, trace or load) must stay; shard the plain module (torch.compile works on "
                "it), or the module around this one with its parameters, if any, in ignored_params"
            )
        if is_container(module):
            raise ValueError(
                f"fully_shard unshards a module for its forward, and {type(module).__name__} has none; shard "
                "the modules in it, or pass them as a list"
            )
    inner = {id(child) for module in modules for child in module.modules() if child is not module}
    return [module for module in dict.fromkeys(modules) if id(module) not in inner]


def _checked(mp_policy: Any, offload_policy: Any) -> CPUOffloadPolicy | None:
    """Checks arguments by themselves; returns what is offloaded, if anything is."""
    check_kind("mp_policy", mp_policy, MixedPrecisionPolicy, optional=False)
    offloads = type(offload_policy).__name__ == CPUOffloadPolicy.__name__  # ours or another package's
    kind = CPUOffloadPolicy if offloads else OffloadPolicy
    check_kind("offload_policy", offload_policy, kind, optional=False)
    return offload_policy if isinstance(offload_policy, CPUOffloadPolicy) else None


def _casts(policy: MixedPrecisionPolicy) -> InputCasts:
    inputs = policy.param_dtype if policy.cast_forward_inputs else None
    return InputCasts(inputs, inputs, outputs=policy.output_dtype)


def _offload_state(slots: Iterable[ParamSlot], offload: CPUOffloadPolicy | None) -> None:
    """Marks parameters whose optimizer state alone is offloaded; what will stand for them is marked alike."""
    if offload is not None and offload.only_state:
        offload_optimizer_state((slot.param for slot in slots), offload.pin_memory)


def _data_mesh(mesh: DeviceMesh, dims: DataParallelMeshDims | None) -> DataMesh:
    check_kind("dp_mesh_dims", dims, DataParallelMeshDims)
    if not isinstance(mesh, DeviceMesh):
        ranks_of(mesh)  # which refuses it
    return DataMesh(mesh) if dims is None else DataMesh.within(mesh, dims)


class _Place(NamedTuple):
    """Where a parameter lies: the mesh, and the dimension along which it is cut there."""

    over: DataMesh
    dim: int


def _place_of(slot: ParamSlot, placement_of: _Placements | None, data: DataMesh) -> _Place:
    """Checks one parameter; returns where it is to lie, by default on a mesh that is given."""
    shape = held_by_this_rank(slot.param).shape
    if not shape:
        raise ValueError(
            f"parameter '{slot.fqn}' has no dimension that could be cut; give it the shape (1,), or pass it "
            "in ignored_params"
        )
    placement = placement_of(slot.param) if placement_of is not None else None
    over = data
    if type(placement).__name__ == ShardPlacementResult.__name__:  # ours, or torch's
        told = cast(ShardPlacementResult, placement)
        over, placement = _mesh_told(slot, told.mesh_info, data), told.placement
    over.check(slot.fqn, slot.param)
    if placement is None:
        return _Place(over, 0)
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
    return _Place(over, _dim_of(slot.fqn, placement, shape, over))


def _mesh_told(slot: ParamSlot, info: Any, data: DataMesh) -> DataMesh:
    try:
        return DataMesh.of(info, data.mesh.device_type)
    except (TypeError, ValueError) as error:
        error.args = (f"the mesh of parameter '{slot.fqn}' does not fit: {error}",)
        raise


def _dim_of(fqn: str, placement: Shard, shape: torch.Size, over: DataMesh) -> int:
    dim = placement.dim + len(shape) if placement.dim < 0 else placement.dim
    if not 0 <= dim < len(shape):
        raise NoDimensionError(f"parameter '{fqn}' of shape {tuple(shape)} has no dimension {placement.dim}")
    shard = over.ranks.shard
    ranks = 1 if shard is None else shard.size
    if dim and shape[dim] % ranks:
        raise UnevenCutError(
            f"parameter '{fqn}' of shape {tuple(shape)} cannot be cut along dimension {dim}: its size "
            f"must be a multiple of the {ranks} ranks (only dimension 0 can be cut unevenly)"
        )
    return dim


def _meshes(places: Mapping[nn.Parameter, _Place], data: DataMesh) -> list[DataMesh]:
    """Returns the meshes on which parameters lie, first that on which they lie by default."""
    found: list[DataMesh] = []
    for over, _ in places.values():
        if over not in found:
            found.append(over)
    return sorted(found, key=lambda over: over != data) or [data]


def _resolved(reshard_after_forward: Any) -> bool | int | None:
    """Checks the argument; returns a number only where some of the ranks may keep the full parameters."""
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return reshard_after_forward
    if not isinstance(reshard_after_forward, int):
        raise WrongKindError(
            f"reshard_after_forward is a bool, an int or None, not {reshard_after_forward!r}"
        )
    if reshard_after_forward == 1:
        warnings.warn(
            "reshard_after_forward=1 lets each rank keep all of the unit's parameters, as False does; pass "
            "True if they are to be freed",
            stacklevel=3,
        )
        return False
    return reshard_after_forward


def _kept_within(
    reshard_after_forward: bool | int | None,
    over: DataMesh,
    data: DataMesh,
    device: torch.device,
    shared_memory: bool,
) -> Communicator | None:
    """Returns the ranks that keep full parameters between them; of meshes beside `data` not all may."""
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return None
    shard = over.ranks.shard
    if over != data and (shard is None or shard.size == 1):  # where there is nothing to gather
        return None
    if shard is None:
        raise ValueError(
            f"reshard_after_forward={reshard_after_forward} needs ranks over which is sharded, and "
            "dp_mesh_dims names none: pass True or False"
        )
    if shard.size == reshard_after_forward:
        return None
    return make_communicator(neighbours(shard, reshard_after_forward), device, shared_memory)
