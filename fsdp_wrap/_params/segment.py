"""`Segment`: the memory of one layout: unsharded buffer, leaves and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter
from sys import getrefcount

import torch

from fsdp_wrap._comm import Buffer, Communicator, ResidentBuffer
from fsdp_wrap._core import SegmentDtypes
from fsdp_wrap._core.torch_private import foreach_copy_, set_version_counters
from fsdp_wrap._params.gradients import Gradients
from fsdp_wrap._params.layout import Layout
from fsdp_wrap._params.parallel import to_local

_VERSION = attrgetter("_version")
_DATA_PTR = torch.Tensor.data_ptr

_FREED = 1 << 31
"""The version of leaves whose memory is freed, which no graph has saved."""


class Segment:
    """One layout with its unsharded buffer, its leaves and their gradients.

    Args:
        layout: How the parameters lie in the buffers.
        dtypes: Of the buffers.
        communicator: Allocates the buffers.
        contributors: By how much summed gradients are divided: over so many ranks they are averaged.

    Attributes:
        places: Of each leaf, its number.
        trainable: Whether any leaf needs a gradient now.
        shard: This rank's.
        write_shard: Copies it to where it travels from.
        from_host: By what it does so, if the shard lies in host memory.
        counted: The leaves, and where they are `DTensor`s their parts on this rank, each with a version.
        versions: Of these, when they were filled or freed last, or `edited` was called; the runtime's
            writes do not move them.
    """

    def __init__(
        self, layout: Layout, dtypes: SegmentDtypes, communicator: Communicator, contributors: float
    ) -> None:
        self.layout = layout
        self.dtypes = dtypes
        self._communicator = communicator
        self.full, self.gathered = self._make_buffers()
        self.leaves = layout.make_leaves(self.full.tensor)
        self.places = {leaf: index for index, leaf in enumerate(self.leaves)}
        if dtypes.arriving != dtypes.param:
            for leaf in self.leaves:
                leaf.grad_dtype = dtypes.arriving
        self.trainable = False
        self._keeps_memory = False
        self._admitted = self._rests = False
        self._lie_at: list[int] = []
        self._references: list[int] = []
        self._held: dict[int, int] = {}  # leaves that somebody keeps: how many references without
        self._apart: list[int] = []  # those with memory of their own
        others = () if layout.distributed is None else layout.memory
        self.counted = (*self.leaves, *others)
        self.versions = [*map(_VERSION, self.counted)]
        self._freed = (_FREED,) * len(self.counted)
        set_version_counters(self.counted, self._freed)
        self._alias_full()
        self.full.free()  # before the other one is allocated
        self.gathered.free()
        self.gradients = Gradients(layout, dtypes, communicator, contributors, self.leaves)

    def _make_buffers(self) -> tuple[Buffer, Buffer]:
        """Returns the unsharded buffer, and the one that travels."""
        layout, dtype = self.layout, self.dtypes.param
        if layout.resident is not None and dtype == self.dtypes.master:
            full: Buffer = ResidentBuffer(layout.resident)
        else:
            full = self._communicator.buffer(layout.full_numel, dtype)
        return full, full if layout.in_place else self._communicator.buffer(layout.numel, dtype)

    def describe(self) -> str:
        """Says how many elements this rank holds of how many, and of which dtypes."""
        held = sum(interval.data.numel() for interval in self.layout.intervals())
        frozen = "" if any(source.requires_grad for source in self.layout.sources) else " (frozen)"
        aligned = self.layout.alignment
        padding = f" (aligned to {aligned}, {self.layout.padding_numel} of padding)" if aligned else ""
        return f"{held} of {sum(leaf.numel() for leaf in self.leaves)} {self.dtypes}{frozen}{padding}"

    def edited(self) -> list[int]:
        """Returns which leaves were written to since the last call, where that does not reach the shard."""
        before, self.versions = self.versions, [*map(_VERSION, self.counted)]
        pairs = zip(before, self.versions) if self.full.temporary else ()
        return [number % len(self.leaves) for number, (old, new) in enumerate(pairs) if old != new]

    def cover(self) -> None:
        """Lets the modules' attributes show the leaves, to whoever looks until `uncover`."""
        self._lie_at, self._references = (
            [*map(_DATA_PTR, self.layout.memory)],
            [*map(getrefcount, self.leaves)],
        )
        for index, alone in self._held.items():
            self._references[index] = alone
        self.layout.cover.put()

    def uncover(self) -> list[int]:
        """Ends that; returns which leaves were changed meanwhile, where that reaches no shard."""
        self.layout.cover.take_away()
        before, references = self._references, [*map(getrefcount, self.leaves)]
        if references != before or self._held:
            held = [index for index, alone in enumerate(before) if references[index] > alone]
            self._held = {index: before[index] for index in held}
        lie_at = [*map(_DATA_PTR, self.layout.memory)]
        if lie_at != self._lie_at:
            self._apart = [index for index, known in enumerate(self._lie_at) if lie_at[index] != known]
        return sorted({*self.edited(), *self._apart})

    def _part_from_held(self) -> None:
        """Gives leaves that somebody has kept memory of their own until they are filled again.

        To read what is freed would end the process.
        """
        self._forget_dropped()
        memory = self.layout.memory
        self.layout.lie_in((index, memory[index].data.clone()) for index in self._held)
        self._apart += self._held

    def _forget_dropped(self) -> None:
        """Forgets which leaves were held and are not any more.

        A graph may have had one of the references that were counted without, and be gone: then a leaf that
        does not train has as many now, and is held.
        """
        references, leaves = [*map(getrefcount, self.leaves)], self.leaves
        self._held = {
            index: alone
            for index, alone in self._held.items()
            if references[index] + (not leaves[index].requires_grad) > alone
        }

    def _rejoin(self) -> None:
        views = self.layout.views(self.full.tensor)
        self.layout.lie_in((index, views[index]) for index in self._apart)
        self._apart = []

    def admit(self, changed: bool, in_place: bool) -> None:
        """Lets autograd use the leaves, now that their values have come.

        Args:
            changed: Whether their values are others than before: what graphs saved then is refused.
            in_place: Whether they have come into the unsharded buffer, also where gathers go elsewhere.
        """
        if self.from_host is not None:
            self.from_host.settle()
        if self.gathered is not self.full and not in_place and not self._rests:
            self.full.allocate()
            foreach_copy_(*self._copies)
            self.gathered.free()
        if self._apart:
            self._rejoin()
        if changed:
            self.versions = [version + 1 for version in self.versions]
        set_version_counters(self.counted, tuple(self.versions))
        self._admitted, self._rests = True, False

    def free(self) -> None:
        """Frees the unsharded buffer; memory that a NumPy array shares is left to the array.

        Autograd refuses the leaves until they are filled again, as it does tensors that were changed since
        it saved them. Gradients that took the parameters' place stay until they are reduced.
        """
        if self._admitted:
            self.versions = [*map(_VERSION, self.counted)]
            if self._held and self.full.temporary:
                self._part_from_held()
            set_version_counters(self.counted, self._freed)
        self._admitted = self._rests = False
        if self._keeps_memory or self.gradients.buffer is self.full:
            return
        if self.full.free():
            return
        self.full = self._communicator.buffer(self.layout.full_numel, self.dtypes.param)
        if self.layout.in_place:
            self.gathered = self.full
        self.gathered.allocate()
        self._alias_full()
        self.full.free()
        self.gathered.free()

    def rest(self) -> bool:
        """Keeps the unsharded buffer as it is until `admit` or `free`; autograd refuses the leaves so long.

        Returns:
            Whether it can: where there is nothing else in the buffer than was gathered.
        """
        edited = self.full.temporary and [*map(_VERSION, self.counted)] != self.versions
        if edited or self.gradients.buffer is self.full:
            return False
        before, self._keeps_memory = self._keeps_memory, True
        self.free()
        self._keeps_memory, self._rests = before, True
        return True

    def let_use(self) -> None:
        """Lets autograd use the leaves of a buffer that rests."""
        set_version_counters(self.counted, tuple(self.versions))
        self._admitted = True

    def refuse_conversion(self) -> None:
        """Refuses another dtype of the sharded parameters while gradients wait in the old one.

        Raises:
            RuntimeError: If it is so.
        """
        layout = self.layout
        converted = any(param.dtype != layout.dtype for param in (layout.flat_param, *layout.sources))
        if converted and self.gradients.accumulated:
            raise RuntimeError(
                f"the parameter '{layout.fqns[0]}' and others beside it changed their dtype while gradients "
                "left by no_sync wait for a backward; convert before or after the accumulation"
            )

    def follow_shard(self) -> None:
        """Goes over to where the layout's shard lies now, or a resident buffer of the same dtype."""
        fits = self.dtypes.param == self.dtypes.master == self.layout.dtype
        if self.layout.resident is not None and fits:
            self.full = self.gathered = ResidentBuffer(self.layout.resident)
            self._alias_full()
        self._write_from_shard()

    def keep_memory(self, keep: bool) -> None:
        """Decides whether `free` leaves the unsharded buffer where it is."""
        self._keeps_memory = keep

    def _alias_full(self) -> None:
        self._own = self._communicator.own_part(self.gathered.data)
        self._write_from_shard()
        pairs = self.layout.same_elements(self.gathered.data, self.full.data)
        self._copies = [target for _, target in pairs], [source for source, _ in pairs]
        self.layout.lie_in(enumerate(self.layout.views(self.full.tensor)))

    def _write_from_shard(self) -> None:
        self.write_shard: Callable[[], object] = _write_nothing
        self.shard = self.layout.flat_param.data
        self.from_host = self.layout.from_host(self.dtypes.param) if self.full.temporary else None
        if self.from_host is not None:
            self.write_shard = partial(self.from_host.write, self._own)
        elif self.full.temporary:  # not by a function of ours: gathers are many
            self.write_shard = partial(self._own.copy_, self.shard, non_blocking=True)

    def train(self, wanted: Sequence[bool]) -> None:
        """Lets the leaves need gradients, or not."""
        for leaf, trains in zip(self.leaves, wanted):
            leaf.requires_grad_(trains)
        self.trainable = True in wanted

    @torch.no_grad()
    def take_gradient(self, index: int, grad: torch.Tensor) -> None:
        """Adds a gradient that came another way to a leaf's."""
        leaf, part = self.leaves[index], (self.layout.distributed or [None] * (index + 1))[index]
        held = to_local(grad)
        held = held.to(leaf.device, leaf.grad_dtype or leaf.dtype, copy=True)
        taken = held if part is None else part.tensor(held)
        leaf.grad = taken if leaf.grad is None else leaf.grad + taken

    def take_in_place(self, index: int) -> None:
        """Moves a leaf's gradient to where the leaf lies, if that may serve as the reduce buffer.

        Raises:
            RuntimeError: If a gradient lies there already.
        """
        param, reduce = self.dtypes.param, self.dtypes.reduce
        fits = self.layout.in_place and torch.promote_types(param, reduce) == reduce
        fits = fits and self.dtypes.arriving is not None and not self._keeps_memory
        if fits and self.full.temporary and self.full.resizable:
            self.gradients.take_in(self.full, index)


def _write_nothing() -> None:
    """Writes the shard where the shard is the buffer."""
