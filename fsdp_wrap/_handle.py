"""`ParamHandle`: the storage and the communication of one unit.

SHARDED --unshard--> UNSHARDING --wait--> UNSHARDED --reshard--> SHARDED. Resharding is always safe.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch
from torch import nn

from fsdp_wrap._collectives import Communicator, ResidentBuffer
from fsdp_wrap._device import Finished, Pending
from fsdp_wrap._layout import Layout

__all__ = ["HandleState", "ParamHandle"]


class HandleState(Enum):
    """What is in memory.

    Attributes:
        SHARDED: Shards only.
        UNSHARDING: Unsharded buffers are allocated and being filled.
        UNSHARDED: Unsharded buffers are filled; leaves may be used.
        SUMMONED: As UNSHARDED, but the parameters are in the user's hands: no forward, no backward.
        REPLACED: As SHARDED, but the modules show what a state dict is to contain or to load into.
    """

    SHARDED = "sharded"
    UNSHARDING = "unsharding"
    UNSHARDED = "unsharded"
    SUMMONED = "summoned"
    REPLACED = "replaced"


class Segment:
    """One layout with its unsharded buffer, its leaves and its reduce buffer."""

    def __init__(self, layout: Layout, communicator: Communicator, contributors: int) -> None:
        self.layout = layout
        self._communicator = communicator
        resident = layout.resident
        self.full = (
            communicator.buffer(layout.numel, layout.dtype) if resident is None else ResidentBuffer(resident)
        )
        self.leaves = layout.make_leaves(self.full.tensor)
        # Written through an alias of its own, so that autograd's version counters do not move.
        self.full_data = self.full.tensor.data
        self.own_data = communicator.own_part(self.full_data)
        self.grads = communicator.buffer(layout.numel, layout.dtype)
        self._grad_views = layout.views(self.grads.tensor)
        self._grad_padding = layout.padding(self.grads.tensor)
        self._filled = [False] * len(self.leaves)
        self._accumulated = False
        self._scale = 1.0 / contributors
        self.full.free()
        self.grads.free()

    @property
    def trainable(self) -> bool:
        """Whether any leaf needs a gradient now."""
        return any(leaf.requires_grad for leaf in self.leaves)

    def free(self) -> None:
        """Frees the unsharded buffer; memory that a NumPy array shares is left to the array."""
        if self.full.resizable:
            self.full.free()
            return
        self.full = self._communicator.buffer(self.layout.numel, self.layout.dtype)
        self.full_data = self.full.tensor.data
        self.own_data = self._communicator.own_part(self.full_data)
        for leaf, view in zip(self.leaves, self.layout.views(self.full.tensor)):
            leaf.data = view
        self.full.free()

    def follow_requires_grad(self) -> bool:
        """Lets leaves need gradients as the sharded parameters do; returns whether any changed."""
        changed = False
        for leaf, source in zip(self.leaves, self.layout.sources):
            if leaf.requires_grad != source.requires_grad:
                leaf.requires_grad_(source.requires_grad)
                changed = True
        return changed

    def take_gradient(self, index: int) -> None:
        """Moves a leaf's gradient into the reduce buffer, divided by the number of ranks."""
        leaf = self.leaves[index]
        grad, leaf.grad = leaf.grad, None
        if grad is None:
            return
        self._allocate_gradients()
        view, filled = self._grad_views[index], self._filled[index]
        self._filled[index] = True
        _accumulate(view, grad.to_dense() if grad.layout != torch.strided else grad, self._scale, filled)

    def complete_gradients(self) -> torch.Tensor:
        """Returns the reduce buffer, with zeros where no gradient came."""
        self._allocate_gradients()
        for view, filled in zip(self._grad_views, self._filled):
            if not filled:
                view.zero_()
        return self.grads.tensor

    def add_reduced(self, shard: torch.Tensor) -> None:
        """Adds the reduced gradients to the sharded parameters', and forgets what was reduced."""
        self.layout.add_reduced(shard, self._filled)
        self.drop_gradients()

    def keep_accumulated(self) -> None:
        """Keeps the gradients taken so far for a later backward."""
        if self.grads.allocated:
            self._accumulated = True
            self.layout.mark_unsynced()

    def forget_zeroed(self) -> None:
        """Forgets accumulated gradients that the user has zeroed since on the sharded parameters."""
        if self._accumulated:
            for index, zeroed in enumerate(self.layout.zeroed()):
                self._filled[index] = self._filled[index] and not zeroed

    def drop_gradients(self) -> None:
        """Forgets all gradients and frees the reduce buffer."""
        self._filled = [False] * len(self.leaves)
        self._accumulated = False
        self.grads.free()

    def drop_partial_gradients(self) -> None:
        """Forgets what a failed backward left; what earlier backwards accumulated stays."""
        for leaf in self.leaves:
            leaf.grad = None
        if not self._accumulated:
            self.drop_gradients()

    def _allocate_gradients(self) -> None:
        if not self.grads.allocated:
            self.grads.allocate()
            for gap in self._grad_padding:
                gap.zero_()


def _accumulate(view: torch.Tensor, grad: torch.Tensor, scale: float, filled: bool) -> None:
    if filled:
        view.add_(grad, alpha=scale)
    elif grad.dtype != view.dtype or scale == 1.0:
        view.copy_(grad)
        if scale != 1.0:
            view.mul_(scale)
    else:
        torch.mul(grad, scale, out=view)  # one pass for copy and division


class ParamHandle:
    """Owns what one unit keeps in memory and communicates.

    Args:
        layouts: One per segment.
        communicator: Of the ranks that hold one copy of the unit between them.
        replicas: Of the ranks that hold the same part of other copies.
    """

    def __init__(self, layouts: Sequence[Layout], communicator: Communicator, replicas: Communicator) -> None:
        self.communicator = communicator
        self.replicas = replicas
        contributors = communicator.size * replicas.size
        self.segments = [Segment(layout, communicator, contributors) for layout in layouts]
        self.state = HandleState.SHARDED
        self._gathering: Pending = Finished()
        self._reduction: _Reduction | None = None
        self._summoned: list[_SummonedSegment] = []
        self._shows_leaves = True
        self.show_sharded()

    @property
    def unsharded_nbytes(self) -> int:
        """Bytes of the unsharded buffers when they are allocated."""
        return sum(segment.full.nbytes for segment in self.segments)

    @property
    def trainable(self) -> bool:
        """Whether any parameter of the unit needs a gradient now."""
        return any(segment.trainable for segment in self.segments)

    def owns_memory_of(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory is part of an unsharded buffer."""
        return any(segment.full.holds(tensor) for segment in self.segments)

    @property
    def shows_shards(self) -> bool:
        """Whether the modules show pieces of the original parameters."""
        shards = any(segment.layout.resident is None for segment in self.segments)
        in_full = self.state in (HandleState.SUMMONED, HandleState.REPLACED)
        return shards and not self._shows_leaves and not in_full

    @property
    def reducing(self) -> bool:
        """Whether a reduction was issued and not finished."""
        return self._reduction is not None

    @property
    def holds_gradients(self) -> bool:
        """Whether gradients were taken that no reduction has consumed."""
        return not self.reducing and any(segment.grads.allocated for segment in self.segments)

    # parameters

    def unshard(self) -> bool:
        """Issues the all-gather; returns False if the unit was unsharded (or being so) already."""
        if self.state is not HandleState.SHARDED:
            return False
        for segment in self.segments:
            segment.full.allocate()
            segment.layout.write_shard(segment.own_data)
        self._gathering = self.communicator.all_gather([segment.full_data for segment in self.segments])
        self.state = HandleState.UNSHARDING
        return True

    def wait(self) -> None:
        """Makes the leaves usable by what the caller does next."""
        if self.state is HandleState.UNSHARDING:
            self._gathering.wait()
            self._gathering = Finished()
            self.state = HandleState.UNSHARDED

    def reshard(self) -> bool:
        """Frees the full parameters; returns False if the unit was sharded already."""
        if self.state not in (HandleState.UNSHARDING, HandleState.UNSHARDED):
            return False
        self.wait()  # a gather in flight still writes
        self.show_sharded()
        for segment in self.segments:
            segment.free()
        self.state = HandleState.SHARDED
        return True

    def show_leaves(self) -> None:
        """Lets the modules compute with the leaves."""
        if not self._shows_leaves:
            self._shows_leaves = True
            for segment in self.segments:
                segment.layout.show(segment.leaves)

    def show_sharded(self) -> None:
        """Lets the modules show the sharded parameters."""
        if self._shows_leaves:
            self._shows_leaves = False
            for segment in self.segments:
                segment.layout.show_sharded()

    def summon(self, copies: bool = False) -> None:
        """Puts the full parameters, in master dtype, into the user's hands.

        They are memory of their own, not the leaves': references that the user keeps stay valid.

        Args:
            copies: Give each parameter its own storage instead of one for the segment.
        """
        self.reshard()
        self._summoned = [
            _SummonedSegment(segment.layout, self.communicator, copies) for segment in self.segments
        ]
        self.state = HandleState.SUMMONED

    def edits(self, prefix: str) -> list[list[torch.Tensor]]:
        """Returns what the modules show of summoned parameters now; `prefix` is for messages.

        Raises:
            ValueError: If a parameter was replaced by one of another shape or dtype.
        """
        return [segment.edits(prefix) for segment in self._summoned]

    def dismiss(self, edits: list[list[torch.Tensor]]) -> None:
        """Takes the full parameters back; `edits` (none: they are dropped) go into the shards."""
        summoned, self._summoned = self._summoned, []
        for segment in self.segments:
            segment.layout.hide_full()
        self.state = HandleState.SHARDED
        for summoned_segment, edited in zip(summoned, edits):
            summoned_segment.write_back(edited)

    def replace(self, params: Sequence[Sequence[nn.Parameter]]) -> None:
        """Lets the modules show other parameters, given by segment, in place of the sharded ones."""
        self.reshard()
        for segment, shown in zip(self.segments, params):
            segment.layout.show_full(shown, copies=True)
        self.state = HandleState.REPLACED

    def end_replacement(self) -> None:
        """Lets the modules show the sharded parameters again."""
        for segment in self.segments:
            segment.layout.hide_full()
        self.state = HandleState.SHARDED

    # gradients

    def follow_requires_grad(self) -> bool:
        """Lets the leaves follow the sharded parameters' `requires_grad`; returns whether any changed."""
        return any([segment.follow_requires_grad() for segment in self.segments])

    def start_reduction(self) -> int:
        """Issues the reduce-scatter of every segment that holds gradients; returns the bytes concerned."""
        # Whether a segment takes part must not depend on which of its leaves this rank used.
        segments = [segment for segment in self.segments if segment.trainable or segment.grads.allocated]
        full = [segment.complete_gradients() for segment in segments]
        shards = [
            self.communicator.empty(segment.layout.shard_numel, segment.layout.dtype) for segment in segments
        ]
        pending = self.communicator.reduce_scatter(shards, full)
        self._reduction = _Reduction(segments, shards, pending, self.replicas)
        return sum(segment.grads.nbytes for segment in segments)

    def finish_reduction(self) -> None:
        """Waits for the reduction, if one was issued, and adds it to the sharded parameters' gradients."""
        if self._reduction is not None:
            reduction, self._reduction = self._reduction, None
            reduction.finish()

    def keep_accumulated(self) -> None:
        """Keeps the gradients taken so far for a later backward (`no_sync`)."""
        for segment in self.segments:
            segment.keep_accumulated()

    def forget_zeroed(self) -> None:
        """Forgets accumulated gradients that the user has zeroed since."""
        for segment in self.segments:
            segment.forget_zeroed()

    def abandon_backward(self) -> None:
        """Drops what a failed backward left: works in flight, gradients on leaves, partial sums."""
        if self._reduction is not None:
            reduction, self._reduction = self._reduction, None
            reduction.abandon()
        for segment in self.segments:
            segment.drop_partial_gradients()


class _Reduction:
    """A reduction in flight: its buffers, what is still to be done, and where the result goes.

    The sum over the replicas follows that within the copy, at once if the latter is finished already.
    """

    def __init__(
        self, segments: list[Segment], shards: list[torch.Tensor], pending: Pending, replicas: Communicator
    ) -> None:
        self._segments, self._shards, self._pending = segments, shards, pending
        self._replicas = replicas
        self._over_replicas = replicas.all_reduce(shards) if isinstance(pending, Finished) else None

    def finish(self) -> None:
        self._pending.wait()
        if self._over_replicas is None:
            self._over_replicas = self._replicas.all_reduce(self._shards)
        self._over_replicas.wait()
        for segment, shard in zip(self._segments, self._shards):
            segment.add_reduced(shard)

    def abandon(self) -> None:
        self._pending.wait()
        for segment in self._segments:
            segment.drop_gradients()


class _SummonedSegment:
    """The full parameters of one segment while the user holds them."""

    def __init__(self, layout: Layout, communicator: Communicator, copies: bool) -> None:
        self._layout = layout
        self._full = communicator.empty(layout.numel, layout.dtype)
        self._own = communicator.own_part(self._full)
        layout.write_shard(self._own)
        communicator.all_gather([self._full]).wait()
        views = layout.views(self._full)
        self._params = [
            nn.Parameter(view.clone() if copies else view, requires_grad=source.requires_grad)
            for view, source in zip(views, layout.sources)
        ]
        layout.show_full(self._params, copies)

    def edits(self, prefix: str) -> list[torch.Tensor]:
        """Returns what the modules show now, or refuses what does not fit."""
        edited = []
        for fqn, param, shown in zip(self._layout.fqns, self._params, self._layout.shown()):
            found = param if shown is None else shown
            if found.shape != param.shape or found.dtype != param.dtype:
                raise ValueError(
                    f"parameter '{prefix}{fqn}' was replaced inside summon_full_params by one of shape "
                    f"{tuple(found.shape)} and dtype {found.dtype}; it must keep {tuple(param.shape)} and "
                    f"{param.dtype}. No edit was written back"
                )
            edited.append(found.detach())
        return edited

    def write_back(self, edited: list[torch.Tensor]) -> None:
        """Takes this rank's part of the edited parameters into the shard."""
        for view, tensor in zip(self._layout.views(self._full), edited):
            if tensor.data_ptr() != view.data_ptr():
                view.copy_(tensor)
        self._layout.read_shard(self._own)
