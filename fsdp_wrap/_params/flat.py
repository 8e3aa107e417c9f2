"""`FlatParameter` and the layouts that concatenate parameters and cut the result into even shards."""

from __future__ import annotations

import copy
import math
import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, final

import torch
from torch import nn

from fsdp_wrap._comm import Communicator
from fsdp_wrap._core import ParamSlot, show_extra
from fsdp_wrap._core.torch_private import foreach_copy_, foreach_zero_, make_subclass
from fsdp_wrap._params.layout import Extent, Interval, Layout, round_up, stretches

__all__ = ["FlatLayout", "FlatParameter", "FlatParameterLayout", "HiddenFlatParameter"]

_VERSION = attrgetter("_version")


class FlatParameter(nn.Parameter):
    """This rank's shard of the concatenated parameters of one segment; what an optimizer updates.

    It takes no part in autograd: modules compute with leaves, and `.grad` is filled by the reduction.

    Attributes:
        _fqns: Names of the original parameters within the unit, in order.
        _shapes: Their shapes.
        _numels: Their element counts.
        of_layout: The layout whose shard it is, if any; there `compat/internals.py` reads what torch's have.
        shard_alias: Another tensor of the same data, once it was asked for.
    """

    _fqns: tuple[str, ...]
    _shapes: tuple[torch.Size, ...]
    _numels: tuple[int, ...]
    of_layout: LayoutRef | None = None
    shard_alias: torch.Tensor | None = None
    _fsdp_flattened = True  # by which clients know sharded parameters
    _is_flat_param = True  # by which torch knows its own

    def __new__(cls, data: torch.Tensor, requires_grad: bool, extents: Sequence[Extent]) -> FlatParameter:
        self: FlatParameter = make_subclass(cls, data, requires_grad)
        self._fqns = tuple(extent.fqn for extent in extents)
        self._shapes = tuple(extent.shape for extent in extents)
        self._numels = tuple(extent.shape.numel() for extent in extents)
        return self

    def register_hook(self, hook: Any) -> Any:
        """Refuses what autograd would call with the gradient before it is accumulated: it never does."""
        raise ValueError(
            f"register_hook on the FlatParameter of '{self._fqns[0]}' and others would never be called, "
            "since gradients come from a reduction: use register_post_accumulate_grad_hook, or hook the "
            "module's parameters inside its forward"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatParameter:
        extents = [Extent(fqn, shape, 0) for fqn, shape in zip(self._fqns, self._shapes)]
        copied = FlatParameter(self.detach().clone(), self.requires_grad, extents)
        memo[id(self)] = copied
        return copied


class LayoutRef(weakref.ref["FlatLayout"]):
    """Of a `FlatParameter` to its layout; where that is pickled, it is left out."""

    def __reduce__(self) -> Any:
        return type(None), ()


class HiddenFlatParameter(FlatParameter):
    """One that no optimizer sees, but its slices or another: their gradients are its own."""

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient of the shard, of which those of slices are views; zeros where a slice has none."""
        layout = None if self.of_layout is None else self.of_layout()
        return None if layout is None else layout.joint_gradient()

    @grad.setter
    def grad(self, grad: torch.Tensor | None) -> None:
        layout = None if self.of_layout is None else self.of_layout()
        if layout is not None:
            layout.read_gradient(grad, [grad is not None] * len(layout.places))


class _UseNotes:
    """By which ranks tell each other, in a reduction, whose gradients they have contributed to.

    Where a rank has no gradient its contribution is -0.0. A sum of zeros is -0.0 only if all of them are, so
    one number of each piece, its first, is enough to note it, and nothing more travels: who has used the
    parameter makes sure that this number is not -0.0.

    Args:
        bounds: The (start, stop) of each parameter.
        shard_numel: Elements of each rank's part of the buffer.
        communicator: Of the ranks.
        together: Whether all are one for the optimizer, so that one that was used speaks for all.
    """

    def __init__(
        self,
        bounds: Sequence[tuple[int, int]],
        shard_numel: int,
        communicator: Communicator,
        together: bool,
    ) -> None:
        marks = [_begins(start, stop, shard_numel) for start, stop in bounds]
        if together:
            firsts = {mark // shard_numel: mark for mark in reversed([*chain.from_iterable(marks)])}
            marks = [sorted(firsts.values())] * len(bounds)
        self._marks, self._bounds, self._together = marks, bounds, together
        self._first, self._length = communicator.rank * shard_numel, shard_numel
        own = range(self._first, self._first + shard_numel)
        self._own = [next((mark - self._first for mark in each if mark in own), None) for each in marks]
        with torch.inference_mode(False):
            every = sorted({*chain.from_iterable(marks)})
            self._every = torch.tensor(every, dtype=torch.int64, device=communicator.device)

    def write(self, full: torch.Tensor, used: Sequence[bool]) -> None:
        """Notes what this rank has used, in its contribution of all ranks' parts."""
        index = self._every
        if False in used:
            some = {mark for marks, mine in zip(self._marks, used) if mine for mark in marks}
            index = torch.tensor(sorted(some), dtype=torch.int64, device=full.device)
        full.index_add_(0, index, full.new_zeros(index.numel()))  # -0.0 + 0.0 is 0.0

    def write_in_shard(self, shard: torch.Tensor, used: Sequence[bool]) -> None:
        """Notes what all ranks have used in what this rank has got of a sum."""
        for (start, stop), mark, by_any in zip(self._bounds, self._own, used):
            if mark is None:
                continue
            if by_any or (self._together and any(used)):
                shard[mark] += 0.0
            else:
                shard[max(0, start - self._first) : max(0, stop - self._first)] = -0.0

    def read(self, shard: torch.Tensor, used: Sequence[bool], wanted: Sequence[bool]) -> list[bool]:
        """For each parameter, whether any rank has used it, where this one holds a piece of it.

        Args:
            shard: What this rank has got of the sum.
            used: What this rank has used, and so need not look for.
            wanted: Of which parameters it matters.
        """
        open_marks: dict[int | None, bool] = {
            mark: False
            for mark, mine, matters in zip(self._own, used, wanted)
            if matters and not mine and mark is not None
        }
        if open_marks and not (self._together and any(used)):
            index = torch.tensor([*open_marks], device=shard.device)
            open_marks.update(zip(open_marks, map(_is_noted, shard[index].tolist())))
        return [mine or open_marks.get(mark, False) for mark, mine in zip(self._own, used)]


class FlatLayout(Layout):
    """Parameters of one dtype side by side in one buffer, cut into one even shard per rank.

    Attributes:
        first: Where this rank's shard begins in the unsharded buffer.
        module: The unit's module.

    Args:
        slots: The original parameters; their data are copied and then given up.
        communicator: Allocates the shard and knows the rank.
        name: Name of the `FlatParameter` in the unit's module.
        module: The unit's module.
        sharded: Whether the buffer is cut at all; otherwise every rank holds the whole of it as its shard.
        offload: Whether the shard lives in host memory.
    """

    flat_param: FlatParameter
    _kind = FlatParameter
    _one_for_all = True  # whether the optimizer sees all original parameters as one

    def __init__(
        self,
        slots: Sequence[ParamSlot],
        communicator: Communicator,
        *,
        name: str,
        module: nn.Module,
        sharded: bool,
        offload: bool,
    ) -> None:
        super().__init__(name, slots, communicator, offload)
        first = slots[0].param
        self.dtype, self.module, self.sharded, self.in_place = first.dtype, module, sharded, True
        self.extents = _extents(slots, self._alignment)
        self.shard_numel = max(1, -(-self.extents[-1].stop // communicator.size))
        self.numel = self.full_numel = self.shard_numel * communicator.size
        self.noted_numel = 0
        self.first = self.shard_numel * communicator.rank
        self._bounds = [extent.within(self.first, self.shard_numel) for extent in self.extents]
        self._sizes, self._indices = stretches(self._bounds, self.shard_numel)
        bounds = [(extent.start, extent.stop) for extent in self.extents]
        self._use_notes = _UseNotes(bounds, self.shard_numel, communicator, together=self._one_for_all)
        self.note_used, self.note_in_shard = self._use_notes.write, self._use_notes.write_in_shard
        shard = self._allocate(self.shard_numel, self.dtype)
        self._resides = not sharded and not self.offloaded
        self._fill(shard, slots)
        self._hold(shard, first.requires_grad)
        self._stand_for([slot.param for slot in slots])
        for slot, piece in zip(slots, self._pieces):
            slot.param.data = piece  # whoever holds the original does not keep its memory alive
        self._follow_places()
        self.hide_full()

    def _fill(self, shard: torch.Tensor, slots: Sequence[ParamSlot]) -> None:
        shard.zero_()
        for extent, slot, (start, stop) in zip(self.extents, slots, self._bounds):
            if stop > start:
                offset = self.first + start - extent.start
                shard[start:stop].copy_(slot.param.detach().reshape(-1)[offset : offset + stop - start])

    def _hold(self, shard: torch.Tensor, requires_grad: bool) -> None:
        """Makes the `FlatParameter`."""
        self.flat_param = self._kind(shard, requires_grad, self.extents)
        self.flat_param.of_layout = LayoutRef(self)
        self._lie_in(shard)

    def _lie_in(self, shard: torch.Tensor) -> None:
        self._shard, self._pieces = shard, self.pieces(shard)

    @abstractmethod
    def _stand_for(self, originals: Sequence[nn.Parameter]) -> None:
        """Sets `sources` and `sharded_params`.

        Args:
            originals: One for each piece; those of the user, in the layout that is made first.
        """

    @property
    def resident(self) -> torch.Tensor | None:
        return self.flat_param.data if self._resides else None

    @property
    def version(self) -> int:
        version: int = self.flat_param._version + sum(map(_VERSION, self.sharded_params))
        return version

    def written(self) -> tuple[list[int], list[int]]:
        return [*map(_VERSION, self.sources)], [*map(torch.Tensor.data_ptr, self.sources)]

    def intervals(self) -> list[Interval]:
        result = []
        for extent, source, (start, stop) in zip(self.extents, self.sources, self._bounds):
            first = self.first + start - extent.start if stop > start else 0
            offset = start if source is self.flat_param else 0
            data = self.flat_param.data[start:stop]
            result.append(Interval(extent.fqn, extent.shape, first, data, source, offset, extent.start))
        return result

    def held_by_rank(self) -> list[list[int]]:
        firsts = range(0, self.numel, self.shard_numel)
        bounds = ([extent.within(first, self.shard_numel) for first in firsts] for extent in self.extents)
        return [[stop - start for start, stop in ranks] for ranks in bounds]

    def pieces(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """Cuts a shard into this rank's pieces of the original parameters: 1-D, or whole if not sharded."""
        if not self.sharded:
            return self.views(shard)
        parts = torch.split_with_sizes(shard, self._sizes)
        return [*map(parts.__getitem__, self._indices)]

    # buffers

    def parts(self, travelling: torch.Tensor) -> list[list[torch.Tensor]]:
        return [[view] for view in self.views(travelling)]

    def split(self, index: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor]

    def packer(self, travelling: torch.Tensor) -> Callable[[list[torch.Tensor]], object]:
        views, gaps = self.views(travelling), self.padding(travelling)

        def pack(tensors: list[torch.Tensor]) -> None:
            foreach_copy_(views, tensors)
            if gaps:
                foreach_zero_(gaps)

        return pack

    def padding(self, travelling: torch.Tensor) -> list[torch.Tensor]:
        stops = [0, *(extent.stop for extent in self.extents)]
        starts = [*(extent.start for extent in self.extents), self.numel]
        return [travelling[stop:start] for stop, start in zip(stops, starts) if start > stop]

    def write_shard(self, out: torch.Tensor) -> None:
        shard = self.flat_param.data
        if not self._resides or out.data_ptr() != shard.data_ptr():
            out.copy_(shard, non_blocking=True)

    def read_shard(self, own: torch.Tensor) -> None:
        self.flat_param.data.copy_(own.data)

    # gradients

    def notes(self, travelling: torch.Tensor) -> torch.Tensor:
        return travelling

    def used_by_any(self, shard: torch.Tensor, used: Sequence[bool]) -> Sequence[bool]:
        return self._use_notes.read(shard, used, self.trains)

    def take_gradients_in(self, dtype: torch.dtype) -> None:
        for param in self.sharded_params:
            param.grad_dtype = None

    def joint_gradient(self) -> torch.Tensor | None:
        """Returns the gradient shard, of which the sharded parameters' gradients are views, if any has one.

        While gradients wait for a reduction, or parameters are shown in full, it may be a copy.
        """
        return self.flat_param.grad

    # changes from outside

    def follow_replaced(self) -> bool:
        if self.flat_param.data_ptr() == self._shard.data_ptr():
            return False
        self._go_to(self.flat_param.data)
        return True

    def _go_to(self, shard: torch.Tensor) -> None:
        """Goes over to the memory of another shard, perhaps of another dtype."""
        if shard.shape != self._shard.shape:
            raise ValueError(
                f"the data of the FlatParameter of '{self.fqns[0]}' and others were replaced by a tensor of "
                f"shape {tuple(shard.shape)}; they must keep {tuple(self._shard.shape)}"
            )
        self.dtype, self.flat_param.data = shard.dtype, shard
        self._lie_in(shard)
        for param, data in zip(self.sharded_params, self.cut(shard)):
            param.data = data
            if param.grad is not None:
                grad, param.grad = param.grad, None
                param.grad = grad.to(param)

    def _part(self, memo: dict[int, Any]) -> None:
        flat, sources = self.flat_param, self.sources
        self._hold(self._allocate(self.shard_numel, self.dtype).copy_(flat.data), flat.requires_grad)
        own = {"of_layout": self.flat_param.of_layout, "shard_alias": None}
        self.flat_param.__dict__.update(flat.__dict__ | own)
        memo[id(flat)] = self.flat_param
        self._stand_for(
            [nn.Parameter(piece, each.requires_grad) for piece, each in zip(self._pieces, sources)]
        )

    def follow_modules(self, memo: dict[int, Any]) -> None:
        self.module = copy.deepcopy(self.module, memo)
        super().follow_modules(memo)


@final
class FlatParameterLayout(FlatLayout):
    """The optimizer sees the `FlatParameter` alone; under the original names stand plain slices of it."""

    _shows_plain = True

    def _stand_for(self, originals: Sequence[nn.Parameter]) -> None:
        self.sources, self.sharded_params = [self.flat_param] * len(self.places), [self.flat_param]

    def cut(self, shard: torch.Tensor) -> list[torch.Tensor]:
        return [shard]

    _cut_gradients = cut

    def _having_gradients(self, used: Sequence[bool]) -> Sequence[bool]:
        return [any(used)]

    def _stand_ins(self) -> Sequence[torch.Tensor]:
        return self._pieces

    def show_full(self, params: Sequence[nn.Parameter], copies: bool) -> None:
        show_extra(self.module, self.name, None)
        super().show_full(params, copies)

    def hide_full(self) -> None:
        show_extra(self.module, self.name, self.flat_param)
        super().hide_full()

    def gradients(self) -> list[torch.Tensor | None]:
        grad = self.flat_param.grad
        return [None] * len(self.sources) if grad is None else [*self.pieces(grad)]

    def gradient_blocks(self) -> list[torch.Tensor]:
        grad = self.flat_param.grad
        return [] if grad is None else [grad]

    def _go_to(self, shard: torch.Tensor) -> None:
        super()._go_to(shard)
        self._follow_places()
        self.show_sharded()

    def _part(self, memo: dict[int, Any]) -> None:
        before = self._pieces
        super()._part(memo)
        memo.update((id(piece), new) for piece, new in zip(before, self._pieces))


def _extents(slots: Sequence[ParamSlot], alignment: int) -> list[Extent]:
    result: list[Extent] = []
    start = 0
    for slot in slots:
        result.append(Extent(slot.fqn, slot.param.shape, start))
        start = round_up(result[-1].stop, alignment)
    return result


def _begins(start: int, stop: int, length: int) -> list[int]:
    """Where the pieces begin into which even parts of this length cut a parameter."""
    return [start, *range(start // length * length + length, stop, length)] if stop > start else []


def _is_noted(number: float) -> bool:
    return number != 0 or math.copysign(1, number) > 0
