"""Sharding and steps by keyword: one way to write a `setup` that `fit` can vary."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from fsdp_wrap._comm import default_mesh
from fsdp_wrap._runtime import units_in
from fsdp_wrap.api import (
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)
from fsdp_wrap.fully_shard import fully_shard
from fsdp_wrap.fully_sharded_data_parallel import FullyShardedDataParallel
from fsdp_wrap.wrap import ModuleWrapPolicy

WORDS = {
    "strategy": ("full", "grad_op", "hybrid"),
    "wrapping": ("blocks", "whole"),
    "offload": ("none", "optimizer", "all"),
    "checkpointing": ("none", "blocks", "host"),
    "precision": ("fp32", "bf16", "pure_bf16"),
    "front_end": ("fully_shard", "wrapper"),
}
"""The values of the keywords of `shard_as`, the default first."""

STANDARD = {
    "strategy": ("full", "grad_op"),
    "offload": ("none", "optimizer"),
    "checkpointing": ("none", "blocks", "host"),
}
"""The default of `fit(vary=...)`, as far as a setup takes these names; checkpointing on the
host is for accelerators only."""

_STRATEGIES = {
    "full": ShardingStrategy.FULL_SHARD,
    "grad_op": ShardingStrategy.SHARD_GRAD_OP,
    "hybrid": ShardingStrategy.HYBRID_SHARD,
}
_DTYPES = {
    "fp32": (None, None),
    "bf16": (torch.bfloat16, torch.float32),
    "pure_bf16": (torch.bfloat16, torch.bfloat16),
}
"""The dtypes of parameters and of reductions."""

OFFLOADS = {
    "none": (OffloadPolicy(), None),
    "optimizer": (
        CPUOffloadPolicy(offload_params=False, offload_optimizer_state=True),
        CPUOffload(offload_optimizer_state=True),
    ),
    "all": (CPUOffloadPolicy(), CPUOffload(offload_params=True)),
}
"""For `fully_shard` and for the wrapper."""


def shard_as(
    model: nn.Module,
    blocks: type[nn.Module] | str | Iterable[type[nn.Module] | str],
    *,
    strategy: str = "full",
    wrapping: str = "blocks",
    offload: str = "none",
    checkpointing: str = "none",
    precision: str = "fp32",
    front_end: str = "fully_shard",
    ranks_per_host: int = 8,
) -> nn.Module:
    """Shards a model by keywords that a `setup` may take from `fit`.

    Parameters on the meta device get memory. The wrapper gives them values by `reset_parameters`, as it
    always does; with `fully_shard` initialise or load them afterwards. A plan needs no values.

    Args:
        model: The model.
        blocks: The classes of its blocks, or their names.
        strategy: "full" frees full parameters after forward, "grad_op" after backward, "hybrid" shards within
            hosts and replicates over them.
        wrapping: "blocks" makes a unit of each block, "whole" one of the model.
        offload: Kept in host memory between steps: "none", the "optimizer"'s state, or "all".
        checkpointing: "blocks" computes each block's activations again in backward, "host" moves them to host
            memory meanwhile by `offload_activations`, which changes nothing on the CPU.
        precision: "bf16" computes in bfloat16 and reduces gradients in float32, "pure_bf16" reduces in
            bfloat16 as well; "fp32" does all in the parameters' dtype.
        front_end: "fully_shard" or "wrapper".
        ranks_per_host: The ranks that shard together with "hybrid"; all ranks, if there are fewer.

    Returns:
        The model, or the wrapper around it.

    Raises:
        ValueError: If a word is unknown, no module is of these classes, or ranks do not fill hosts.
    """
    chosen = {
        "strategy": strategy,
        "wrapping": wrapping,
        "offload": offload,
        "checkpointing": checkpointing,
        "precision": precision,
        "front_end": front_end,
    }
    for name, word in chosen.items():
        check_word(name, word, WORDS[name])
    found = modules_of(model, (blocks,) if isinstance(blocks, (type, str)) else tuple(blocks))
    if checkpointing == "blocks":
        for module in found:
            setattr(module, "forward", partial(checkpoint, module.forward, use_reentrant=False))  # noqa: B010
    units = found if wrapping == "blocks" else []
    mesh = mesh_of(_ranks_per_replica(ranks_per_host) if strategy == "hybrid" else None, "shard_as()")
    if front_end == "wrapper":
        made = _wrapped(model, {type(module) for module in units}, mesh, chosen)
    else:
        made = _composed(model, units, mesh, chosen)
    if checkpointing == "host" and mesh.device_type != "cpu":
        from fsdp_wrap._activations import offload_activations  # an add-on, which may be left out

        offload_activations(made)
    return made


def check_word(name: str, word: str, words: Iterable[str]) -> None:
    """Checks that a word is one of some.

    Raises:
        ValueError: If it is another one.
    """
    if word not in words:
        raise ValueError(f"{name} must be one of {', '.join(words)}, not {word!r}")


def modules_of(model: nn.Module, blocks: tuple[type[nn.Module] | str, ...]) -> list[nn.Module]:
    """Returns the modules of some classes, or of classes of some names."""
    classes = tuple(each for each in blocks if isinstance(each, type))
    modules = [*model.modules()]
    found = [each for each in modules if isinstance(each, classes) or type(each).__name__ in blocks]
    if not found:
        asked = ", ".join(each if isinstance(each, str) else each.__name__ for each in blocks)
        there = ", ".join(dict.fromkeys(type(each).__name__ for each in modules))
        raise ValueError(f"the model has no module of {asked}; its classes are {there}")
    return found


def step_of(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    loss: Callable[[], torch.Tensor],
    accumulation: int = 1,
    *,
    sync: str = "last",
) -> Callable[[], None]:
    """Returns a training step: `accumulation` forwards and backwards, and one step of the optimizer.

    Args:
        model: The result of `shard_as`.
        optimizer: The optimizer of its parameters.
        loss: Makes a batch and returns its loss, a scalar.
        accumulation: How many batches make a step.
        sync: Gradients are reduced in the "last" backward, and until then whole ones add up on each rank; or
            in "every" one, which takes less memory and more communication.

    Raises:
        ValueError: If `accumulation` is no positive number, or `sync` is another word.
    """
    if accumulation < 1:
        raise ValueError(f"accumulation must be at least 1, not {accumulation}")
    if sync not in ("last", "every"):
        raise ValueError(f"sync must be 'last' or 'every', not {sync!r}")

    def step() -> None:
        for part in range(accumulation):
            is_last = part == accumulation - 1
            with _reducing(model, is_last or sync == "every"):
                part_of_loss: Any = loss() / accumulation
                part_of_loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _reducing(model: nn.Module, reduces: bool) -> AbstractContextManager[object]:
    """Lets the backward inside reduce gradients, or only accumulate them."""
    if isinstance(model, FullyShardedDataParallel):
        return nullcontext() if reduces else model.no_sync()
    sharded: Any = model
    sharded.set_requires_gradient_sync(reduces)
    return nullcontext()


def _ranks_per_replica(ranks_per_host: int) -> int:
    """Returns the ranks that shard together with "hybrid"."""
    ranks = dist.get_world_size()
    within = min(ranks, ranks_per_host)
    if ranks % within:
        raise ValueError(f"strategy='hybrid': {ranks} ranks do not fill hosts of {ranks_per_host}")
    return within


def mesh_of(ranks_per_replica: int | None, asking: str) -> DeviceMesh:
    """Returns a mesh of all ranks, of two dimensions where some of them hold a replica between them."""
    whole = default_mesh(asking)
    if ranks_per_replica is None:
        return whole
    replicas, rest = divmod(dist.get_world_size(), ranks_per_replica)
    if rest:
        raise ValueError(f"{asking}: {dist.get_world_size()} ranks are no replicas of {ranks_per_replica}")
    names = ("replicate", "shard")
    return init_device_mesh(whole.device_type, (replicas, ranks_per_replica), mesh_dim_names=names)


def allocate(model: nn.Module, mesh: DeviceMesh) -> None:
    """Gives parameters on the meta device memory: on the mesh's device, or on the host if offloaded."""
    layouts = [layout for unit in units_in(model).values() for layout in unit.layouts if layout.offloaded]
    on_host = {id(param) for layout in layouts for param in layout.sharded_params}

    def empty(tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, device="cpu" if id(tensor) in on_host else mesh.device_type)

    if any(param.is_meta for param in model.parameters()):
        model._apply(empty)  # type: ignore[no-untyped-call]


def _composed(
    model: nn.Module, units: list[nn.Module], mesh: DeviceMesh, chosen: dict[str, str]
) -> nn.Module:
    kwargs: dict[str, Any] = {
        "mesh": mesh,
        "mp_policy": MixedPrecisionPolicy(*_DTYPES[chosen["precision"]]),
        "offload_policy": OFFLOADS[chosen["offload"]][0],
    }
    reshard = chosen["strategy"] != "grad_op"
    for module in units:
        fully_shard(module, reshard_after_forward=reshard, **kwargs)
    # by default (None) the root's parameters are gathered once; the only unit is resharded as well
    fully_shard(model, reshard_after_forward=None if units and reshard else reshard, **kwargs)
    allocate(model, mesh)
    return model


def _wrapped(
    model: nn.Module, classes: set[type[nn.Module]], mesh: DeviceMesh, chosen: dict[str, str]
) -> nn.Module:
    dtypes = _DTYPES[chosen["precision"]]
    return FullyShardedDataParallel(
        model,
        device_mesh=mesh,
        sharding_strategy=_STRATEGIES[chosen["strategy"]],
        auto_wrap_policy=ModuleWrapPolicy(classes) if classes else None,
        mixed_precision=MixedPrecision(*dtypes) if any(dtypes) else None,
        cpu_offload=OFFLOADS[chosen["offload"]][1],
        device_id=None if mesh.device_type == "cpu" else torch.device(mesh.device_type),
        use_orig_params=True,
    )
