"""How gradients are reduced, if the user chooses: communication hooks, `compress`, in place of parameters.

A hook averages by itself. The ready-made ones have the names of torch's hooks for its wrapper. They divide
once before and once after they sum, by about the root of the number of ranks each time, so that low precision
neither overflows nor underflows.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from fsdp_wrap._by_hand import require_idle
from fsdp_wrap._checks import refuse_unsharded, require_root
from fsdp_wrap._comm import Pending, lane_of, make_communicator, reduce_scatter_single
from fsdp_wrap._core import OtherCommsError, Seam
from fsdp_wrap._params import Buffers
from fsdp_wrap._runtime import Unit, units_in
from fsdp_wrap._state.gradients.in_place import GradientsInPlace

_TORCH_HOOKS = "torch.distributed.algorithms._comm_hooks.default_hooks"

# ready-made


class DefaultState:
    """The state of the ready-made hooks.

    Args:
        process_group: The ranks to average over.

    Attributes:
        process_group: See there.
        world_size: How many they are.
        gradient_predivide_factor: Divisor of gradients before they are summed, a power of two.
        gradient_postdivide_factor: Divisor of the sum; the product of both is `world_size`.

    Raises:
        ValueError: If there is no process group.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        if process_group is None:
            raise ValueError(
                "a communication hook's state needs the process group to average over, not None: make it "
                "with process_group=..."
            )
        self.process_group = process_group
        self.world_size = dist.get_world_size(process_group)
        self.gradient_predivide_factor = 2.0 ** math.ceil(math.log2(self.world_size) / 2)
        self.gradient_postdivide_factor = self.world_size / self.gradient_predivide_factor


class LowPrecisionState(DefaultState):
    """The state of the compressing hooks.

    Args:
        process_group: The ranks to average over.
        parameter_type: Accepted as torch's is; gradients come back in the dtype in which they were given.
    """

    def __init__(self, process_group: dist.ProcessGroup, parameter_type: torch.dtype = torch.float32) -> None:
        super().__init__(process_group)
        self.parameter_type = parameter_type


def allreduce_hook(state: DefaultState, grad: torch.Tensor) -> None:
    """Averages gradients that every rank holds whole, in place.

    Args:
        state: The ranks and the divisors.
        grad: 1-D, of any floating dtype.
    """
    _average(grad.dtype, state, grad, None)


def reduce_scatter_hook(state: DefaultState, grad: torch.Tensor, output: torch.Tensor) -> None:
    """Averages gradients of which every rank keeps its part.

    Args:
        state: The ranks and the divisors.
        grad: This rank's gradients of all parameters of a unit, 1-D; spoiled.
        output: Gets this rank's part of the average: 1-D, of `grad.numel() / state.world_size` elements.
    """
    _average(grad.dtype, state, grad, output)


def fp16_compress_hook(
    state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None = None
) -> None:
    """Reduces in float16, by `allreduce_hook` or, with an output, `reduce_scatter_hook`.

    Args:
        state: The ranks and the divisors.
        grad: This rank's gradients of all parameters of a unit, 1-D; averaged in place, or spoiled if there
            is an `output`.
        output: Gets this rank's part of the average: 1-D, of `grad.numel() / state.world_size` elements. None
            if every rank holds the gradients whole.
    """
    _average(torch.float16, state, grad, output)


def bf16_compress_hook(
    state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None = None
) -> None:
    """Reduces in bfloat16, by `allreduce_hook` or, with an output, `reduce_scatter_hook`.

    Args:
        state: The ranks and the divisors.
        grad: This rank's gradients of all parameters of a unit, 1-D; averaged in place, or spoiled if there
            is an `output`.
        output: Gets this rank's part of the average: 1-D, of `grad.numel() / state.world_size` elements. None
            if every rank holds the gradients whole.
    """
    _average(torch.bfloat16, state, grad, output)


def _average(
    dtype: torch.dtype, state: DefaultState, grad: torch.Tensor, output: torch.Tensor | None
) -> None:
    travelling = grad.div_(state.gradient_predivide_factor).to(dtype)
    if output is None:
        dist.all_reduce(travelling, group=state.process_group)
        output, averaged = grad, travelling
    else:
        averaged = output if output.dtype == dtype else travelling.new_empty(output.shape)
        reduce_scatter_single(averaged, travelling, group=state.process_group)
    output.copy_(averaged).div_(state.gradient_postdivide_factor)


_READY_MADE = (allreduce_hook, reduce_scatter_hook, fp16_compress_hook, bf16_compress_hook)


# registered


def register_comm_hook(module: nn.Module, state: object, hook: Callable[..., None]) -> None:
    """Lets a hook reduce the gradients of all units of a wrapped module.

    Nothing is divided by the number of ranks before: the hook averages. It runs in each backward outside of
    `no_sync`, once for each unit and dtype, on the stream of the reductions where there is one.

    Units whose parameters are sharded call `hook(state, grad, output)`: `output`, all zeros, is to get this
    rank's part of the average of `grad` over the ranks that the unit is sharded over. With hybrid strategies
    these are the ranks of the shard group (which `state` should name), and the results are averaged over
    the replicas afterwards. Units under NO_SHARD call `hook(state, grad)`, which averages in place.

    Args:
        module: The root wrapper.
        state: The first argument of the hook.
        hook: The hook. Torch's own ones may be given.

    Raises:
        RuntimeError: Below the root, if there is a hook already (both are an `AssertionError` as well) or
            compressed reductions, inside a forward or backward, or while gradients wait that were accumulated
            under `no_sync`.
        ValueError: If there is no unit in the module; if `hook` cannot be called as the units will call it,
            or is a ready-made one and `state` names other ranks than a unit's gradients are to be averaged
            over.
    """
    units = [*units_in(module).values()]
    if not units:
        refuse_unsharded(module, "register_comm_hook()")
    require_root(units[0], "register_comm_hook()")
    require_idle(units, "register_comm_hook()")
    owning = [(unit, unit.buffers) for unit in units if unit.params]
    for unit, buffers in owning:
        _check_unit(unit, buffers)
        _check_hook(hook, unit, buffers)
        if hook in _READY_MADE or _module_of(hook) == _TORCH_HOOKS:
            _check_ranks(state, unit, buffers)
    for unit, buffers in owning:
        alone = make_communicator(None, buffers.communicator.device)
        replicas = buffers.replicas if _is_sharded(buffers) else alone
        buffers.gradients.reduce_by(_HookedReduction(unit, buffers, state, _working(hook)), replicas)


def _check_unit(unit: Unit, buffers: Buffers) -> None:
    if buffers.gradients.has_own_reduction:
        raise OtherCommsError(f"{unit.name} has a communication hook already, and takes one")
    if buffers.transport.compresses_reductions:
        raise RuntimeError(
            f"compress() decides how gradients of {unit.name} travel: call it without reductions first"
        )
    if buffers.gradients.untaken:
        raise RuntimeError(
            f"{unit.name} holds gradients that no_sync() left unreduced: run a backward outside of "
            "no_sync(), or call zero_grad(), before"
        )


def _check_hook(hook: Any, unit: Unit, buffers: Buffers) -> None:
    if not callable(hook):
        raise ValueError(f"a communication hook must be callable, but is {hook!r}")
    try:
        signature = inspect.signature(hook)
    except ValueError:  # not every callable tells
        return
    arguments = ("state", "grad", "output") if _is_sharded(buffers) else ("state", "grad")
    try:
        signature.bind(*arguments)
    except TypeError as error:
        raise ValueError(
            f"{unit.name} will call the communication hook as hook({', '.join(arguments)}), which its "
            f"signature {signature} does not allow: {error}"
        ) from None


def _check_ranks(state: Any, unit: Unit, buffers: Buffers) -> None:
    group = getattr(state, "process_group", None)
    if group is None:
        raise ValueError(f"a ready-made hook needs a DefaultState or LowPrecisionState, not {state!r}")
    named = sorted(dist.get_process_group_ranks(group))
    needed = sorted((buffers.communicator if _is_sharded(buffers) else buffers.replicas).members)
    if named != needed:
        raise ValueError(
            f"the hook has to average the gradients of {unit.name} over ranks {needed}, but its state "
            f"has ranks {named}: make it with their group, or where units differ write a hook that chooses"
        )


def _is_sharded(buffers: Buffers) -> bool:
    return all(segment.layout.sharded for segment in buffers.segments)


def _module_of(hook: Callable[..., None]) -> str:
    return getattr(hook, "__module__", "")


def _working(hook: Callable[..., None]) -> Callable[..., None]:
    """Replaces torch's hooks that fail on the CPU by this library's."""
    ours = {own.__name__: own for own in (fp16_compress_hook, bf16_compress_hook)}
    return ours.get(hook.__name__, hook) if _module_of(hook) == _TORCH_HOOKS else hook


class _HookedReduction:
    """The reduction of one unit by a hook (a `ReduceScatter`)."""

    def __init__(self, unit: Unit, buffers: Buffers, state: object, hook: Callable[..., None]) -> None:
        self._name = unit.name  # not the unit, which holds this
        self._lane = lane_of(buffers.communicator.device, "reduce")
        self._sharded = _is_sharded(buffers)
        self._state, self._hook = state, hook

    def __call__(self, shards: list[torch.Tensor], full: list[torch.Tensor]) -> Pending:
        def run(_: bool) -> None:
            for shard, grad in zip(shards, full):
                self._reduce(shard, grad.data.to(shard.dtype))  # an alias: hooks may replace its data

        return self._lane.issue(run)

    def _reduce(self, shard: torch.Tensor, grad: torch.Tensor) -> None:
        expected = shard.shape
        result = shard.zero_() if self._sharded else grad
        self._hook(self._state, *((grad, shard) if self._sharded else (grad,)))
        if result.shape != expected:
            raise RuntimeError(
                f"the communication hook left gradients of shape {tuple(result.shape)} for {self._name}; "
                f"they must keep {tuple(expected)}"
            )
        if not self._sharded:
            shard.copy_(grad)


# compressed


class _Compress(Protocol):
    def __call__(self, module: nn.Module, *, gathers: str | None, reductions: str | None) -> None: ...


compression: Seam[_Compress] = Seam("compression", "fsdp_wrap._compression")


def compress(module: nn.Module, *, gathers: str | None = None, reductions: str | None = None) -> None:
    """Lets the units of a module gather parameters and reduce gradients in fewer bytes.

    Each may travel as "bf16", or as "int8" or "int4": whole numbers from -127 to 127 or from -7 to 7, of
    which 128 consecutive ones of a rank's part share a scale s, the largest absolute value / 127 or / 7. A
    number comes back with an error of at most s / 2, before it is rounded to its dtype; a block with a NaN or
    an infinity comes back without a finite number. They take 0.5, 0.258 and 0.133 of fp32's bytes.

    All ranks compute with the same rounded parameters, bit for bit; what optimizers update, and what
    `summon_full_params` and state dicts show, is not rounded. A rank rounds the gradients that it sends
    once; the receiver adds them up in the reduce dtype, with its own in full.

    These travel as they are: integers and 8-bit floats, shards of less than 1,024 elements, what would not
    shrink, the sum over the replicas of hybrid strategies and of NO_SHARD, and parameters that fewer ranks
    keep from forward to backward.

    All ranks must call it alike (it is collective), at any time outside of forward and backward. The next
    call replaces what was chosen; `compress(module)` ends it.

    Args:
        module: A wrapped module, one that `fully_shard` was applied to, or one that contains such.
        gathers: How parameters travel; None: in param dtype.
        reductions: How gradients travel; None: in reduce dtype.

    Raises:
        MissingAddOn: If this copy of the library has no compression.
        RuntimeError: Inside a forward or backward, or if reductions are to be compressed that a communication
            hook does.
        ValueError: If a name is unknown, there is no unit, or ranks choose differently.
    """
    compression.needed("compress()")(module, gathers=gathers, reductions=reductions)


# in place


def set_gradients_in_place(module: nn.Module, enabled: bool = True) -> None:
    """Lets gradients take the place of their full parameters, which saves a unit's memory in backward.

    A parameter's full value is overwritten once it has its gradient in a backward. So nothing may need the
    value later in that backward: no detached copy-free alias of the parameter with which the module
    computes (`weight.detach()`), and no second gradient of the same parameter by nested reentrant
    checkpoints, which is noticed and raises. Ordinary layers, shared ones as well, allow it.

    It has an effect where gradients are reduced in the dtype of computation and at once (not under
    `no_sync`), on units of the wrapper that are sharded and resharded after backward.

    Args:
        module: Wrapped or sharded, or with such modules inside: all units at and below it are meant.
        enabled: Whether gradients may do so from the next backward on.

    Raises:
        ValueError: If there is no unit in the module.
        RuntimeError: In the middle of a forward or backward.
    """
    units = units_in(module).values()
    if not units:
        refuse_unsharded(module, "set_gradients_in_place()")
    require_idle(units, "set_gradients_in_place()")
    for unit in units:
        for plug_in in [plug_in for plug_in in unit.plug_ins.own if isinstance(plug_in, GradientsInPlace)]:
            unit.plug_ins.detach(plug_in)
        if enabled:
            unit.plug_ins.attach(GradientsInPlace())
