"""`IntervalTensor`: a tensor of which this rank holds one interval, as sharded state dicts contain it.

A contiguous interval of a flattened n-dimensional tensor is a handful of rectangular boxes of that tensor
(three for a matrix). So each rank writes and reads what it holds as chunks of the full tensor, by the
protocol of `torch.distributed.checkpoint` for tensors that bring chunks of their own, and nothing travels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from fsdp_wrap._torch_private import make_wrapper_subclass, pin_memory_operator, pytree, to_copy_operator
from fsdp_wrap._watch import deaths_told

__all__ = ["Box", "IntervalTensor", "assemble", "boxes_of"]

_aten = torch.ops.aten


@dataclass(frozen=True)
class Box:
    """A rectangular part of a tensor that is contiguous in it.

    Attributes:
        offsets: Index of its first element.
        sizes: Its shape.
        first: Index of its first element in the flattened tensor.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    first: int

    @property
    def numel(self) -> int:
        """How many elements it has."""
        return torch.Size(self.sizes).numel()


def boxes_of(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    """Cuts the interval [start, stop) of a flattened tensor into at most 2 x dimensions - 1 boxes, in order.

    An empty interval has none, save that of a tensor without elements: that has one, of the whole shape.
    """
    if torch.Size(shape).numel() == 0:
        yield Box((0,) * len(shape), shape, 0)
    elif start < stop and not shape:
        yield Box((), (), 0)
    elif start < stop:
        yield from _boxes(shape, start, stop)


def _boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[Box]:
    row = torch.Size(shape[1:]).numel()
    first, last = -(-start // row), stop // row  # whole rows: [first, last)
    if first > last:  # inside of one row
        yield from _within_row(shape, last, start, stop)
        return
    if start < first * row:
        yield from _within_row(shape, first - 1, start, first * row)
    if first < last:
        yield Box((first,) + (0,) * (len(shape) - 1), (last - first, *shape[1:]), first * row)
    if last * row < stop:
        yield from _within_row(shape, last, last * row, stop)


def _within_row(shape: tuple[int, ...], index: int, start: int, stop: int) -> Iterator[Box]:
    base = index * torch.Size(shape[1:]).numel()
    for box in _boxes(shape[1:], start - base, stop - base):
        yield Box((index, *box.offsets), (1, *box.sizes), base + box.first)


class IntervalTensor(torch.Tensor):
    """A tensor of full shape of which this rank holds the interval [start, start + piece.numel()).

    Elementwise operations, copies and moves act on the piece; whatever needs other elements raises
    TypeError. Made by sharded state dicts; `torch.distributed.checkpoint` saves and loads it.

    Args:
        shape: Shape of the full tensor.
        start: Index of the piece's first element in the flattened full tensor.
        piece: 1-D, contiguous; it is not copied.
        requires_grad: Whether the tensor claims to need a gradient.
    """

    start: int
    piece: torch.Tensor

    @staticmethod
    def __new__(
        cls, shape: torch.Size, start: int, piece: torch.Tensor, requires_grad: bool = False
    ) -> IntervalTensor:
        self: IntervalTensor = make_wrapper_subclass(
            cls, shape, dtype=piece.dtype, device=piece.device, requires_grad=requires_grad
        )
        self.start, self.piece = start, piece
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    @property
    def stop(self) -> int:
        """Index after the piece's last element in the flattened full tensor."""
        return self.start + self.piece.numel()

    def boxes(self) -> dict[tuple[int, ...], torch.Tensor]:
        """Returns the boxes that this rank holds, as views of the piece, by their offsets."""
        found = boxes_of(tuple(self.shape), self.start, self.stop)
        return {
            box.offsets: self.piece.narrow(0, box.first - self.start, box.numel).view(box.sizes)
            for box in found
        }

    def full_tensor(self, group: dist.ProcessGroup | None = None) -> torch.Tensor:
        """Returns the full tensor; collective over `group`, whose ranks hold all of it between them."""
        return assemble(self.detach(), self._write_into, lambda data: _largest(data, group))

    def to_dtensor(self, mesh: DeviceMesh) -> DTensor:
        """Returns the same as a `DTensor`; collective over `mesh`, whose ranks hold all of it between them.

        It is sharded along dimension 0 over the mesh's last dimension, and replicated over the others.
        """
        placements: list[Any] = [Replicate()] * mesh.ndim
        if self.ndim > 0:
            placements[-1] = Shard(0)

        def combine(data: torch.Tensor) -> None:
            for dim in range(mesh.ndim):
                _largest(data, mesh.get_group(dim))

        full = assemble(self.detach(), self._write_into, combine)
        return distribute_tensor(full, mesh, placements, src_data_rank=None)

    def _write_into(self, full: torch.Tensor) -> None:
        full.view(-1)[self.start : self.stop].copy_(self.piece)

    # how torch.distributed.checkpoint sees it

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk, properties=TensorProperties(dtype=self.dtype), size=self.size()
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), box.shape) for offsets, box in self.boxes().items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        # By offset: the index counts the chunks of all ranks.
        return _with_own_storage(self.boxes()[tuple(index.offset or ())])

    # how torch sees it

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _aten.copy_.default:
            return _copy(args[0], args[1])
        if func is _aten.new_empty.default:
            return _new_empty(args[0], torch.Size(args[1]), dict(kwargs or {}))
        if func not in _ON_PIECES and torch.Tag.pointwise not in func.tags:
            raise TypeError(
                f"{func} needs elements that other ranks hold: a value of a sharded state dict takes "
                "elementwise operations only; use full_tensor() or to_dtensor(), or a full state dict"
            )
        return _on_pieces(func, args, dict(kwargs or {}))

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["piece"], (self.shape, self.start, self.requires_grad)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], context: Any, *_: Any) -> IntervalTensor:
        shape, start, requires_grad = context
        return IntervalTensor(shape, start, inner["piece"], requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> IntervalTensor:
        copied = IntervalTensor(self.shape, self.start, self.piece.clone(), self.requires_grad)
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        own = self.piece.untyped_storage().nbytes() == self.piece.numel() * self.piece.element_size()
        # A view would take the whole shard with it.
        return _rebuild, (tuple(self.shape), self.start, self.piece if own else self.piece.clone())

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        shape = tuple(self.shape)
        return f"IntervalTensor(shape={shape}, start={self.start}, piece={self.piece!r})"


_LOOKS = {_aten.all.default, _aten.any.default, _aten.equal.default}
"""What comparing needs; they tell of what this rank holds."""

_ON_PIECES = {
    _aten.detach.default,
    _aten.clone.default,
    to_copy_operator,
    _aten.alias.default,
    _aten.empty_like.default,
    _aten.zeros_like.default,
    _aten.ones_like.default,
    _aten.full_like.default,
    _aten.zero_.default,
    _aten.fill_.Scalar,
    _aten.is_pinned.default,
    pin_memory_operator,
    *_LOOKS,
}


def _rebuild(shape: tuple[int, ...], start: int, piece: torch.Tensor) -> IntervalTensor:
    return IntervalTensor(torch.Size(shape), start, piece)


torch.serialization.add_safe_globals([IntervalTensor, _rebuild])


def _new_empty(like: IntervalTensor, size: torch.Size, kwargs: dict[str, Any]) -> torch.Tensor:
    if size != like.shape:
        return like.piece.new_empty(size, **kwargs)
    return IntervalTensor(size, like.start, like.piece.new_empty(like.piece.shape, **kwargs))


def _on_pieces(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    kwargs.pop("memory_format", None)  # pieces are 1-D
    leaves, spec = pytree.tree_flatten((args, kwargs))
    whole = [leaf for leaf in leaves if isinstance(leaf, IntervalTensor)]
    first = whole[0]
    for leaf in leaves:
        if isinstance(leaf, IntervalTensor):
            _refuse_other(first, leaf)
        elif isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            raise TypeError(f"{func}: a value of a sharded state dict cannot combine with a full tensor")
    pieces = [leaf.piece if isinstance(leaf, IntervalTensor) else leaf for leaf in leaves]
    piece_args, piece_kwargs = pytree.tree_unflatten(pieces, spec)
    result = func(*piece_args, **piece_kwargs)
    if not isinstance(result, torch.Tensor) or func in _LOOKS:
        return result
    if result is first.piece:  # in place
        return first
    return IntervalTensor(first.shape, first.start, result)


def _refuse_other(one: IntervalTensor, other: IntervalTensor) -> None:
    if (one.shape, one.start, one.stop) != (other.shape, other.start, other.stop):
        raise ValueError(
            f"elements {other.start} to {other.stop} do not match elements {one.start} to {one.stop}, which "
            "this rank holds: the value comes from another rank, wrapping or number of ranks; load it by "
            "torch.distributed.checkpoint, which fits it"
        )


def _copy(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    if isinstance(target, IntervalTensor) and isinstance(source, IntervalTensor):
        _refuse_other(target, source)
        target.piece.copy_(source.piece)
    elif isinstance(target, IntervalTensor):
        full = source.expand(target.shape).reshape(-1)
        target.piece.copy_(full[target.start : target.stop])
    else:
        assert isinstance(source, IntervalTensor)
        if source.piece.numel() != source.shape.numel():
            raise TypeError(
                "a full tensor cannot take what this rank holds of a sharded one: use full_tensor(), or "
                "load under FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT)"
            )
        target.copy_(source.piece.view(source.shape))
    return target


def assemble(
    like: torch.Tensor, write: Callable[[torch.Tensor], None], combine: Callable[[torch.Tensor], None]
) -> torch.Tensor:
    """Puts a full tensor together from what every rank has of it.

    Args:
        like: Gives shape, dtype and device.
        write: Writes what this rank has into a full tensor of zeros.
        combine: Replaces bytes by the largest over the ranks: what a rank does not have is zero, and what
            several have is the same.
    """
    full = torch.zeros(like.shape, dtype=like.dtype, device=like.device)
    write(full)
    if full.numel() > 0:
        combine(full.view(-1).view(torch.uint8))
    return full


def _with_own_storage(view: torch.Tensor) -> torch.Tensor:
    """Returns the same host memory as a tensor whose storage is no larger than it.

    DCP's writer copies a tensor that shares a storage with others, and keeps such copies until its file is
    done: in all as much as the rank's shards.
    """
    if view.device.type != "cpu" or view.numel() == 0 or view.untyped_storage().nbytes() == view.nbytes:
        return view
    data = torch.from_numpy(view.detach().view(-1).view(torch.uint8).numpy())
    return data.view(view.dtype).view(view.shape)


def _largest(data: torch.Tensor, group: dist.ProcessGroup | None) -> None:
    with deaths_told(group):
        dist.all_reduce(data, op=dist.ReduceOp.MAX, group=group)
