"""The wrapper's arguments: `Settings` checks and reads them, `ShowsSettings` shows them as attributes.

`resolve_settings` checks those of its state dicts.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import DeviceMesh

from fsdp_wrap._building import over_replicas
from fsdp_wrap._comm import Communicator, ShardMesh, destroyed, resolve_mesh
from fsdp_wrap._core import (
    NO_CASTS,
    UNIT_ATTR,
    BackwardPrefetch,
    CPUOffload,
    FullOptimStateDictConfig,
    FullPrecision,
    FullStateDictConfig,
    Ignored,
    InputCasts,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    OptimStateDictConfig,
    ParamSlot,
    ShardAlignment,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
    WrongConfigError,
    WrongKindError,
    check_dtypes,
    check_kind,
    check_own,
    find_replicated,
    warn_caller,
    with_our_fields,
)
from fsdp_wrap._full_in_eval import FULL_PRECISION_IN_EVAL
from fsdp_wrap._params import JointParams, PackedParams, ShardedParams, SliceParams, is_packable
from fsdp_wrap._runtime import UnitOptions

_RESHARD_AFTER_FORWARD = (ShardingStrategy.FULL_SHARD, ShardingStrategy.HYBRID_SHARD)


def resolve_ignored(module: nn.Module, ignored_modules: Any, ignored_states: Any) -> Ignored:
    """Returns the ignored modules and parameters of the two arguments; warns if `module` is one of them."""
    if isinstance(ignored_states, Ignored):  # resolved already, by the unit above
        return ignored_states
    if ignored_modules is not None and ignored_states is not None:
        raise ValueError(
            "ignored_modules and ignored_states exclude each other: pass both kinds as ignored_states"
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
                f"{argument} holds a {type(item).__name__} that is sharded already: leave it out, the "
                "modules above do not touch what it has"
            )
    modules = {child for item in given if isinstance(item, nn.Module) for child in item.modules()}
    if module in modules:
        warn_caller(
            f"{argument} holds the {type(module).__name__} that is being wrapped: all its parameters stay as "
            "they are, whole on every rank, and their gradients are not reduced"
        )
    params = {item for item in given if isinstance(item, nn.Parameter)}
    modules |= find_replicated([module])
    params.update(param for child in modules for param in child.parameters(recurse=False))
    return Ignored(frozenset(modules), frozenset(params))


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of a wrapper that the units below it inherit, under their names, as given."""

    process_group: Any = None
    device_mesh: DeviceMesh | None = None
    sharding_strategy: ShardingStrategy | None = None
    cpu_offload: torch_fsdp.CPUOffload | None = None
    backward_prefetch: BackwardPrefetch | None = None
    mixed_precision: MixedPrecision | None = None
    param_init_fn: Callable[[nn.Module], None] | None = None
    device_id: int | torch.device | None = None
    sync_module_states: bool = False
    forward_prefetch: bool = False
    limit_all_gathers: bool = True
    use_orig_params: bool = False
    shared_memory: bool = True
    travel_together_bytes: int | None = None
    shard_alignment: int | str | None = None
    state_over_replicas: bool = False

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> Settings:
        """Makes settings of a wrapper's arguments."""
        return cls(**{name: arguments[name] for name in _names() if name in arguments})

    def mesh(self) -> ShardMesh:
        """Checks the arguments that do not depend on the module, and returns the mesh."""
        init = self.param_init_fn
        if init is not None and not callable(init):
            raise ValueError(f"param_init_fn needs to be callable with a module, or None, not {init!r}")
        check_kind("sharding_strategy", self.sharding_strategy, ShardingStrategy)
        check_kind("cpu_offload", self.cpu_offload, torch_fsdp.CPUOffload)
        check_kind("backward_prefetch", self.backward_prefetch, BackwardPrefetch)
        check_kind("mixed_precision", self.mixed_precision, MixedPrecision)
        check_own(self.shared_memory, self.travel_together_bytes, self.state_over_replicas)
        ShardAlignment.of(self.shard_alignment)
        if self.mixed_precision is not None:
            check_dtypes(self.mixed_precision)
        mesh = resolve_mesh(self.process_group, self.device_mesh, self.strategy)
        if self.state_over_replicas:
            mesh = over_replicas.needed("state_over_replicas=True").flat_ranks(mesh, self.strategy.name)
        return mesh

    @property
    def strategy(self) -> ShardingStrategy:
        """The sharding strategy, by default FULL_SHARD."""
        return self.sharding_strategy or ShardingStrategy.FULL_SHARD

    @property
    def policy(self) -> MixedPrecision:
        """The mixed precision, by default without casts."""
        return self.mixed_precision or MixedPrecision()

    @property
    def offload(self) -> CPUOffload:
        """What is kept in host memory, by default nothing."""
        return with_our_fields(self.cpu_offload, CPUOffload) if self.cpu_offload else CPUOffload()

    def params_maker(self, module: nn.Module, mesh: ShardMesh) -> Callable[..., ShardedParams]:
        """Returns a function that makes the sharded parameters of a segment."""
        plain = SliceParams if self.use_orig_params else JointParams
        options: dict[str, Any] = {"module": module, "sharded": mesh.shard is not None}
        options["offload"] = self.offload.offload_params
        alignment = ShardAlignment.of(self.shard_alignment)

        def make_params(
            slots: Sequence[ParamSlot], communicator: Communicator, *, name: str
        ) -> ShardedParams:
            if is_packable(slots[0].param):  # frozen, and sharded as bytes
                return PackedParams(slots, communicator, name=name, **options)
            return plain(slots, communicator, name=name, **options, alignment=alignment)

        return make_params

    def _casts(self, module: nn.Module) -> InputCasts:
        casts = NO_CASTS if self.mixed_precision is None else InputCasts.of(self.mixed_precision, module)
        return NO_CASTS if casts == NO_CASTS else casts

    def unit_options(self, module: nn.Module) -> UnitOptions:
        """Returns the options of the unit made of a module."""
        return UnitOptions(
            reshard_after_forward=self.strategy in _RESHARD_AFTER_FORWARD,
            backward_prefetch=self.backward_prefetch,
            forward_prefetch=bool(self.forward_prefetch),
            casts=self._casts(module),
            full_in_eval=os.environ.get(FULL_PRECISION_IN_EVAL) == "1",
            travel_together_bytes=self.travel_together_bytes,
        )


@functools.cache
def _names() -> tuple[str, ...]:
    """Returns the names of the settings."""
    return tuple(field.name for field in fields(Settings))


class ShowsSettings(nn.Module):
    """The read-only attributes of `torch.distributed.fsdp.FullyShardedDataParallel`'s instances."""

    _settings: Settings
    _group_reference: Callable[[], dist.ProcessGroup | None]
    _compute_device: torch.device

    def _show_settings(self, settings: Settings, mesh: ShardMesh, device: torch.device) -> None:
        # Without process groups, which a wrapper must not keep alive.
        held = settings.process_group, settings.device_mesh, settings.param_init_fn
        if any([value is not None for value in held]):
            settings = replace(settings, process_group=None, device_mesh=None, param_init_fn=None)
        reference = mesh.axes[0].reference
        # At once: a module looks at each attribute that is set, whether it is a parameter or a module.
        self.__dict__.update(_settings=settings, _group_reference=reference, _compute_device=device)

    @property
    def process_group(self) -> dist.ProcessGroup:
        """The process group of the sharding ranks; with NO_SHARD of the replicas.

        Raises:
            RuntimeError: If the group was destroyed.
        """
        group = self._group_reference()
        if group is None:
            raise destroyed()
        return group

    @property
    def rank(self) -> int:
        """This process's rank in `process_group`."""
        return self.process_group.rank()

    @property
    def world_size(self) -> int:
        """The number of ranks in `process_group`."""
        return self.process_group.size()

    @property
    def compute_device(self) -> torch.device:
        """The device that the module computes on."""
        return self._compute_device

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """The sharding strategy of the unit."""
        return self._settings.strategy

    @property
    def cpu_offload(self) -> CPUOffload:
        """Whether shards, or optimizer state, are kept in host memory."""
        return self._settings.offload

    @property
    def mixed_precision(self) -> MixedPrecision:
        """The dtypes of computation and communication."""
        policy = self._settings.policy
        return MixedPrecision() if isinstance(policy, FullPrecision) else policy

    @property
    def backward_prefetch(self) -> BackwardPrefetch | None:
        """The time at which backward gathers the next unit; None for no prefetch."""
        return self._settings.backward_prefetch

    @property
    def forward_prefetch(self) -> bool:
        """Whether forward prefetches the next unit."""
        return self._settings.forward_prefetch

    @property
    def limit_all_gathers(self) -> bool:
        """The argument as given, without effect: at most two units' gathers are ever in flight."""
        return self._settings.limit_all_gathers


_CONFIGS: dict[StateDictType, tuple[type[StateDictConfig], type[OptimStateDictConfig]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
}


def resolve_settings(
    kind: StateDictType = StateDictType.FULL_STATE_DICT,
    config: StateDictConfig | None = None,
    optim_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """Checks configurations and completes them by their defaults."""
    check_kind("state_dict_type", kind, StateDictType, optional=False)
    config_type, optim_type = _CONFIGS[kind]
    return StateDictSettings(
        kind,
        _completed("state_dict_config", kind, config, config_type),
        _completed("optim_state_dict_config", kind, optim_config, optim_type),
    )


def _completed(name: str, kind: StateDictType, given: Any, wanted: type) -> Any:
    given = wanted() if given is None else given
    if type(given) is not wanted:
        raise WrongConfigError(f"{kind.name} takes a {wanted.__name__} as {name}, not {given!r}")
    return given
