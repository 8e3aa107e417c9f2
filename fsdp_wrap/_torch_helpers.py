"""Makes torch's functions for state dicts work on wrapped and sharded models.

The functions of `torch.distributed.checkpoint.state_dict` look for torch's wrapper. They would take ours for
a plain module, and each rank's pieces of an optimizer's state for all of it, under full names. Programs may
have imported them already. So the private functions that they call are rebound when the first model is
wrapped or sharded, and go on calling torch's own for all other models. `fsdp_wrap.compat` is not needed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import cache, partial, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict as theirs
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp_wrap._comm import calling, deaths_told
from fsdp_wrap._core import clean_fqn, joined
from fsdp_wrap._core.torch_private import IncompatibleKeys, StridedShard, torch_gathers
from fsdp_wrap._params import PASSES_FOR_DTENSOR, FlatParameter, IntervalTensor
from fsdp_wrap._runtime import buffers_of, units_in
from fsdp_wrap._state import FirstRank, refuse_shared
from fsdp_wrap.distributed_state_dict import (
    is_wrapped,
    load_model_state,
    load_optim_state,
    model_state,
    optim_state,
)


@cache
def adapt_torch_helpers() -> None:
    """Rebinds the private functions that torch's helpers call, once in a process."""
    rebound: list[tuple[Any, str, Callable[..., Any]]] = [
        (theirs, "_get_model_state_dict", partial(_ask_first, "get_model_state_dict()", model_state)),
        (theirs, "_get_optim_state_dict", partial(_ask_first, "get_optimizer_state_dict()", optim_state)),
        (theirs, "_load_model_state_dict", _load_model_state),
        (theirs, "_load_optim_state_dict", _load_optim_state),
        (theirs, "_distribute_state_dict", _distribute),
        (theirs, "_verify_options", _verify_options),
        (theirs, "_get_fqns", _fqns),
    ]
    if not PASSES_FOR_DTENSOR:
        rebound.append((torch_gathers, "_iterate_state_dict", _iterate))
    for module, name, own in rebound:
        torchs = getattr(module, name)
        setattr(module, name, wraps(torchs)(partial(own, torchs)))
    writer: Any = HuggingFaceStorageWriter
    writer.prepare_global_plan = _refusing_boxes(writer.prepare_global_plan)


# each gets torch's own function, and then its arguments


def _ask_first(
    name: str, own: Callable[..., Any], torchs: Callable[..., Any], model: nn.Module, *args: Any
) -> Any:
    units = units_in(model).values()
    if not units:
        return torchs(model, *args)
    if is_wrapped(model):
        with deaths_told(), calling(name):
            return own(model, *args)
    info = args[-1]
    asked = buffers_of(units) if info.full_state_dict or info.broadcast_from_rank0 else ()
    communicators = dict.fromkeys(buffers.communicator for buffers in asked)
    with deaths_told(), calling(name, [communicator.positions for communicator in communicators]):
        for communicator in communicators:  # torch's own collectives would wait for long, and name nobody
            communicator.agree(name, {"full_state_dict": info.full_state_dict})
        return torchs(model, *args)


def _load_model_state(
    torchs: Callable[..., Any], model: nn.Module, state_dict: dict[str, Any], info: Any
) -> Any:
    """Lets the first rank decide for all whether there is a model to load, if it broadcasts its own.

    Torch takes the empty dict of another rank for "the optimizer only": it goes on, and the first one hangs.
    """
    if units_in(model) and info.broadcast_from_rank0:
        shared = [info.handle_model]
        with deaths_told():
            dist.broadcast_object_list(shared)
        info.handle_model = shared[0]
    if not info.handle_model:
        return IncompatibleKeys([], [])
    return _ask_first("set_model_state_dict()", load_model_state, torchs, model, state_dict, info)


def _load_optim_state(torchs: Callable[..., None], model: nn.Module, *args: Any) -> None:
    """Loads into models of `DTensor`s too: those of torch's functions do not know what was never stepped.

    But torch's load a model of `DTensor`s on a part of the ranks, if the first of all ranks broadcasts to it.
    """
    if not units_in(model) or (
        args[-1].broadcast_from_rank0
        and not is_wrapped(model)
        and FirstRank(model).reaches < dist.get_world_size()
    ):
        return torchs(model, *args)
    with deaths_told(), calling("set_optimizer_state_dict()"):
        return load_optim_state(model, *args)


def _distribute(
    torchs: Callable[..., Any], full: dict[str, Any], local: dict[str, Any], **kwargs: Any
) -> Any:
    return torchs({key: _cut(value, local.get(key)) for key, value in full.items()}, local, **kwargs)


def _cut(full: Any, target: Any) -> Any:
    """Cuts this rank's part out of a full tensor where torch cannot scatter it.

    Torch cannot if tensor parallelism and sharding cut one dimension whose size does not divide.
    """
    if not isinstance(full, torch.Tensor) or not isinstance(target, DTensor) or not full.dim():
        return full
    if not any(isinstance(placement, StridedShard) for placement in target.placements):
        return full
    return distribute_tensor(full.detach(), target.device_mesh, target.placements, src_data_rank=None)


def _verify_options(torchs: Callable[..., Any], model: nn.Module, optims: Any, **kwargs: Any) -> Any:
    if units_in(model):
        refuse_shared(model, optims)
    info = torchs(model, optims, **kwargs)
    if info.submodule_prefixes:
        info.submodule_prefixes = {clean_fqn(prefix) for prefix in info.submodule_prefixes}
    return info


def _fqns(
    torchs: Callable[..., set[str]], model: nn.Module, name: str, *args: Any, **kwargs: Any
) -> set[str]:
    """Returns torch's names; its walk finds no `FlatParameter` beside the module that a compiled one has."""
    owner, _, last = name.rpartition(".")
    flat = last.startswith("_flat_param") and model.get_submodule(owner)._parameters.get(last)
    if isinstance(flat, FlatParameter):
        return {joined(fqn, last) for fqn in torchs(model, owner, *args, **kwargs)}
    return torchs(model, name, *args, **kwargs)


def _iterate(
    torchs: Callable[..., Any], value: Any, of_sharded: Any, of_dtensor: Any, of_tensor: Any, **kwargs: Any
) -> Any:
    if isinstance(value, IntervalTensor):  # which `isinstance` takes for a plain tensor
        of_tensor = of_dtensor
    return torchs(value, of_sharded, of_dtensor, of_tensor, **kwargs)


def _refusing_boxes(torchs: Callable[..., list[SavePlan]]) -> Callable[..., list[SavePlan]]:
    """Makes a writer refuse what its files cannot hold: several boxes of a tensor from one rank."""

    @wraps(torchs)
    def prepare_global_plan(writer: Any, plans: list[SavePlan]) -> list[SavePlan]:
        for rank, plan in enumerate(plans):
            boxes = Counter(item.index.fqn for item in plan.items)
            for fqn, number in boxes.items():
                if number > 1:
                    raise ValueError(
                        f"{type(writer).__name__} stores one box of a tensor for each rank. Of '{fqn}' rank "
                        f"{rank} holds {number}: take a state dict of rows, by "
                        "ShardedStateDictConfig(_use_dtensor=True) or by wrapping with a device_mesh, or use "
                        "fsdp_wrap.checkpoint.export_safetensors"
                    )
        return torchs(writer, plans)

    return prepare_global_plan
