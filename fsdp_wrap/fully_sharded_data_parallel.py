"""`FullyShardedDataParallel`, the public wrapper."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.algorithms.join import Joinable, JoinHook
from torch.distributed.device_mesh import DeviceMesh

from fsdp_wrap._attributes import GONE
from fsdp_wrap._building import (
    REGISTRY,
    MaterializationError,
    UnitSpec,
    Values,
    build_unit,
    check_contents,
    warn_of_container,
)
from fsdp_wrap._by_hand import end_failed_backward, joins, no_sync, require_idle
from fsdp_wrap._checks import converted, require_root
from fsdp_wrap._comm import ShardMesh, resolve_device
from fsdp_wrap._core import (
    UNIT_ATTR,
    WRAPPED_ATTR,
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullPrecision,
    FullStateDictConfig,
    Ignored,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    OptimStateKeyType,
    SegmentPolicy,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    UnitContents,
    check_flag,
    clean_fqn,
    listed,
    not_picklable,
    tells_keywords,
)
from fsdp_wrap._params import Where
from fsdp_wrap._runtime import Unit, run_forward, step_of, units_in
from fsdp_wrap._settings import Settings, ShowsSettings, resolve_ignored, resolve_settings
from fsdp_wrap._state import (
    deepcopy_wrapper,
    full_units,
    is_summoned,
    iter_full_params,
    offload_optimizer_state,
    register_comm_hook,
    summon_full_params,
)
from fsdp_wrap._state_dict_methods import OptimStateDictMethods, StateDictMethods, end_load
from fsdp_wrap._wrap_plan import plan_wrapping
from fsdp_wrap.clip_grad import clip_grad_norm_, grad_norms
from fsdp_wrap.forward_methods import register_forward_method

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
]

_clean_names: ContextVar[bool] = ContextVar("fsdp_wrap_clean_names", default=False)


@contextmanager
def clean_names() -> Iterator[None]:
    """Removes wrapper prefixes from names of parameters, buffers and modules while the context is open."""
    token = _clean_names.set(True)
    try:
        yield
    finally:
        _clean_names.reset(token)


_IN_BACKWARD = "wrap with use_orig_params=True, which keeps the Parameter objects, or step after backward"
"""Advice about optimizers applied in backward, which would train nothing."""


_INSTEAD = {
    "mesh": "pass it as device_mesh",
    "mp_policy": "pass mixed_precision=MixedPrecision(...)",
    "offload_policy": "pass cpu_offload=CPUOffload(offload_params=True)",
    "reshard_after_forward": (
        "pass sharding_strategy, FULL_SHARD to free parameters after forward, or SHARD_GRAD_OP to keep them"
    ),
    "ignored_params": "pass them as ignored_states",
    "shard_placement_fn": "only fully_shard has it",
    "dp_mesh_dims": "pass device_mesh=mesh[...] with the dimensions to shard over",
    "device_ids": "pass device_id, the one device of this rank",
    "find_unused_parameters": "leave it out, parameters may be unused",
    **GONE,
}
"""What stands for arguments of `fully_shard`, DistributedDataParallel and the last release."""
_OF_FULLY_SHARD = {
    "set_requires_gradient_sync": "accumulate gradients inside of `with model.no_sync():`",
    "set_requires_all_reduce": "use `with model.no_sync(reduce_within_copy=True):`",
    "set_is_last_backward": "accumulate gradients inside of `with model.no_sync():`",
    "unshard": "use `with FullyShardedDataParallel.summon_full_params(model):`",
    "reshard": "parameters are resharded after each use, and at the end of summon_full_params",
    "set_modules_to_forward_prefetch": "pass forward_prefetch=True",
    "set_modules_to_backward_prefetch": "pass backward_prefetch",
    "set_gradient_divide_factor": "scale the loss",
    "set_reduce_scatter_divide_factor": "scale the loss",
    "set_all_reduce_hook": "use register_comm_hook(state, hook)",
    "set_reshard_after_backward": "pass sharding_strategy",
}
"""What stands for methods of `fully_shard`'s modules."""


class FullyShardedDataParallel(Joinable, ShowsSettings, StateDictMethods, OptimStateDictMethods):
    """Shards a module's parameters, gradients and optimizer state over the ranks of a process group.

    Each wrapped module is a unit. Its parameters are unsharded just before its forward and backward, and
    freed after them. Build the optimizer from `parameters()` after wrapping.

    After a forward, modules show sharded parameters again, which are not in the graph of the forward. To
    call `torch.autograd.grad` with respect to a parameter, read the parameter while the forward runs, by a
    forward pre-hook on its layer. The result is this rank's own gradient. `backward()` needs no such hook.

    Args:
        module: The module to wrap.
        process_group: The ranks to shard over; None for the default group. For hybrid strategies a (shard,
            replicate) pair of groups; None to shard within each host. An object that has only the methods
            `rank()` and `size()` stands in for a group: the module is wrapped as on that rank, but cannot
            run unless the size is 1.
        sharding_strategy: FULL_SHARD by default.
        cpu_offload: Keep shards, gradients and optimizer state in host memory, or optimizer state alone: a
            `CPUOffload`, ours or torch's.
        auto_wrap_policy: Chooses the submodules that become units of their own; see `fsdp_wrap.wrap`.
        backward_prefetch: When backward gathers the next unit.
        mixed_precision: Dtypes of computation and communication: floating-point ones of 16 bits or more. With
            an `auto_wrap_policy`, modules of its `_module_classes_to_ignore` become units of their own that
            stay in full precision.
        ignored_modules: Modules not to shard, with all modules below them.
        param_init_fn: Materialises and initialises the tensors that a module holds directly on the meta
            device. It is called for the modules of a unit that hold such tensors, and for their parents,
            children first. Without it, the modules' `reset_parameters` are called. Tensors with values keep
            them.
        device_id: The device to compute on; by default the device of the module's tensors. If all tensors are
            on the meta device, it is the current accelerator, if there is one.
        sync_module_states: Start all ranks from the first rank's parameters and buffers. On the other ranks
            these may be on the meta device.
        forward_prefetch: Gather the unit that came next in the last iteration while the running one computes.
        limit_all_gathers: Accepted; at most two units' gathers are ever in flight.
        use_orig_params: Let `parameters()` give the module's own parameters, holding 1-D slices, instead
            of `FlatParameter`s.
        ignored_states: Modules or parameters not to shard.
        device_mesh: A `DeviceMesh` instead of `process_group`: of one dimension, or of two (replicate, shard)
            for hybrid strategies.
        shared_memory: Let ranks on one host communicate through its memory, if they compute on the CPU in a
            gloo group. Not one of torch's arguments.
        travel_together_bytes: Bytes of memory for batches: one collective gathers or reduces several small
            units, from the second iteration on. 0 switches batches off; None is the default of the device.
            The root's value holds for the model, and `set_travel_together_bytes` changes it. Not one of
            torch's arguments.
        shard_alignment: Alignment of the boundaries between shards within a parameter: a number of elements,
            or "rows" for indices of the first dimension. The cost is padding, which `repr` shows. None for no
            alignment. Frozen tensor subclasses, which are sharded as bytes, are not aligned. Not one of
            torch's arguments.
        state_over_replicas: With hybrid strategies, shard parameters, gradients and optimizer state over the
            replicas too: each copy computes by itself as before, and all ranks hold one state between them.
            Each rank also keeps its part of the copy, as gathered, and gathers it over the replicas when the
            state has changed. Not one of torch's arguments.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If the process group is missing or does not contain this rank, the module is wrapped
            already, a parameter cannot be sharded, an ignored object is no module or parameter, or nothing
            can be computed in a dtype of `mixed_precision`.
        RuntimeError: If `param_init_fn` leaves a tensor on the meta device.

    The API is that of `torch.distributed.fsdp.FullyShardedDataParallel`; the method is ZeRO stage 3
    (Rajbhandari et al., 2020, arXiv:1910.02054).
    """

    @tells_keywords(_INSTEAD)
    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: torch_fsdp.CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Iterable[nn.Module] | None = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: int | torch.device | None = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Iterable[nn.Module] | Iterable[nn.Parameter] | None = None,
        device_mesh: DeviceMesh | None = None,
        *,
        shared_memory: bool = True,
        travel_together_bytes: int | None = None,
        shard_alignment: int | str | None = None,
        state_over_replicas: bool = False,
    ) -> None:
        # Late, since it imports torch.distributed.checkpoint, which takes as long as this package.
        from fsdp_wrap._torch_helpers import adapt_torch_helpers

        super().__init__()
        adapt_torch_helpers()
        _check_wrappable(module)
        ignored = resolve_ignored(module, ignored_modules, ignored_states)
        settings = Settings.of(locals())
        mesh = settings.mesh()
        values = Values(param_init_fn=param_init_fn, synchronised=sync_module_states, first=mesh.is_first)
        contents = UnitContents.of(module, ignored)
        check_contents(contents, values, mesh, None if use_orig_params else _IN_BACKWARD)
        device = resolve_device(contents.tensors(), device_id, mesh.groups)
        spec = _spec_of(settings, module, mesh, device)
        if auto_wrap_policy is not None:
            _wrap_below(type(self), module, auto_wrap_policy, ignored, replace(settings, device_id=device))
        self._show_settings(settings, mesh, device)
        self._adopt(module, build_unit(module, contents, spec, values))

    def _adopt(self, module: nn.Module, unit: Unit) -> None:
        self._fsdp_wrapped_module = module
        self.__dict__.update({UNIT_ATTR: unit, "_unit": unit, "_load": None, "_load_errors": None})
        self.__dict__["_state_dict_settings"] = resolve_settings()
        unit.moves_to(self)
        for sharded in unit.params if self.cpu_offload.only_state else ():
            offload_optimizer_state(sharded.sharded_params)
        self.register_load_state_dict_post_hook(end_load)  # type: ignore[no-untyped-call]

    # the wrapped module

    @property
    def module(self) -> nn.Module:
        """The wrapped module."""
        return self._fsdp_wrapped_module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == WRAPPED_ATTR:  # not set yet: the lookup below would recurse
                raise
        try:
            return getattr(self._fsdp_wrapped_module, name)
        except AttributeError as error:
            if name in GONE:
                raise AttributeError(f"{error}: {GONE[name]}", name=name, obj=self) from None
            if name not in _OF_FULLY_SHARD:
                raise
            raise AttributeError(
                f"{error}; '{name}' is a method of fully_shard's modules: {_OF_FULLY_SHARD[name]}",
                name=name,
                obj=self,
            ) from None

    def __getitem__(self, key: Any) -> Any:
        return self._fsdp_wrapped_module[key]  # type: ignore[index]

    def extra_repr(self) -> str:
        """Returns one line: the strategy, this rank's elements of each dtype, and batches."""
        buffers = self._unit.buffers
        if not buffers.params:
            return f"{self.sharding_strategy.name}, no parameters of its own"
        copies = f" x {buffers.replicas.size} copies" if buffers.replicas.size > 1 else ""
        copies += " (state over replicas)" if buffers.staged else ""
        ways = [
            communicator.way for communicator in (buffers.communicator, buffers.replicas) if communicator.way
        ]
        way = f", through {ways[0]}" if ways else ""
        others = step_of(self._unit).queue.gathered_with(self._unit) if self._unit.step else []
        if others:
            way += f", gathered with {listed(map(repr, others), 3)}"
        held = ", ".join(segment.describe() for segment in buffers.segments)
        return (
            f"{self.sharding_strategy.name}, rank {buffers.communicator.rank} of "
            f"{buffers.communicator.size}{copies}, holds {held}{way}"
        )

    def check_is_root(self) -> bool:
        """Returns whether this instance is the root of its tree, as is known after the first forward."""
        return step_of(self._unit).root is self._unit

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """Returns the wrapper instances at and below `module`, parents first.

        Args:
            module: Any module.
            root_only: Return only instances that no other instance encloses.
        """
        wrappers = [m for m in module.modules() if isinstance(m, FullyShardedDataParallel)]
        if root_only:
            nested = {id(m) for outer in wrappers for m in outer.modules() if m is not outer}
            wrappers = [m for m in wrappers if id(m) not in nested]
        return wrappers

    # training

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the wrapped module's forward with its full parameters."""
        # The body of `_run_as_forward`, to save a call in every step.
        if self._load is not None:  # left by a failed load of a plain module above
            self._end_load()
        return run_forward(self._unit, self._modules[WRAPPED_ATTR], args, kwargs)  # type: ignore[arg-type]

    def _run_as_forward(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        self._end_load()
        return run_forward(self._unit, call, args, kwargs)

    def register_forward_method(self, method_name: str) -> None:
        """Makes a method of the wrapped module, such as `generate`, run with full parameters.

        See `fsdp_wrap.forward_methods`.

        Args:
            method_name: Name of the method. It must return its result, and not be a generator.

        Raises:
            ValueError: If there is no such method, or it cannot run as a forward.
        """
        register_forward_method(self, self._fsdp_wrapped_module, method_name, self._run_as_forward)

    def join_hook(self, **kwargs: Any) -> JoinHook:
        """Returns the hook of this model, the root, for `torch.distributed.algorithms.Join`; collective.

        Args:
            kwargs: Arguments of `Join`. `divide_by_initial_world_size=False` divides gradients by the number
                of ranks that still have a batch, not of all. `optimizer`, or a sequence of them, is for ranks
                without any batch, which step with the others.
        """
        return joins.needed("Join")(self).hook(**kwargs)  # type: ignore[no-any-return]

    join_device = torch.device("cpu")
    """The device of `Join`'s own collectives."""

    @property
    def join_process_group(self) -> dist.ProcessGroup:
        """The ranks that compute with this model; collective if they have not met in this way."""
        return joins.needed("Join")(self).group  # type: ignore[no-any-return]

    def no_sync(self, *, reduce_within_copy: bool = False) -> AbstractContextManager[None]:
        """Accumulates gradients without communication, or with little, while the context is open.

        The next backward outside of the context adds the accumulated gradients to its own. Until then they
        are held unsharded, in memory of the size of the full model. Units that do not reshard after forward
        (SHARD_GRAD_OP) keep their parameters too. The next forward gathers nothing, unless the parameters
        have changed; a change must come on all ranks alike. A backward outside of the context frees them.

        Until then a `.grad` that was None is zeros of the parameter's dtype, on NO_SHARD too, where torch's
        is the accumulated gradient of this rank, in the dtype in which it was computed. Log and clip after
        the backward outside of the context.

        Args:
            reduce_within_copy: With several copies (HYBRID_SHARD, _HYBRID_SHARD_ZERO2, NO_SHARD), sum
                gradients over the ranks of each copy at once. The next backward outside of the context sums
                over the copies. Until then each rank holds its shard of the sums, but not as `.grad`:
                optimizers refuse to step, and `zero_grad` drops the sums. With one copy, gradients are
                reduced as outside of the context. Not one of torch's arguments.

        Raises:
            RuntimeError: If another instance encloses this one.
            NotIdleError: With `reduce_within_copy`, when entered inside a backward.
            TypeError: If `reduce_within_copy` is not a bool.
        """
        require_root(self._unit, "no_sync()")
        check_flag("reduce_within_copy", reduce_within_copy)
        return no_sync(step_of(self._unit), reduce_within_copy)

    def set_reshard_after_forward(self, reshard_after_forward: bool) -> None:
        """Sets for this unit alone whether its full parameters are freed between forward and backward.

        By default the strategy decides, except that the root keeps its own, since backward needs them first.

        Args:
            reshard_after_forward: True frees them after forward, and backward gathers them again. False keeps
                them.
        """
        self._unit.set_reshard_after_forward(reshard_after_forward)

    def clip_grad_norm_(self, max_norm: float | int, norm_type: float | int = 2.0) -> torch.Tensor:
        """Scales all gradients so that their total norm over all ranks is at most `max_norm`.

        Collective, for the root only. Gradients of ignored parameters must be the same on all ranks.

        Args:
            max_norm: Upper bound of the norm.
            norm_type: The p of the p-norm, positive; `float("inf")` for the largest absolute value.

        Returns:
            The total norm before clipping, a 0-d tensor, the same on all ranks.

        Raises:
            RuntimeError: Inside a forward, a backward or `summon_full_params`, or if another instance
                encloses this one.
            ValueError: If `norm_type` is not positive or `max_norm` negative.
        """
        return clip_grad_norm_(self, max_norm, norm_type)

    def grad_norms(self, norm_type: float | int = 2.0) -> dict[str, torch.Tensor]:
        """Returns the norm of each parameter's gradient over all ranks, by original name; unshards nothing.

        Collective; see `GradientNorms.by_name`. Parameters without a gradient are left out.

        Args:
            norm_type: The p of the p-norm, as for `clip_grad_norm_`.

        Raises:
            RuntimeError: Inside a forward, a backward or `summon_full_params`.
            ValueError: If `norm_type` is not positive.
        """
        return grad_norms(self, norm_type)

    def register_comm_hook(self, state: object, hook: Callable[..., None]) -> None:
        """Makes a hook reduce the gradients of all units; `fsdp_wrap.comm_hooks` has ready-made hooks.

        The hook averages: `hook(state, grad, output)` over the ranks that a unit is sharded over, or
        `hook(state, grad)` in place under NO_SHARD. With hybrid strategies the runtime averages its results
        over the replicas.

        Args:
            state: The first argument of the hook.
            hook: The hook.

        Raises:
            RuntimeError: If another instance encloses this one, if there is a hook already or compressed
                reductions, inside a forward or backward, or while gradients accumulated under `no_sync` wait
                to be reduced.
            ValueError: If `hook` does not take these arguments, or is a ready-made hook and `state` has other
                ranks.
        """
        register_comm_hook(self, state, hook)

    # full parameters

    summon_full_params = staticmethod(summon_full_params)
    iter_full_params = staticmethod(iter_full_params)

    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields names and parameters; inside `summon_full_params` names carry no wrapper prefixes."""
        if self._unit.step is not None:
            end_failed_backward(step_of(self._unit))
        return self._cleaned_if_summoned(super().named_parameters(*args, **kwargs))

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields names and buffers; inside `summon_full_params` names carry no wrapper prefixes."""
        return self._cleaned_if_summoned(super().named_buffers(*args, **kwargs))

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Yields names and modules; inside `summon_full_params` names carry no wrapper prefixes.

        A wrapper and its wrapped module then have the same name.
        """
        named: Iterator[tuple[str, nn.Module]] = super().named_modules(*args, **kwargs)
        if not (_clean_names.get() or is_summoned(self._unit)):
            return named  # one generator less for each level of nesting
        return ((clean_fqn(name), module) for name, module in named)

    def _cleaned_if_summoned(self, named: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        clean = _clean_names.get() or any(is_summoned(unit) for unit in units_in(self).values())
        return ((clean_fqn(name) if clean else name, value) for name, value in named)

    def apply(self, fn: Callable[[nn.Module], None]) -> FullyShardedDataParallel:
        """Applies `fn` to every submodule and self with full parameters shown; edits are kept.

        Args:
            fn: The function. It is called with each module, the innermost first, and may edit parameters in
                place.
        """
        units = list(units_in(self).values())
        require_idle(units, "apply()")
        with full_units(units, "apply()", writeback=True):  # units that are already shown stay so
            super().apply(fn)
        return self

    # conversions and copies

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> FullyShardedDataParallel:
        units = list(units_in(self).values())
        for unit in units:
            _check_conversion(unit, fn)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for unit in units:
            if unit.buffers.where is Where.SHARDED:
                unit.buffers.follow_replaced()
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> FullyShardedDataParallel:
        """Returns a second model of the same values, on the same process groups; no communication."""
        return deepcopy_wrapper(self, self._unit, memo)

    def __getstate__(self) -> dict[str, Any]:
        raise not_picklable(f"a wrapped module ({self._unit.name})")


def _check_wrappable(module: Any) -> None:
    if not isinstance(module, nn.Module):
        raise TypeError(f"FullyShardedDataParallel wraps a torch.nn.Module, not {type(module).__name__}")
    if isinstance(module, FullyShardedDataParallel):
        raise ValueError(
            f"this {type(module.module).__name__} is already wrapped in FullyShardedDataParallel: wrap a "
            "module once"
        )
    REGISTRY.refuse_taken(module)
    warn_of_container(module)


def _spec_of(settings: Settings, module: nn.Module, mesh: ShardMesh, device: torch.device) -> UnitSpec:
    precision = settings.policy
    policy = SegmentPolicy.of(precision)
    return UnitSpec(
        mesh=mesh,
        device=device,
        make_params=settings.params_maker(module, mesh),
        policy_of=lambda _: policy,
        buffer_dtype=precision.buffer_dtype,
        options=settings.unit_options(module),
        shared_memory=settings.shared_memory is not False,
    )


def _wrap_below(
    wrapper_cls: type[FullyShardedDataParallel],
    module: nn.Module,
    auto_wrap_policy: Any,
    ignored: Ignored,
    settings: Settings,
) -> None:
    names = {child: name for name, child in module.named_modules()}

    def make_unit(child: nn.Module, kwargs: dict[str, Any], left_to_ancestor: Set[nn.Parameter]) -> nn.Module:
        inherited: Any = replace(ignored, left=frozenset(left_to_ancestor))
        try:
            return wrapper_cls(child, **kwargs, ignored_states=inherited)
        except MaterializationError as error:
            raise MaterializationError(f"in '{names[child]}': {error}") from None

    policy = settings.mixed_precision
    classes = () if policy is None else tuple(policy._module_classes_to_ignore)
    plan = plan_wrapping(
        module,
        auto_wrap_policy,
        wrapper_cls,
        ignored_modules=ignored.modules,
        ignored_params=ignored.params,
        wrapper_kwargs=vars(settings),
        apart=(classes, {"mixed_precision": FullPrecision()}),
    )
    for child, kwargs in plan.targets.items():
        if kwargs == vars(settings):  # which were checked
            continue
        own = Settings.of(kwargs)
        try:
            own.mesh()
        except (TypeError, ValueError) as error:
            raise type(error)(f"for '{names[child]}': {error}") from None
    plan.apply(make_unit)


def _check_conversion(unit: Unit, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Refuses a conversion that would move shards to another device, or change their dtype while in use."""
    for segment, after in converted(unit, fn, "move the module before wrapping it, or pass device_id"):
        before = segment.params.flat_param.dtype
        if after == before:
            continue
        require_idle([unit], "a conversion to another dtype")
        if is_summoned(unit) or segment.gradients.accumulated:
            state = "shown in full" if is_summoned(unit) else "waiting for gradients left by no_sync"
            raise RuntimeError(
                f"the parameters of {unit.name} cannot go from {before} to {after} while they are {state}: "
                "convert between steps"
            )
