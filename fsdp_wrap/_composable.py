"""The common part of `fully_shard` and `replicate`: makes units of modules in place, with `DTensor`s."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import DeviceMesh

from fsdp_wrap._building import (
    NO_PARTS,
    REGISTRY,
    UnitSpec,
    assemble_unit,
    check_tensors,
    drop_gradients,
    is_container,
    move,
)
from fsdp_wrap._comm import Communicator, device_of, ranks_of
from fsdp_wrap._core import (
    NO_CASTS,
    UNIT_ATTR,
    AlreadyShardedError,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    Ignored,
    InputCasts,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ParamSlot,
    SegmentPolicy,
    ShardAlignment,
    UnitContents,
    check_kind,
    find_replicated,
    watch_distributed_steps,
    with_our_fields,
)
from fsdp_wrap._fsdp_module import FSDPModule, run_as_unit
from fsdp_wrap._params import DataMesh, DTensorParams, ExtensionParams, ShardedParams, is_extension
from fsdp_wrap._runtime import UnitOptions
from fsdp_wrap._state import offload_optimizer_state

OWN_DTYPES = MixedPrecisionPolicy()
ON_DEVICE = OffloadPolicy()
"""Default policies of both functions."""


class Location(NamedTuple):
    """The location of a parameter: its mesh, and the dimension to shard it along."""

    over: DataMesh
    dim: int


@dataclass(frozen=True, kw_only=True)
class Composition:
    """The checked arguments of one call of `fully_shard` or `replicate`."""

    by: str  # name of the called function, for messages
    kind: type[FSDPModule]
    data: DataMesh  # the default mesh of parameters
    location_of: Callable[[ParamSlot], Location]  # also checks the parameter and aligns its shards
    mp_policy: MixedPrecisionPolicy
    offload: CPUOffloadPolicy | None
    ignored_params: Iterable[nn.Parameter] | None
    options: UnitOptions
    kept_within: Callable[[DataMesh], Communicator | None] | None = None  # ranks that keep parameters whole
    shared_memory: bool = True
    alignment: ShardAlignment | None = None


def compose(module: Any, parts: list[nn.Module], wanted: Composition) -> None:
    """Makes a unit of the user's module or list in place; `parts` are the modules with a forward."""
    # Late, since it imports torch.distributed.checkpoint, which takes as long as this package.
    from fsdp_wrap._torch_helpers import adapt_torch_helpers

    adapt_torch_helpers()
    watch_distributed_steps()
    owner = module if isinstance(module, nn.Module) else nn.ModuleList(parts)
    replicated = find_replicated(parts)  # by torch's `replicate()`
    theirs = (param for replica in replicated for param in replica.parameters(recurse=False))
    ignored = frozenset((*(wanted.ignored_params or ()), *theirs))
    contents = UnitContents.of(owner, Ignored(modules=replicated, params=ignored))
    slots, device = contents.slots, device_of(wanted.data.mesh)
    later = f"apply it to model.parameters() after {wanted.by}"
    check_tensors(contents, later, extended=True)
    locations = {slot.param: wanted.location_of(slot) for slot in slots}
    meshes = _meshes(locations, wanted.data)
    policy, offload = wanted.mp_policy, wanted.offload
    policies = {slot.param: SegmentPolicy.of_param(slot.param, slot.fqn, policy) for slot in slots}
    inputs = policy.param_dtype if policy.cast_forward_inputs else None
    casts = InputCasts(inputs, inputs, outputs=policy.output_dtype)
    casts = NO_CASTS if casts == NO_CASTS else casts

    def spec_over(over: DataMesh, number: int) -> UnitSpec:
        return UnitSpec(
            mesh=over.ranks,
            device=device,
            make_params=_params_maker(over, locations, wanted),
            policy_of=policies.__getitem__,
            options=replace(
                wanted.options,
                casts=casts,
                most_reducing=len(meshes),
                reshards_within=wanted.kept_within and wanted.kept_within(over),
            ),
            parts=NO_PARTS if owner is module else tuple(parts),
            shared_memory=wanted.shared_memory,
            only=frozenset(param for param, location in locations.items() if location.over == over),
            mesh_label=f"(mesh {number}: {over.label})" if number > 1 else "",
        )

    first, *others = [spec_over(over, number) for number, over in enumerate(meshes, 1)]
    drop_gradients(contents)
    move([named for named in contents.tensors() if not named[1].is_meta], device)
    if offload is not None and offload.only_state:  # marks parameters, and shards inherit the marks
        offload_optimizer_state((slot.param for slot in slots), offload.pin_memory)
    unit = assemble_unit(owner, contents, first, others)
    for part in parts:
        run_as_unit(part, unit, wanted.kind)


# checks of arguments


def outermost(modules: Any, by: str) -> list[nn.Module]:
    """Checks the user's modules for the function named `by`; returns the outermost ones."""
    modules = list(modules) if isinstance(modules, (list, tuple)) else [modules]
    if not modules or not all(isinstance(module, nn.Module) for module in modules):
        given = ", ".join(type(module).__name__ for module in modules) or "an empty list"
        raise TypeError(f"{by} takes a torch.nn.Module or a list of them, not {given}")
    for module in modules:
        REGISTRY.refuse_taken(module)
        if UNIT_ATTR in module.__dict__:
            raise AlreadyShardedError(
                f"fully_shard or replicate was applied to this {type(module).__name__} before: a module is "
                "sharded once, after the modules in it"
            )
        if isinstance(module, torch.jit.ScriptModule):
            raise TypeError(
                f"{by} changes a module's class, and that of a {type(module).__name__} "
                f"(torch.jit.script, trace or load) must stay; {by} the plain module (torch.compile works on "
                "it), or the module around this one with its parameters, if any, in ignored_params"
            )
        if is_container(module):
            raise ValueError(
                f"{by} shows the parameters of a module to its forward, and {type(module).__name__} has "
                f"none; {by} the modules in it, or pass them as a list"
            )
    if len(modules) == 1:
        return [*modules]
    inner = {id(child) for module in modules for child in module.modules() if child is not module}
    return [module for module in dict.fromkeys(modules) if id(module) not in inner]


def checked_policies(
    mp_policy: Any, offload_policy: Any
) -> tuple[MixedPrecisionPolicy, CPUOffloadPolicy | None]:
    """Returns both policies as ours, torch's too; None for one that offloads nothing."""
    check_kind("mp_policy", mp_policy, torch_fsdp.MixedPrecisionPolicy, optional=False)
    check_kind("offload_policy", offload_policy, OffloadPolicy)
    precision = with_our_fields(mp_policy, MixedPrecisionPolicy)
    if not isinstance(offload_policy, torch_fsdp.CPUOffloadPolicy):
        return precision, None
    return precision, with_our_fields(offload_policy, CPUOffloadPolicy)


def check_mesh(mesh: Any, dims: Any) -> None:
    """Checks the types of both arguments, and that this rank is in the mesh."""
    check_kind("dp_mesh_dims", dims, DataParallelMeshDims)
    if not isinstance(mesh, DeviceMesh):
        ranks_of(mesh)  # raises the error


# the parts of a unit


def _params_maker(
    over: DataMesh, locations: Mapping[nn.Parameter, Location], wanted: Composition
) -> Callable[[list[ParamSlot], Communicator, str], ShardedParams]:
    """Returns a function that makes the sharded parameters of a segment on one mesh."""
    offload = wanted.offload
    options: dict[str, Any] = {"mesh": over, "alignment": wanted.alignment}
    options["offload"] = offload is not None and offload.offload_params
    options["pin"] = offload is not None and offload.pin_memory

    def make_params(segment: list[ParamSlot], allocator: Communicator, name: str) -> ShardedParams:
        if is_extension(segment[0].param):
            return ExtensionParams(segment, allocator, name=name, mp_policy=wanted.mp_policy, **options)
        dims = [locations[slot.param].dim for slot in segment]
        return DTensorParams(segment, allocator, dims=dims, name=name, **options)

    return make_params


def _meshes(locations: Mapping[nn.Parameter, Location], data: DataMesh) -> list[DataMesh]:
    """Returns the meshes of all parameters, the default one first."""
    meshes: list[DataMesh] = []
    for over, _ in locations.values():
        if over not in meshes:
            meshes.append(over)
    return sorted(meshes, key=data.__ne__) or [data]


def without_dimensions(slot: ParamSlot) -> ValueError:
    """Returns the error about a 0-d parameter."""
    return ValueError(
        f"parameter '{slot.fqn}' has no dimension: give it the shape (1,), or pass it in ignored_params"
    )
