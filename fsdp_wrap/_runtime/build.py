"""Makes a unit of a module: checks it, places it on the device, and assembles layout, handle and unit."""

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
    move,
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
"""Name under which a unit's module holds its `FlatParameter` (torch's name)."""

LayoutMaker = Callable[..., Layout]
"""Makes the layout of a segment, given its parameters, the communicator and `name=`."""


@dataclass(frozen=True, kw_only=True)
class UnitSpec:
    """How to make a unit.

    Attributes:
        mesh: The ranks to shard over.
        device: Where the unit computes.
        make_layout: How its parameters lie in buffers.
        policy_of: Dtypes of computation and communication of a parameter.
        options: How the schedule treats the unit.
        parts: The modules that run, where the unit's own only holds them together.
        shared_memory: Whether ranks that share a host may communicate through its memory.
        buffer_dtype: Dtype of buffers from the first forward on; None for their own.
        only: The parameters that it takes; None for all that the module has.
        mesh_label: Name of its mesh, where the module has units over several; empty for the first.
    """

    mesh: ShardMesh
    device: torch.device
    make_layout: LayoutMaker
    policy_of: Callable[[nn.Parameter], SegmentPolicy]
    options: UnitOptions
    parts: tuple[nn.Module, ...] = ()
    shared_memory: bool = True
    buffer_dtype: torch.dtype | None = None
    only: frozenset[nn.Parameter] | None = None
    mesh_label: str = ""

    def communicators(self) -> tuple[Communicator, Communicator]:
        """Returns those of the ranks that hold one copy between them, and of the replicas."""
        shard, replicate = (
            make_communicator(ranks, self.device, self.shared_memory)
            for ranks in (self.mesh.shard, self.mesh.replicate)
        )
        return shard, replicate


def check_module(
    module: nn.Module, ignored: Ignored, values: Values, mesh: ShardMesh, instead: str | None
) -> list[tuple[str, torch.Tensor]]:
    """Checks all that a module would shard, in units below it as well, before anything changes.

    Args:
        module: The module.
        ignored: What is left alone.
        values: Where tensors get their values from.
        mesh: The ranks to shard over.
        instead: As `check_tensors` takes it.

    Returns:
        The tensors concerned by name, parameters first.

    Raises:
        ValueError: If a tensor is on the meta device and nothing can initialise it. Where values come from
            the first rank, also if another rank refused its module.
        TypeError, ValueError: As `check_tensors` does.
    """
    contents = UnitContents.of(module, ignored)
    error: Exception | None = None
    try:
        check_tensors(contents, instead, distributed=True)
        for slot in contents.slots:
            check_beside(slot.fqn, slot.param, mesh)
        check_materializable(contents, values)
    except (TypeError, ValueError) as found:
        error = found
    if values.synchronised:  # what ranks hold may differ, and so may what is wrong with it
        refuse_together(error, mesh.groups)
    if error is not None:
        raise error
    drop_gradients(contents)
    return contents.tensors()


def build_unit(module: nn.Module, ignored: Ignored, spec: UnitSpec, values: Values) -> Unit:
    """Makes a unit of a checked `module`: shards what no unit below it owns, and shows the shards."""
    left = (param for unit in units_in(module).values() for param in unit.left)
    contents = UnitContents.of(module, ignored, {param for param in left if not is_owned(param)})
    materialize(contents, values, spec.device, _stand_ins(contents))
    tensors = contents.tensors()
    move(tensors, spec.device)
    if values.synchronised:
        broadcast(tensors, spec.communicators()[::-1], spec.mesh.groups)
    return assemble_unit(module, contents, spec)


def assemble_unit(
    module: nn.Module, contents: UnitContents, spec: UnitSpec, beside: Sequence[UnitSpec] = ()
) -> Unit:
    """Makes a unit of a module whose tensors are where they belong.

    Args:
        module: The module.
        contents: What it has.
        spec: How to make it.
        beside: The same of those parameters that lie on other meshes. They become units of their own, which
            run whenever this one does.
    """
    lenders = REGISTRY.borrow(contents)
    for lender in lenders:
        lender.lend()
    modules = [each for _, each in contents.modules]
    kinds = [_by_kind(_taken(contents, each), each.policy_of) for each in (spec, *beside)]
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
    if unit.handle is not None or any(each._buffers for each in modules):  # else it may become one again
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


def _taken(contents: UnitContents, spec: UnitSpec) -> list[ParamSlot]:
    return [slot for slot in contents.slots if spec.only is None or slot.param in spec.only]


def _storage(spec: UnitSpec, by_kind: dict[_Kind, list[ParamSlot]]) -> dict[str, Any]:
    """Shards the parameters of a unit; returns what the unit needs of that."""
    segments = [*by_kind.values()]
    communicator, replicas = spec.communicators()
    samples = sample([slot.param for slot in segment] for segment in segments)
    layouts = [
        spec.make_layout(segment, communicator, name=f"{FLAT_PARAM}_{number}" if number else FLAT_PARAM)
        for number, segment in enumerate(segments)
    ]
    policies, held_by = [kind[-1] for kind in by_kind], HeldBy.of(spec.mesh, spec.device)
    return {
        "handle": ParamHandle(layouts, communicator, replicas, policies, held_by) if layouts else None,
        "options": spec.options,
        "parts": spec.parts,
        "initial": InitialValues(samples, layouts).lines,
        "mesh_label": spec.mesh_label,
    }


def _stand_ins(contents: UnitContents) -> dict[torch.Tensor, nn.Parameter]:
    """Returns, for the sharded parameters of other units, parameters of full shape on the meta device."""
    result: dict[torch.Tensor, nn.Parameter] = {}
    for fqn, _, param in contents.borrowed:
        _, layout, index = REGISTRY.owner(fqn, param)
        buffer = torch.empty(layout.full_numel, dtype=layout.dtype, device="meta")
        result[param] = nn.Parameter(layout.views(buffer)[index], requires_grad=param.requires_grad)
    return result


@functools.cache
def _skip_runtime_frames() -> None:
    """Tells dynamo not to trace this package's frames, but what they call: it breaks graphs at every unit."""
    trace_rules().add(__name__.partition(".")[0])


_Kind = tuple[torch.dtype, bool, bool, bool, SegmentPolicy]


def _by_kind(
    slots: Iterable[ParamSlot], policy_of: Callable[[nn.Parameter], SegmentPolicy]
) -> dict[_Kind, list[ParamSlot]]:
    by_kind: dict[_Kind, list[ParamSlot]] = {}
    for slot in slots:
        param = slot.param
        kind = param.dtype, param.requires_grad, param.is_meta, is_extension(param), policy_of(param)
        by_kind.setdefault(kind, []).append(slot)
    return by_kind
