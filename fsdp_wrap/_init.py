"""Makes a unit of a module: checks it, places it on the device, and assembles layout, handle and unit."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from fsdp_wrap._collectives import Communicator
from fsdp_wrap._communicators import make_communicator
from fsdp_wrap._compile import skip_runtime_frames
from fsdp_wrap._composition import announce_sharded
from fsdp_wrap._errors import AlreadyShardedError
from fsdp_wrap._handle import ParamHandle
from fsdp_wrap._held_by import HeldBy
from fsdp_wrap._initial_values import InitialValues, sample
from fsdp_wrap._layout import Layout
from fsdp_wrap._materialize import (
    Values,
    broadcast,
    check_materializable,
    materialize,
    move,
    own_tensors,
    refuse_together,
)
from fsdp_wrap._mesh import ShardMesh
from fsdp_wrap._modules import (
    Ignored,
    ParamSlot,
    Place,
    collect_borrowed,
    collect_slots,
    is_owned,
    mark_managed,
    mark_owned,
    own_modules,
)
from fsdp_wrap._param_checks import (
    check_borrowed,
    check_buffers,
    check_param,
    refuse_optimizer_in_backward,
)
from fsdp_wrap._precision import BufferCasts, SegmentPolicy
from fsdp_wrap._refusals import refuse_earlier_optimizers, refuse_pieces
from fsdp_wrap._schedule import guard_parametrizations
from fsdp_wrap._slice_layout import SliceLayout
from fsdp_wrap._steps import note_fused_steps
from fsdp_wrap._unit import Unit, UnitOptions, units_in
from fsdp_wrap.flat_param import FlatParameterLayout

__all__ = [
    "FLAT_PARAM",
    "FlatSpec",
    "UnitSpec",
    "assemble_unit",
    "build_unit",
    "check_module",
    "refuse_taken",
    "register_copy",
    "taken_in",
]

FLAT_PARAM = "_flat_param"
"""Name under which a unit's module holds its `FlatParameter` (torch's name)."""

_CURE = "wrap with use_orig_params=True, which keeps the Parameter objects, or step after backward"


@dataclass(frozen=True, kw_only=True)
class UnitSpec:
    """How to make a unit.

    Attributes:
        mesh: The ranks to shard over.
        device: Where the unit computes.
        policy_of: Dtypes of computation and communication of a parameter.
        options: How the schedule treats the unit.
        ignored: What not to touch.
        parts: The modules that run, where the unit's own only holds them together.
        shared_memory: Whether ranks that share a host may communicate through its memory.
        buffer_dtype: Dtype of buffers from the first forward on; None for their own.
    """

    mesh: ShardMesh
    device: torch.device
    policy_of: Callable[[nn.Parameter], SegmentPolicy]
    options: UnitOptions
    ignored: Ignored = field(default_factory=Ignored)
    parts: tuple[nn.Module, ...] = ()
    shared_memory: bool = True
    buffer_dtype: torch.dtype | None = None

    def communicators(self) -> tuple[Communicator, Communicator]:
        """Returns those of the ranks that hold one copy between them, and of the replicas."""
        shard, replicate = (
            make_communicator(ranks, self.device, self.shared_memory)
            for ranks in (self.mesh.shard, self.mesh.replicate)
        )
        return shard, replicate


@dataclass(frozen=True, kw_only=True)
class FlatSpec(UnitSpec):
    """How to make a unit of `FlatParameter`s.

    Attributes:
        use_orig_params: What the optimizer sees: the user's parameters or `FlatParameter`s.
        offload: Whether shards and their gradients live in host memory.
        values: Where tensors get their values from.
    """

    use_orig_params: bool
    offload: bool
    values: Values


LayoutMaker = Callable[[list[ParamSlot], str, Communicator], Layout]
"""Makes the layout of a segment, given its parameters, its name and the communicator."""


def check_module(
    module: nn.Module, ignored: Ignored, values: Values, mesh: ShardMesh, use_orig_params: bool
) -> list[tuple[str, torch.Tensor]]:
    """Checks all that a module would shard, in units below it as well, before anything changes.

    Returns:
        The tensors concerned by name, parameters first.

    Raises:
        ValueError: If a tensor is on the meta device and nothing can initialise it, or a parameter has
            gradient hooks or, where other tensors are trained, optimizers. Where values come from the first
            rank, also if another rank refused its module.
        TypeError: If a parameter is of a class whose behaviour leaves could not carry over, or belongs to a
            TorchScript module.
    """
    slots = collect_slots(module, ignored)
    error: Exception | None = None
    try:
        for slot in slots:
            check_param(slot)
            if not use_orig_params:
                refuse_optimizer_in_backward(slot, _CURE)
        check_borrowed(module, ignored)
        check_buffers(module, ignored)
        check_materializable(module, slots, ignored, values)
    except (TypeError, ValueError) as found:
        error = found
    if values.synchronised:  # what ranks hold may differ, and so may what is wrong with it
        refuse_together(error, mesh.groups)
    if error is not None:
        raise error
    return own_tensors(module, slots, ignored)


def build_unit(module: nn.Module, spec: FlatSpec) -> Unit:
    """Makes a unit of a checked `module`: shards what no unit below it owns, and shows the shards."""
    slots = collect_slots(module, spec.ignored, _lent_params(module))
    communicator, replicas = spec.communicators()
    stand_ins = _stand_ins(module, spec.ignored)
    materialize(module, slots, spec.ignored, spec.values, spec.device, stand_ins)
    tensors = own_tensors(module, slots, spec.ignored)
    move(tensors, spec.device)
    if spec.values.synchronised:
        broadcast(tensors, [replicas, communicator])

    def make_layout(segment: list[ParamSlot], name: str, allocator: Communicator) -> Layout:
        kind = SliceLayout if spec.use_orig_params else FlatParameterLayout
        return kind(
            segment,
            allocator,
            name=name,
            module=module,
            sharded=spec.mesh.shard is not None,
            offload=spec.offload,
        )

    return assemble_unit(module, slots, spec, make_layout)


def assemble_unit(
    module: nn.Module, slots: Iterable[ParamSlot], spec: UnitSpec, make_layout: LayoutMaker
) -> Unit:
    """Makes a unit of a module whose tensors are where they belong."""
    segments = _segments(slots, spec.policy_of)
    communicator, replicas = spec.communicators()
    samples = sample([slot.param for slot in segment] for segment in segments.values())
    lenders = _borrow(module, spec.ignored)  # while the module shows no `FlatParameter`
    layouts = [
        make_layout(segment, FLAT_PARAM if number == 0 else f"{FLAT_PARAM}_{number}", communicator)
        for number, segment in enumerate(segments.values())
    ]
    policies = [kind[-1] for kind in segments]
    held_by = HeldBy.of(spec.mesh, spec.device)
    handle = ParamHandle(layouts, communicator, replicas, policies, held_by) if layouts else None
    modules = [each for _, each in own_modules(module, spec.ignored.modules)]
    unit = Unit(
        module,
        handle,
        spec.options,
        left=spec.ignored.left,
        lenders=lenders,
        buffers=BufferCasts(modules, spec.buffer_dtype),
        parts=spec.parts,
        initial=InitialValues(samples, layouts),
    )
    for fqn, below in units_in(module).items():
        below.nest(fqn)
    guard_parametrizations(unit, modules)
    skip_runtime_frames()
    if handle is not None or any(each._buffers for each in modules):  # else it may become a unit again
        _taken.update(modules)
    for each in modules:
        mark_managed(each)
    for each in spec.parts or (module,):
        announce_sharded(each)
    _note_owners(unit, segments.values())
    refuse_earlier_optimizers(unit, segments.values())
    refuse_pieces(unit)
    note_fused_steps()
    return unit


def _note_owners(unit: Unit, segments: Iterable[Iterable[ParamSlot]]) -> None:
    for number, segment in enumerate(segments):
        for index, slot in enumerate(segment):
            mark_owned(slot.param)
            _owners[slot.param] = _Ownership(weakref.ref(unit), number, index)
            for place, _ in slot.places:
                _users.setdefault(place, set()).add(_owners[slot.param])


def register_copy(unit: Unit, modules: Iterable[nn.Module]) -> None:
    """Notes what a copied unit has: the copies of the modules it took, and its sharded parameters."""
    _taken.update(modules)
    refuse_pieces(unit)
    for number, segment in enumerate(unit.handle.segments if unit.handle is not None else ()):
        for index, param in enumerate(segment.layout.sources):
            if is_owned(param) and not isinstance(param, DTensor):  # which conversions exchange: no weak refs
                _owners[param] = _Ownership(weakref.ref(unit), number, index)
        for place, _ in segment.layout.shapes():
            _users.setdefault(place, set()).add(_Ownership(weakref.ref(unit), number, 0))


def taken_in(module: nn.Module) -> list[nn.Module]:
    """Returns the modules at and below `module` that a unit has taken."""
    return [each for each in module.modules() if each in _taken]


@dataclass(frozen=True)
class _Ownership:
    """Which leaf of which unit stands for an original parameter."""

    unit: weakref.ref[Unit]
    segment: int
    index: int


# Weak on both sides: a parameter outlives neither its users nor its unit because of it.
_owners: WeakIdKeyDictionary = WeakIdKeyDictionary()


# Modules that show parameters of a unit; a shared module may belong to more than one.
_users: weakref.WeakKeyDictionary[nn.Module, set[_Ownership]] = weakref.WeakKeyDictionary()

_taken: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def refuse_taken(module: nn.Module) -> None:
    """Refuses a module that a unit has taken already, as its own or as part of it."""
    if module in _taken:
        raise AlreadyShardedError(
            f"this {type(module).__name__} is already wrapped, or part of a wrapped module; wrap parts "
            "before the whole, each once"
        )


def _borrow(module: nn.Module, ignored: Ignored) -> list[Unit]:
    """Lets the owners of tied parameters show them in `module` as well; returns the owners."""
    lenders: dict[int, Unit] = {}
    for _, current in own_modules(module, ignored.modules):
        owners = (ownership.unit() for ownership in _users.get(current, ()))
        lenders.update({id(owner): owner for owner in owners if owner is not None})
    for fqn, place, param in list(collect_borrowed(module, ignored)):
        if _shows(place):
            continue
        owner, layout = _owner(fqn, param)
        layout.add_place(_owners[param].index, place)
        lenders[id(owner)] = owner
    return list(lenders.values())


def _shows(place: Place) -> bool:
    """Whether a unit shows a parameter in this place already, as in a module that two units share."""
    owners = (ownership.unit() for ownership in _users.get(place[0], ()))
    handles = [owner.handle for owner in owners if owner is not None and owner.handle is not None]
    return any(place in segment.layout.shapes() for handle in handles for segment in handle.segments)


def _owner(fqn: str, param: nn.Parameter) -> tuple[Unit, Layout]:
    """Returns the unit that has taken a parameter, and the layout in which it is."""
    if param not in _owners:
        raise ValueError(
            f"parameter '{fqn}' is the sharded parameter of another unit; tie parameters before sharding them"
        )
    ownership: _Ownership = _owners[param]
    owner = ownership.unit()
    if owner is None or owner.handle is None:
        raise ValueError(f"parameter '{fqn}' belonged to a wrapped module that no longer exists")
    return owner, owner.handle.segments[ownership.segment].layout


def _stand_ins(module: nn.Module, ignored: Ignored) -> dict[nn.Parameter, nn.Parameter]:
    """Returns, for the sharded parameters of other units, parameters of full shape on the meta device."""
    result: dict[nn.Parameter, nn.Parameter] = {}
    for fqn, _, param in collect_borrowed(module, ignored):
        _, layout = _owner(fqn, param)
        buffer = torch.empty(layout.full_numel, dtype=layout.dtype, device="meta")
        full = layout.views(buffer)[_owners[param].index]
        result[param] = nn.Parameter(full, requires_grad=param.requires_grad)
    return result


def _lent_params(module: nn.Module) -> frozenset[nn.Parameter]:
    """Returns the tied parameters that units below have left and no unit has taken yet."""
    left = (param for unit in units_in(module).values() for param in unit.left)
    return frozenset(param for param in left if not is_owned(param))


def _segments(
    slots: Iterable[ParamSlot], policy_of: Callable[[nn.Parameter], SegmentPolicy]
) -> dict[tuple[torch.dtype, bool, bool, SegmentPolicy], list[ParamSlot]]:
    by_kind: dict[tuple[torch.dtype, bool, bool, SegmentPolicy], list[ParamSlot]] = {}
    for slot in slots:
        param = slot.param
        kind = param.dtype, param.requires_grad, param.is_meta, policy_of(param)
        by_kind.setdefault(kind, []).append(slot)
    return by_kind
