"""Enums and configurations under torch's path: torch's own, or subclasses with fields of ours."""

from fsdp_wrap._core import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    DataParallelMeshInfo,
    DDPMeshInfo,
    FSDPMeshInfo,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    HSDPMeshInfo,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    ShardPlacementResult,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "DataParallelMeshInfo",
    "DDPMeshInfo",
    "FSDPMeshInfo",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "HSDPMeshInfo",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardPlacementResult",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
]

for _public in map(globals().__getitem__, __all__):
    if not _public.__module__.startswith("torch."):
        _public.__module__ = __name__  # the path that errors and pickles name
