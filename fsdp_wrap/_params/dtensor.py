"""`DTensorParams`: sharded parameters that are `DTensor`s, as `fully_shard` shows them."""

from __future__ import annotations

import operator
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from fsdp_wrap._comm import Communicator
from fsdp_wrap._core import ParamSlot, ShardAlignment, mark_owned, refuse_in_steps
from fsdp_wrap._core.torch_private import DTensorSpec, TensorMeta
from fsdp_wrap._params.chunks import ChunkLayout, Cut, only_rows
from fsdp_wrap._params.layout import alignment_of, shared
from fsdp_wrap._params.parallel import DataMesh, LocalPart, Redistribution, dtensor_of, to_local
from fsdp_wrap._params.shard_gradients import ShardGradients
from fsdp_wrap._params.sharded_params import Interval, ShardedParams, Written, named_shapes

_LOCAL, _VERSION = operator.attrgetter("_local_tensor"), operator.attrgetter("_version")
_DATA_PTR = torch.Tensor.data_ptr


class DTensorGradients(ShardGradients):
    """The gradients of `DTensor`s, each with a dtype that may be another than its parameter's."""

    _specs: Sequence[DTensorSpec]
    _dtype: torch.dtype | None = None

    def take_specs(self, specs: Sequence[DTensorSpec]) -> None:
        """Takes mesh, placements and shape of each gradient from its parameter's."""
        self._specs = specs if self._dtype is None else [_in_dtype(spec, self._dtype) for spec in specs]

    def follow(
        self, sources: Sequence[nn.Parameter], params: Sequence[nn.Parameter], shard: torch.Tensor
    ) -> None:
        super().follow(sources, params, shard)
        if self._dtype is not None:
            self.take_dtype(self._dtype)

    def take_dtype(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self.take_specs(self._specs)
        for param in self._params:
            grad, param.grad = param.grad, None
            param.grad_dtype = dtype
            if grad is not None:
                param.grad = grad.to(dtype)


def _in_dtype(spec: DTensorSpec, dtype: torch.dtype) -> DTensorSpec:
    assert spec.tensor_meta is not None
    shape, stride, _ = spec.tensor_meta
    return DTensorSpec(spec.mesh, spec.placements, TensorMeta(shape, stride, dtype))


Placed = tuple[DeviceMesh, tuple[Placement, ...], tuple[torch.Size, tuple[int, ...]]]
"""Mesh, placements, shape and stride of a sharded parameter."""


class Specs:
    """The `DTensorSpec`s of one segment's sharded parameters, made once for each dtype.

    Units of the same shapes on one mesh have them together: torch makes a spec of a dozen objects.
    """

    def __init__(self, placed: Sequence[Placed]) -> None:
        self.placed = placed
        self._by_dtype: dict[torch.dtype, Sequence[DTensorSpec]] = {}

    @classmethod
    def of(cls, layout: ChunkLayout, mesh: DataMesh, parts: Sequence[LocalPart | None] | None) -> Specs:
        """Returns those of a layout's parameters; `parts` are their distributed parts, if any has one."""
        if parts is not None:
            return cls(
                [(*mesh.placed(part, cut.dim), _whole(cut, part)) for cut, part in zip(layout.extents, parts)]
            )
        key = layout, id(mesh.mesh), mesh.only_copies  # equal meshes may have other process groups
        specs = _SPECS.get(key)
        if specs is None:
            specs = cls([(*mesh.placed(None, cut.dim), _whole(cut, None)) for cut in layout.extents])
            _SPECS[key] = specs
        return specs

    def in_dtype(self, dtype: torch.dtype) -> Sequence[DTensorSpec]:
        """Returns a spec for each parameter."""
        if dtype not in self._by_dtype:
            self._by_dtype[dtype] = [
                DTensorSpec(mesh, placements, TensorMeta(shape, stride, dtype))
                for mesh, placements, (shape, stride) in self.placed
            ]
        return self._by_dtype[dtype]


_SPECS: WeakValueDictionary[tuple[ChunkLayout, int, bool], Specs] = WeakValueDictionary()


class DTensorParams(ShardedParams):
    """Parameters of one dtype, each cut into one chunk per rank, as `DTensor`s that the optimizer sees.

    Over a mesh that only replicates, the chunk is the whole. Leaves of the same dtype alias it, and nothing
    is gathered.

    Args:
        slots: The original parameters; their data are copied and then given up.
        communicator: Allocates the shard and knows the rank.
        mesh: The ranks over which parameters are sharded and replicated.
        dims: For each parameter, the dimension that is cut.
        name: Name of the segment within its unit.
        offload: Whether the shard lives in host memory.
        pin: Whether that memory is pinned.
        alignment: The alignment that the chunks have; they are not moved to have it.
    """

    layout: ChunkLayout
    gradients: DTensorGradients
    _gradients_kind = DTensorGradients

    def __init__(
        self,
        slots: Sequence[ParamSlot],
        communicator: Communicator,
        *,
        mesh: DataMesh,
        dims: Sequence[int],
        name: str,
        offload: bool,
        pin: bool,
        alignment: ShardAlignment | None = None,
    ) -> None:
        places = (*named_shapes(slots),), alignment_of(slots), (*dims,)
        ranks = communicator.rank, communicator.size
        layout = shared(ChunkLayout, *places, *ranks, mesh.shards, alignment)
        super().__init__(name, layout, slots, communicator, offload, pin, mesh.part_of)
        self._all_specs = Specs.of(layout, mesh, self.distributed)
        self._take_over(slots)

    def _adopt(self, shard: torch.Tensor) -> None:
        self._shard, self.dtype, self._pieces = shard, shard.dtype, self.layout.cut(shard)
        resides = not self.layout.sharded and not self.offloaded and not shard.is_meta
        self.resident = shard.data if resides else None
        self.flat_param = nn.Parameter(shard, requires_grad=False)
        self._specs = self._all_specs.in_dtype(self.dtype)

    def _stand_for(self, originals: Sequence[nn.Parameter]) -> None:
        shards = map(dtensor_of, self._pieces, self._specs)
        self.sources = self.sharded_params = [
            nn.Parameter(shard, requires_grad=param.requires_grad) for shard, param in zip(shards, originals)
        ]
        self._show_pieces()

    def _show_pieces(self) -> None:
        """Binds the sharded parameters, which conversions change, to the pieces of the shard."""
        this = weakref.ref(self)
        for index, (param, piece) in enumerate(zip(self.sources, self._pieces)):
            param._local_tensor = piece  # type: ignore[attr-defined]  # not another alias of it
            param.__dict__.update(self._attributes[index])
            mark_owned(param)
            part = self._parts[index]
            param.redistribute = Redistribution(this, index, part)  # type: ignore[attr-defined]
        self.gradients.take_specs(self._specs)
        self.gradients.follow(self.sources, self.sharded_params, self._shard)

    def sharded_param(self, index: int) -> nn.Parameter:
        """Returns the sharded parameter of an index."""
        return self.sources[index]

    def graph_leaf(self, index: int) -> nn.Parameter | None:
        """Returns the leaf that takes a parameter's gradients; None while the unit is in no schedule."""
        owner = self.owner
        return self.leaves[index] if owner is not None and owner.prepare_leaves() else None

    # contents

    def written(self) -> Written:
        sources = self.sources  # the shard's version counts writes to the pieces themselves
        return (*map(_VERSION, sources), self._shard._version), (*map(_DATA_PTR, map(_LOCAL, sources)),)

    def intervals(self) -> list[Interval]:
        return [
            Interval(cut.fqn, source.shape, first, piece.view(-1), source, first, part=part)
            for cut, piece, source, part in zip(self.layout.extents, self._pieces, self.sources, self._parts)
            for first in [only_rows(cut).first_row(self.layout.rank) * cut.shape[1:].numel()]
        ]

    # changes by users, and copies

    def follow_replaced(self) -> bool:
        """Takes over parameters that were converted, loaded with `assign=True`, or left the meta device."""
        shown = [*map(dict.get, *self.display.firsts)]  # on every step: no call
        same = all(map(operator.is_, shown, self.sources))
        if same and all(map(operator.is_, map(_LOCAL, self.sources), self._pieces)):
            return False
        params = [param for param in shown if param is not None]
        if len(params) < len(shown):
            return False  # removed parameters are refused elsewhere
        for cut, spec, param in zip(self.layout.extents, self._specs, params):
            _check_replaced(cut, spec, param, params[0], self.layout.rank)
        self._take_values(params)
        for cut, before, now in zip(self.layout.extents, self.sources, params):
            if before is not now:  # an optimizer that was made earlier would train nothing
                refuse_in_steps(before, partial(_why_left, self.name_of, cut.fqn))
        self.gradients.follow_replaced(self.sources, params)
        self.sources = self.sharded_params = params
        self._show_pieces()
        self._show_in(self.display.places)
        self.display.show_sharded()  # tied places may have got different parameters
        return True

    def _take_values(self, params: Sequence[nn.Parameter]) -> None:
        """Takes over the values of other sharded parameters."""
        values = [to_local(param.detach()) for param in params]
        self._adopt(self._new_shard(values[0]))
        for piece, value in zip(self._pieces, values):
            piece.copy_(value)


def _why_left(name_of: Callable[[str], str], fqn: str) -> str:
    return (
        f"holds the parameter '{name_of(fqn)}' as it was before another took its place (on rank "
        f"{dist.get_rank()}), by load_state_dict(assign=True), say: training no longer reaches it. Make the "
        "optimizer after that, or load without assign"
    )


def _whole(cut: Cut, part: LocalPart | None) -> tuple[torch.Size, tuple[int, ...]]:
    """Returns shape and stride of the parameter that the optimizer sees."""
    if part is not None:
        return part.shape, part.stride
    return cut.shape, torch.empty(cut.shape, device="meta").stride()


def _check_replaced(cut: Cut, spec: DTensorSpec, param: nn.Parameter, first: nn.Parameter, rank: int) -> None:
    fits = isinstance(param, DTensor) and param.shape == spec.shape and param.placements == spec.placements
    same_kind = param.dtype == first.dtype and param.is_meta == first.is_meta
    if not fits or not same_kind or param._local_tensor.shape[cut.dim] != cut.rows(rank):  # type: ignore[attr-defined]
        raise ValueError(
            f"the sharded parameter '{cut.fqn}' was replaced by a {type(param).__name__} of shape "
            f"{tuple(param.shape)}, dtype {param.dtype} on {param.device}; it must stay a DTensor of shape "
            f"{tuple(spec.shape)}, with placements {spec.placements}, and of one dtype with the unit's others"
        )
