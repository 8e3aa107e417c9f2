"""The wrapper's arguments: checked, read, and shown as attributes of what they have set up."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_wrap._comm import ShardMesh, resolve_mesh
from fsdp_wrap._core import (
    UNIT_ATTR,
    BackwardPrefetch,
    CPUOffload,
    FullPrecision,
    Ignored,
    InputCasts,
    MixedPrecision,
    ShardingStrategy,
    WrongKindError,
    check_flag,
    check_kind,
    find_replicated,
)
from fsdp_wrap._params import FlatParameterLayout, Layout, SliceLayout
from fsdp_wrap._runtime import FULL_PRECISION_IN_EVAL, Unit, UnitOptions

__all__ = [
    "Settings",
    "ShowsSettings",
    "resolve_ignored",
    "resolve_options",
]

_RESHARD_AFTER_FORWARD = (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)


def resolve_ignored(module: nn.Module, ignored_modules: Any, ignored_states: Any) -> Ignored:
    """Reads the two arguments by which users name what not to shard.

    Warns if `module` itself is to be ignored, which leaves its unit nothing to shard.

    Raises:
        TypeError: If they are no collections.
        WrongKindError: If they hold anything else than modules or parameters.
        ValueError: If both are given, or hold a wrapped module.
    """
    if isinstance(ignored_states, Ignored):  # of the unit above, which has resolved it
        return ignored_states
    if ignored_modules is not None and ignored_states is not None:
        raise ValueError(
            "ignored_modules and ignored_states exclude each other; pass both kinds as ignored_states"
        )
    argument = "ignored_states" if ignored_modules is None else "ignored_modules"
    value = ignored_states if ignored_modules is None else ignored_modules
    if value is not None and not isinstance(value, Iterable):
        raise TypeError(f"{argument} must be an iterable, not {type(value).__name__}")
    given = list(value or ())
    allowed = (nn.Module,) if argument == "ignored_modules" else (nn.Module, nn.Parameter)
    for item in given:
        if not isinstance(item, allowed):
            kinds = " or ".join(kind.__name__ for kind in allowed)
            raise WrongKindError(f"{argument} must hold {kinds} objects only, found {type(item).__name__}")
        if UNIT_ATTR in item.__dict__:
            raise ValueError(
                f"{argument} holds a {type(item).__name__} that is sharded already, and so needs not be "
                "ignored: leave it out, the modules above do not touch what it has"
            )
    modules = {child for item in given if isinstance(item, nn.Module) for child in item.modules()}
    if module in modules:
        warnings.warn(
            f"{argument} holds the {type(module).__name__} that is being wrapped: all its parameters stay as "
            "they are, whole on every rank, and their gradients are not reduced",
            stacklevel=3,
        )
    params = {item for item in given if isinstance(item, nn.Parameter)}
    modules |= find_replicated([module])
    params.update(param for child in modules for param in child.parameters(recurse=False))
    return Ignored(frozenset(modules), frozenset(params))


def resolve_options(
    *,
    sharding_strategy: Any,
    process_group: Any = None,
    device_mesh: Any = None,
    cpu_offload: Any = None,
    backward_prefetch: Any = None,
    mixed_precision: Any = None,
    param_init_fn: Any = None,
    shared_memory: Any = None,
    **others: Any,
) -> ShardMesh:
    """Checks what does not depend on the module, and finds the ranks."""
    if param_init_fn is not None and not callable(param_init_fn):
        raise ValueError(f"param_init_fn needs to be callable with a module, or None, not {param_init_fn!r}")
    check_kind("sharding_strategy", sharding_strategy, ShardingStrategy)
    check_kind("cpu_offload", cpu_offload, CPUOffload)
    check_kind("backward_prefetch", backward_prefetch, BackwardPrefetch)
    check_kind("mixed_precision", mixed_precision, MixedPrecision)
    check_flag("shared_memory", shared_memory)
    if mixed_precision is not None:
        mixed_precision.check()
    return resolve_mesh(process_group, device_mesh, sharding_strategy or ShardingStrategy.FULL_SHARD)


@dataclass(frozen=True)
class Settings:
    """The options of one wrapper, with their defaults filled in.

    Attributes:
        group: The ranks that shard, or, where none do, that hold copies; a reference, since a model must not
            keep process groups alive.
        device: Where it computes.
        sharding_strategy: How it shards.
        cpu_offload: Whether shards live in host memory.
        mixed_precision: Dtypes of computation and communication.
        backward_prefetch: When backward gathers the next unit.
        forward_prefetch: Whether forward does.
        limit_all_gathers: As given.
        use_orig_params: Whether the optimizer sees slices of the original parameters.
    """

    group: Callable[[], dist.ProcessGroup | None]
    device: torch.device
    sharding_strategy: ShardingStrategy
    cpu_offload: CPUOffload
    mixed_precision: MixedPrecision
    backward_prefetch: BackwardPrefetch | None
    forward_prefetch: bool
    limit_all_gathers: bool
    use_orig_params: bool

    @classmethod
    def of(cls, mesh: ShardMesh, device: torch.device, options: Mapping[str, Any]) -> Settings:
        """Reads the wrapper's options, by the names of its arguments."""
        policy = options["mixed_precision"]
        return cls(
            mesh.first.reference,
            device,
            options["sharding_strategy"],
            options["cpu_offload"] or CPUOffload(),
            policy.plain if isinstance(policy, FullPrecision) else policy or MixedPrecision(),
            options["backward_prefetch"],
            options["forward_prefetch"],
            options["limit_all_gathers"],
            options["use_orig_params"],
        )

    def layouts(self, module: nn.Module, mesh: ShardMesh) -> Callable[..., Layout]:
        """Returns what makes the layouts of a module's parameters."""
        kind = SliceLayout if self.use_orig_params else FlatParameterLayout
        sharded, offload = mesh.shard is not None, self.cpu_offload.offload_params
        return partial(kind, module=module, sharded=sharded, offload=offload)

    def unit_options(self, casts: InputCasts) -> UnitOptions:
        """Returns how the schedule is to treat a unit."""
        return UnitOptions(
            reshard_after_forward=self.sharding_strategy in _RESHARD_AFTER_FORWARD,
            backward_prefetch=self.backward_prefetch,
            forward_prefetch=bool(self.forward_prefetch),
            casts=casts,
            full_in_eval=os.environ.get(FULL_PRECISION_IN_EVAL) == "1",
        )


class ShowsSettings(nn.Module):
    """The attributes of `torch.distributed.fsdp.FullyShardedDataParallel`'s instances, to be read only."""

    _settings: Settings
    _unit: Unit

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The ranks over which is sharded; with NO_SHARD those that hold the copies.

        Raises:
            RuntimeError: If it was destroyed.
        """
        group = self._settings.group()
        if group is None:
            raise RuntimeError("the process group of this wrapped module was destroyed; wrap it anew")
        return group

    @property
    def rank(self) -> int:
        """This process's rank in `process_group`."""
        return self.process_group.rank()

    @property
    def world_size(self) -> int:
        """How many ranks `process_group` has."""
        return self.process_group.size()

    @property
    def compute_device(self) -> torch.device:
        """Where the module computes."""
        return self._settings.device

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """How the unit is sharded."""
        return self._settings.sharding_strategy

    @property
    def cpu_offload(self) -> CPUOffload:
        """Whether shards live in host memory."""
        return self._settings.cpu_offload

    @property
    def mixed_precision(self) -> MixedPrecision:
        """Dtypes of computation and communication."""
        return self._settings.mixed_precision

    @property
    def backward_prefetch(self) -> BackwardPrefetch | None:
        """When backward gathers the next unit."""
        return self._settings.backward_prefetch

    @property
    def forward_prefetch(self) -> bool:
        """Whether forward gathers the next unit."""
        return self._settings.forward_prefetch

    @property
    def limit_all_gathers(self) -> bool:
        """As it was given; at most two units' gathers are ever in flight."""
        return self._settings.limit_all_gathers
