"""`DataMesh`: the mesh over which units shard, and its relation to meshes of distributed parameters."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from fsdp_wrap._comm import ShardMesh, ranks_of
from fsdp_wrap._core import DataParallelMeshDims, Seam, WrongKindError
from fsdp_wrap._core.torch_private import StridedShard, concatenated_mesh, flattened_mesh
from fsdp_wrap._params.parallel.local_part import LocalPart, not_divisible

Placed = tuple[DeviceMesh, tuple[Placement, ...]]
"""A mesh, and the placements of a tensor over it."""


@dataclass(frozen=True)
class DataMesh:
    """The ranks over which parameters are sharded and replicated.

    Attributes:
        mesh: A mesh of one dimension (shard, or replicate) or two (replicate, shard).
        whole: The mesh of all parameters, if they are distributed already and `mesh` is a part of it.
        dims: The dimensions of `whole` that `mesh` consists of.
        only_copies: Whether all of `mesh` replicates; with `dims`, those decide.
        copies: The mesh (replicate, shard) of the copies that share their state over `mesh`, if they do.
    """

    mesh: DeviceMesh
    whole: DeviceMesh | None = None
    dims: DataParallelMeshDims | None = None
    only_copies: bool = False
    copies: DeviceMesh | None = None

    @classmethod
    def of(cls, info: Any, device_type: str) -> DataMesh:
        """Reads a `FSDPMeshInfo`, `HSDPMeshInfo` or `DDPMeshInfo`, ours or torch's."""
        if not isinstance(getattr(info, "mesh", None), DeviceMesh) or not hasattr(info, "shard_mesh_dim"):
            raise WrongKindError(
                f"mesh_info must be a FSDPMeshInfo, HSDPMeshInfo or DDPMeshInfo, not {info!r}"
            )
        dims = getattr(info, "dp_mesh_dims", None)
        mesh = info.mesh if dims is None or info.spmd_mesh is None else info.spmd_mesh
        if mesh.device_type != device_type:
            raise ValueError(
                f"{mesh} is of {mesh.device_type} devices, and the unit computes on {device_type}: pass a "
                "mesh of the same devices, or shard the module of this parameter by a call of its own"
            )
        if mesh.get_coordinate() is None:
            raise ValueError(
                f"rank {dist.get_rank()} is not part of {mesh}: give each rank the mesh that it belongs to "
                "(a dimension of one that init_device_mesh made of all ranks)"
            )
        if dims is not None:
            return cls.within(mesh, dims)
        numbers = [info.replicate_mesh_dim, info.shard_mesh_dim]
        indices = [number + mesh.ndim if number < 0 else number for number in numbers if number is not None]
        if indices != [*range(mesh.ndim)]:
            raise ValueError(
                f"replicate_mesh_dim={numbers[0]} and shard_mesh_dim={numbers[1]} of {mesh} must be all of "
                "its dimensions, in this order: pass the part of it that they stand for, such as mesh['dp'] "
                "or mesh['replicate', 'shard']"
            )
        return cls(mesh, only_copies=info.shard_mesh_dim is None)

    @classmethod
    def within(cls, whole: DeviceMesh, dims: DataParallelMeshDims) -> DataMesh:
        """Returns the mesh of some dimensions of another one.

        Several dimensions that shard, or that replicate, become one, which is collective: it makes a process
        group.
        """
        names, wanted = whole.mesh_dim_names or (), (*dims.replicate_names, *dims.shard_names)
        missing = [name for name in wanted if name not in names]
        if missing or not wanted or len({*wanted}) < len(wanted):
            raise ValueError(
                f"dp_mesh_dims names {wanted}, and mesh has the dimensions {names}: name some of these, "
                "each once (init_device_mesh takes mesh_dim_names)"
            )
        parts = [
            _as_one(whole, dim_names) for dim_names in (dims.replicate_names, dims.shard_names) if dim_names
        ]
        return cls(parts[0] if len(parts) == 1 else concatenated_mesh(parts), whole, dims)

    @functools.cached_property
    def ranks(self) -> ShardMesh:
        """The ranks of the mesh, as units take them."""
        ranks = ranks_of(self.mesh, self.shards)
        return ranks if self.copies is None else replace(ranks, copies=ranks_of(self.copies))

    @property
    def shards(self) -> bool:
        """Whether each rank has a part of each parameter, and not the whole."""
        return not self.only_copies if self.dims is None else bool(self.dims.shard_names)

    @property
    def label(self) -> str:
        """Names of the dimensions, or their sizes if they have none."""
        return " x ".join(self.mesh.mesh_dim_names or map(str, self.mesh.shape))

    @property
    def own_dims(self) -> tuple[str, ...]:
        """Names of dimensions of the distributed parameters' mesh that are part of this one."""
        return () if self.dims is None else (*self.dims.replicate_names, *self.dims.shard_names)

    def copied_everywhere(self) -> DataMesh:
        """Returns the same ranks in one dimension that replicates; collective where there were several."""
        if self.mesh.ndim == 1:
            return DataMesh(self.mesh, only_copies=True)
        if self.mesh.mesh_dim_names is None:
            raise ValueError(
                f"{self.mesh} needs names for parameters that stay whole on all of its ranks: make it by "
                "init_device_mesh(..., mesh_dim_names=('replicate', 'shard'))"
            )
        return DataMesh(_as_one(self.mesh, self.mesh.mesh_dim_names), only_copies=True)

    def part_of(self, fqn: str, param: torch.Tensor) -> LocalPart | None:
        """Returns the part of a parameter that is distributed, as a `DTensor` or by types, or None."""
        library = sys.modules.get("spmd_types")
        if library is not None and not isinstance(param, DTensor) and library.has_local_type(param):
            return typed_part.needed(f"parameter '{fqn}' with types of spmd_types")(fqn, param, self)
        return LocalPart.of(param, self.own_dims)

    def check(self, fqn: str, param: torch.Tensor) -> None:
        """Refuses a parameter whose distribution does not let it be sharded further."""
        part = self.part_of(fqn, param)
        if self.whole is not None:
            self._check_within(fqn, part, self.whole)
        if part is None:
            return
        if not all(isinstance(placement, (Shard, StridedShard, Replicate)) for placement in part.placements):
            raise not_divisible(fqn, part)
        try:
            self.placed(part, 0)
        except (RuntimeError, ValueError, NotImplementedError, TypeError) as error:
            raise ValueError(
                f"parameter '{fqn}' is a DTensor on {part.mesh}, and the mesh to shard over is {self.mesh}; "
                "both must be slices of one mesh and share no rank but this: make one mesh, say (dp, tp), by "
                "init_device_mesh(..., mesh_dim_names=('dp', 'tp')), parallelise over mesh['tp'] and pass "
                f"mesh['dp'] ({error})"
            ) from error

    def _check_within(self, fqn: str, part: LocalPart | None, whole: DeviceMesh) -> None:
        actual = "a plain tensor" if part is None else f"a DTensor on {part.mesh}"
        if part is None or part.mesh != whole:
            raise ValueError(
                f"parameter '{fqn}' is {actual}; with dp_mesh_dims all parameters must be DTensors on "
                f"the mesh passed, {whole} (distribute_tensor; torchtitan: spmd_backend='full_dtensor')"
            )
        for name in self.own_dims:
            placement = part.placements[_place(whole, name)]
            if not isinstance(placement, Replicate):
                raise ValueError(
                    f"parameter '{fqn}' has the placement {placement} over '{name}', over which dp_mesh_dims "
                    "is to shard or replicate it; it must be Replicate() there"
                )

    def placed(self, part: LocalPart | None, dim: int) -> Placed:
        """Returns mesh and placements of a sharded parameter, over its own mesh as well if it has one.

        Args:
            part: The part of the parameter on this rank, if it was distributed already.
            dim: The dimension that is cut.

        Raises:
            RuntimeError: If there is no mesh that both meshes are parts of.
        """
        if self.dims is not None and part is not None:
            return self._placed_within(part, dim, self.dims)
        if part is None:
            return self.mesh, _over_data(self.mesh.ndim, None if self.only_copies else dim)
        last = Replicate() if self.only_copies else _shard(dim, part, 0)
        over_data = (*[Replicate()] * (self.mesh.ndim - 1), last)
        return concatenated_mesh([self.mesh, part.mesh]), (*over_data, *part.placements)

    def _placed_within(self, part: LocalPart, dim: int, dims: DataParallelMeshDims) -> Placed:
        """Places a part over `whole`: several sharding dimensions become one, where the first one was."""
        names, placements = part.mesh.mesh_dim_names or (), [*part.placements]
        for name in dims.shard_names:
            index = _place(part.mesh, name)
            placements[index] = _shard(dim, part, index + 1)
        if len(dims.shard_names) <= 1:
            return part.mesh, tuple(placements)
        meshes: list[DeviceMesh] = []
        combined: list[Placement] = []
        for name, placement in zip(names, placements):
            if name == next(dim_name for dim_name in names if dim_name in dims.shard_names):
                meshes.append(self.mesh)
                combined += [*[Replicate()] * (self.mesh.ndim - 1), placement]
            elif name not in self.own_dims:
                meshes.append(part.mesh[name])
                combined.append(placement)
        return concatenated_mesh(meshes), tuple(combined)


typed_part: Seam[Callable[[str, torch.Tensor, DataMesh], LocalPart | None]]
typed_part = Seam("parameters with types of spmd_types", "fsdp_wrap.compat._spmd_types")


@functools.cache  # one tuple for all parameters
def _over_data(ndim: int, dim: int | None) -> tuple[Placement, ...]:
    """Returns the placements over a mesh of so many dimensions; the last one cuts along `dim`, if any."""
    return (*[Replicate()] * (ndim - 1), Replicate() if dim is None else Shard(dim))


def _as_one(mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh:
    return mesh[names[0]] if len(names) == 1 else flattened_mesh(mesh[tuple(names)], "_".join(names))


def _place(mesh: DeviceMesh, name: str) -> int:
    return (mesh.mesh_dim_names or ()).index(name)


def _shard(dim: int, part: LocalPart | None, first: int) -> Placement:
    """Returns the placement for a cut along `dim` of a local part: strided if the part was cut there too.

    Dimensions of the part's mesh count from `first` on: they cut further what this placement has cut.
    """
    parts = 1
    if part is not None:
        cuts = zip(part.mesh.shape[first:], part.placements[first:])
        parts = math.prod(n for n, how in cuts if isinstance(how, (Shard, StridedShard)) and how.dim == dim)
    return Shard(dim) if parts == 1 else StridedShard(dim, split_factor=parts)
