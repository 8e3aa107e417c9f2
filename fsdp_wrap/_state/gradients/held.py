"""The gradients at and below a module, by the ranks that hold them."""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import accumulate, chain, repeat
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from fsdp_wrap._comm import Communicator
from fsdp_wrap._core import is_owned
from fsdp_wrap._core.torch_private import DisableTorchFunctionSubclass
from fsdp_wrap._params import Buffers, ShardedParams, to_local
from fsdp_wrap._runtime import buffers_of, units_in
from fsdp_wrap._state.originals import Original, Originals

_TRAINS, _BASE = operator.attrgetter("requires_grad"), operator.attrgetter("_base")
_GRAD, _GRAD_LOCAL = operator.attrgetter("grad"), operator.attrgetter("grad._local_tensor")
_GENERATION, _ACCUMULATED = (
    operator.attrgetter("segments.generation"),
    operator.attrgetter("gradients.accumulated"),
)
_END = object()  # of what is watched: more there would go unseen
_DATA_PTR, _NUMEL = torch.Tensor.data_ptr, torch.Tensor.numel


class Over(NamedTuple):
    """The ranks that hold a tensor between them: those of a group, and of dimensions of another mesh.

    `copies` are those of the tensor in the group.
    """

    group: Communicator | None = None
    mesh: tuple[DeviceMesh, tuple[int, ...]] | None = None
    copies: int = 1


Named = list[tuple[Original, torch.Tensor | None]]
"""Parameters, each with this rank's part of its gradient, or None."""


class HeldGradients:
    """The gradients at and below a module; valid while `is_current`.

    Attributes:
        distributed: Whether tensor parallelism has distributed a parameter, so that ranks of other units hold
            parts.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module: Callable[[], Any] = weakref.ref(module)  # which holds this
        self.units = list(dict.fromkeys(units_in(module).values()))
        self._all_buffers = buffers_of(self.units)
        self._segments = [segment for buffers in self._all_buffers for segment in buffers.segments]
        self.device = next((one.communicator.device for one in self._all_buffers), torch.device("cpu"))
        sharded = {id(source) for segment in self._segments for source in segment.params.sources}
        self._others = [param for param in module.parameters() if id(param) not in sharded]
        self.distributed = any(isinstance(param, DTensor) for param in self._others) or any(
            segment.params.distributed is not None for segment in self._segments
        )
        self._homes = _homes([*self._all_buffers, None])
        self._blocks = self._blocks_of(self._all_buffers)
        self._generations = [*map(_GENERATION, self._all_buffers)]
        self._watch(module)

    def _watch(self, module: nn.Module) -> None:
        """Notes the modules and their parameters.

        Units' own parameters are only counted: the next forward refuses any other in their place.
        """
        displays = (segment.params.display for segment in self._segments)
        owned = {place for display in displays for places in display.places for place in places}
        self._counted, watched = list[dict[str, Any]](), list[dict[str, Any]]()
        for one in module.modules():
            watched.append(one._modules)
            only_owned = all((one, name) in owned for name in one._parameters)
            (self._counted if only_owned else watched).append(one._parameters)
        self._counts = [*map(len, self._counted)]
        self._watched = [*(registry.values() for registry in watched), (_END,)]
        self._seen = [*chain.from_iterable(self._watched)]

    @property
    def is_current(self) -> bool:
        """Whether modules, their parameters and dtypes are still the same."""
        if [*map(_GENERATION, self._all_buffers)] != self._generations:
            return False
        if [*map(len, self._counted)] != self._counts:
            return False
        return all(map(operator.is_, chain.from_iterable(self._watched), self._seen))

    @property
    def replicated(self) -> list[nn.Parameter]:
        """The parameters that no unit owns; tied ones of a unit elsewhere count there."""
        return [param for param in self._others if not is_owned(param)]

    def params(self) -> Iterator[nn.Parameter]:
        """Yields all parameters, as the optimizer sees them; some more than once."""
        for segment in self._segments:
            yield from segment.params.sources
        yield from self.replicated

    def widest_dtype(self) -> torch.dtype:
        """Returns the widest dtype of all possible gradients: a rank may have none of them."""
        dtypes = {segment.dtypes.grad for segment in self._segments}
        dtypes |= {param.dtype for param in self.replicated}
        if len(dtypes) != 1:  # else asking each parameter would change nothing
            trained = (one for one in self._segments if any(map(_TRAINS, one.params.sources)))
            dtypes = {segment.dtypes.grad for segment in trained}
            dtypes |= {param.dtype for param in self.replicated if param.requires_grad}
        return functools.reduce(torch.promote_types, dtypes).to_real() if dtypes else torch.float32

    @property
    def unreduced(self) -> list[Buffers]:
        """Units whose gradients `no_sync` has left for a later backward to reduce."""
        if not any(map(_ACCUMULATED, self._segments)):
            return []
        return [buffers for buffers in self._all_buffers if buffers.gradients.accumulated]

    def by_ranks(self, without: Collection[Buffers] = ()) -> dict[Over, list[torch.Tensor]]:
        """Groups non-empty local gradients by the ranks that hold the rest; skips those in `without`."""
        asked = [buffers for buffers in self._all_buffers if buffers not in without]
        blocks = self._blocks_of(asked) if without else self._blocks
        parts = {
            over: [block for of_kind in of_ranks for block in of_kind.find()]
            for over, of_ranks in blocks.items()
        }
        for buffers in asked if self.distributed else ():
            layouts = [sharded for sharded in buffers.params if sharded.distributed is not None]
            for over, grads in gradients_by_ranks(buffers, layouts, self._homes[buffers]).items():
                parts.setdefault(over, []).extend(grads)
        # Also where this rank has no part, or no gradient: others may have.
        for param in (param for param in self.replicated if param.requires_grad or param.grad is not None):
            grad, held = _strided(param), parts.setdefault(self._over_of(param), [])
            if grad is not None and grad.numel():
                held.append(grad)
        return parts or {Over(): []}

    def _over_of(self, param: torch.Tensor) -> Over:
        return over_of(param) if isinstance(param, DTensor) else self._homes[None]

    def _blocks_of(self, all_buffers: Iterable[Buffers]) -> dict[Over, list[_Blocks]]:
        kinds: dict[tuple[Over, bool], list[ShardedParams]] = {}
        for buffers in all_buffers:
            for sharded in buffers.params:
                if sharded.distributed is None:
                    of_dtensors = any(isinstance(source, DTensor) for source in sharded.sources)
                    kinds.setdefault((self._homes[buffers], of_dtensors), []).append(sharded)
        blocks: dict[Over, list[_Blocks]] = {}
        for (over, of_dtensors), layouts in kinds.items():
            blocks.setdefault(over, []).append(_Blocks(layouts, of_dtensors))
        return blocks

    def _with_gradients(self) -> Iterator[tuple[Original, torch.Tensor | None]]:
        """Yields the parameters with this rank's parts of their gradients."""
        gradients = {segment.params: segment.params.gradients.pieces() for segment in self._segments}
        for original in Originals(self._module()).by_name.values():
            if original.sharded in gradients:
                yield original, gradients[original.sharded][original.index]
            elif not original.owned and not is_owned(original.source):
                yield original, _strided(original.source)

    def named(self) -> dict[Over, Named]:
        """Returns all parameters with local parts of their gradients, by the ranks that hold the rest."""
        overs = {
            sharded: overs_of(buffers, sharded, self._homes[buffers])
            for buffers in self._all_buffers
            for sharded in buffers.params
        }
        by_over: dict[Over, Named] = {}
        for original, grad in self._with_gradients():
            of_layout = None if original.sharded is None else overs[original.sharded]
            over = self._over_of(original.source) if of_layout is None else of_layout[original.index]
            by_over.setdefault(over, []).append((original, grad))
        return by_over


def gradients_by_ranks(
    buffers: Buffers, layouts: Iterable[ShardedParams], home: Over | None = None
) -> dict[Over, list[torch.Tensor]]:
    """Groups layouts' non-empty local gradients by the ranks that hold the rest; a group may be empty."""
    by_over: dict[Over, list[torch.Tensor]] = {}
    for sharded in layouts:
        for over, grad in zip(overs_of(buffers, sharded, home), sharded.gradients.pieces()):
            held = by_over.setdefault(over, [])
            if grad is not None and grad.numel():
                held.append(grad)
    return by_over


def overs_of(buffers: Buffers, sharded: ShardedParams, home: Over | None = None) -> list[Over]:
    """Returns, for each original parameter of a layout, the ranks that hold it between them.

    `home` is a wider group for those of no other mesh; None for the unit's.
    """
    cut = Over(buffers.communicator if sharded.layout.sharded and buffers.communicator.size > 1 else None)
    parts = sharded.distributed or [None] * len(sharded.layout.fqns)
    return [home or cut if part is None else cut._replace(mesh=(part.mesh, part.cut_dims)) for part in parts]


def over_of(grad: torch.Tensor) -> Over:
    """Returns the ranks that hold the gradient of a parameter outside of units."""
    if not isinstance(grad, DTensor):
        return Over()
    if any(placement.is_partial() for placement in grad.placements):
        raise ValueError(
            f"a gradient of shape {tuple(grad.shape)} has placements {grad.placements}: each rank has a "
            "summand of it, of which no norm can be taken; redistribute it first"
        )
    cut = [dim for dim, placement in enumerate(grad.placements) if not isinstance(placement, Replicate)]
    return Over(None, (grad.device_mesh, tuple(cut)))


class _Blocks:
    """The gradients of several units, in as few tensors as possible.

    Most of the time a unit's gradients are views of one reduced shard, and lie in it as the sharded
    parameters lie in theirs. Comparing all addresses at once takes a fraction of the time of asking layouts.
    """

    def __init__(self, layouts: Sequence[ShardedParams], of_dtensors: bool) -> None:
        self._gradient_of = _GRAD_LOCAL if of_dtensors else _GRAD
        held = [
            [param for param in dict.fromkeys(sharded.sources) if to_local(param).numel()]
            for sharded in layouts
        ]
        self._params = [*chain.from_iterable(held)]
        filled = [(sharded, params) for sharded, params in zip(layouts, held) if params]
        shards = [sharded.flat_param for sharded, _ in filled]
        self._counts = [len(params) for _, params in filled]
        self._firsts = [*accumulate(self._counts, initial=0)][:-1]
        self._numels = [shard.numel() for shard in shards]
        pieces = [*map(to_local, self._params)]
        self._offsets = [*map(operator.sub, map(_DATA_PTR, pieces), self._spread(shards))]
        self._runs = [_runs_of(shard, [*map(to_local, params)]) for shard, (_, params) in zip(shards, filled)]

    def find(self) -> list[torch.Tensor]:
        """Returns the non-empty gradients, without padding."""
        try:
            with DisableTorchFunctionSubclass():  # which a getter would look for on each
                grads = [*map(self._gradient_of, self._params)]
            shards = [*map(_BASE, map(grads.__getitem__, self._firsts))]
            if [*map(_NUMEL, shards)] == self._numels:
                expected = [*map(operator.add, self._spread(shards), self._offsets)]
                if [*map(_DATA_PTR, grads)] == expected:
                    return [s[run] for s, runs in zip(shards, self._runs) for run in runs]
        except (AttributeError, TypeError):  # a parameter has no gradient, or one that is no view
            pass
        present = (to_local(param.grad) for param in self._params if param.grad is not None)
        return [grad for grad in present if grad.numel()]

    def _spread(self, shards: Sequence[torch.Tensor]) -> chain[int]:
        """Yields the address of its shard for each parameter."""
        return chain.from_iterable(map(repeat, map(_DATA_PTR, shards), self._counts))


def _runs_of(shard: torch.Tensor, pieces: Sequence[torch.Tensor]) -> list[slice]:
    """Returns the slices of a shard that its pieces fill.

    A factor that is not finite would make NaNs of the padding between them, which nobody zeroes.
    """
    begin, size, runs = shard.data_ptr(), shard.element_size(), list[slice]()
    for start, piece in sorted(((tensor.data_ptr() - begin) // size, tensor.numel()) for tensor in pieces):
        joins = bool(runs) and runs[-1].stop == start
        runs.append(slice(runs.pop().start if joins else start, start + piece))
    return runs


def _strided(param: nn.Parameter) -> torch.Tensor | None:
    """Returns the gradient's memory on this rank: of a sparse one the values, each element's once."""
    if param.grad is None or not param.grad.is_sparse:
        return None if param.grad is None else to_local(param.grad)
    param.grad = param.grad.coalesce()
    return param.grad.values()


def _homes(all_buffers: Iterable[Buffers | None]) -> dict[Buffers | None, Over]:
    """Divides units among as few groups as possible: the widest takes all of which it holds whole copies.

    None stands for the parameters that no unit owns.
    """
    left, homes = list(all_buffers), dict[Buffers | None, Over]()
    groups = dict.fromkeys(buffers.communicator for buffers in left if buffers is not None)
    for group in sorted((group for group in groups if group.size > 1), key=lambda group: -group.size):
        copies = {buffers: count for buffers in left if (count := _copies(buffers, group))}
        if any(
            buffers is not None and buffers.communicator == group for buffers in copies
        ):  # else a wider has them
            left = [buffers for buffers in left if buffers not in copies]
            homes |= {buffers: Over(group, None, count) for buffers, count in copies.items()}
    return homes | dict.fromkeys(left, Over())


def _copies(buffers: Buffers | None, group: Communicator) -> int:
    """Returns how many copies of a unit's gradients a group holds; 0 if it does not hold whole ones."""
    if buffers is None:
        return group.size
    members, shard, replicas = group.members, buffers.communicator.members, buffers.replicas.members
    if members == shard:
        return 1
    if len(shard) == 1 and members <= replicas:
        return group.size
    whole = len(shard) * len(replicas) == group.size and shard | replicas <= members
    return len(replicas) if whole else 0
