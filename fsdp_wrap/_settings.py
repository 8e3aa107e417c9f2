"""What programs read from a wrapper beside its methods: how it was set up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_wrap._mesh import ShardMesh
from fsdp_wrap._precision import FullPrecision
from fsdp_wrap._unit import Unit
from fsdp_wrap.api import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy

__all__ = ["Settings", "ShowsSettings"]


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
