"""Checks of a module before it is sharded, and of what refers to its parameters as they were before."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from fsdp_wrap._building.materialize import Values, direct_tensors, reset_method
from fsdp_wrap._core import OptimizerPiece, ParamSlot, UnitContents, note_piece, refuse_in_steps, warn_caller
from fsdp_wrap._core.torch_private import optimizers_in_backward
from fsdp_wrap._params import (
    Buffers,
    Showing,
    Where,
    check_extension,
    check_packable,
    distributed_names,
    is_extension,
    is_packable,
    side_data_kind,
    to_local,
)
from fsdp_wrap._runtime import Unit

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


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


def refuse_sharing(unit: Unit, fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Refuses a conversion to memory shared with other processes, which `DTensor`s do not support."""
    probe = torch.empty(1, device="cpu")
    if fn(probe).is_cpu and probe.is_shared():  # type: ignore[no-untyped-call]
        raise TypeError(
            f"share_memory() of {unit.name} on rank {dist.get_rank()}: sharded parameters are DTensors, "
            "which cannot lie in memory shared with other processes. Share a plain model with the values "
            "that fsdp_wrap.iter_full_params() gives"
        )


def shows_shards(buffers: Buffers) -> bool:
    """Whether modules show pieces of the original parameters."""
    shards = any(sharded.resident is None for sharded in buffers.params)
    others = buffers.where is Where.LENT and (buffers.lent.shows_full or not buffers.lent.summoned)
    return shards and buffers.shown.state is Showing.SHARDED and not others


class ParametrizationGuard:
    """A forward pre-hook that refuses to compute a parametrised tensor from sharded parameters."""

    def __init__(self, unit: Unit) -> None:
        self._unit = weakref.ref(unit)

    def __call__(self, module: nn.Module, args: Any) -> None:
        unit = self._unit()
        if unit is not None and shows_shards(unit.buffers):
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
