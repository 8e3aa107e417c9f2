"""Checks that raise errors for unsupported uses of a unit's parameters, before and after sharding."""

from __future__ import annotations

import re
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from operator import attrgetter
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from fsdp_wrap._core import (
    NotRootError,
    OptimizerPiece,
    ParamSlot,
    ReplacedError,
    UnitContents,
    note_piece,
    refuse_in_steps,
    warn_caller,
)
from fsdp_wrap._core.torch_private import graph_task, optimizers_in_backward
from fsdp_wrap._params import (
    Buffers,
    Segment,
    ShardedParams,
    Showing,
    Where,
    check_extension,
    check_packable,
    distributed_names,
    is_extension,
    is_packable,
    refuse_other_codes,
    side_data_kind,
    to_local,
)
from fsdp_wrap._runtime.materialize import Values, direct_tensors, reset_method
from fsdp_wrap._runtime.unit import Unit

_VERSION = attrgetter("_version")
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
_OUTSIDE = (
    "If this is {} used outside of its module's forward: it was sharded then (on rank {}). Use its "
    "full_tensor() (fully_shard), keep it from resharding, or make one unit of the modules that use it"
)


def check_tensors(
    contents: UnitContents, instead: str | None, extended: bool = False, filled_later: bool = False
) -> None:
    """Refuses tensors that cannot be sharded, or would lose their behaviour or hooks.

    Args:
        contents: The tensors of the future unit.
        instead: Advice about optimizers applied in backward, which would train nothing; None allows them.
        extended: Whether parameters may be tensor extensions (subclasses with hooks for the all-gather).
        filled_later: Whether a function of the user still fills what is on the meta device.
    """
    for fqn, tensor in contents.tensors():
        if is_lazy(tensor):
            raise ValueError(
                f"'{fqn}' is an {type(tensor).__name__} of a lazy module and has no shape yet; run one "
                "forward of the plain model on a batch before sharding it"
            )
    for slot in contents.slots:
        for user, _ in slot.places:
            _refuse_scripted(slot.fqn, user)
        side = side_data_kind(slot.param)
        if side is not None:
            side.check(slot.fqn, slot.param, filled_later)
        elif extended and is_extension(slot.param):
            check_extension(slot.fqn, slot.param)
        elif is_extension(slot.param) and is_packable(slot.param):
            check_packable(slot.fqn, slot.param)
        else:
            kind: type = type(slot.param)
            part = type(to_local(slot.param)) if kind is DTensor else None
            if kind is not nn.Parameter and part is not torch.Tensor:
                raise TypeError(
                    f"parameter '{slot.fqn}' is a {type(slot.param).__name__}, whose behaviour sharding "
                    "would lose; ignore it with ignored_states, or make it a plain torch.nn.Parameter"
                )
        if slot.param._backward_hooks or slot.param._post_accumulate_grad_hooks:
            raise ValueError(
                f"parameter '{slot.fqn}' has gradient hooks, which would not run: a wrapped module computes "
                "with another tensor; remove them before wrapping, and give them to the sharded parameters "
                "after it"
            )
        if instead is not None and optimizers_in_backward(slot.param):
            raise ValueError(
                f"parameter '{slot.fqn}' has an optimizer that is applied in backward, which would train "
                f"nothing: sharding puts another tensor in its place; {instead}"
            )
    for fqn, (user, _), _ in contents.borrowed:
        _refuse_scripted(fqn, user)


def is_container(module: nn.Module) -> bool:
    """Returns whether the module is a container without a forward, which would never be unsharded."""
    forward = getattr(module.forward, "__func__", module.forward)
    return isinstance(module, _CONTAINERS) and forward is nn.Module.forward


def warn_of_container(module: nn.Module) -> None:
    """Warns if a module that the user wraps is a container without a forward."""
    if is_container(module):
        warn_caller(
            f"a {type(module).__name__} was wrapped, and has no forward: its parameters are gathered for a "
            "forward, so wrap the modules in it, or the one above"
        )


def drop_gradients(contents: UnitContents) -> None:
    """Drops gradients from before sharding, with a warning, since they are not averaged over the ranks."""
    having = [slot for slot in contents.slots if slot.param.grad is not None]
    for slot in having:
        slot.param.grad = None
    if having:
        warn_caller(
            f"gradients that {len(having)} parameters had before sharding were dropped, the first of "
            f"'{having[0].fqn}': they are of this rank alone, not averaged. Step before sharding, or run the "
            "backward after it; zero_grad() before sharding avoids this warning"
        )


def check_materializable(contents: UnitContents, values: Values) -> None:
    """Checks that every tensor on the meta device can get values."""
    empty = [(fqn, tensor) for fqn, tensor in contents.tensors() if tensor.is_meta]
    if not empty or values.received or values.param_init_fn is not None:
        return
    holders: dict[torch.Tensor, list[nn.Module]] = {}
    for _, module in contents.modules:
        for tensor in direct_tensors(module).values():
            holders.setdefault(tensor, []).append(module)
    for fqn, tensor in empty:
        if not any(map(reset_method, holders[tensor])):
            raise ValueError(
                f"'{fqn}' is on the meta device and has no values, and {type(holders[tensor][0]).__name__}, "
                "which holds it, has no reset_parameters(); pass param_init_fn, or materialise the module "
                "before wrapping it (module.to_empty(device=...) and initialise it)"
            )


def _refuse_scripted(fqn: str, module: nn.Module) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            f"parameter '{fqn}' belongs to a {type(module).__name__} (torch.jit.script, trace or load): "
            "a compiled module keeps its parameters as they were and cannot show others; shard the plain "
            "module (torch.compile works on it), or leave this one out by ignored_states (ignored_params of "
            "fully_shard)"
        )


def refuse_graph(unit: Unit, leaf: nn.Parameter) -> None:
    """Refuses a leaf's gradient that has a graph of its own."""
    if leaf.grad is not None and leaf.grad.requires_grad:
        leaf.grad = None
        raise RuntimeError(
            f"backward(create_graph=True) reached the parameters of {unit.name}, whose reduced gradients "
            "can have no graph; use torch.autograd.grad(outputs, inputs, create_graph=True) for the "
            "inner derivative and backward() without create_graph for the outer one"
        )


def converted(
    unit: Unit, fn: Callable[[torch.Tensor], torch.Tensor], instead: str
) -> list[tuple[Segment, torch.dtype]]:
    """Returns the segments of a unit, each with the dtype to which a function converts its shard.

    A function that moves a shard to another device is refused; the error ends with the advice `instead`.
    """
    conversions = []
    for segment in unit.segments:
        shard = segment.params.flat_param.data
        before = torch.empty(0, dtype=shard.dtype, device=shard.device)
        after = fn(before)
        if after.device != before.device and not before.is_meta:
            raise ValueError(
                f"the sharded parameters of {unit.name} cannot go from {before.device} to {after.device}; "
                f"{instead}"
            )
        if after.dtype != before.dtype:
            refuse_other_codes(segment.params.side_data, after.dtype, unit.name_of)
        conversions.append((segment, after.dtype))
    return conversions


def refuse_sharing(unit: Unit, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Refuses a conversion to memory shared with other processes, which `DTensor`s do not support."""
    probe = torch.empty(1, device="cpu")
    if fn(probe).is_cpu and probe.is_shared():  # type: ignore[no-untyped-call]
        raise TypeError(
            f"share_memory() of {unit.name} on rank {dist.get_rank()}: sharded parameters are DTensors, "
            "which cannot lie in memory shared with other processes. Share a plain model with the values "
            "that fsdp_wrap.iter_full_params() gives"
        )


def name_sharded(error: BaseException, units: Iterable[Unit]) -> None:
    """Adds to an operator's error the sharded parameters that may have caused it.

    An error about mixed `DTensor`s names no tensor. An error about sizes has the size of the shard.
    """
    message = str(error)
    mixed, sizes = "mixed torch.Tensor and DTensor" in message, {*map(int, re.findall(r"\d+", message))}
    vague = "1-D tensor" in message
    of_sizes = vague or re.search("size mismatch|The size of tensor|shapes cannot be", message)
    if type(error) is not RuntimeError or _OUTSIDE[-30:] in message or not (mixed or of_sizes):
        return
    names = [
        unit.name_of(fqn)
        for unit in units
        for sharded in (unit.params if _shows_shards(unit.buffers) else ())
        for fqn, numel in _shown_pieces(sharded)
        if mixed or (numel is not None and (vague or numel in sizes))
    ]
    if names:
        several = f" or another of {len(names)} parameters" if len(names) > 1 else ""
        error.args = (
            f"{message}\n{_OUTSIDE.format(repr(names[0]) + several, dist.get_rank())}",
            *error.args[1:],
        )


def _shows_shards(buffers: Buffers) -> bool:
    """Whether modules show pieces of the original parameters."""
    shards = any(sharded.resident is None for sharded in buffers.params)
    others = buffers.where is Where.LENT and (buffers.lent.shows_full or not buffers.lent.summoned)
    return shards and buffers.shown.state is Showing.SHARDED and not others


def _shown_pieces(sharded: ShardedParams) -> Iterable[tuple[str, int | None]]:
    """Returns the parameter names, with the numbers of elements shown; None for `DTensor`s."""
    if any(isinstance(source, DTensor) for source in sharded.sources):
        return ((fqn, None) for fqn in sharded.layout.fqns)
    return ((interval.fqn, interval.data.numel()) for interval in sharded.intervals())


def refuse_alone(unit: Unit) -> None:
    """Refuses a forward of a tied unit outside of the unit that unshards it."""
    if graph_task() == -1 and not unit.running:
        assert unit.tied_to is not None
        raise RuntimeError(
            f"{unit.name} may be skipped (allow_skipping), so it runs only inside the forward of "
            f"{unit.tied_to.name}, and rank {dist.get_rank()} ran it alone"
        )


def refuse_without_backward(unit: Unit, buffers: Buffers) -> None:
    """Refuses a forward after which this rank has no backward to reduce a tied unit's gradients in."""
    if torch.is_grad_enabled() and buffers.segments.trainable and unit.tied_to is not None:
        raise RuntimeError(
            f"no output of {unit.tied_to.name} needs a gradient on rank {dist.get_rank()}, where {unit.name} "
            "may be skipped (allow_skipping) and trains: other ranks would wait for its gradients. Use "
            "something that trains, or an input that needs a gradient, on all ranks"
        )


def refuse_replaced(unit: Unit, sharded: ShardedParams) -> None:
    """Refuses sharded parameters that users have replaced or removed."""
    for fqn, replacement in sharded.display.replaced():
        what = "was removed" if replacement is None else f"was replaced by {_described(replacement)}"
        raise ReplacedError(
            f"the sharded parameter '{unit.name_of(fqn)}' {what} in its "
            f"module on rank {dist.get_rank()}, where optimizer and training would not know of it: put the "
            "former object back, and write new values into it; or replace it before sharding, or, with the "
            "wrapper, inside summon_full_params"
        )


def _described(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    return f"a {type(value).__name__} of shape {tuple(value.shape)} and dtype {value.dtype}"


class ParametrizationGuard:
    """A forward pre-hook that refuses to compute a parametrised tensor from sharded parameters."""

    def __init__(self, unit: Unit) -> None:
        self._unit = weakref.ref(unit)

    def __call__(self, module: nn.Module, args: Any) -> None:
        unit = self._unit()
        if unit is not None and _shows_shards(unit.buffers):
            raise RuntimeError(
                f"a parametrised tensor of {unit.name} is computed from parameters that are sharded now; "
                "read it inside summon_full_params"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> ParametrizationGuard:
        unit = self._unit()
        return self if unit is None else ParametrizationGuard(memo.get(id(unit), unit))


def refuse_earlier_optimizers(unit: Unit, segments: Iterable[Iterable[ParamSlot]]) -> None:
    """Makes optimizers raise on `step` if they hold Parameter objects from before sharding."""
    slots = chain.from_iterable(segments)
    sources = chain.from_iterable(sharded.sources for sharded in unit.params)
    for slot, source in zip(slots, sources):
        if slot.param is not source:
            refuse_in_steps(slot.param, partial(_why_left, weakref.ref(unit), slot.fqn))


def require_root(unit: Unit, doing: str) -> None:
    """Refuses an operation on the whole model if another unit encloses this one."""
    if unit.nested:
        raise NotRootError(f"{doing} must be called on the root, and this is {unit.name}")


def refuse_unsharded(module: nn.Module, doing: str) -> NoReturn:
    """Refuses a model in which nothing is wrapped or sharded."""
    raise ValueError(
        f"{type(module).__name__} has no wrapped or sharded module: call {doing} with the model that has"
    )


def refuse_pieces(unit: Unit) -> None:
    """Makes optimizers that are not elementwise raise on `step` with pieces of original parameters.

    `DTensor`s are allowed, since their operators communicate. So are unsharded parameters.
    """
    buffers = unit.buffers
    cut = buffers.communicator.size > 1 or bool(distributed_names(buffers.params))
    by_source: dict[nn.Parameter, list[tuple[str, int]]] = {}  # a `FlatParameter` stands for many
    for sharded in buffers.params:
        for extent, source in zip(sharded.layout.extents, sharded.sources):
            if not isinstance(source, DTensor) and (cut or source.shape != extent.shape):
                by_source.setdefault(source, []).append((extent.fqn, len(extent.shape)))
    for source, originals in by_source.items():
        name = partial(_name_of, weakref.ref(unit), originals[0][0])
        note_piece(source, OptimizerPiece(name, tuple(dim for _, dim in originals), cut, _why_in_pieces))


def refuse_steps_between_sums(units: Iterable[Unit]) -> None:
    """Makes optimizers raise on `step` while gradients wait for a sum over the replicas."""
    for unit in units:
        for sharded in unit.params:
            trained = next((source for source in sharded.sources if source.requires_grad), None)
            if trained is not None:  # one parameter is enough: all of a segment are summed together
                refuse_in_steps(trained, partial(_why_not_between, weakref.ref(unit)))


def _why_not_between(reference: weakref.ref[Unit]) -> str | None:
    unit = reference()
    if unit is None or not any(segment.gradients.waits_for_replicas for segment in unit.segments):
        return None
    return (
        f"must not step now: gradients of {unit.name} are summed over a part of the ranks only (seen on rank "
        f"{dist.get_rank()}). Run the last backward before the step after set_requires_all_reduce(True), or "
        "outside of no_sync(reduce_within_copy=True); zero_grad() forgets them"
    )


def _name_of(reference: weakref.ref[Unit], fqn: str) -> str:
    """Returns the name of a parameter relative to the root, or to its unit if that is gone."""
    unit = reference()
    return fqn if unit is None else unit.name_of(fqn)


def _why_left(reference: weakref.ref[Unit], fqn: str) -> str:
    return (
        f"was made before the model was sharded and holds the parameter '{_name_of(reference, fqn)}' as it "
        f"was then, which training no longer reaches (seen on rank {dist.get_rank()}): make it from "
        "model.parameters() after sharding, or wrap with FullyShardedDataParallel(..., "
        "use_orig_params=True), which keeps Parameter objects that are no DTensors"
    )


def _why_in_pieces(name: str) -> str:
    return (
        f"computes with whole parameters, and of '{name}' it gets a flat piece (on rank {dist.get_rank()}): "
        "its numbers would be other ones than without sharding. Use an optimizer that is elementwise (SGD, "
        "AdamW), fsdp_wrap.optim.Muon, or use_orig_params=True with ShardingStrategy.NO_SHARD, which gives "
        "it whole ones"
    )
