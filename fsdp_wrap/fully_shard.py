"""`fully_shard`, the composable front-end: parameters are `DTensor`s, and modules change class in place."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fsdp_wrap._comm import (
    Communicator,
    Ranks,
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
    Ignored,
    InputCasts,
    MixedPrecisionPolicy,
    NoDimensionError,
    OffloadPolicy,
    ParamSlot,
    SegmentPolicy,
    UnevenCutError,
    WrongKindError,
    check_flag,
    check_kind,
    find_replicated,
)
from fsdp_wrap._fsdp_module import (
    FSDPModule,
    GradientReductionHandle,
    UnshardHandle,
    run_as_unit,
    share_comm_ctx,
)
from fsdp_wrap._params import DTensorLayout, Layout
from fsdp_wrap._runtime import (
    REGISTRY,
    UnitOptions,
    UnitSpec,
    assemble_unit,
    check_tensors,
    is_container,
    move,
)

__all__ = ["FSDPModule", "GradientReductionHandle", "UnshardHandle", "fully_shard", "share_comm_ctx"]

_Placements = Callable[[nn.Parameter], Shard | None]

_OWN_DTYPES = MixedPrecisionPolicy()
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
    shared_memory: bool = True,
) -> Any:
    """Makes a unit of a module in place: its parameters become `DTensor`s that are sharded over the ranks.

    The unit owns what no unit below it owns, so call this on the inner modules first. Each parameter is cut
    as by `torch.chunk`. The module gets the methods of `FSDPModule`. Build the optimizer afterwards. What is
    on the meta device stays there: call `to_empty(device=...)`, then initialise or load it.

    Args:
        module: The module, or a list of modules which make one unit: unsharded before the first of them runs,
            resharded after the last.
        mesh: Of one dimension, or of two (replicate, shard); by default all ranks.
        reshard_after_forward: Whether the full parameters are freed between forward and backward; by default
            those of all but the root. A number lets so many neighbouring ranks keep them between them; that
            of all ranks is True, and 1 is False, with a warning, since it is easily taken for True.
        shard_placement_fn: Chooses for a parameter the `Shard(dim)` to cut it along; None is `Shard(0)`. The
            size of another dimension than the first must be a multiple of the ranks.
        mp_policy: Dtypes of computation and communication.
        offload_policy: Whether shards live in host memory.
        ignored_params: Parameters to leave alone.
        shared_memory: Let ranks that share a host communicate through its memory, where they compute on the
            CPU in a gloo group; not one of torch's arguments.

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
    _check_policies(mp_policy, offload_policy)
    check_flag("shared_memory", shared_memory)
    mesh = default_mesh() if mesh is None else mesh
    ranks, device = ranks_of(mesh), device_of(mesh)
    assert ranks.shard is not None
    reshard_after_forward = _resolved(reshard_after_forward, ranks.shard.size)
    alone = isinstance(module, nn.Module)
    owner = module if alone else nn.ModuleList(parts)
    contents = Contents.of(owner, _ignored(parts, ignored_params))
    slots = contents.slots
    check_tensors(contents, "apply it to model.parameters() after fully_shard")
    dims = {slot.param: _dim_of(slot, shard_placement_fn, ranks.shard.size) for slot in slots}
    policies = {slot.param: SegmentPolicy.of_param(slot.param, slot.fqn, mp_policy) for slot in slots}
    inputs = mp_policy.param_dtype if mp_policy.cast_forward_inputs else None
    options = UnitOptions(
        reshard_after_forward=reshard_after_forward is not False,
        keeps_as_root=not reshard_after_forward,
        casts=InputCasts(inputs, inputs, outputs=mp_policy.output_dtype),
        reshards_within=_kept_within(reshard_after_forward, ranks.shard, device, shared_memory is not False),
    )
    move([named for named in contents.tensors() if not named[1].is_meta], device)

    def make_layout(segment: list[ParamSlot], allocator: Communicator, name: str) -> Layout:
        return DTensorLayout(
            segment,
            allocator,
            mesh=mesh,
            dims=[dims[slot.param] for slot in segment],
            name=name,
            offload=isinstance(offload_policy, CPUOffloadPolicy),
            pin=isinstance(offload_policy, CPUOffloadPolicy) and offload_policy.pin_memory,
        )

    spec = UnitSpec(
        mesh=ranks,
        device=device,
        make_layout=make_layout,
        policy_of=policies.__getitem__,
        options=options,
        parts=() if alone else tuple(parts),
        shared_memory=shared_memory is not False,
    )
    unit = assemble_unit(owner, contents, spec)
    for part in parts:
        run_as_unit(part, unit)
    return module


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


def _check_policies(mp_policy: Any, offload_policy: Any) -> None:
    check_kind("mp_policy", mp_policy, MixedPrecisionPolicy, optional=False)
    offloads = type(offload_policy).__name__ == CPUOffloadPolicy.__name__  # ours or another package's
    kind = CPUOffloadPolicy if offloads else OffloadPolicy
    check_kind("offload_policy", offload_policy, kind, optional=False)


def _dim_of(slot: ParamSlot, placement_of: _Placements | None, ranks: int) -> int:
    """Checks one parameter; returns the dimension along which it is cut."""
    shape = slot.param.shape
    if not shape:
        raise ValueError(
            f"parameter '{slot.fqn}' has no dimension that could be cut; give it the shape (1,), or pass it "
            "in ignored_params"
        )
    placement = placement_of(slot.param) if placement_of is not None else None
    if placement is None:
        return 0
    if not isinstance(placement, Shard):
        raise WrongKindError(
            f"shard_placement_fn must return a Shard or None, not {placement!r} (for parameter '{slot.fqn}')"
        )
    dim = placement.dim + len(shape) if placement.dim < 0 else placement.dim
    if not 0 <= dim < len(shape):
        raise NoDimensionError(
            f"parameter '{slot.fqn}' of shape {tuple(shape)} has no dimension {placement.dim}"
        )
    if dim and shape[dim] % ranks:
        raise UnevenCutError(
            f"parameter '{slot.fqn}' of shape {tuple(shape)} cannot be cut along dimension {dim}: its size "
            f"must be a multiple of the {ranks} ranks (only dimension 0 can be cut unevenly)"
        )
    return dim


def _resolved(reshard_after_forward: Any, ranks: int) -> bool | int | None:
    """Checks the argument; returns a number only where some of the ranks keep the full parameters."""
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
    return True if reshard_after_forward == ranks else reshard_after_forward


def _kept_within(
    reshard_after_forward: bool | int | None, shard: Ranks, device: torch.device, shared_memory: bool
) -> Communicator | None:
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return None
    return make_communicator(neighbours(shard, reshard_after_forward), device, shared_memory)
