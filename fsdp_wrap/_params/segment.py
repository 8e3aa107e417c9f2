"""`Segment`: the memory of one segment of a unit: unsharded buffer, leaves and their gradients.

`ShownLeaves` knows what users do with leaves between a forward and its backward.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from operator import attrgetter
from sys import getrefcount

import torch
from torch import nn

from fsdp_wrap._comm import Buffer, Communicator, ResidentBuffer
from fsdp_wrap._core import PlugIns, SegmentDtypes, round_up
from fsdp_wrap._core.torch_private import foreach_copy_, set_version_counters
from fsdp_wrap._params.gradients import Gradients
from fsdp_wrap._params.layout import ALIGNMENT_BYTES
from fsdp_wrap._params.sharded_params import ShardedParams

_VERSION = attrgetter("_version")
_DATA_PTR = torch.Tensor.data_ptr

FREED_VERSION = 1 << 31
"""The version of freed leaves, which no graph has saved."""


class Segment:
    """Sharded parameters with their unsharded buffer, their leaves and the gradients of these.

    Attributes:
        full: The unsharded buffer.
        gathered: The buffer into which shards are gathered; often `full`.
        trainable: Whether any leaf needs a gradient now.
        write_shard: Copies the shard to this rank's part of `gathered`.
        from_host: The copier of a shard in host memory, or None.
        counted: The leaves, and the local parts of `DTensor`s, each with a version counter.
        versions: Their versions when they were last filled or freed, or `edited` was called.
    """

    def __init__(
        self,
        params: ShardedParams,
        dtypes: SegmentDtypes,
        communicator: Communicator,
        plug_ins: PlugIns,
    ) -> None:
        self.params, self.layout = params, params.layout
        self.dtypes = dtypes
        self._communicator = communicator
        self.full, self.gathered = self._make_buffers()
        self.leaves = params.make_leaves(self.full.data)
        if dtypes.arriving != dtypes.param:
            for leaf in self.leaves:
                leaf.grad_dtype = dtypes.arriving
        self.trainable = False
        self._keeps_memory = False
        self._admitted = False
        self._shown: ShownLeaves | None = None  # once attributes have shown them
        others = () if params.distributed is None else params.memory
        self.counted = (*self.leaves, *others)
        self.versions = self._versions_now()
        self._freed = (FREED_VERSION,) * len(self.counted)
        set_version_counters(self.counted, self._freed)
        self._follow_buffers()
        self.full.free()  # before the other one is allocated
        self.gathered.free()
        self.gradients = Gradients(params, dtypes, communicator, self.leaves, plug_ins)

    def _make_buffers(self) -> tuple[Buffer, Buffer]:
        """Returns the unsharded buffer and the gathered one."""
        layout, dtype = self.layout, self.dtypes.param
        resident = self.params.resident
        if resident is not None and dtype == self.dtypes.master:
            full: Buffer = ResidentBuffer(resident)
        else:
            full = self._communicator.buffer(layout.full_numel, dtype)
        return full, full if layout.in_place else self._communicator.buffer(layout.numel, dtype)

    @cached_property
    def places(self) -> dict[nn.Parameter, int]:
        """Numbers of the leaves."""
        return {leaf: index for index, leaf in enumerate(self.leaves)}

    def _versions_now(self) -> tuple[int, ...]:
        return (*map(_VERSION, self.counted),)

    @property
    def made_for(self) -> object:
        """For what the values were gathered; None where they are the same for all."""
        return None

    @property
    def nbytes_by_dtype(self) -> Counter[torch.dtype]:
        """Bytes of the full parameters by the dtype in which they travel."""
        return Counter({self.dtypes.param: self.full.nbytes})

    @property
    def batched_nbytes(self) -> int:
        """Bytes of the shard in the buffer of a batched gather."""
        return round_up(self.gathered.nbytes // self._communicator.size, ALIGNMENT_BYTES)

    def describe(self) -> str:
        """Describes sizes, dtypes and alignment, for `repr`."""
        held = sum(interval.data.numel() for interval in self.params.intervals())
        frozen = "" if any(source.requires_grad for source in self.params.sources) else " (frozen)"
        aligned = self.layout.alignment
        padding = f" (aligned to {aligned}, {self.layout.padding_numel} of padding)" if aligned else ""
        return f"{held} of {sum(leaf.numel() for leaf in self.leaves)} {self.dtypes}{frozen}{padding}"

    def edited(self) -> list[int]:
        """Returns which leaves were written to since the last call, if the write does not reach the shard."""
        before, self.versions = self.versions, self._versions_now()
        pairs = zip(before, self.versions) if self.full.temporary else ()
        return [number % len(self.leaves) for number, (old, new) in enumerate(pairs) if old != new]

    def cover(self) -> None:
        """Shows the leaves by attributes of modules until `uncover`."""
        if self._shown is None:
            self._shown = ShownLeaves(self.params)
        self._shown.cover()

    def uncover(self) -> list[str]:
        """Undoes `cover`; returns names of leaves that were changed since, if that reaches no shard."""
        assert self._shown is not None
        self._shown.uncover()
        changed = self.edited() + self._shown.apart
        return [self.layout.fqns[index] for index in sorted({*changed})] if changed else []

    def admit(self, changed: bool, in_place: bool) -> None:
        """Lets autograd use the leaves, once their values have been gathered.

        Args:
            changed: Whether the values are new: graphs that saved earlier ones are refused.
            in_place: Whether they were gathered into the unsharded buffer itself.
        """
        if self.from_host is not None:
            self.from_host.settle()
        if self.gathered is not self.full and not in_place:
            self.full.allocate()
            foreach_copy_(*self._copies)
            self.gathered.free()
        if self._shown is not None and self._shown.apart:
            self._shown.rejoin(self.layout.views(self.full.data))
        if changed:
            self.versions = (*[version + 1 for version in self.versions],)
        set_version_counters(self.counted, self.versions)
        self._admitted = True

    def free(self) -> None:
        """Frees the unsharded buffer; memory that a NumPy array shares is left to the array.

        Autograd refuses the leaves until they are filled again, as if they had changed since it saved them.
        Gradients that took the parameters' place stay until they are reduced.
        """
        if self._admitted:
            self.versions = (*map(_VERSION, self.counted),)
            if self._shown is not None and self._shown.held and self.full.temporary:
                self._shown.part()
            set_version_counters(self.counted, self._freed)
        self._admitted = False
        if self._keeps_memory or self.gradients.taken is self.full:
            return
        if self.full.free():
            return
        self.full, self.gathered = self._make_buffers()
        self._alias_full()
        self.full.free()
        self.gathered.free()

    @property
    def holds_changes(self) -> bool:
        """Whether the unsharded buffer holds edits, or gradients in place of the parameters."""
        edited = self.full.temporary and self._versions_now() != self.versions
        return edited or self.gradients.taken is self.full

    def refuse_conversion(self) -> None:
        """Refuses another dtype of the sharded parameters while gradients wait in the old one."""
        params = self.params
        converted = any(param.dtype != params.dtype for param in (params.flat_param, *params.sources))
        if converted and self.gradients.accumulated:
            raise RuntimeError(
                f"the parameter '{self.layout.fqns[0]}' and others beside it changed their dtype while "
                "gradients left by no_sync wait for a backward; convert before or after the accumulation"
            )

    def follow_shard(self) -> None:
        """Moves to the memory of the shard, or to a resident buffer of the same dtype."""
        fits = self.dtypes.param == self.dtypes.master == self.params.dtype
        if self.params.resident is not None and fits:
            self.full = self.gathered = ResidentBuffer(self.params.resident)
            self._alias_full()
        self._write_from_shard()

    def keep_memory(self, keep: bool) -> None:
        """Decides whether `free` leaves the unsharded buffer where it is."""
        self._keeps_memory = keep

    def _alias_full(self) -> None:
        self._follow_buffers()
        self.params.lie_in(enumerate(self.layout.views(self.full.data)))

    def _follow_buffers(self) -> None:
        """Writes and copies to the present buffers from now on."""
        self._own = self._communicator.own_part(self.gathered.data)
        self._write_from_shard()
        self.__dict__.pop("_copies", None)

    @cached_property
    def _copies(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Parts of the unsharded buffer, and those of the gathered one to copy there; both have memory."""
        pairs = self.layout.same_elements(self.gathered.data, self.full.data)
        return [target for _, target in pairs], [source for source, _ in pairs]

    def _write_from_shard(self) -> None:
        self.write_shard: Callable[[], object] = lambda: None  # of a shard that is the buffer itself
        self.shard = self.params.shard
        self.from_host = self.params.from_host(self.dtypes.param) if self.full.temporary else None
        if self.from_host is not None:
            self.write_shard = partial(self.from_host.write, self._own)
        elif self.full.temporary:
            self.write_shard = partial(torch.Tensor.copy_, self._own, self.shard, True)  # non-blocking

    def train(self, wanted: Sequence[bool]) -> None:
        """Sets `requires_grad` of each leaf."""
        for leaf, trains in zip(self.leaves, wanted):
            leaf.requires_grad_(trains)
        self.trainable = True in wanted

    def take_in_place(self, index: int) -> None:
        """Moves a leaf's gradient into the leaf's memory, if that may serve as the reduce buffer."""
        param, reduce = self.dtypes.param, self.dtypes.reduce
        fits = self.layout.in_place and torch.promote_types(param, reduce) == reduce
        fits = fits and self.dtypes.arriving is not None and not self._keeps_memory
        if fits and self.full.temporary and self.full.resizable:
            self.gradients.take_in(self.full, index)


class ShownLeaves:
    """Leaves that attributes of modules show until a backward: users may write to them, or hold them.

    A leaf that is held gets memory of its own when the others are freed: reads of freed memory crash.

    Attributes:
        held: Numbers of leaves that users hold, each with the references that others have.
        apart: Numbers of leaves with memory of their own.
    """

    def __init__(self, params: ShardedParams) -> None:
        self._params = params
        self.held: dict[int, int] = {}
        self.apart: list[int] = []
        self._addresses: list[int] = []  # of the leaves, and below their reference counts, at `cover`
        self._references: list[int] = []

    def cover(self) -> None:
        """Shows the leaves by attributes of modules until `uncover`."""
        self._addresses = [*map(_DATA_PTR, self._params.memory)]
        self._references = [*map(getrefcount, self._params.leaves)]
        for index, alone in self.held.items():
            self._references[index] = alone
        self._params.display.cover()

    def uncover(self) -> None:
        """Undoes `cover`; notes which leaves are held now, and which got other memory."""
        self._params.display.uncover()
        before, references = self._references, [*map(getrefcount, self._params.leaves)]
        if references != before or self.held:
            held = [index for index, alone in enumerate(before) if references[index] > alone]
            self.held = {index: before[index] for index in held}
        addresses = [*map(_DATA_PTR, self._params.memory)]
        if addresses != self._addresses:
            self.apart = [index for index, known in enumerate(self._addresses) if addresses[index] != known]

    def part(self) -> None:
        """Gives held leaves memory of their own until they are filled again."""
        self.forget_dropped()
        memory = self._params.memory
        self._params.lie_in((index, memory[index].data.clone()) for index in self.held)
        self.apart += self.held

    def rejoin(self, views: Sequence[torch.Tensor]) -> None:
        """Gives leaves with memory of their own their place in the unsharded buffer again."""
        self._params.lie_in((index, views[index]) for index in self.apart)
        self.apart = []

    def forget_dropped(self) -> None:
        """Forgets leaves that are not held any more.

        A graph may have had one of the counted references, and be gone: a leaf that does not train then has
        as many as before, and is held.
        """
        leaves = self._params.leaves
        references = [*map(getrefcount, leaves)]
        self.held = {
            index: alone
            for index, alone in self.held.items()
            if references[index] + (not leaves[index].requires_grad) > alone
        }
