"""Builds units: checks a module, moves its tensors to the device, and makes layouts, handle and unit."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from fsdp_wrap._comm import Communicator, ShardMesh, make_communicator
from fsdp_wrap._core import (
    BufferCasts,
    Ignored,
    ParamSlot,
    Seam,
    SegmentPolicy,
    UnitContents,
    announce_sharded,
    is_owned,
    mark_managed,
    watch_steps,
)
from fsdp_wrap._core.torch_private import trace_rules
from fsdp_wrap._params import HeldBy, Layout, ParamHandle, check_beside, is_extension
from fsdp_wrap._runtime.materialize import (
    Values,
    broadcast,
    check_materializable,
    materialize,
    refuse_together,
)
from fsdp_wrap._runtime.refusals import (
    check_tensors,
    drop_gradients,
    refuse_earlier_optimizers,
    refuse_pieces,
)
from fsdp_wrap._runtime.registry import REGISTRY
from fsdp_wrap._runtime.same_model import InitialValues, sample
from fsdp_wrap._runtime.schedule import guard_parametrizations
from fsdp_wrap._runtime.unit import Unit, UnitOptions, units_in

FLAT_PARAM = "_flat_param"
"""Attribute of a module that holds its `FlatParameter` (torch's name)."""

over_replicas: Seam[Any] = Seam("state over replicas", "fsdp_wrap._state_over_replicas")

LayoutMaker = Callable[..., Layout]
"""Makes the layout of a segment from its parameters, the communicator and `name=`."""


@dataclass(frozen=True, kw_only=True)
class UnitSpec:
    """The specification of a unit."""

    mesh: ShardMesh
    device: torch.device
    make_layout: LayoutMaker
    policy_of: Callable[[nn.Parameter], SegmentPolicy]
    options: UnitOptions
    parts: tuple[nn.Module, ...] = ()  # the modules with a forward, if the unit's module only groups them
    shared_memory: bool = True
    buffer_dtype: torch.dtype | None = None  # of module buffers, from the first forward on; None keeps theirs
    only: frozenset[nn.Parameter] | None = None  # the parameters to take; None for all of the module
    mesh_label: str = ""  # empty for the first mesh of the module

    def communicators(self, mesh: ShardMesh) -> tuple[Communicator, Communicator]:
        """Returns the communicator of a mesh's sharding ranks and the communicator of its replicas."""
        options = self.device, self.shared_memory
        return make_communicator(mesh.shard, *options), make_communicator(mesh.replicate, *options)


def check_module(
    module: nn.Module, ignored: Ignored, values: Values, mesh: ShardMesh, instead: str | None
) -> list[tuple[str, torch.Tensor]]:
    """Checks all tensors of a module before anything changes; returns them by name, parameters first.

    Collective with `values.synchronised`: then a module that one rank refuses is refused on all ranks.
    """
    contents = UnitContents.of(module, ignored)
    error: Exception | None = None
    try:
        check_tensors(contents, instead)
        for slot in contents.slots:
            check_beside(slot.fqn, slot.param, mesh)
        check_materializable(contents, values)
    except (TypeError, ValueError) as found:
        error = found
    if values.synchronised:  # the modules of the ranks may differ, and so may their errors
        refuse_together(error, mesh.groups)
    if error is not None:
        raise error
    drop_gradients(contents)
    return contents.tensors()


def build_unit(module: nn.Module, ignored: Ignored, spec: UnitSpec, values: Values) -> Unit:
    """Makes a unit of a checked module, with the parameters that no unit below it owns."""
    left = (param for unit in units_in(module).values() for param in unit.left)
    contents = UnitContents.of(module, ignored, {param for param in left if not is_owned(param)})
    if any(tensor.is_meta for _, tensor in contents.tensors()):
        materialize(contents, values, spec.device, _stand_ins(contents))
    tensors = contents.tensors()
    move(tensors, spec.device)
    if values.synchronised:
        broadcast(tensors, spec.communicators(spec.mesh)[::-1], spec.mesh.groups)
    return assemble_unit(module, contents, spec)


def move(named: Iterable[tuple[str, torch.Tensor]], device: torch.device) -> None:
    """Moves tensors to a device; they stay the same Python objects."""
    for _, tensor in named:
        if tensor.device != device:
            tensor.data = tensor.data.to(device)


def assemble_unit(
    module: nn.Module, contents: UnitContents, spec: UnitSpec, beside: Sequence[UnitSpec] = ()
) -> Unit:
    """Makes a unit of a module whose tensors are on their device.

    The specs in `beside` are for parameters on other meshes. Each becomes a unit of its own that runs
    whenever this one does.
    """
    lenders = REGISTRY.borrow(contents)
    for lender in lenders:
        lender.lend()
    modules = [each for _, each in contents.modules]
    kinds = [_by_kind(contents, each) for each in (spec, *beside)]
    others = tuple(Unit(module, **_storage(*pair)) for pair in zip(beside, kinds[1:]))
    unit = Unit(
        module,
        **_storage(spec, kinds[0]),
        left=contents.ignored.left,
        lenders=(*lenders, *others),
        buffers=BufferCasts(modules, spec.buffer_dtype),
    )
    for fqn, below in units_in(module).items():
        below.nest(fqn)
    _skip_runtime_frames()
    if unit.handle is not None or any(each._buffers for each in modules):  # else it may be wrapped again
        REGISTRY.take(modules)
    for each in modules:
        mark_managed(each)
    for each in spec.parts or (module,):
        announce_sharded(each)
    for made, by_kind in zip(unit.over_all_meshes, kinds):
        guard_parametrizations(made, modules)
        REGISTRY.note(made, [[slot.param for slot in segment] for segment in by_kind.values()])
        refuse_earlier_optimizers(made, [*by_kind.values()])
        refuse_pieces(made)
    watch_steps()
    return unit


def _storage(spec: UnitSpec, by_kind: dict[_Kind, list[ParamSlot]]) -> dict[str, Any]:
    """Shards the parameters of a unit; returns the arguments of `Unit` for them."""
    segments = [*by_kind.values()]
    communicator, replicas = spec.communicators(spec.mesh)
    samples = [torch.stack([sample(slot.param) for slot in segment]) for segment in segments]
    layouts = [
        spec.make_layout(segment, communicator, name=f"{FLAT_PARAM}_{number}" if number else FLAT_PARAM)
        for number, segment in enumerate(segments)
    ]
    policies, held_by = [kind[-1] for kind in by_kind], HeldBy.of(spec.mesh, spec.device)
    handle = ParamHandle(layouts, communicator, replicas, policies, held_by) if layouts else None
    if handle is not None and spec.mesh.copies is not None:
        staged = over_replicas.needed("state_over_replicas=True").transport
        handle.set_transport(staged(*spec.communicators(spec.mesh.copies)))
    return {
        "handle": handle,
        "options": spec.options,
        "parts": spec.parts,
        "initial": InitialValues(samples, layouts).lines,
        "mesh_label": spec.mesh_label,
    }


def _stand_ins(contents: UnitContents) -> dict[torch.Tensor, nn.Parameter]:
    """Returns a full-shape meta parameter for each sharded parameter that the module borrows."""
    result: dict[torch.Tensor, nn.Parameter] = {}
    for fqn, _, param in contents.borrowed:
        _, layout, index = REGISTRY.owner(fqn, param)
        buffer = torch.empty(layout.full_numel, dtype=layout.dtype, device="meta")
        result[param] = nn.Parameter(layout.views(buffer)[index], requires_grad=param.requires_grad)
    return result


@functools.cache
def _skip_runtime_frames() -> None:
    """Makes dynamo skip the frames of this package, but not the functions that they call.

    Dynamo would break the graph at every unit otherwise.
    """
    trace_rules().add(__name__.partition(".")[0])


_Kind = tuple[torch.dtype, bool, bool, bool, SegmentPolicy]


def _by_kind(contents: UnitContents, spec: UnitSpec) -> dict[_Kind, list[ParamSlot]]:
    by_kind: dict[_Kind, list[ParamSlot]] = {}
    for slot in [each for each in contents.slots if spec.only is None or each.param in spec.only]:
        param = slot.param
        kind = param.dtype, param.requires_grad, param.is_meta, is_extension(param), spec.policy_of(param)
        by_kind.setdefault(kind, []).append(slot)
    return by_kind
