"""Builds units: checks a module, moves its tensors to the device, shards its parameters, makes the unit.

The registry tells which modules and parameters units own, and refuses a second unit of a module.
"""

from __future__ import annotations

import functools
import importlib
import math
import pkgutil
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils.parametrize import ParametrizationList
from torch.utils.weak import WeakIdKeyDictionary

from fsdp_wrap._building.materialize import Values, broadcast, materialize, refuse_together
from fsdp_wrap._building.refusals import (
    ParametrizationGuard,
    check_materializable,
    check_tensors,
    drop_gradients,
    refuse_earlier_optimizers,
    refuse_pieces,
)
from fsdp_wrap._comm import Communicator, ShardMesh, make_communicator
from fsdp_wrap._core import (
    AlreadyShardedError,
    BufferCasts,
    ParamSlot,
    Seam,
    SegmentPolicy,
    UnitContents,
    announce_sharded,
    is_owned,
    mark_managed,
    mark_owned,
    note_ignored,
    watch_steps,
)
from fsdp_wrap._core.torch_private import trace_rules
from fsdp_wrap._params import (
    Buffers,
    HeldBy,
    NoBuffers,
    ShardedParams,
    Written,
    check_beside,
    is_extension,
    same_sample,
    side_data_kind,
    side_data_of,
    to_local,
)
from fsdp_wrap._runtime import Unit, UnitOptions, units_in


class Registry:
    """The modules and parameters that units own, all held weakly.

    Attributes:
        taken: The modules that units have taken, as their own or as part of them, in that order, with the
            units whose parameters they show. These are in the order of `note`, in which lenders unshard.
    """

    def __init__(self) -> None:
        self.taken: weakref.WeakKeyDictionary[nn.Module, tuple[weakref.ref[Unit], ...]]
        self.taken = weakref.WeakKeyDictionary()
        self._owners = WeakIdKeyDictionary()  # original parameter -> its unit, segment and index there

    def take(self, modules: Iterable[nn.Module]) -> None:
        """Records modules as taken by a unit."""
        for module in modules:
            self.taken.setdefault(module, ())

    def refuse_taken(self, module: nn.Module) -> None:
        """Refuses a module that a unit has taken already, as its own or as part of it."""
        if module in self.taken:
            raise AlreadyShardedError(
                f"this {type(module).__name__} is already wrapped, or part of a wrapped module; wrap parts "
                "before the whole, each once"
            )

    def note(self, unit: Unit, originals: Iterable[Sequence[nn.Parameter]]) -> None:
        """Records the parameters of a unit, given by segment, and the modules that show them."""
        this = weakref.ref(unit)
        alone = (this,)  # one tuple for most of its modules
        for number, (params, sharded) in enumerate(zip(originals, unit.params)):
            for index, param in enumerate(params):
                if param is not sharded.sources[index] or not isinstance(param, DTensor):
                    # Not a `DTensor` that is the source itself: conversions swap it, which
                    # weak references would forbid.
                    mark_owned(param)
                    self._owners[param] = this, number, index
            for module, _ in chain.from_iterable(sharded.display.places):
                users = self._users_of(module)
                if unit not in users:
                    self.taken[module] = (*map(weakref.ref, users), this) if users else alone

    def _users_of(self, module: nn.Module) -> list[Unit]:
        """Returns the units whose parameters a module shows."""
        users = (reference() for reference in self.taken.get(module, ()))
        return [unit for unit in users if unit is not None]

    def units(self) -> set[Unit]:
        """Returns all units with parameters."""
        return {unit for module in [*self.taken] for unit in self._users_of(module) if unit.params}

    def owner(self, fqn: str, param: nn.Parameter) -> tuple[Unit, ShardedParams, int]:
        """Returns the unit that owns an original parameter, its sharded parameters, and its index there."""
        if param not in self._owners:
            raise ValueError(
                f"parameter '{fqn}' is the sharded parameter of another unit: tie parameters before "
                "sharding them"
            )
        reference, number, index = self._owners[param]
        unit: Unit | None = reference()
        if unit is None or not unit.params:
            raise ValueError(
                f"parameter '{fqn}' was sharded in a wrapped module that no longer exists, and its values "
                "are gone with it: build the module anew, or keep the wrapped one"
            )
        return unit, unit.params[number], index

    def borrow(self, contents: UnitContents) -> list[Unit]:
        """Makes the owners of tied parameters show them in a new unit's modules too; returns the owners."""
        users = (self._users_of(module) for _, module in contents.modules)
        # A unit whose module is gone has no parameters, and lends nothing.
        lenders = {unit: None for unit in chain.from_iterable(users) if unit.params}
        for fqn, place, param in contents.borrowed:
            params = (sharded for unit in self._users_of(place[0]) for sharded in unit.params)
            shown = (places for sharded in params for places in sharded.display.places)
            if not any(place in places for places in shown):  # units may share it
                unit, sharded, index = self.owner(fqn, param)
                sharded.add_place(index, place)
                lenders[unit] = None
        return list(lenders)


REGISTRY = Registry()
"""The registry of this process."""


FLAT_PARAM = "_flat_param"
"""Attribute of a module that holds its `FlatParameter` (torch's name)."""

over_replicas: Seam[Any] = Seam("state over replicas", "fsdp_wrap._state_over_replicas")

NO_PARTS: frozenset[nn.Module] = frozenset()
"""One object for all units whose module has a forward itself."""

ParamsMaker = Callable[..., ShardedParams]
"""Makes the sharded parameters of a segment from its parameters, the communicator and `name=`."""


@dataclass(frozen=True, kw_only=True)
class UnitSpec:
    """The specification of a unit."""

    mesh: ShardMesh
    device: torch.device
    make_params: ParamsMaker
    policy_of: Callable[[nn.Parameter], SegmentPolicy]
    options: UnitOptions
    parts: Collection[nn.Module] = NO_PARTS  # those with a forward, if the unit's module only groups them
    shared_memory: bool = True
    buffer_dtype: torch.dtype | None = None  # of module buffers, from the first forward on; None keeps theirs
    only: frozenset[nn.Parameter] | None = None  # the parameters to take; None for all of the module
    mesh_label: str = ""  # empty for the first mesh of the module

    def communicators(self, mesh: ShardMesh) -> tuple[Communicator, Communicator]:
        """Returns the communicator of a mesh's sharding ranks and the communicator of its replicas."""
        options = self.device, self.shared_memory
        return make_communicator(mesh.shard, *options), make_communicator(mesh.replicate, *options)


def check_contents(contents: UnitContents, values: Values, mesh: ShardMesh, instead: str | None) -> None:
    """Checks all tensors of a module before anything changes.

    Collective with `values.synchronised`: then a module that one rank refuses is refused on all ranks.
    """
    error: Exception | None = None
    try:
        check_tensors(contents, instead, filled_later=values.param_init_fn is not None)
        for slot in contents.slots:
            check_beside(slot.fqn, slot.param, mesh)
        check_materializable(contents, values)
    except (TypeError, ValueError) as raised:
        error = raised
    if values.synchronised:  # the modules of the ranks may differ, and so may their errors
        refuse_together(error, mesh.groups)
    if error is not None:
        raise error
    drop_gradients(contents)


def build_unit(module: nn.Module, contents: UnitContents, spec: UnitSpec, values: Values) -> Unit:
    """Makes a unit of checked contents, less the parameters that units below it have taken since."""
    if below := units_in(module):
        left = (param for unit in below.values() for param in unit.left)
        contents = UnitContents.of(module, contents.ignored, {param for param in left if not is_owned(param)})
    tensors = contents.tensors()
    if any(tensor.is_meta for _, tensor in tensors):
        materialize(contents, values, spec.device, _stand_ins(contents))
        tensors = contents.tensors()
    move(tensors, spec.device)
    if values.synchronised:
        broadcast(tensors, spec.communicators(spec.mesh)[::-1], spec.mesh.groups)
    return assemble_unit(module, contents, spec)


def move(named: Iterable[tuple[str, torch.Tensor]], device: torch.device) -> None:
    """Moves tensors to a device; they stay the same Python objects."""
    for fqn, tensor in named:
        side = side_data_of(fqn, tensor)
        if side is not None:
            side.move(device)
        if tensor.device != device:
            tensor.data = tensor.data.to(device)


def assemble_unit(
    module: nn.Module, contents: UnitContents, spec: UnitSpec, beside: Sequence[UnitSpec] = ()
) -> Unit:
    """Makes a unit of a module whose tensors are on their device.

    The specs in `beside` are for parameters on other meshes. Each becomes a unit of its own that runs
    whenever this one does.
    """
    for slot in contents.slots:  # also what a function of the user has filled
        kind = side_data_kind(slot.param)
        if kind is not None:
            kind.check(slot.fqn, slot.param, filled_later=False)
    note_ignored(contents.ignored)
    lenders = REGISTRY.borrow(contents)
    for lender in lenders:
        lender.lend()
    modules = [submodule for _, submodule in contents.modules]
    kinds = [_by_kind(contents, unit_spec) for unit_spec in (spec, *beside)]
    others = tuple(Unit(module, **_storage(*pair)) for pair in zip(beside, kinds[1:]))
    unit = Unit(
        module,
        **_storage(spec, kinds[0]),
        left=contents.ignored.left,
        lenders=(*lenders, *others),
        buffer_casts=BufferCasts(modules, spec.buffer_dtype),
    )
    for fqn, below in units_in(module).items():
        below.nest(fqn)
    _skip_runtime_frames()
    if unit.params or any(submodule._buffers for submodule in modules):  # else it may be wrapped again
        REGISTRY.take(modules)
    for submodule in modules:
        mark_managed(submodule)
    for part in spec.parts or (module,):
        announce_sharded(part)
    for made, by_kind in zip(unit.over_all_meshes, kinds):
        _prepare_modules(made)
        _guard_parametrizations(made, modules)
        REGISTRY.note(made, [[slot.param for slot in segment] for segment in by_kind.values()])
        refuse_earlier_optimizers(made, [*by_kind.values()])
        refuse_pieces(made)
    watch_steps()
    return unit


def _prepare_modules(unit: Unit) -> None:
    for sharded in unit.params:
        for side, places in zip(sharded.side_data, sharded.display.places):
            if side is not None:
                for module, _ in places:
                    side.prepare(module)


def _storage(spec: UnitSpec, by_kind: dict[_Kind, list[ParamSlot]]) -> dict[str, Any]:
    """Shards the parameters of a unit; returns the arguments of `Unit` for them."""
    segments = [*by_kind.values()]
    communicator, replicas = spec.communicators(spec.mesh)
    samples = [sample([slot.param for slot in segment]) for segment in segments]
    params = [
        spec.make_params(segment, communicator, name=f"{FLAT_PARAM}_{number}" if number else FLAT_PARAM)
        for number, segment in enumerate(segments)
    ]
    policies, held_by = [kind[-1] for kind in by_kind], HeldBy.of(spec.mesh, spec.device)
    buffers = Buffers(params, communicator, replicas, policies, held_by) if params else NoBuffers()
    if spec.mesh.copies is not None:
        staged = over_replicas.needed("state_over_replicas=True").transport
        buffers.set_transport(staged(*spec.communicators(spec.mesh.copies)))
    return {
        "buffers": buffers,
        "options": spec.options,
        "parts": spec.parts,
        "initial": InitialValues(samples, params, buffers.written),
        "mesh_label": spec.mesh_label,
    }


def _stand_ins(contents: UnitContents) -> dict[torch.Tensor, nn.Parameter]:
    """Returns a full-shape meta parameter for each sharded parameter that the module borrows."""
    result: dict[torch.Tensor, nn.Parameter] = {}
    for fqn, _, param in contents.borrowed:
        _, sharded, index = REGISTRY.owner(fqn, param)
        buffer = torch.empty(sharded.layout.full_numel, dtype=sharded.dtype, device="meta")
        result[param] = nn.Parameter(sharded.layout.views(buffer)[index], requires_grad=param.requires_grad)
    return result


@functools.cache
def _skip_runtime_frames() -> None:
    """Makes dynamo skip the frames of this package, but not the functions that they call.

    Dynamo would break the graph at every unit otherwise. It follows the look-up of attributes, by which a
    compiled forward finds its parameters.
    """
    package = importlib.import_module(__name__.partition(".")[0])
    rules = trace_rules()
    for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if info.name != f"{package.__name__}._attributes":
            rules.add(info.name)


_Kind = tuple[torch.dtype, bool, bool, bool, bool, SegmentPolicy]


def _by_kind(contents: UnitContents, spec: UnitSpec) -> dict[_Kind, list[ParamSlot]]:
    by_kind: dict[_Kind, list[ParamSlot]] = {}
    for slot in [slot for slot in contents.slots if spec.only is None or slot.param in spec.only]:
        param = slot.param
        has_side_data = side_data_kind(param) is not None  # its codes are never cast
        policy = SegmentPolicy() if has_side_data else spec.policy_of(param)
        kind = param.dtype, param.requires_grad, param.is_meta, is_extension(param), has_side_data, policy
        by_kind.setdefault(kind, []).append(slot)
    return by_kind


_SAMPLED = 4  # elements of a parameter


def sample(params: Sequence[nn.Parameter]) -> torch.Tensor:
    """Returns a few elements of each unsharded parameter of a segment: parameters x elements, in float32.

    They are NaN where there are no values to compare: on the meta device, of a tensor extension. Zeros take
    the place of those that a small parameter lacks.
    """
    first = params[0]  # all are of one kind
    if first.is_meta or is_extension(first):
        return torch.full((len(params), _SAMPLED), math.nan, device=first.device)
    rows = [_elements(to_local(param).data.reshape(-1)) for param in params]
    values = torch.cat(rows)
    real = (values.abs() if values.is_complex() else values).to(torch.float32)
    missing = [_SAMPLED - len(row) for row in rows]
    if any(missing):
        taken = torch.split(real, [*map(len, rows)])
        real = torch.cat([nn.functional.pad(row, (0, lacks)) for row, lacks in zip(taken, missing)])
    return real.view(-1, _SAMPLED)


def _elements(flat: torch.Tensor) -> torch.Tensor:
    distance = max(1, flat.numel() // _SAMPLED)
    return flat[: _SAMPLED * distance : distance]


class InitialValues:
    """Samples of the initial values of a unit's parameters, valid until the shards are written to.

    Args:
        samples: The `sample` of each segment.
        params: The segments' sharded parameters.
        written: Their versions now.
    """

    def __init__(
        self, samples: Sequence[torch.Tensor], params: Sequence[ShardedParams], written: Sequence[Written]
    ) -> None:
        self._samples, self._written = (*samples,), written
        # Some ways of loading move no version counter.
        self._sampled = (*[sharded.sample().clone() for sharded in params],)

    def __call__(self, params: Sequence[ShardedParams]) -> list[str]:
        """Returns a line per parameter: its sampled elements, or "" if it was written to since."""
        result: list[str] = []
        for values, sharded, written, before in zip(self._samples, params, self._written, self._sampled):
            now = sharded.sample()
            known = not values.is_meta and sharded.written() == written and same_sample(before, now)
            lines = [" ".join(map(repr, row)) for row in values.tolist()] if known else [""] * len(values)
            result += lines
        return result


def _guard_parametrizations(unit: Unit, modules: Iterable[nn.Module]) -> None:
    """Makes parametrizations refuse sharded parameters, whose shards do not fit each other."""
    for module in modules:
        if isinstance(module, ParametrizationList):
            module.register_forward_pre_hook(ParametrizationGuard(unit))
