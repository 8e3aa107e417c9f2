"""`FSDPModule`: the methods of a module after `fully_shard` or `replicate`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, TypeVar, overload

import torch
from torch import nn

from fsdp_wrap._attributes import telling
from fsdp_wrap._building import refuse_sharing
from fsdp_wrap._by_hand import (
    ManualEnd,
    await_reduction,
    end_failed_backward,
    finalize,
    refuse_steps_between_sums,
    require_between_backwards,
    require_idle,
    reset,
    reshard,
    set_manual,
    set_sums,
    show_unsharded,
    unshard,
    wait_for,
)
from fsdp_wrap._checks import converted, refuse_replaced, require_root
from fsdp_wrap._core import UNIT_ATTR, listed, not_picklable
from fsdp_wrap._custom_comms import allocate_by_group, allocate_symmetric, hook_reductions, use_comms
from fsdp_wrap._params import Buffers, Layout, Where, make_copyable
from fsdp_wrap._runtime import (
    Step,
    Unit,
    buffers_of,
    run_forward,
    step_of,
    units_in,
)
from fsdp_wrap._state import deepcopy_wrapper, load_side_data, note_load, shortened, sides_in
from fsdp_wrap.forward_methods import register_forward_method

_Self = TypeVar("_Self", bound="FSDPModule")
_Destination = TypeVar("_Destination", bound=dict[str, Any])


class FSDPModule(nn.Module):
    """A module after `fully_shard`: an instance of a subclass of its former class, run as a unit.

    Outside of the unit's forward and backward the unit is sharded, and `parameters()` are `DTensor`s.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Makes an instance of the original class, as a sliced container asks for."""
        return cls.__mro__[cls.__mro__.index(FSDPModule) + 1](*args, **kwargs)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs forward, and all hooks, with full parameters."""
        return run_forward(self.__dict__[UNIT_ATTR], super().__call__, args, kwargs, self)

    def __run_as_forward(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return run_forward(_unit_of(self), call, args, kwargs, self)

    def register_forward_method(self, method_name: str) -> None:
        """Makes a method such as `generate` run with full parameters; see `fsdp_wrap.forward_methods`.

        Args:
            method_name: Name of the method. It must return its result, and not be a generator.

        Raises:
            ValueError: If there is no such method, or it cannot run as a forward.
        """
        register_forward_method(self, self, method_name, self.__run_as_forward)

    # parameters

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields names and parameters; first ends a backward that raised, so that they are sharded."""
        unit: Unit | None = self.__dict__.get(UNIT_ATTR)
        if unit is not None and unit.step is not None:
            end_failed_backward(step_of(unit))
        return super().named_parameters(*args, **kwargs)

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Gathers this unit's parameters, and makes the modules show them until it is resharded.

        The next forward uses them, unless an optimizer has changed the sharded parameters since. Between a
        forward and its backward the full parameters are in the graph of the forward. Then
        `torch.autograd.grad(loss, layer.weight)` gives this rank's own gradient. Sharded parameters are in no
        graph.

        Args:
            async_op: Return a handle at once; its `wait`, or the forward, waits for the gather.
        """
        units = _unit_of(self).over_all_meshes
        for unit in units:
            unshard(unit)
        handle = _IssuedUnshard(units[0])
        if async_op:
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Frees this unit's full parameters; the modules show the sharded parameters."""
        for unit in _unit_of(self).over_all_meshes:
            reshard(unit)

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Sets whether full parameters are freed between forward and backward, also of the root.

        Args:
            reshard_after_forward: True frees them after forward, and backward gathers them again. False keeps
                them.
            recurse: Also set it for the units below.

        Raises:
            ValueError: If `reshard_after_forward` is not a bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(f"reshard_after_forward must be a bool, and is {reshard_after_forward!r}")
        for unit in self.__units(recurse):
            unit.set_reshard_after_forward(reshard_after_forward)

    def set_reshard_after_backward(self, reshard_after_backward: bool, *, recurse: bool = True) -> None:
        """Sets whether full parameters are freed after backward.

        If not, the next forward uses them, unless an optimizer has changed the sharded parameters since.

        Args:
            reshard_after_backward: True, as at the beginning, frees them.
            recurse: Also set it for the units below.
        """
        self.__set(recurse, reshards_after_backward=reshard_after_backward)

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Sets whether the memory of full parameters stays allocated while they are sharded.

        The first unshard allocates it. Each later one gathers into the same memory.

        Args:
            keep: Whether the memory stays allocated.
            recurse: Also set it for the units below.
        """
        for buffers in self.__buffers(recurse):
            buffers.keep_storage(keep)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Sets whether backward gathers this unit's parameters; an embedding's backward does not need them.

        A backward that needs parameters which were not gathered may crash the process.

        Args:
            unshard_in_backward: Whether backward gathers them, as at the beginning.
        """
        self.__set(False, unshards_in_backward=unshard_in_backward)

    def set_modules_to_forward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Makes this unit's forward issue the all-gathers of other units.

        Args:
            modules: The modules of these units, in the order of their gathers. An empty list
                restores the default.

        Raises:
            ValueError: If a module is no `FSDPModule`.
        """
        self.__set(False, forward_targets=_units_of(modules))

    def set_modules_to_backward_prefetch(self, modules: list[FSDPModule]) -> None:
        """Makes this unit's backward issue the all-gathers of these units instead of the expected next one.

        Args:
            modules: The modules of these units, in the order of their gathers. An empty list
                restores the default.

        Raises:
            ValueError: If a module is no `FSDPModule`.
        """
        self.__set(False, backward_targets=_units_of(modules))

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Makes the next iteration wait for an event, such as an optimizer's step on another stream.

        Args:
            event: The event to wait for, once.
        """
        wait_for(self.__step, event)

    # gradients

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Sets whether a backward waits for its last reduction, or leaves the wait to the next backward.

        Args:
            is_last_backward: True, as at the beginning, waits. With False, read no gradient before the last
                backward.
        """
        self.__step.ending.last = is_last_backward

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Sets whether `finalize_backward`, instead of each backward, waits for the last reduction.

        If so, `set_is_last_backward` has no effect.

        Args:
            enabled: Whether to wait in `finalize_backward`.

        Raises:
            RuntimeError: If another unit encloses this one, or a backward has begun and was not finalized.
        """
        require_root(_unit_of(self), "set_manual_backward_finalization()")
        set_manual(self.__step, enabled)

    @overload
    def finalize_backward(self, *, async_op: Literal[False] = False) -> None: ...

    @overload
    def finalize_backward(self, *, async_op: Literal[True]) -> GradientReductionHandle: ...

    @overload
    def finalize_backward(self, *, async_op: bool) -> GradientReductionHandle | None: ...

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Ends the backwards since the last call: issues remaining reductions, reshards, and waits.

        Gradients must not be read or cleared before. All backwards but the last may run after
        `set_requires_gradient_sync(False)`, but it must be on again when this is called. Before the first
        forward this does nothing.

        Args:
            async_op: Return a handle at once; no forward may begin before its `wait`.

        Raises:
            RuntimeError: If another unit encloses this one, `set_manual_backward_finalization` is off, a
                backward is running, the last handle has not waited, or gradients would stay summed over a
                part of the ranks only.
        """
        require_root(_unit_of(self), "finalize_backward()")
        step = self.__step
        finalize(step)
        if async_op:
            ending = step.ending  # not the user's before the first forward, when nothing is to end
            return (
                _IssuedReduction(step, ending) if isinstance(ending, ManualEnd) else GradientReductionHandle()
            )
        await_reduction(step)
        return None

    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Sets whether gradients are reduced, or accumulated unsharded for a later backward.

        While gradients accumulate, parameters without a `.grad` get zeros as their gradient: log and clip
        after the backward that reduces. `zero_grad` drops the accumulated gradients.

        Args:
            requires_gradient_sync: Whether backwards reduce, as at the beginning.
            recurse: Also set it for the units below.
        """
        sums = requires_gradient_sync
        set_sums(self.__units(recurse), syncs=sums, sums_over_replicas=sums)

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Sets whether reduced gradients are summed over the replicas, or kept for a later backward.

        Until the sum, each rank holds its shard of the sums over its copy, but not as `.grad`: optimizers
        refuse to step, and `zero_grad` drops the sums. To detect `zero_grad`, the smallest parameter of each
        unit and dtype has zeros as its gradient. Without replicas this has no effect. The first backward
        after `True` sums all gradients, also of units that it does not reach.

        Args:
            requires_all_reduce: Whether backwards sum over the replicas, as at the beginning.
            recurse: Also set it for the units below.

        Raises:
            NotIdleError: Inside a backward.
        """
        unit = _unit_of(self)
        if unit.step is not None:
            require_between_backwards(step_of(unit), "set_requires_all_reduce()")
        if not requires_all_reduce:
            refuse_steps_between_sums(self.__units(recurse))
        set_sums(self.__units(recurse), sums_over_replicas=requires_all_reduce)

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Sets the divisor of this unit's summed gradients, by default the number of ranks.

        It holds for all parameters of the unit, on every mesh.

        Args:
            factor: The divisor, finite and not 0.

        Raises:
            ValueError: If it is 0, infinite or not a number.
        """
        if not 0 < abs(factor) < float("inf"):  # nor NaN
            raise ValueError(f"the divisor of gradients must be finite and not 0, but is {factor}")
        for buffers in self.__buffers(False):
            buffers.gradients.divide_by(factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The old name of `set_gradient_divide_factor`.

        Args:
            factor: The divisor, finite and not 0.
        """
        self.set_gradient_divide_factor(factor)

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None] | None, *, stream: torch.Stream | None = None
    ) -> None:
        """Sets a hook that is called with this rank's averaged gradients after each reduction of this unit.

        The hook may change them in place, for example average them over further ranks. It gets one 1-D tensor
        for each dtype in the unit.

        Args:
            hook: The hook; None removes it.
            stream: The stream to run the hook on; by default the computation's.

        Raises:
            TypeError: If the hook cannot be called.
            ValueError: If a stream is given, and the mesh has replicas or the unit computes on the CPU.
        """
        for unit in _unit_of(self).over_all_meshes:
            hook_reductions(unit, hook, stream)

    # communication

    def set_custom_all_gather(self, comm: Any) -> None:
        """Makes this unit gather its parameters by a user's object.

        Args:
            comm: An object with the interface of torch's `AllGather`: `allocate(size, *, dtype, device)`
                returns memory, and `comm(output_tensor, input_tensor, group, async_op)` fills the output from
                all ranks' inputs and returns a work, or None if it is done.

        Raises:
            TypeError: If `comm` does not have this interface.
            RuntimeError: If `compress` has set codecs for this unit.
        """
        self.__use_comms(all_gather=comm)

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Makes this unit reduce its gradients by a user's object.

        Args:
            comm: An object with the interface of torch's `ReduceScatter`: `allocate(size, *, dtype, device)`
                returns memory, and `comm(output_tensor, input_tensor, group, op)` writes the output. `op` is
                always `ReduceOp.SUM`; the output is divided afterwards.

        Raises:
            TypeError: If `comm` does not have this interface.
            RuntimeError: If `compress` has set codecs for this unit.
        """
        self.__use_comms(reduce_scatter=comm)

    def __use_comms(self, **comms: Any) -> None:
        require_idle([self.__step.root], "setting a custom collective")
        for unit in _unit_of(self).over_all_meshes:
            if unit.params:
                use_comms(unit.buffers, unit.name, **comms)

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Sets whether the process group's own allocator allocates this unit's communication buffers.

        NCCL then sends from the buffers without a copy. With a backend without allocator this has no effect.

        Args:
            enable: Whether it does.

        Raises:
            RuntimeError: If a custom collective or `set_symm_mem_for_comm` allocates the buffers, inside a
                forward or backward, or while gradients wait for a reduction.
        """
        require_idle([self.__step.root], "choosing the memory for communication")
        for unit in _unit_of(self).over_all_meshes:
            allocate_by_group(unit, enable)

    def set_symm_mem_for_comm(self, backend: Literal["NCCL"] = "NCCL") -> None:
        """Allocates this unit's communication buffers in NCCL's symmetric memory; collective.

        NCCL may then use copy engines or special kernels. Both gathers and reductions use the memory.

        Args:
            backend: "NCCL", the only one that has such memory.

        Raises:
            ValueError: If `backend` is not "NCCL", or the unit does not communicate by NCCL.
            RuntimeError: If a custom collective or the process group's allocator allocates the buffers,
                inside a forward or backward, or while gradients wait for a reduction.
        """
        require_idle([self.__step.root], "choosing the memory for communication")
        for unit in _unit_of(self).over_all_meshes:
            allocate_symmetric(unit, backend)

    def set_separate_reduce_scatter_group(self, enable: bool = True, *, recurse: bool = True) -> None:
        """Sets whether gradients are reduced in a process group of their own; collective.

        With NCCL, reductions then no longer queue behind gathers. All ranks must pass the same value. On the
        CPU this has no effect, since collectives do not queue there.

        Args:
            enable: Whether they are.
            recurse: Also set it for the units below.
        """
        require_idle([self.__step.root], "choosing the process group of reductions")
        for unit in self.__units(recurse):
            unit.buffers.communicator.reduce_apart(enable)
            unit.set(reduces_apart=enable)

    def set_reduce_scatter_max_input_buffers(self, max_input_buffers: int, *, recurse: bool = True) -> None:
        """Sets how many units' reductions may be in flight at once, by default one.

        More of them let the computation wait less for slow reductions, at the cost of memory.

        Args:
            max_input_buffers: The number of reductions, at least 1.
            recurse: Also set it for the units below.

        Raises:
            TypeError: If `max_input_buffers` is no int.
            ValueError: If `max_input_buffers` is less than 1.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(f"max_input_buffers must be an int, not {max_input_buffers!r}")
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be at least 1, not {max_input_buffers}")
        self.__set(recurse, most_reducing=max_input_buffers)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Accepted without effect: gradients are always reduced by sums, and divided afterwards.

        Args:
            enable: Ignored.
        """

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Sets whether parameters that no rank used get gradients of zeros, or None.

        In both cases different ranks may use different parameters.

        Args:
            reduce_scatter_unused_params: True for zeros, False, as at the beginning, for None.
            recurse: Also set it for the units below.
        """
        self.__set(recurse, counts_unused=reduce_scatter_unused_params)

    def reset_iter_state(self) -> None:
        """Drops the state of a failed forward or backward, and gradients that wait for a reduction.

        The next outermost forward does the same, but keeps gradients that earlier backwards accumulated.

        Raises:
            RuntimeError: If another unit encloses this one.
        """
        require_root(_unit_of(self), "reset_iter_state()")
        reset(self.__step)

    # conversions, copies, state dicts

    def _apply(self: _Self, fn: Callable[..., Any], recurse: bool = True) -> _Self:
        unit = _unit_of(self)
        refuse_sharing(unit, fn)
        for member in unit.over_all_meshes:
            converted(member, fn, "they live where their mesh does")
        self.reshard()
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for buffers in self.__buffers(False):
            if buffers.where is Where.SHARDED:
                if not unit.parts or _shows_one_kind(buffers):  # parts are converted one by one
                    buffers.follow_replaced()
        return self

    def __deepcopy__(self: _Self, memo: dict[int, Any]) -> _Self:
        """Returns a second module of the same values, on the same process groups; no communication."""
        return deepcopy_wrapper(self, _unit_of(self), memo)

    def extra_repr(self) -> str:
        """Returns the text of the module's class, and where state and shards lie."""
        all_buffers = self.__buffers(False)
        layouts = [segment.layout for buffers in all_buffers for segment in buffers.segments]
        staged = "state over replicas" if any(buffers.staged for buffers in all_buffers) else ""
        return ", ".join(filter(None, [super().extra_repr(), staged, _format_alignment(layouts)]))

    def __getstate__(self) -> dict[str, Any]:
        raise not_picklable(f"a sharded or replicated module ({_unit_of(self).name})")

    @overload
    def state_dict(
        self, *, destination: _Destination, prefix: str = ..., keep_vars: bool = ...
    ) -> _Destination: ...

    @overload
    def state_dict(self, *, prefix: str = ..., keep_vars: bool = ...) -> dict[str, Any]: ...

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the state dict of `torch.nn.Module`, with `DTensor`s.

        Raises:
            ReplacedError: If a sharded parameter was removed or replaced.
            ValueError: If the replacement is no `DTensor` that fits.
        """
        self.reshard()
        for unit in _unit_of(self).over_all_meshes:
            buffers = unit.buffers
            if buffers.where is Where.SHARDED and not buffers.segments.without_values:
                buffers.follow_replaced()
                for segment in buffers.segments:
                    refuse_replaced(unit, segment.params)
        earlier = len((args[0] if args else kwargs.get("destination")) or ())
        destination = super().state_dict(*args, **kwargs)
        make_copyable(destination, [*destination][earlier:])
        return destination

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads a state dict as `torch.nn.Module` does; lists in its errors are short.

        Args:
            state_dict: `DTensor`s; `set_model_state_dict` also takes full tensors.
            strict: Whether names must match exactly.
            assign: Whether the values replace parameters; they must then be `DTensor`s that fit.

        Returns:
            Missing and unexpected keys.

        Raises:
            RuntimeError: If the state dict does not fit. What fits of it has been loaded.
        """
        try:
            return super().load_state_dict(state_dict, strict, assign)
        except RuntimeError as error:
            text = shortened(str(error))
            if text == str(error):
                raise
            raise RuntimeError(text) from None

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        self.reshard()
        _, strict, missing, _, errors = args
        for unit in _unit_of(self).over_all_meshes:
            note_load(unit, self, state_dict, prefix, call=args[-1])  # the errors of the whole load
            load_side_data(sides_in(unit, self, prefix), state_dict, strict, missing, errors)
        super()._load_from_state_dict(state_dict, prefix, *args)

    # common helpers; names that a user's module, whose class this joins, cannot have as well

    @property
    def __step(self) -> Step:
        return step_of(_unit_of(self))

    def __units(self, recurse: bool) -> Iterable[Unit]:
        return dict.fromkeys(units_in(self).values()) if recurse else _unit_of(self).over_all_meshes

    def __buffers(self, recurse: bool) -> list[Buffers]:
        return buffers_of(self.__units(recurse))

    def __set(self, recurse: bool, **options: Any) -> None:
        for unit in self.__units(recurse):
            unit.set(**options)


def share_comm_ctx(modules: list[FSDPModule]) -> None:
    """Accepted without effect: all units of a process share the communication queues of their device.

    Args:
        modules: Roots, such as the stages of a pipeline.

    Raises:
        ValueError: If a module is no `FSDPModule`.
    """
    _units_of(modules)


class GradientReductionHandle:
    """The handle of the reductions that `FSDPModule.finalize_backward` has issued."""

    def wait(self) -> None:
        """Waits until the gradients are reduced.

        Raises:
            RuntimeError: If `FSDPModule.reset_iter_state` has dropped the gradients.
        """


class _IssuedReduction(GradientReductionHandle):
    def __init__(self, step: Step, ending: ManualEnd) -> None:
        self._step: Step | None = step
        self._ending, self._issued = ending, ending.issue()

    def wait(self) -> None:
        if self._step is not None:
            self._ending.require_issued(self._issued)
            await_reduction(self._step)
            self._step = None


class UnshardHandle:
    """The handle of the gather that `FSDPModule.unshard` has issued."""

    def wait(self) -> None:
        """Waits for the gather, and makes the modules show the full parameters."""


class _IssuedUnshard(UnshardHandle):
    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        unit, self._unit = self._unit, None
        for member in () if unit is None else unit.over_all_meshes:
            show_unsharded(member)


def run_as_unit(module: nn.Module, unit: Unit, kind: type[FSDPModule]) -> None:
    """Changes a module's class to a subclass of its own class and of `kind`, so that it runs as a unit."""
    module.__dict__[UNIT_ATTR] = unit
    module.__class__ = _class_of(type(module), kind)  # type: ignore[arg-type]  # classes can be hashed


@functools.cache
def _class_of(cls: type[nn.Module], kind: type[FSDPModule]) -> type[FSDPModule]:
    name = f"{kind.__name__.removesuffix('Module')}{cls.__name__}"
    return type(name, (kind, cls), {"__module__": cls.__module__, "__getattr__": telling(cls.__getattr__)})


def _unit_of(module: Any) -> Unit:
    if not isinstance(module, FSDPModule):
        raise ValueError(
            f"this {type(module).__name__} is not sharded yet: apply fully_shard or replicate to it first"
        )
    unit: Unit = module.__dict__[UNIT_ATTR]
    return unit


def _units_of(modules: Iterable[Any]) -> tuple[Unit, ...]:
    return tuple(unit for module in modules for unit in _unit_of(module).over_all_meshes)


def _shows_one_kind(buffers: Buffers) -> bool:
    """Returns whether each segment's shown parameters have one dtype, and all or none are meta tensors."""
    shown = ([param for param in sharded.display.shown() if param is not None] for sharded in buffers.params)
    return all(len({(param.dtype, param.is_meta) for param in params}) == 1 for params in shown)


def _format_alignment(layouts: Sequence[Layout]) -> str:
    """Formats, for `repr`, the alignment of shards and the parameters left unsharded for it; "" if none."""
    aligned = [layout for layout in layouts if layout.alignment is not None]
    if not aligned:
        return ""
    whole = [repr(fqn) for layout in aligned if not layout.sharded for fqn in layout.fqns]
    beside = f" ({listed(whole, 3)} whole on every rank)" if whole else ""
    return f"aligned to {aligned[0].alignment}{beside}"
