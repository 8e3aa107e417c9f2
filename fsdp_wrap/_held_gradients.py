"""Which gradients there are at and below a module, and which ranks hold them."""

from __future__ import annotations

import functools
import operator
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, compress
from typing import Any

import torch
from torch import nn

from fsdp_wrap._collectives import Communicator
from fsdp_wrap._full_values import handles_of
from fsdp_wrap._gradient_blocks import GradientBlocks
from fsdp_wrap._gradient_mark import held_by_this_rank
from fsdp_wrap._handle import ParamHandle
from fsdp_wrap._modules import Place, clean_fqn, is_owned
from fsdp_wrap._unit import units_in

__all__ = ["HeldGradients", "NamedGradient", "Share"]


_TRAINS = operator.attrgetter("requires_grad")
_GENERATION, _ACCUMULATED = operator.attrgetter("generation"), operator.attrgetter("accumulated")


@dataclass(frozen=True, eq=False)
class Share:
    """Gradients that the same ranks hold between them.

    Attributes:
        handles: Who reduces them; None stands for the parameters that no unit owns.
        group: The ranks that hold all of them between them; None where each rank does by itself.
        copies: How many copies of each that group holds.
    """

    handles: Sequence[ParamHandle | None]
    group: Communicator | None
    copies: int


@dataclass(frozen=True, eq=False)
class NamedGradient:
    """This rank's piece of one original parameter's gradient, if there is any.

    Attributes:
        number: Where the parameter stands among those of the module.
        name: Its original name, the first if it is tied.
        dtype: That of the parameter.
        piece: The gradient's piece.
    """

    number: int
    name: str
    dtype: torch.dtype
    piece: torch.Tensor | None


class _Tree:
    """The modules at and below one, and the parameters that they show, to notice whether any came or went.

    A unit's own parameters need no look: the next forward refuses any other in their place.
    """

    def __init__(self, module: nn.Module, handles: Iterable[ParamHandle]) -> None:
        layouts = [segment.layout for handle in handles for segment in handle.segments]
        owned = {place for layout in layouts for places in layout.places for place in places}
        watched: list[dict[str, Any]] = []
        self._counted: list[dict[str, Any]] = []
        for one in module.modules():
            params = one._parameters
            stay = all(
                (one, name) in owned or (param is not None and is_owned(param))
                for name, param in params.items()
            )
            (self._counted if stay else watched).append(params)
            (watched if one._modules else self._counted).append(one._modules)
        self._counts = [*map(len, self._counted)]
        self._watched = [*(registry.values() for registry in watched), (self,)]  # which marks the end
        self._found = [*chain.from_iterable(self._watched)]

    @property
    def is_unchanged(self) -> bool:
        """Whether all are those that were found."""
        if [*map(len, self._counted)] != self._counts:
            return False
        return all(map(operator.is_, chain.from_iterable(self._watched), self._found))


class HeldGradients:
    """What was found at and below a module; it holds as long as `is_current`.

    Attributes:
        units: The units.
        handles: Of those that own parameters.
        shares: The gradients, by the ranks that hold them.
        device: Where the units compute.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.units = list(dict.fromkeys(units_in(module).values()))
        self.handles = handles_of(self.units)
        self.device = next((one.communicator.device for one in self.handles), torch.device("cpu"))
        sharded = {id(source) for one in self.handles for source in _sources(one)}
        self._replicated = {
            clean_fqn(name): param for name, param in module.named_parameters() if id(param) not in sharded
        }
        self.shares = _shares([*self.handles, None] if self._replicated else self.handles)
        self._blocks = {share: _blocks(share.handles) for share in self.shares}
        self._tree = _Tree(module, self.handles)
        self._generations = [*map(_GENERATION, self.handles)]
        self._handles = [handle for handle in self.handles for _ in handle.segments]
        self._segments = [segment for handle in self.handles for segment in handle.segments]
        self._gradients = [segment.gradients for segment in self._segments]

    @property
    def is_current(self) -> bool:
        """Whether the modules below, what they show as parameters, and dtypes are those that were found."""
        return [*map(_GENERATION, self.handles)] == self._generations and self._tree.is_unchanged

    @property
    def replicated(self) -> dict[str, nn.Parameter]:
        """The parameters that no unit owns, by name; tied ones of a unit elsewhere count there."""
        return {name: param for name, param in self._replicated.items() if not is_owned(param)}

    def params(self) -> Iterator[nn.Parameter]:
        """Yields all parameters, as the optimizer sees them; some more than once."""
        yield from chain.from_iterable(map(_sources, self.handles))
        yield from self.replicated.values()

    def widest_dtype(self) -> torch.dtype:
        """Returns that of the gradients that there may be: a rank may have none of them."""
        replicated = self.replicated.values()
        dtypes = {segment.dtypes.grad for segment in self._segments} | {param.dtype for param in replicated}
        if len(dtypes) != 1:  # else asking each parameter would change nothing
            trained = (one for one in self._segments if any(map(_TRAINS, one.layout.sources)))
            dtypes = {segment.dtypes.grad for segment in trained}
            dtypes |= {param.dtype for param in replicated if param.requires_grad}
        return functools.reduce(torch.promote_types, dtypes) if dtypes else torch.float32

    @property
    def unreduced(self) -> list[ParamHandle]:
        """Those whose gradients `no_sync` has left for a later backward to reduce."""
        return [*compress(self._handles, map(_ACCUMULATED, self._gradients))]

    def held(self, share: Share, without: Collection[ParamHandle] = ()) -> list[torch.Tensor]:
        """Returns what this rank holds of a share, in as few tensors as possible, none of them empty.

        Args:
            share: The gradients.
            without: Those of these are passed over.
        """
        handles = [each for each in share.handles if each not in without] if without else share.handles
        found = (_blocks(handles) if without else self._blocks[share]).find()
        if None in handles:
            strided = (_strided(param) for param in self.replicated.values())
            found += [grad for grad in strided if grad is not None and grad.numel() > 0]
        return found

    def named(self, share: Share) -> list[NamedGradient]:
        """Returns the gradients of a share one by one, also those that are not there."""
        names = _names(self._module)
        numbers = {name: number for number, name in names.values()}
        found = []
        for handle in share.handles:
            for segment in () if handle is None else handle.segments:
                layout = segment.layout
                for places, piece in zip(layout.places, layout.gradients()):
                    number, name = min(names[place] for place in places if place in names)
                    found.append(NamedGradient(number, name, layout.dtype, piece))
            for name, param in self.replicated.items() if handle is None else ():
                found.append(NamedGradient(numbers[name], name, param.dtype, _strided(param)))
        return found


def _blocks(handles: Iterable[ParamHandle | None]) -> GradientBlocks:
    segments = chain.from_iterable(each.segments for each in handles if each is not None)
    return GradientBlocks([segment.layout for segment in segments])


def _sources(handle: ParamHandle) -> Iterator[nn.Parameter]:
    return chain.from_iterable(segment.layout.sources for segment in handle.segments)


def _strided(param: nn.Parameter) -> torch.Tensor | None:
    """Returns the gradient's memory on this rank: of a sparse one the values, each element's once."""
    if param.grad is None or not param.grad.is_sparse:
        return None if param.grad is None else held_by_this_rank(param.grad)
    param.grad = param.grad.coalesce()
    return param.grad.values()


def _names(module: nn.Module) -> dict[Place, tuple[int, str]]:
    """Numbers and names every place that shows a parameter, or would if it were not sharded."""
    places = (
        ((owner, key), clean_fqn(f"{prefix}.{key}" if prefix else key))
        for prefix, owner in module.named_modules()
        for key in owner._parameters
    )
    return {place: (number, name) for number, (place, name) in enumerate(places)}


def _shares(handles: Iterable[ParamHandle | None]) -> list[Share]:
    """Divides units among as few groups as possible: the widest takes all of which it holds whole copies."""
    left = list(handles)
    shares: list[Share] = []
    for group in _groups(left):
        copies = {handle: count for handle in left if (count := _copies(handle, group))}
        if not any(handle is not None and handle.communicator == group for handle in copies):
            continue  # a wider group has them
        left = [handle for handle in left if handle not in copies]
        for count in dict.fromkeys(copies.values()):
            shares.append(Share([each for each in copies if copies[each] == count], group, count))
    return [*shares, Share(left, None, 1)] if left else shares


def _groups(handles: Iterable[ParamHandle | None]) -> list[Communicator]:
    """Returns those over which handles are sharded, the widest first."""
    found = dict.fromkeys(handle.communicator for handle in handles if handle is not None)
    return sorted((group for group in found if group.size > 1), key=lambda group: -group.size)


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
