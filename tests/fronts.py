"""Both front-ends behind one set of options, for tests that hold for either.

A `front` is "flat" or "orig", the wrapper without and with `use_orig_params`, or "composable", `fully_shard`.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import models
from fsdp_wrap import (
    BackwardPrefetch,
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap._runtime.unit import units_in
from fsdp_wrap.wrap import plan_wrapping
from models import named_state

FRONTS = ["flat", "orig", "composable"]
each_front = pytest.mark.parametrize("front", FRONTS)
either_front = pytest.mark.parametrize("front", FRONTS[1:])
"""The wrapper with `use_orig_params`, or `fully_shard`."""
each_form = pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
"""Both forms of the wrapper."""
FULL, KEPT = ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP
HYBRID = ShardingStrategy.HYBRID_SHARD


def shard(front: str, module: nn.Module, auto_wrap_policy: Any = None, **options: Any) -> nn.Module:
    """Makes units of the modules that the policy chooses, and of `module`.

    Args:
        front: The front-end.
        module: It changes in place.
        auto_wrap_policy: A policy of the wrapper.
        options: The wrapper's; translated for `fully_shard`. Unlike that, the wrapper reshards the root after
            forward with FULL_SHARD, and so does `fully_shard` if that is given.
    """
    if front != "composable":
        return FSDP(module, auto_wrap_policy=auto_wrap_policy, use_orig_params=front == "orig", **options)
    chosen = [] if auto_wrap_policy is None else plan_wrapping(module, auto_wrap_policy, fully_shard).targets
    for child in chosen:
        fully_shard(child, **translated(options))
    return fully_shard(module, **translated(options))


def shard_columns(module: nn.Module, units: Iterable[nn.Module]) -> nn.Module:
    """Shards matrices along their second dimension, where the ranks divide it."""

    def place(param: nn.Parameter) -> Shard | None:
        return Shard(1) if param.ndim == 2 and param.shape[1] % dist.get_world_size() == 0 else None

    for unit in units:
        fully_shard(unit, shard_placement_fn=place)
    return fully_shard(module, shard_placement_fn=place)


RESHARDS = {FULL: True, KEPT: False, HYBRID: True, ShardingStrategy._HYBRID_SHARD_ZERO2: False}


def translated(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns options of the wrapper as those of `fully_shard`; its own it takes as they are."""
    return dict(_translated(name, value) for name, value in options.items())


def _translated(name: str, value: Any) -> tuple[str, Any]:
    if name == "sharding_strategy":
        return "reshard_after_forward", RESHARDS[value]
    if name == "device_mesh":
        return "mesh", value
    if name == "process_group":
        return "mesh", value and DeviceMesh.from_group(value, "cpu")
    if name == "mixed_precision":
        return "mp_policy", MixedPrecisionPolicy(value.param_dtype, value.reduce_dtype)
    if name != "cpu_offload":
        return name, value
    if value.only_state:
        return "offload_policy", CPUOffloadPolicy(offload_params=False, offload_optimizer_state=True)
    return "offload_policy", CPUOffloadPolicy() if value.offload_params else OffloadPolicy()


def chosen(front: str, strategy: str, world_size: int) -> dict[str, Any]:
    """Returns the options of a strategy, or of FULL_SHARD where such ranks or the front-end lack it."""
    if strategy == "HYBRID_SHARD" and world_size == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        return {"sharding_strategy": HYBRID, "device_mesh": mesh}
    lacks = strategy == "HYBRID_SHARD" or (strategy == "NO_SHARD" and front == "composable")
    return {"sharding_strategy": FULL if lacks else ShardingStrategy[strategy]}


def twins(
    front: str, make: Callable[[], nn.Module], dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = make().to(dtype)
    return plain, shard(front, copy.deepcopy(plain), **options)


def prefetching(name: str | None) -> dict[str, Any]:
    """Returns the options of a wrapper that prefetches so, and of `fully_shard` by "default"."""
    if name == "default":
        return {}
    return {"backward_prefetch": BackwardPrefetch[name] if name else None}


def inner(module: Any) -> Any:
    """Returns the module below a wrapper; `fully_shard` puts none around it."""
    return module.module if isinstance(module, FSDP) else module


def full(value: torch.Tensor) -> torch.Tensor:
    """Returns the whole of a sharded tensor, a plain one as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def local_numel(param: torch.Tensor) -> int:
    return (param.to_local() if isinstance(param, DTensor) else param).numel()


def full_state(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: full(value) for name, value in model.state_dict().items()}


def assert_sharded(model: nn.Module) -> None:
    """Asserts that no unit computes or shows full parameters."""
    for unit in units_in(model).values():
        assert not unit.running, unit.fqn
        buffers = unit.buffers
        assert not unit.params or buffers.where.name == "SHARDED" or buffers.stays.name == "EARLIER", unit.fqn


def full_grads(model: nn.Module) -> dict[str, torch.Tensor]:
    """Returns full gradients by clean name; zeros where there is none."""
    if isinstance(model, FSDP):
        return models.full_grads(model)
    return {
        name: full(torch.zeros_like(param) if param.grad is None else param.grad)
        for name, param in model.named_parameters()
    }


def assert_same_values(model: nn.Module, reference: nn.Module, **tolerance: float) -> None:
    """Asserts that full parameters are a plain model's, or DDP's; to the bit without a tolerance."""
    expected = {name: param.detach() for name, param in named_state(reference)}
    assert_tensors(full_state(model), expected, **tolerance)


def assert_same_grads(model: nn.Module, reference: nn.Module, **tolerance: float) -> None:
    expected = {name: param.grad for name, param in named_state(reference)}
    assert_tensors(full_grads(model), expected, **tolerance)


def assert_tensors(actual: Mapping[str, Any], expected: Mapping[str, Any], **tolerance: Any) -> None:
    """Asserts that tensors are those expected by name; to the bit without a tolerance."""
    for name, value in expected.items():
        if tolerance:
            torch.testing.assert_close(actual[name], value, msg=f"{name}: {{}}".format, **tolerance)
        else:
            assert torch.equal(actual[name], value), name


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulates gradients, by the means of the front-end, or of DDP; a plain module does anyway."""
    if not isinstance(model, FSDPModule):
        with getattr(model, "no_sync", nullcontext)():
            yield
    else:
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)


@contextmanager
def within_copy(model: nn.Module) -> Iterator[None]:
    """Reduces gradients within each copy alone, by the means of the front-end; a plain module is one."""
    if isinstance(model, FSDP):
        with model.no_sync(reduce_within_copy=True):
            yield
    elif not isinstance(model, FSDPModule):
        yield
    else:
        model.set_requires_all_reduce(False)
        yield
        model.set_requires_all_reduce(True)


def accumulating(model: nn.Module, letter: str) -> AbstractContextManager[None]:
    """Enters T: without reductions; C: with reductions within the copy; F: with all."""
    return {"T": no_sync, "C": within_copy, "F": nullcontext}[letter](*[model] * (letter != "F"))


def clip(model: nn.Module, max_norm: float, norm_type: float | str = 2.0) -> torch.Tensor:
    """Clips by the means of the front-end, for `fully_shard` and plain modules torch's function."""
    if isinstance(model, FSDP):
        return model.clip_grad_norm_(max_norm, norm_type)  # type: ignore[arg-type]
    return full(nn.utils.clip_grad_norm_(model.parameters(), max_norm, float(norm_type)))


SIDE = 150
ONE = SIDE * SIDE * 4
"""Bytes of one of the matrices of `squares`."""


def squares(front: str, per_unit: int = 2, units: int = 4) -> nn.Module:

    def unit() -> nn.Module:
        return nn.Sequential(*(nn.Linear(SIDE, SIDE, bias=False) for _ in range(per_unit)))

    net = nn.Sequential(*(unit() for _ in range(units)))
    own = set(net.children())
    return shard(front, net, lambda module, recurse, nonwrapped_numel: recurse or module in own)
