"""The gradients at and below a module, by the ranks that hold them."""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, repeat
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from fsdp_wrap._comm import Communicator
from fsdp_wrap._core import is_owned
from fsdp_wrap._core.torch_private import DisableTorchFunctionSubclass
from fsdp_wrap._params import Layout, ParamHandle, Segment, to_local
from fsdp_wrap._runtime import units_in
from fsdp_wrap._state.originals import Original, Originals, handles_of

_TRAINS, _BASE = operator.attrgetter("requires_grad"), operator.attrgetter("_base")
_GRAD, _GRAD_LOCAL = operator.attrgetter("grad"), operator.attrgetter("grad._local_tensor")
_GENERATION, _ACCUMULATED = operator.attrgetter("generation"), operator.attrgetter("gradients.accumulated")
_END = object()  # of what is watched: more there would go unseen
_DATA_PTR, _NUMEL = torch.Tensor.data_ptr, torch.Tensor.numel

Over = tuple[Communicator | None, tuple[DeviceMesh, tuple[int, ...]] | None]
"""Ranks that hold a tensor between them: a unit's, and those of dimensions of another mesh."""

Named = list[tuple[Original, torch.Tensor | None]]
"""Parameters, each with this rank's part of its gradient, or None."""


@dataclass(frozen=True, eq=False)
class Share:
    """Gradients that the same ranks hold between them.

    Attributes:
        handles: Handles that reduce them; None stands for the parameters that no unit owns.
        group: The ranks that hold all of them between them; None where each rank does by itself.
        copies: Copies of each gradient in that group.
    """

    handles: Sequence[ParamHandle | None]
    group: Communicator | None
    copies: int


class HeldGradients:
    """The gradients at and below a module; valid while `is_current`.

    Attributes:
        shares: The gradients, by the ranks that hold them.
        distributed: Whether tensor parallelism has distributed a parameter, so that ranks of other units hold
            parts.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module: Callable[[], Any] = weakref.ref(module)  # which holds this
        self.units = list(dict.fromkeys(units_in(module).values()))
        self._handles = handles_of(self.units)
        self._segments = _segments(self._handles)
        self.device = next((one.communicator.device for one in self._handles), torch.device("cpu"))
        sharded = {id(source) for segment in self._segments for source in segment.layout.sources}
        self._others = [param for param in module.parameters() if id(param) not in sharded]
        self.distributed = any(isinstance(param, DTensor) for param in self._others) or any(
            segment.layout.distributed is not None for segment in self._segments
        )
        self.shares = _shares([*self._handles, None] if self._others else self._handles)
        self._blocks = {share: _blocks_of(share.handles) for share in self.shares}
        self._generations = [*map(_GENERATION, self._handles)]
        self._watch(module)

    def _watch(self, module: nn.Module) -> None:
        """Notes the modules and their parameters.

        Units' own parameters are only counted: the next forward refuses any other in their place.
        """
        owned = {place for segment in self._segments for places in segment.layout.places for place in places}
        self._counted, watched = list[dict[str, Any]](), list[dict[str, Any]]()
        for one in module.modules():
            watched.append(one._modules)
            only_owned = all((one, name) in owned for name in one._parameters)
            (self._counted if only_owned else watched).append(one._parameters)
        self._counts = [*map(len, self._counted)]
        self._watched = [*(registry.values() for registry in watched), (_END,)]
        self._found = [*chain.from_iterable(self._watched)]

    @property
    def is_current(self) -> bool:
        """Whether modules, their parameters and dtypes are still the same."""
        if [*map(_GENERATION, self._handles)] != self._generations:
            return False
        if [*map(len, self._counted)] != self._counts:
            return False
        return all(map(operator.is_, chain.from_iterable(self._watched), self._found))

    @property
    def replicated(self) -> list[nn.Parameter]:
        """The parameters that no unit owns; tied ones of a unit elsewhere count there."""
        return [param for param in self._others if not is_owned(param)]

    def params(self) -> Iterator[nn.Parameter]:
        """Yields all parameters, as the optimizer sees them; some more than once."""
        for segment in self._segments:
            yield from segment.layout.sources
        yield from self.replicated

    def widest_dtype(self) -> torch.dtype:
        """Returns the widest dtype of all possible gradients: a rank may have none of them."""
        dtypes = {segment.dtypes.grad for segment in self._segments}
        dtypes |= {param.dtype for param in self.replicated}
        if len(dtypes) != 1:  # else asking each parameter would change nothing
            trained = (one for one in self._segments if any(map(_TRAINS, one.layout.sources)))
            dtypes = {segment.dtypes.grad for segment in trained}
            dtypes |= {param.dtype for param in self.replicated if param.requires_grad}
        return functools.reduce(torch.promote_types, dtypes).to_real() if dtypes else torch.float32

    @property
    def unreduced(self) -> list[ParamHandle]:
        """Units whose gradients `no_sync` has left for a later backward to reduce."""
        if not any(map(_ACCUMULATED, self._segments)):
            return []
        return [handle for handle in self._handles if handle.accumulates]

    def held(self, share: Share, without: Collection[ParamHandle] = ()) -> list[torch.Tensor]:
        """Returns this rank's part of a share in few non-empty tensors, save handles `without`."""
        handles = [each for each in share.handles if each not in without] if without else share.handles
        blocks = _blocks_of(handles) if without else self._blocks[share]
        found = [block for each in blocks for block in each.find()]
        if None in handles:
            strided = map(_strided, self.replicated)
            found += [grad for grad in strided if grad is not None and grad.numel() > 0]
        return found

    def by_ranks(self, without: Collection[ParamHandle] = ()) -> dict[Over, list[torch.Tensor]]:
        """Returns this rank's non-empty parts by the ranks that hold the rest, also none, save `without`."""
        handles = [handle for handle in self._handles if handle not in without]
        found: dict[Over, list[torch.Tensor]] = {(None, None): [], **gradients_by_ranks(handles)}
        # Also where this rank has no part, or no gradient: others may have.
        for param in (each for each in self.replicated if each.requires_grad or each.grad is not None):
            grad, held = _strided(param), found.setdefault(over_of(param), [])
            if grad is not None and grad.numel():
                held.append(grad)
        return found

    def _each(self) -> Iterator[tuple[Original, torch.Tensor | None]]:
        """Yields the parameters with this rank's parts of their gradients."""
        gradients = {segment.layout: segment.layout.gradients() for segment in self._segments}
        for original in Originals(self._module()).by_name.values():
            if original.layout in gradients:
                yield original, gradients[original.layout][original.index]
            elif original.handle is None and not is_owned(original.source):
                yield original, _strided(original.source)

    def named(self) -> dict[Share, Named]:
        """Returns the parameters of each share with this rank's parts of their gradients."""
        every = [*self._each()]
        return {share: [each for each in every if each[0].handle in share.handles] for share in self.shares}

    def named_by_ranks(self) -> dict[Over, Named]:
        """Returns all parameters with local parts of their gradients, by the ranks that hold the rest."""
        overs = {layout: overs_of(handle, layout) for handle in self._handles for layout in handle.layouts}
        found: dict[Over, Named] = {}
        for original, grad in self._each():
            of_layout = None if original.layout is None else overs[original.layout]
            over = over_of(original.source) if of_layout is None else of_layout[original.index]
            found.setdefault(over, []).append((original, grad))
        return found


def gradients_by_ranks(handles: Iterable[ParamHandle]) -> dict[Over, list[torch.Tensor]]:
    """Returns this rank's non-empty gradients of units by the ranks that hold the rest, also none."""
    found: dict[Over, list[torch.Tensor]] = {}
    for handle in handles:
        for layout in handle.layouts:
            for over, grad in zip(overs_of(handle, layout), layout.gradients()):
                held = found.setdefault(over, [])
                if grad is not None and grad.numel():
                    held.append(grad)
    return found


def overs_of(handle: ParamHandle, layout: Layout) -> list[Over]:
    """Returns, for each original parameter of a layout, the ranks that hold it between them."""
    cut = handle.communicator if layout.sharded and handle.communicator.size > 1 else None
    parts = layout.distributed or [None] * len(layout.fqns)
    return [(cut, None if part is None else (part.mesh, part.cut_dims)) for part in parts]


def over_of(grad: torch.Tensor) -> Over:
    """Returns the ranks that hold the gradient of a parameter outside of units."""
    if not isinstance(grad, DTensor):
        return None, None
    if any(placement.is_partial() for placement in grad.placements):
        raise ValueError(
            f"a gradient of shape {tuple(grad.shape)} has placements {grad.placements}: each rank has a "
            "summand of it, of which no norm can be taken; redistribute it first"
        )
    cut = [dim for dim, placement in enumerate(grad.placements) if not isinstance(placement, Replicate)]
    return None, (grad.device_mesh, tuple(cut))


class _Blocks:
    """The gradients of several units, in as few tensors as possible.

    Most of the time a unit's gradients are views of one reduced shard, and lie in it as the sharded
    parameters lie in theirs. Comparing all addresses at once takes a fraction of the time of asking layouts.
    """

    def __init__(self, layouts: Sequence[Layout], of_dtensors: bool) -> None:
        self._gradient_of = _GRAD_LOCAL if of_dtensors else _GRAD
        held = [
            [param for param in dict.fromkeys(layout.sources) if to_local(param).numel()]
            for layout in layouts
        ]
        self._params = [*chain.from_iterable(held)]
        filled = [(layout, params) for layout, params in zip(layouts, held) if params]
        shards = [layout.flat_param for layout, _ in filled]
        self._counts = [len(params) for _, params in filled]
        self._firsts = [*accumulate(self._counts, initial=0)][:-1]
        self._numels = [shard.numel() for shard in shards]
        pieces = [*map(to_local, self._params)]
        self._offsets = [*map(operator.sub, map(_DATA_PTR, pieces), self._spread(shards))]
        self._runs = [_runs_of(shard, [*map(to_local, params)]) for shard, (_, params) in zip(shards, filled)]

    def find(self) -> list[torch.Tensor]:
        """Returns the gradients, none empty, without padding."""
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
        found = (to_local(param.grad) for param in self._params if param.grad is not None)
        return [grad for grad in found if grad.numel()]

    def _spread(self, shards: Sequence[torch.Tensor]) -> chain[int]:
        """Yields the address of its shard for each parameter."""
        return chain.from_iterable(map(repeat, map(_DATA_PTR, shards), self._counts))


def _blocks_of(handles: Iterable[ParamHandle | None]) -> list[_Blocks]:
    kinds: dict[bool, list[Layout]] = {}
    for segment in _segments(handles):
        layout = segment.layout
        kinds.setdefault(any(isinstance(each, DTensor) for each in layout.sources), []).append(layout)
    return [_Blocks(layouts, of_dtensors) for of_dtensors, layouts in kinds.items()]


def _runs_of(shard: torch.Tensor, pieces: Sequence[torch.Tensor]) -> list[slice]:
    """Returns the slices of a shard that its pieces fill.

    A factor that is not finite would make NaNs of the padding between them, which nobody zeroes.
    """
    begin, size, runs = shard.data_ptr(), shard.element_size(), list[slice]()
    for start, piece in sorted(((each.data_ptr() - begin) // size, each.numel()) for each in pieces):
        joins = bool(runs) and runs[-1].stop == start
        runs.append(slice(runs.pop().start if joins else start, start + piece))
    return runs


def _segments(handles: Iterable[ParamHandle | None]) -> list[Segment]:
    return [segment for handle in handles if handle is not None for segment in handle.segments]


def _strided(param: nn.Parameter) -> torch.Tensor | None:
    """Returns the gradient's memory on this rank: of a sparse one the values, each element's once."""
    if param.grad is None or not param.grad.is_sparse:
        return None if param.grad is None else to_local(param.grad)
    param.grad = param.grad.coalesce()
    return param.grad.values()


def _shares(handles: Iterable[ParamHandle | None]) -> list[Share]:
    """Divides units among as few groups as possible: the widest takes all of which it holds whole copies."""
    left = list(handles)
    shares: list[Share] = []
    found = dict.fromkeys(handle.communicator for handle in left if handle is not None)
    for group in sorted((group for group in found if group.size > 1), key=lambda group: -group.size):
        copies = {handle: count for handle in left if (count := _copies(handle, group))}
        if not any(handle is not None and handle.communicator == group for handle in copies):
            continue  # a wider group has them
        left = [handle for handle in left if handle not in copies]
        for count in dict.fromkeys(copies.values()):
            shares.append(Share([each for each in copies if copies[each] == count], group, count))
    return [*shares, Share(left, None, 1)] if left else shares


def _copies(handle: ParamHandle | None, group: Communicator) -> int:
    """Returns how many copies of a unit's gradients a group holds; 0 if it does not hold whole ones."""
    if handle is None:
        return group.size
    members, shard, replicas = group.members, handle.communicator.members, handle.replicas.members
    if members == shard:
        return 1
    if len(shard) == 1 and members <= replicas:
        return group.size
    whole = len(shard) * len(replicas) == group.size and shard | replicas <= members
    return len(replicas) if whole else 0
