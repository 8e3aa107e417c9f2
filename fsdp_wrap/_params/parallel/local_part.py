"""`LocalPart`: this rank's part of a distributed parameter; `HeldBy`: the ranks that hold tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from fsdp_wrap._comm import ShardMesh, default_group, device_type_for, group_of, mesh_over
from fsdp_wrap._core import ceil_div
from fsdp_wrap._core.torch_private import AsyncCollectiveTensor, DTensorSpec, StridedShard, TensorMeta

# `from_local` costs ten times as much, per gradient and step, and the empty `__init__` some.
dtensor_of: Callable[[torch.Tensor, DTensorSpec], DTensor]
dtensor_of = functools.partial(DTensor.__new__, DTensor, requires_grad=False)


def to_local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns this rank's part of a tensor, without autograd or communication."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def placed(tensor: torch.Tensor) -> tuple[DeviceMesh, tuple[Placement, ...]] | None:
    """Returns mesh and placements of a `DTensor`; None for other tensors."""
    return (tensor.device_mesh, tensor.placements) if isinstance(tensor, DTensor) else None


@dataclass(frozen=True)
class HeldBy:
    """The ranks that hold tensors between them, without a reference that keeps their process group alive.

    Attributes:
        ranks: Global ranks, in order.
        names: Name of the mesh's dimension, if it has one.
        replicated: Whether each of them holds everything.
        given: The user's mesh, if the ranks were given by one.
        reference: Returns their process group while that lives.
    """

    ranks: tuple[int, ...]
    device_type: str
    names: tuple[str, ...] | None = None
    replicated: bool = False
    given: DeviceMesh | None = field(default=None, compare=False)
    reference: Callable[[], Any] = field(default=lambda: None, compare=False)

    @classmethod
    def of(cls, mesh: ShardMesh, device: torch.device) -> HeldBy:
        """Returns the ranks that hold one copy of a unit between them; all replicas, if each has a copy."""
        ranks = mesh.shard or mesh.replicate
        assert ranks is not None
        names = None if mesh.given is None else mesh.given.mesh_dim_names
        return cls(
            ranks.members,
            device.type,
            names and names[-1:],
            replicated=mesh.shard is None,
            given=mesh.given,
            reference=ranks.reference,
        )

    @classmethod
    def everyone(cls) -> HeldBy:
        """Returns all ranks."""
        group = default_group("a piece of a sharded state dict")
        return cls(tuple(range(dist.get_world_size(group))), device_type_for(group))

    @property
    def size(self) -> int:
        """Number of ranks that hold one copy between them."""
        return 1 if self.replicated else len(self.ranks)

    @property
    def group(self) -> dist.ProcessGroup:
        """Their process group; raises RuntimeError where there is none any more."""
        return group_of(self.ranks, self.reference())

    @property
    def mesh(self) -> DeviceMesh:
        """The user's mesh, or one of one dimension."""
        return self.given or mesh_over(self.group, self.device_type, self.names)

    @property
    def described(self) -> tuple[Any, ...]:
        """Arguments that make an equal object in another process."""
        return self.ranks, self.device_type, self.names, self.replicated


def holding(tensor: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Returns a tensor placed like another, with another local part of the same shape."""
    if not isinstance(tensor, DTensor):
        return local
    spec = tensor._spec
    if local.dtype != tensor.dtype:
        spec = DTensorSpec(spec.mesh, spec.placements, TensorMeta(spec.shape, spec.stride, local.dtype))
    return dtensor_of(local, spec)


def make_copyable(entries: MutableMapping[str, Any], names: Iterable[str]) -> None:
    """Lets `copy.deepcopy` copy the `DTensor`s of these names in a state dict."""
    for name in names:
        entry = entries[name]
        if isinstance(entry, DTensor) and not isinstance(entry, nn.Parameter) and entry.storage_offset():
            entries[name] = copyable(entry)


def copyable(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor that `copy.deepcopy` can copy: a `DTensor` without a storage offset.

    `deepcopy` applies the offset of the local tensor to the `DTensor`, and copies from the wrong address.
    """
    if not isinstance(tensor, DTensor) or not tensor.storage_offset():
        return tensor
    local = tensor._local_tensor
    same = dtensor_of(local.new_empty(0), tensor._spec)
    same._local_tensor = local
    return same


@dataclass(frozen=True)
class LocalPart:
    """The local part of a parameter that is a `DTensor` before it is sharded.

    Attributes:
        shape: Shape of the whole parameter.
        stride: Stride of the whole parameter.
        own: Dimensions of the mesh over which the unit's reduction averages gradients.
    """

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    own: frozenset[int] = frozenset()

    @classmethod
    def of(cls, param: torch.Tensor, own: Collection[str] = ()) -> LocalPart | None:
        """Returns the local part of a `DTensor`, None for other parameters; `own` names mesh dimensions."""
        if not isinstance(param, DTensor):
            return None
        names = param.device_mesh.mesh_dim_names or ()
        reduced = frozenset(names.index(name) for name in own)
        return cls(param.device_mesh, param.placements, param.shape, param.stride(), reduced)

    @property
    def described(self) -> tuple[Any, ...]:
        """Its attributes, of types that `torch.load` reads with `weights_only`."""
        return self.mesh, self.placements, tuple(self.shape), self.stride, sorted(self.own)

    def tensor(self, local: torch.Tensor) -> DTensor:
        """Returns a `DTensor` placed like the original, with the local part `local`."""
        return dtensor_of(local, self.spec(local.dtype))

    def parameter(self, local: torch.Tensor) -> nn.Parameter:
        """Returns a parameter placed like the original, with `local` itself as its local part."""
        param = nn.Parameter(self.tensor(local), requires_grad=False)
        param._local_tensor = local  # type: ignore[attr-defined]
        return param

    def shown(self, local: torch.Tensor) -> torch.Tensor:
        """Returns what modules have of the original where `local` is its local part."""
        return self.tensor(local)

    def shown_gradient(self, local: torch.Tensor) -> torch.Tensor:
        """Returns a gradient for a leaf; `local` is the local part of one that is placed as the original."""
        return self.tensor(local)

    def attributes(self, param: torch.Tensor) -> dict[str, Any]:
        """Returns the attributes that users gave the original."""
        return dict(vars(param))

    def arriving(self, grad: torch.Tensor) -> torch.Tensor:
        """Returns a leaf's gradient as a `DTensor`, or as it is where that says enough."""
        return grad

    def spec(self, dtype: torch.dtype) -> DTensorSpec:
        """Returns the spec of the original, in some dtype."""
        return DTensorSpec(self.mesh, self.placements, TensorMeta(self.shape, self.stride, dtype))

    @property
    def box(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Offsets and sizes of the local part in the whole parameter, if it is one box."""
        offsets, sizes = [0] * len(self.shape), [*self.shape]
        for place, count, placement in zip(
            self.mesh.get_coordinate() or (), self.mesh.shape, self.placements
        ):
            if isinstance(placement, Shard):
                dim, size = placement.dim, sizes[placement.dim]
                chunk = ceil_div(size, count)
                first = min(place * chunk, size)
                offsets[dim] += first
                sizes[dim] = min(chunk, size - first)
        return tuple(offsets), tuple(sizes)

    @property
    def is_box(self) -> bool:
        """Whether the local part is one box of a tensor with dimensions."""
        return bool(self.shape) and not any(isinstance(place, StridedShard) for place in self.placements)

    @property
    def cut_dims(self) -> tuple[int, ...]:
        """Dimensions of the mesh over which ranks have different parts."""
        return tuple(
            dim for dim, placement in enumerate(self.placements) if not isinstance(placement, Replicate)
        )

    @property
    def may_be_summed(self) -> bool:
        """Whether its gradient may need a sum over ranks with the same part, beside the unit's reduction."""
        dims = {*range(self.mesh.ndim)} - self.own - {*self.cut_dims}
        return any([self.mesh.size(dim) > 1 for dim in dims])

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """Groups of ranks with different parts."""
        return [self.mesh.get_group(dim) for dim in self.cut_dims]

    @property
    def is_first_copy(self) -> bool:
        """Whether no rank before this one has the same part."""
        here = self.mesh.get_coordinate() or ()
        return not any(place for dim, place in enumerate(here) if dim not in self.cut_dims)

    def replicated(self, shape: torch.Size) -> LocalPart:
        """Returns the local part of a tensor that is replicated on the same mesh."""
        stride = torch.empty(shape, device="meta").stride()
        return LocalPart(self.mesh, tuple(Replicate() for _ in self.placements), shape, stride)

    @property
    def held_shape(self) -> torch.Size:
        """Shape of the local part."""
        return self.cut(torch.empty(self.shape, device="meta")).shape

    def cut(self, full: torch.Tensor) -> torch.Tensor:
        """Returns the local part of a tensor of the whole parameter's shape; callers only read it."""
        if any(isinstance(placement, StridedShard) for placement in self.placements):  # rows that lie apart
            shared = full.detach()
            return distribute_tensor(shared, self.mesh, self.placements, src_data_rank=None).to_local()
        for dim, (first, size) in enumerate(zip(*self.box)):
            full = full.narrow(dim, first, size)
        return full

    def index_in_whole(self, index: torch.Tensor) -> torch.Tensor:
        """Maps indices (int64, 1-D) in the flattened local part to the flattened whole parameter."""
        if any(isinstance(placement, StridedShard) for placement in self.placements):
            return self.cut(torch.arange(self.shape.numel()).view(self.shape)).reshape(-1)[index]
        offsets, sizes = self.box
        mapped, step = torch.zeros_like(index), 1
        for offset, size, full in zip(offsets[::-1], sizes[::-1], self.shape[::-1]):
            mapped += (index % size + offset) * step
            index, step = index // size, step * full
        return mapped

    def whole(self, local: torch.Tensor) -> torch.Tensor:
        """Returns the whole of a tensor with this local part; collective over the mesh."""
        return self.tensor(local).full_tensor()

    def gradient(self, grad: torch.Tensor) -> torch.Tensor:
        """Returns the local part of a gradient, placed as the parameter is.

        Collective over the mesh if the gradient is placed otherwise. Over the dimensions in `own` it stays
        this rank's contribution.
        """
        if isinstance(grad, DTensor):
            wanted = tuple(
                given if dim in self.own and isinstance(given, (Partial, Replicate)) else placement
                for dim, (given, placement) in enumerate(zip(grad.placements, self.placements))
            )
            if grad.placements != wanted:
                grad = grad.redistribute(placements=wanted)
        return arrived(grad)

    def sums_over(self, grad: torch.Tensor) -> tuple[int, ...] | None:
        """Returns the mesh dimensions over which sums do what `gradient` does; None if more is needed."""
        if not isinstance(grad, DTensor) or grad.placements == self.placements:
            return ()
        dims = []
        for dim, (given, placement) in enumerate(zip(grad.placements, self.placements)):
            if given == placement or (dim in self.own and isinstance(given, (Partial, Replicate))):
                continue
            if type(given) is not Partial or given.reduce_op != "sum" or not placement.is_replicate():
                return None
            dims.append(dim)
        return tuple(dims)


def arrived(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the local part of a tensor, and waits for it."""
    held = to_local(tensor)
    return held.wait() if isinstance(held, AsyncCollectiveTensor) else held


def check_beside(fqn: str, param: torch.Tensor, ranks: ShardMesh) -> None:
    """Refuses a `DTensor` whose local part cannot become part of a flat parameter over some ranks."""
    part = LocalPart.of(param)
    if part is None:
        return
    if param.is_meta:
        raise ValueError(
            f"parameter '{fqn}' is a DTensor on the meta device: give it values before wrapping "
            "(module.to_empty(device=...) and initialise it), or use fully_shard"
        )
    if not all(type(placement) in (Shard, Replicate) for placement in part.placements):
        raise not_divisible(fqn, part)
    others = {rank for group in (ranks.shard, ranks.replicate) if group is not None for rank in group.members}
    if len(others & {*part.mesh.mesh.flatten().tolist()}) != 1:
        raise ValueError(
            f"parameter '{fqn}' is a DTensor on {part.mesh}, and the wrapper shards over the ranks "
            f"{sorted(others)}: they must share no rank but this one. Make one mesh, say (dp, tp), by "
            "init_device_mesh, parallelise over mesh['tp'], and wrap with device_mesh=mesh['dp']"
        )


def not_divisible(fqn: str, part: LocalPart) -> ValueError:
    """Returns the error for a `DTensor` whose placements cannot be sharded further."""
    return ValueError(
        f"parameter '{fqn}' is a DTensor with placements {part.placements}; only sharded and replicated ones "
        "have values that can be sharded further: redistribute it"
    )
