"""`fully_shard`, the composable front-end: parameters are `DTensor`s, and modules change class in place."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fsdp_wrap._collectives import Communicator, make_communicator
from fsdp_wrap._compute_device import device_of
from fsdp_wrap._copies import deepcopy_wrapper
from fsdp_wrap._dtensor_layout import DTensorLayout
from fsdp_wrap._groups import default_mesh, neighbours
from fsdp_wrap._handle import HandleState
from fsdp_wrap._init import UnitSpec, assemble_unit, check_param, refuse_taken
from fsdp_wrap._layout import Layout
from fsdp_wrap._materialize import move, own_tensors
from fsdp_wrap._mesh import ranks_of
from fsdp_wrap._modules import UNIT_ATTR, Ignored, ParamSlot, collect_slots
from fsdp_wrap._precision import InputCasts
from fsdp_wrap._schedule import Schedule, schedule_of
from fsdp_wrap._unit import Unit, UnitOptions, units_in
from fsdp_wrap.api import CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy, OffloadPolicy
from fsdp_wrap.forward_methods import register_forward_method

__all__ = ["FSDPModule", "UnshardHandle", "fully_shard"]

_Self = TypeVar("_Self", bound="FSDPModule")
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
            those of all but the root. A number lets so many neighbouring ranks keep them between them.
        shard_placement_fn: Chooses for a parameter the `Shard(dim)` to cut it along; None is `Shard(0)`. The
            size of another dimension than the first must be a multiple of the ranks.
        mp_policy: Dtypes of computation and communication.
        offload_policy: Whether shards live in host memory.
        ignored_params: Parameters to leave alone.

    Returns:
        `module` itself.

    Raises:
        TypeError: If an argument is of the wrong type, or a parameter of a class that sharding would lose.
        ValueError: If there is no process group, this rank is not in the mesh, a module is in a unit already
            or has no forward, or a parameter cannot be cut.

    The API is that of `torch.distributed.fsdp.fully_shard`.
    """
    parts = _outermost([module] if isinstance(module, nn.Module) else module)
    for name, value, kind in (
        ("mp_policy", mp_policy, MixedPrecisionPolicy),
        ("offload_policy", offload_policy, OffloadPolicy),
    ):
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be a {kind.__name__}, not {value!r}")
    mesh = default_mesh() if mesh is None else mesh
    ranks, device = ranks_of(mesh), device_of(mesh)
    owner = parts[0] if isinstance(module, nn.Module) else nn.ModuleList(parts)
    ignored = Ignored(params=frozenset(ignored_params or ()))
    slots = collect_slots(owner, ignored)
    assert ranks.shard is not None
    dims = {slot.param: _dim_of(slot, shard_placement_fn, ranks.shard.size) for slot in slots}
    within = _kept_within(reshard_after_forward, ranks.shard, device)
    move([named for named in own_tensors(owner, slots, ignored) if not named[1].is_meta], device)

    def make_layout(segment: list[ParamSlot], name: str, allocator: Communicator) -> Layout:
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
        policy=MixedPrecision(mp_policy.param_dtype, mp_policy.reduce_dtype),
        options=UnitOptions(
            reshard_after_forward=reshard_after_forward is not False,
            keeps_as_root=not reshard_after_forward,
            casts=_casts_of(mp_policy),
            reshards_within=within,
        ),
        ignored=ignored,
        parts=() if isinstance(module, nn.Module) else tuple(parts),
    )
    unit = assemble_unit(owner, slots, spec, make_layout)
    for part in parts:
        part.__dict__[UNIT_ATTR] = unit
        part.__class__ = _sharded_class(type(part))
    return module


def _outermost(modules: Any) -> list[nn.Module]:
    """Checks the argument; returns the modules that no other one encloses."""
    modules = list(modules) if isinstance(modules, (list, tuple)) else [modules]
    if not modules or not all(isinstance(module, nn.Module) for module in modules):
        found = ", ".join(type(module).__name__ for module in modules) or "an empty list"
        raise TypeError(f"fully_shard takes a torch.nn.Module or a list of them, not {found}")
    for module in modules:
        refuse_taken(module)
        if type(module).forward is nn.Module.forward:
            raise ValueError(
                f"fully_shard unshards a module for its forward, and {type(module).__name__} has none; shard "
                "the modules in it, or pass them as a list"
            )
    inner = {id(child) for module in modules for child in module.modules() if child is not module}
    return [module for module in dict.fromkeys(modules) if id(module) not in inner]


def _dim_of(slot: ParamSlot, placement_of: _Placements | None, ranks: int) -> int:
    """Checks one parameter; returns the dimension along which it is cut."""
    check_param(slot)
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
        raise TypeError(
            f"shard_placement_fn must return a Shard or None, not {placement!r} (for parameter '{slot.fqn}')"
        )
    dim = placement.dim + len(shape) if placement.dim < 0 else placement.dim
    if not 0 <= dim < len(shape):
        raise ValueError(f"parameter '{slot.fqn}' of shape {tuple(shape)} has no dimension {placement.dim}")
    if dim and shape[dim] % ranks:
        raise ValueError(
            f"parameter '{slot.fqn}' of shape {tuple(shape)} cannot be cut along dimension {dim}: its size "
            f"must be a multiple of the {ranks} ranks (only dimension 0 can be cut unevenly)"
        )
    return dim


def _kept_within(reshard_after_forward: Any, shard: Any, device: torch.device) -> Communicator | None:
    if isinstance(reshard_after_forward, bool) or reshard_after_forward is None:
        return None
    if not isinstance(reshard_after_forward, int):
        raise TypeError(f"reshard_after_forward is a bool, an int or None, not {reshard_after_forward!r}")
    return make_communicator(neighbours(shard, reshard_after_forward), device)


def _casts_of(policy: MixedPrecisionPolicy) -> InputCasts:
    inputs = policy.param_dtype if policy.cast_forward_inputs else None
    return InputCasts(inputs, inputs, outputs=policy.output_dtype)


_sharded_classes: dict[type[nn.Module], type[FSDPModule]] = {}


def _sharded_class(cls: type[nn.Module]) -> type[FSDPModule]:
    if cls not in _sharded_classes:
        _sharded_classes[cls] = type(f"FSDP{cls.__name__}", (FSDPModule, cls), {"__module__": cls.__module__})
    return _sharded_classes[cls]


def _unit_of(module: Any) -> Unit:
    if not isinstance(module, FSDPModule):
        raise ValueError(f"expected a module to which fully_shard was applied, not a {type(module).__name__}")
    unit: Unit = module.__dict__[UNIT_ATTR]
    return unit


class FSDPModule(nn.Module):
    """What `fully_shard` makes of a module: a subclass of its class that runs as a unit.

    While the unit is sharded, which it is outside of its forward and backward, `parameters()` are `DTensor`s.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Makes an instance of the original class, as containers do when they are sliced."""
        return cls.__mro__[cls.__mro__.index(FSDPModule) + 1](*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs forward, and all hooks, with full parameters."""
        return self._run_as_forward(super().__call__, args, kwargs)

    def _run_as_forward(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        unit = _unit_of(self)
        return schedule_of(unit).run_forward(unit, call, args, kwargs, self)

    def register_forward_method(self, method_name: str) -> None:
        """Lets a method such as `generate` run as forward does; see `fsdp_wrap.forward_methods`.

        Raises:
            ValueError: If there is no such method, or it cannot run so.
        """
        register_forward_method(self, self, method_name, self._run_as_forward)

    # parameters

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers this unit's parameters, and lets the modules show them until it is resharded.

        The next forward takes them over, unless an optimizer has changed the sharded ones since.

        Args:
            async_op: Return at once; the handle's `wait`, or the forward, waits.
        """
        unit = _unit_of(self)
        schedule_of(unit).unshard(unit)
        handle = UnshardHandle(unit)
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Frees this unit's full parameters; the modules show the sharded ones."""
        unit = _unit_of(self)
        schedule_of(unit).reshard(unit)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Decides whether full parameters are freed between forward and backward, as the root as well.

        Raises:
            ValueError: If it is not a bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward must be a bool here, not {reshard_after_forward!r}")
        for unit in self._units(recurse):
            unit.set_reshard_after_forward(reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Decides whether full parameters are freed after backward.

        If not, the next forward takes them over, unless an optimizer has changed the sharded ones since.
        """
        self._set(recurse, reshards_after_backward=reshard_after_backward)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Decides whether backward gathers this unit's parameters: not needed where it computes without them.

        An embedding's does. If another's does not get them, the process may crash.
        """
        self._set(False, unshards_in_backward=unshard_in_backward)

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Lets this unit's forward issue the all-gathers of other units.

        Raises:
            ValueError: If a module is no `FSDPModule`.
        """
        self._set(False, forward_targets=tuple(map(_unit_of, modules)))

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Lets this unit's backward issue the all-gathers of other units, not of the expected next one.

        Raises:
            ValueError: If a module is no `FSDPModule`.
        """
        self._set(False, backward_targets=tuple(map(_unit_of, modules)))

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Lets the next iteration begin after an event, such as of an optimizer's step on another stream."""
        self._schedule.wait_for(event)

    # gradients

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Decides whether a backward ends with waiting for the last reduction, or leaves that to the next."""
        self._schedule.finish_backwards(is_last_backward)

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Decides whether gradients are reduced, or kept in full for a later backward.

        Meanwhile `.grad` of parameters without one are zeros: `zero_grad` forgets what was kept.
        """
        self._set(recurse, syncs=requires_gradient_sync, sums_over_replicas=requires_gradient_sync)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Decides whether reduced gradients are summed over the replicas, or kept for a later backward."""
        self._set(recurse, sums_over_replicas=requires_all_reduce)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divides summed gradients of this unit by a number, instead of by that of the ranks."""
        handle = _unit_of(self).handle
        if handle is not None:
            handle.divide_gradients_by(factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The old name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accepted: gradients are divided by our own kernels and never reduced by anything but sums."""

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Decides whether parameters that no rank used get gradients of zeros, or none.

        Either way, ranks may use different ones.
        """
        self._set(recurse, counts_unused=reduce_scatter_unused_params)

    def reset_iter_state(self) -> None:
        """Drops what a failed forward or backward left, and gradients that wait for a reduction.

        The next outermost forward does this by itself, save for gradients that earlier backwards accumulated.

        Raises:
            RuntimeError: If another unit encloses this one.
        """
        if _unit_of(self).nested:
            raise RuntimeError(f"reset_iter_state() must be called on the root, not on {_unit_of(self).name}")
        self._schedule.reset()

    # conversions, copies, state dicts

    def _apply(self: _Self, fn: Callable[..., Any], recurse: bool = True) -> _Self:
        unit = _unit_of(self)
        _refuse_moves(unit, fn)
        self.reshard()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if unit.handle is not None and unit.handle.state is HandleState.SHARDED and not unit.parts:
            unit.handle.follow_replaced()  # parts are converted one by one: there the next forward does it
        return self

    def __deepcopy__(self: _Self, memo: dict[int, Any]) -> _Self:
        """Returns a second module of the same values, on the same process groups; no communication."""
        return deepcopy_wrapper(self, _unit_of(self), memo)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As `torch.nn.Module`, with `DTensor`s."""
        self.reshard()
        return super().state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.reshard()
        super()._load_from_state_dict(*args, **kwargs)

    # what several of the above share

    @property
    def _schedule(self) -> Schedule:
        return schedule_of(_unit_of(self))

    def _units(self, recurse: bool) -> Iterable[Unit]:
        return dict.fromkeys(units_in(self).values()) if recurse else [_unit_of(self)]

    def _set(self, recurse: bool, **options: Any) -> None:
        for unit in self._units(recurse):
            unit.set(**options)


class UnshardHandle:
    """Waits for what `FSDPModule.unshard` has issued."""

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        """Lets the modules show the full parameters, for what the caller does next."""
        unit, self._unit = self._unit, None
        if unit is not None:
            schedule_of(unit).show_unsharded(unit)


def _refuse_moves(unit: Unit, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for segment in unit.handle.segments if unit.handle is not None else ():
        shard = segment.layout.flat_param.data
        before = torch.empty(0, dtype=shard.dtype, device=shard.device)
        after = fn(before)
        if after.device != before.device and not before.is_meta:
            raise ValueError(
                f"the sharded parameters of {unit.name} cannot go from {before.device} to {after.device}; "
                "they live where their mesh does"
            )
