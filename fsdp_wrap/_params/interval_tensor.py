"""`IntervalTensor`: one rank's interval of a tensor, as sharded state dicts contain it.

A contiguous interval of a flattened n-dimensional tensor consists of a few rectangular boxes (three for a
matrix). So each rank writes and reads its interval as chunks of the full tensor, by the protocol of
`torch.distributed.checkpoint` for tensors with chunks of their own, without communication. `Spread` tells all
ranks' intervals of one tensor, `Box` is a rectangle in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement

from fsdp_wrap._comm import deaths_told
from fsdp_wrap._core import ceil_div
from fsdp_wrap._core.torch_private import (
    ShardOfTensor,
    make_wrapper_subclass,
    no_torch_function,
    object_device_of,
    pin_memory_operator,
    pytree,
    to_copy_operator,
)
from fsdp_wrap._params.parallel import HeldBy, LocalPart


@dataclass(frozen=True, init=False)
class Intervals(Placement):
    """A placement: each rank holds an interval of the flattened tensor, perhaps not whole rows."""


@dataclass(frozen=True)
class Box:
    """A rectangular, contiguous part of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    first: int  # index of its first element in the flattened tensor

    @property
    def numel(self) -> int:
        return torch.Size(self.sizes).numel()


def boxes_of(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Cuts the interval [start, stop) of a flattened tensor into at most 2 x dimensions - 1 boxes, in order.

    An empty interval has no box, but a tensor without elements has one, of the whole shape.
    """
    if torch.Size(shape).numel() == 0 or (not shape and start < stop):
        yield Box((0,) * len(shape), shape, 0)
        return
    rows = [torch.Size(shape[dim + 1 :]).numel() for dim in range(len(shape))]
    while start < stop:
        dim = next(dim for dim, row in enumerate(rows) if start % row == 0 and start + row <= stop)
        offsets = tuple(start // row % size for row, size in zip(rows, shape))
        count = min(shape[dim] - offsets[dim], (stop - start) // rows[dim])
        yield Box(offsets, (*(1,) * dim, count, *shape[dim + 1 :]), start)
        start += count * rows[dim]


class Spread(NamedTuple):
    """The cuts of a tensor in a buffer that is cut evenly between ranks.

    Attributes:
        first: Index of the tensor's first element in the buffer.
        length: Elements of the buffer on each rank.
    """

    held_by: HeldBy
    first: int
    length: int

    def bounds(self, numel: int) -> Iterator[tuple[int, int]]:
        """Yields each rank's (start, stop) in a flattened tensor of so many elements."""
        if self.held_by.size == 1:
            yield 0, numel
            return
        for rank in range(self.held_by.size):
            begin = rank * self.length - self.first
            yield min(max(begin, 0), numel), min(max(begin + self.length, 0), numel)

    def placements(self, shape: torch.Size) -> tuple[Placement, ...]:
        """Returns the placements of a `DTensor`: `Shard(0)` where every rank has just those rows."""
        others = [Replicate()] * (self.held_by.mesh.ndim - 1)
        if self.held_by.replicated:
            return (*others, Replicate())
        return (*others, Shard(0) if self._is_by_rows(shape) else Intervals())

    def _is_by_rows(self, shape: torch.Size) -> bool:
        numel = shape.numel()
        if numel == 0 or not shape:
            return False
        part = ceil_div(shape[0], self.held_by.size) * shape[1:].numel()
        ends = [min(rank * part, numel) for rank in range(self.held_by.size + 1)]
        return [*self.bounds(numel)] == [*zip(ends, ends[1:])]


_aten = torch.ops.aten

_INSTEAD = {
    "_spec": "pieces of state dicts cannot combine with a DTensor, use full_tensor() or to_dtensor()",
    "local_tensor": "it is gone since 0.2, call to_local()",
    "metadata": "it is gone since 0.2, read shape and dtype, and call boxes() for this rank's parts",
}
"""What replaces attributes of `DTensor`, and of `IntervalTensor` in the last release."""


PASSES_FOR_DTENSOR = torch.__version__ >= "2.12"
"""Whether operators reach an object that `isinstance` takes for a `DTensor`.

Up to torch 2.11 they go to `DTensor`'s own runtime instead, which reads attributes that are not there.
"""


class IntervalTensor(torch.Tensor):
    """A tensor of full shape of which this rank holds the interval [start, start + piece.numel()).

    Elementwise operations, copies and moves act on the piece; operations that need other elements raise
    TypeError. Made by sharded state dicts; `torch.distributed.checkpoint` saves and loads it.

    It has the methods of a `DTensor`, for programs that expect one. `isinstance` takes it for a `DTensor`
    from torch 2.12 on.
    """

    start: int
    piece: torch.Tensor
    spread: Spread | None
    part: LocalPart | None

    @staticmethod
    def __new__(
        cls,
        shape: torch.Size,
        start: int,
        piece: torch.Tensor,
        requires_grad: bool = False,
        spread: Spread | None = None,
        part: LocalPart | None = None,
    ) -> IntervalTensor:
        """Makes one around a piece.

        Args:
            shape: Shape of the full tensor.
            start: Index of the piece's first element in the flattened full tensor.
            piece: 1-D, contiguous; it is not copied.
            requires_grad: Whether the tensor claims to need a gradient.
            spread: The ranks that hold the tensor between them, and its cuts; None if that is not known.
            part: The part of the tensor that these ranks hold, if not all: `start` counts in it, flattened.
        """
        self: IntervalTensor = make_wrapper_subclass(
            cls, shape, dtype=piece.dtype, device=piece.device, requires_grad=requires_grad
        )
        self.start, self.piece, self.spread, self.part = start, piece, spread, part
        return self

    __torch_function__ = no_torch_function  # type: ignore[assignment]

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # read by isinstance() beside the type
        return DTensor if PASSES_FOR_DTENSOR else IntervalTensor

    @property
    def stop(self) -> int:
        """Index after the piece's last element in the flattened full tensor."""
        return self.start + self.piece.numel()

    def boxes(self) -> dict[tuple[int, ...], torch.Tensor]:
        """Returns this rank's boxes, as views of the piece, by their offsets."""
        begins, sizes = ((0,) * self.ndim, tuple(self.shape)) if self.part is None else self.part.box
        return {
            tuple(map(sum, zip(begins, box.offsets))): self.piece.narrow(
                0, box.first - self.start, box.numel
            ).view(box.sizes)
            for box in boxes_of(sizes, self.start, self.stop)
        }

    def with_piece(self, piece: torch.Tensor) -> IntervalTensor:
        """Returns a tensor with the same interval on this rank, and other values.

        Args:
            piece: The values, 1-D, as many as before.
        """
        return IntervalTensor(self.shape, self.start, piece, spread=self.spread, part=self.part)

    def own(self, full: torch.Tensor) -> torch.Tensor:
        """Returns this rank's interval of a full tensor, 1-D.

        Args:
            full: A tensor of the full shape.
        """
        held = full if self.part is None else self.part.cut(full)
        return held.reshape(-1)[self.start : self.stop]

    def full_tensor(
        self, group: dist.ProcessGroup | None = None, *, grad_placements: Any = None
    ) -> torch.Tensor:
        """Returns the full tensor; collective.

        Args:
            group: Ranks that hold all of the tensor between them. By default those that did when it was made,
                or all ranks if that is not known.
            grad_placements: Has no effect: no gradient flows here.
        """
        if group is None and self.part is not None and self.spread is not None:
            held_by = self.spread.held_by
            return self._assembled([*([held_by.group] if held_by.size > 1 else []), *self.part.groups])
        if group is None and self.spread is not None:
            if self.spread.held_by.size == 1:
                return self.piece.clone().view(self.shape)
            group = self.spread.held_by.group
        return self._assembled([group])

    def to_dtensor(self, mesh: DeviceMesh) -> DTensor:
        """Returns a `DTensor` of the same values; collective over `mesh`, whose ranks hold all of them.

        It is sharded along dimension 0 over the mesh's last dimension, and replicated over the others.

        Args:
            mesh: The mesh.
        """
        return by_rows(self._assembled([mesh.get_group(dim) for dim in range(mesh.ndim)]), mesh)

    def _assembled(self, groups: Sequence[dist.ProcessGroup | None]) -> torch.Tensor:
        """Returns the full tensor, which the ranks of these groups hold between them; collective."""

        def write(full: torch.Tensor) -> None:
            for offsets, box in self.boxes().items():
                full[tuple(slice(first, first + size) for first, size in zip(offsets, box.shape))] = box

        return assemble(self.shape, self.dtype, groups, write, self.device).to(self.device)

    # the interface of `DTensor`

    @property
    def device_mesh(self) -> DeviceMesh:
        """The ranks that hold the tensor between them."""
        held_by = HeldBy.everyone() if self.spread is None else self.spread.held_by
        return held_by.mesh

    @property
    def placements(self) -> tuple[Placement, ...]:
        """The placements: `Shard(0)` if all ranks hold just those rows, else `Intervals()`."""
        if self.spread is None or self.part is not None:
            return (Intervals(),)
        return self.spread.placements(self.shape)

    def to_local(self, *, grad_placements: Any = None) -> torch.Tensor:
        """Returns this rank's part: rows or the whole, as `placements` says, else the piece, 1-D.

        Args:
            grad_placements: Ignored; `DTensor` has it.
        """
        if isinstance(self.placements[-1], Intervals):
            return self.piece
        rows = self.piece.numel() // self.shape[1:].numel() if self.shape else 1
        return self.piece.view((rows, *self.shape[1:]) if self.shape else ())

    def redistribute(
        self,
        device_mesh: DeviceMesh | None = None,
        placements: Sequence[Placement] | None = None,
        **_: Any,
    ) -> DTensor | IntervalTensor:
        """Returns a `DTensor` with other placements; collective over the ranks that hold the tensor.

        Args:
            device_mesh: The mesh of the result; None for this one.
            placements: One for each of the mesh's dimensions; None for `Replicate()` on all.
        """
        mesh = self.device_mesh if device_mesh is None else device_mesh
        wanted = [Replicate()] * mesh.ndim if placements is None else list(placements)
        if mesh == self.device_mesh and tuple(wanted) == self.placements:
            if isinstance(wanted[-1], Intervals):
                return self
            local, stride = self.to_local(), self.stride()
            return DTensor.from_local(local, mesh, wanted, run_check=False, shape=self.shape, stride=stride)
        return distribute_tensor(self.full_tensor(), mesh, wanted, src_data_rank=None)

    @property
    def _local_tensor(self) -> torch.Tensor:
        return self.piece

    @_local_tensor.setter
    def _local_tensor(self, piece: torch.Tensor) -> None:
        self.piece = piece

    def __getattr__(self, name: str) -> Any:
        instead = f": {_INSTEAD[name]}" if name in _INSTEAD else ""
        raise AttributeError(
            f"'IntervalTensor' object has no attribute '{name}'{instead}", name=name, obj=self
        )

    def local_shards(self) -> list[ShardOfTensor]:
        """Returns this rank's boxes, as a `ShardedTensor` does."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        return [
            ShardOfTensor.from_tensor_and_offsets(box, list(offsets), rank)
            for offsets, box in self.boxes().items()
        ]

    _local_shards = property(local_shards)

    # The protocol of torch.distributed.checkpoint, which whoever saves has imported; it takes long.

    def __create_write_items__(self, fqn: str, _: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        if self.part is not None and not self.part.is_first_copy:
            return []  # the first copy is saved; other copies may be cut differently
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        return [ChunkStorageMetadata(torch.Size(offsets), box.shape) for offsets, box in self.boxes().items()]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        # By offset: the index counts the chunks of all ranks.
        return _with_own_storage(self.boxes()[tuple(index.offset or ())])

    # the protocol of tensor subclasses

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in _OTHERWISE:
            return _OTHERWISE[func](*args, **kwargs or {})
        if func not in _ON_PIECES and torch.Tag.pointwise not in func.tags:
            raise TypeError(
                f"{func} needs elements that other ranks hold: a value of a sharded state dict takes "
                "elementwise operations only; use full_tensor() or to_dtensor(), or a full state dict"
            )
        return _on_pieces(func, args, dict(kwargs or {}))

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["piece"], (self.shape, self.start, self.requires_grad, self.spread, self.part)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: Any, *_: Any) -> IntervalTensor:
        shape, start, *others = context
        return IntervalTensor(shape, start, inner["piece"], *others)

    def __deepcopy__(self, memo: dict[int, Any]) -> IntervalTensor:
        others = self.requires_grad, self.spread, self.part
        copied = IntervalTensor(self.shape, self.start, self.piece.clone(), *others)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        own = self.piece.untyped_storage().nbytes() == self.piece.nbytes
        # A view would take the whole shard with it.
        piece = self.piece if own else self.piece.clone()
        spread = self.spread and (*self.spread.held_by.described, self.spread.first, self.spread.length)
        part = self.part and self.part.described
        return rebuild_interval_tensor, (tuple(self.shape), self.start, piece, spread, part)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"IntervalTensor(shape={tuple(self.shape)}, start={self.start}, piece={self.piece!r})"


_LOOKS = {_aten.all.default, _aten.any.default, _aten.equal.default, _aten.allclose.default}
"""Comparisons; they return a result for this rank's piece."""

_ON_PIECES = {
    _aten.alias.default,
    _aten.zeros_like.default,
    _aten.ones_like.default,
    _aten.full_like.default,
    _aten.zero_.default,
    _aten.fill_.Scalar,
    _aten.is_pinned.default,
    pin_memory_operator,
    *_LOOKS,
}


def by_rows(full: torch.Tensor, mesh: DeviceMesh, *, replicated: bool = False) -> DTensor:
    """Shards a full tensor, which all ranks have, along dimension 0 over the last dimension of a mesh.

    A tensor without dimensions stays whole, as all do with `replicated`.
    """
    placements: list[Placement] = [Replicate()] * mesh.ndim
    if full.ndim > 0 and not replicated:
        placements[-1] = Shard(0)
    rows = distribute_tensor(full, mesh, placements, src_data_rank=None)
    return cast(DTensor, rows.clone())  # else the rows keep all of the full tensor


def rebuild_interval_tensor(
    shape: tuple[int, ...],
    start: int,
    piece: torch.Tensor,
    described: tuple[Any, ...] | None,
    part: tuple[Any, ...] | None,
) -> IntervalTensor:
    spread = None if described is None else Spread(HeldBy(*described[:-2]), *described[-2:])
    beside = None
    if part is not None:
        mesh, placements, sizes, stride, own = part
        beside = LocalPart(mesh, placements, torch.Size(sizes), stride, frozenset(own))
    return IntervalTensor(torch.Size(shape), start, piece, spread=spread, part=beside)


torch.serialization.add_safe_globals([IntervalTensor, rebuild_interval_tensor])


def _on_pieces(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    kwargs.pop("memory_format", None)  # pieces are 1-D
    first = next(leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, IntervalTensor))

    def piece_of(leaf: Any) -> Any:
        if isinstance(leaf, IntervalTensor):
            _refuse_other(first, leaf)
            return leaf.piece
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            raise TypeError(f"{func}: a value of a sharded state dict cannot combine with a full tensor")
        return leaf

    piece_args, piece_kwargs = pytree.tree_map(piece_of, (args, kwargs))
    result = func(*piece_args, **piece_kwargs)
    if not isinstance(result, torch.Tensor) or func in _LOOKS:
        return result
    return first if result is first.piece else first.with_piece(result)  # the former: in place


def _refuse_other(one: IntervalTensor, other: IntervalTensor) -> None:
    if (one.shape, one.start, one.stop, one.part) != (other.shape, other.start, other.stop, other.part):
        raise ValueError(
            f"elements {other.start} to {other.stop} do not match elements {one.start} to {one.stop}, which "
            "this rank holds: the value comes from another rank, wrapping or number of ranks; load it by "
            "torch.distributed.checkpoint, which fits it"
        )


def _new_empty(like: IntervalTensor, size: Sequence[int], **kwargs: Any) -> torch.Tensor:
    if torch.Size(size) != like.shape:
        return like.piece.new_empty(size, **kwargs)
    return like.with_piece(like.piece.new_empty(like.piece.shape, **kwargs))


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    if isinstance(target, IntervalTensor) and isinstance(source, IntervalTensor):
        _refuse_other(target, source)
        target.piece.copy_(source.piece)
    elif isinstance(target, IntervalTensor):
        target.piece.copy_(target.own(source.expand(target.shape)))
    else:
        assert isinstance(source, IntervalTensor)
        if source.piece.numel() != source.shape.numel():
            raise TypeError(
                "a full tensor cannot take what this rank holds of a sharded one: use full_tensor(), or "
                "load under FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT)"
            )
        target.copy_(source.piece.view(source.shape))
    return target


def _anew(func: Callable[..., torch.Tensor], tensor: IntervalTensor, **how: Any) -> IntervalTensor:
    return tensor.with_piece(func(tensor.piece, **{**how, "memory_format": None}))  # pieces are 1-D


_OTHERWISE: dict[Any, Callable[..., torch.Tensor]] = {
    _aten.copy_.default: _copy,
    # Without a walk of arguments: a save does both to each, a load the last.
    _aten.detach.default: lambda tensor: tensor.with_piece(tensor.piece.detach()),
    **{func: partial(_anew, func) for func in (to_copy_operator, _aten.empty_like.default)},
    _aten.new_empty.default: _new_empty,
}


def assemble(
    shape: torch.Size,
    dtype: torch.dtype,
    groups: Sequence[dist.ProcessGroup | None],
    write: Callable[[torch.Tensor], None],
    device: torch.device | None = None,
) -> torch.Tensor:
    """Assembles a full tensor from parts on the ranks of all groups; collective.

    Elements that a rank lacks are zero, and ranks agree on the others: the maximum of bytes is the value.

    Args:
        shape: Shape of the tensor.
        dtype: Dtype of the tensor.
        groups: Groups of ranks that hold all of the tensor between them.
        write: Writes this rank's part into a full tensor of zeros.
        device: Device of the tensor, if the groups can communicate from there.
    """
    full = torch.zeros(shape, dtype=dtype, device=_device_in(groups[0], device))
    write(full)
    data = full.view(-1).view(torch.uint8)
    for group in groups if data.numel() else ():
        with deaths_told(group):
            dist.all_reduce(data, op=dist.ReduceOp.MAX, group=group)
    return full


def _with_own_storage(view: torch.Tensor) -> torch.Tensor:
    """Returns a tensor over the same host memory with a storage of just its size.

    DCP's writer copies tensors that share a storage, and keeps the copies until its file is done: as much
    memory as the rank's shards.
    """
    if view.device.type != "cpu" or view.numel() == 0 or view.untyped_storage().nbytes() == view.nbytes:
        return view
    data = torch.from_numpy(view.detach().view(-1).view(torch.uint8).numpy())
    return data.view(view.dtype).view(view.shape)


def _device_in(group: dist.ProcessGroup | None, device: torch.device | None) -> torch.device:
    """Returns a device from which a group can communicate: the given one, if that is possible."""
    group = dist.group.WORLD if group is None else group
    types = {candidate.type for candidate in group._device_types}  # type: ignore[union-attr]
    return device if device is not None and device.type in types else torch.device(object_device_of(group))
