"""The mesh of a parameter, where `shard_placement_fn` of `fully_shard` chooses it."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from fsdp_wrap._core.api import DataParallelMeshDims

_CURE = "the number of the dimension of the mesh"


@dataclass
class DataParallelMeshInfo:
    """Dimensions of a mesh that shard parameters, and that replicate them.

    Attributes:
        mesh: One dimension, or two: (replicate, shard).
        shard_mesh_dim: Number of the dimension over which parameters are sharded; None for none.
        replicate_mesh_dim: Number of the dimension over which they are replicated; None for none.
        dp_mesh_dims: The argument of `fully_shard`, for parameters that are `DTensor`s on `spmd_mesh`. These
            two count then, in place of the others.
        spmd_mesh: The whole mesh on which those lie.

    Raises:
        ValueError: If a dimension that its class needs is missing.
    """

    mesh: DeviceMesh
    shard_mesh_dim: int | None = None
    replicate_mesh_dim: int | None = None
    dp_mesh_dims: DataParallelMeshDims | None = None
    spmd_mesh: DeviceMesh | None = None

    def __post_init__(self) -> None:
        if self.shard_mesh_dim is None and self.replicate_mesh_dim is None:
            raise ValueError(f"{type(self).__name__} needs shard_mesh_dim or replicate_mesh_dim: {_CURE}")


@dataclass
class FSDPMeshInfo(DataParallelMeshInfo):
    """A mesh over which parameters are sharded."""

    def __post_init__(self) -> None:
        if self.shard_mesh_dim is None:
            raise ValueError(f"{type(self).__name__} needs shard_mesh_dim: {_CURE}")
        super().__post_init__()


@dataclass
class DDPMeshInfo(DataParallelMeshInfo):
    """A mesh over which parameters are replicated."""

    def __post_init__(self) -> None:
        if self.replicate_mesh_dim is None:
            raise ValueError(f"{type(self).__name__} needs replicate_mesh_dim: {_CURE}")
        super().__post_init__()


@dataclass
class HSDPMeshInfo(FSDPMeshInfo, DDPMeshInfo):
    """A mesh of two dimensions: parameters are sharded over one, and replicated over the other."""


@dataclass
class ShardPlacementResult:
    """A result of `shard_placement_fn` that chooses the mesh of a parameter as well.

    Attributes:
        placement: The `Shard(dim)` to cut it along; None for `Shard(0)`, or where it is only replicated.
        mesh_info: The mesh.
    """

    placement: Shard | None
    mesh_info: DataParallelMeshInfo
