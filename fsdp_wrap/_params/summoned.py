"""Full parameters and gradients in the user's hands.

Their memory is not the leaves': references that the user keeps stay valid.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Placement

from fsdp_wrap._comm import Communicator
from fsdp_wrap._core import refuse_in_steps
from fsdp_wrap._params.parallel import placed, to_local
from fsdp_wrap._params.sharded_params import ShardedParams

_REASON = (
    "was made inside summon_full_params and holds '{}' as shown there, which training does not reach: "
    "make it outside, or wrap with use_orig_params=True"
)

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
"""The dtype in which to sum the bits of an element, by its size."""


@dataclass(frozen=True)
class Summoning:
    """Options of `summon_full_params`."""

    rank0_only: bool = False  # the other ranks show the sharded parameters, and get the first one's edits
    offload_to_cpu: bool = False
    with_grads: bool = False
    tells_edits: bool = False  # whether `SummonedSegment.edited` will be asked


class SummonedSegment:
    """The full parameters of one segment; making one is collective, and so is writing back."""

    def __init__(
        self, sharded: ShardedParams, communicator: Communicator, replicas: Communicator, how: Summoning
    ) -> None:
        self._sharded, self._communicator, self._replicas, self._how = sharded, communicator, replicas, how
        self._values = _FullBuffer(sharded, communicator, replicas, how)
        self._grads = _FullBuffer(sharded, communicator, replicas, how)
        self.shows_full = self._values.shows
        self._values.collect(sharded.write_shard)
        self._before = self._values.state() if how.tells_edits else None
        self._have_grads = self._where_grads() if how.with_grads else []
        if any(self._have_grads):
            self._grads.collect(sharded.gradients.write_to)
        self._params = [
            sharded.parameter(index, shown, source.requires_grad)
            for index, (shown, source) in enumerate(zip(self._values.shown, sharded.sources))
        ]
        if self.shows_full:
            sharded.show_full(self._params, copies=False)
        for param, grad, has_grad in zip(sharded.display.shown(), self._grads.shown, self._have_grads):
            if param is not None and has_grad:
                param.grad = grad

    def _where_grads(self) -> list[bool]:
        """Returns for each parameter whether any rank of this copy has a gradient."""
        flags = [source.grad is not None for source in self._sharded.sources]
        tensor = torch.tensor(flags, dtype=torch.int32, device=self._communicator.device)
        self._communicator.all_reduce([tensor], op=dist.ReduceOp.MAX).wait()
        return [bool(flag) for flag in tensor.tolist()]

    def leave(self) -> None:
        """Makes optimizers refuse the shown parameters, if users have kept them there."""
        for fqn, param in zip(self._sharded.layout.fqns, self._params):
            refuse_in_steps(param, functools.partial(_REASON.format, fqn))

    @property
    def edited(self) -> bool:
        """Whether the noted parameters are others than at first, or have other values; alike on all ranks."""
        return self._before is not None and self._values.state() != self._before

    def take_edits(self, prefix: str) -> None:
        """Notes the parameters that modules hold now, for `write_back`; refuses new shapes and dtypes."""
        if not self.shows_full:
            return
        shown = [
            param if current is None else current
            for param, current in zip(self._params, self._sharded.display.shown())
        ]
        grads = [param.grad if self._how.with_grads else None for param in shown]
        # Not against the parameters: their `.data` may have been replaced.
        for fqn, given, param, grad in zip(self._sharded.layout.fqns, self._values.shown, shown, grads):
            _check_fits(f"parameter '{prefix}{fqn}'", given, param)
            if grad is not None:
                _check_fits(f"the gradient of parameter '{prefix}{fqn}'", given, grad)
        self._values.note(shown)
        self._have_grads = [grad is not None for grad in grads]
        if any(self._have_grads):
            self._grads.note(grads)

    def write_back(self) -> None:
        """Copies this rank's part of the noted edits into the shard, which modules show again."""
        self._sharded.read_shard(self._values.own_part())
        if self._how.with_grads:
            have_grads = self._have_grads
            for communicator in (self._communicator, self._replicas) if self._how.rank0_only else ():
                have_grads = communicator.broadcast_object(have_grads)
            self._sharded.gradients.replace(self._grads.own_part() if any(have_grads) else None, have_grads)


class LentParams:
    """What the modules of a sharded unit show to the user: its full parameters, or others of a state dict.

    Args:
        segments: The full parameters; none where others are shown.

    Attributes:
        summoned: Whether full parameters are in the user's hands, on this rank or on others.
        shows_full: Whether the modules show them on this rank.
    """

    def __init__(self, segments: Sequence[SummonedSegment] = ()) -> None:
        self._segments, self.summoned = segments, bool(segments)
        self.shows_full = self.summoned and all(segment.shows_full for segment in segments)

    @classmethod
    def full(
        cls,
        params: Sequence[ShardedParams],
        communicator: Communicator,
        replicas: Communicator,
        how: Summoning,
    ) -> LentParams:
        """Shows the full parameters, in master dtype; collective."""
        return cls([SummonedSegment(sharded, communicator, replicas, how) for sharded in params])

    @classmethod
    def others(cls, params: Sequence[ShardedParams], shown: Sequence[Sequence[nn.Parameter]]) -> LentParams:
        """Shows other parameters, given by segment."""
        for sharded, others in zip(params, shown):
            sharded.show_full(others, copies=True)
        return cls()

    def take_edits(self, prefix: str) -> None:
        """Notes the parameters that the modules show now; `prefix` is for messages."""
        for segment in self._segments:
            segment.take_edits(prefix)

    @property
    def edited(self) -> bool:
        """Whether the noted edits change any parameter, where `Summoning.tells_edits` was set."""
        return any(segment.edited for segment in self._segments)

    def end(self, writeback: bool) -> None:
        """Ends the showing; `writeback` writes noted edits to the shards, and is collective."""
        for segment in self._segments:
            if writeback:
                segment.write_back()
            segment.leave()


NOTHING_LENT = LentParams()


def _check_fits(what: str, given: torch.Tensor, edited: torch.Tensor) -> None:
    if edited.shape != given.shape or edited.dtype != given.dtype:
        raise ValueError(
            f"{what} was replaced inside summon_full_params by one of shape {tuple(edited.shape)} and dtype "
            f"{edited.dtype}; it must keep {tuple(given.shape)} and {given.dtype}. No edit was written back"
        )
    here, there = placed(given), placed(edited)
    if here != there:
        raise ValueError(
            f"{what} was replaced inside summon_full_params by {_format_placed(there)}; it must stay "
            f"{_format_placed(here)}: distribute what is put there likewise "
            "(torch.distributed.tensor.distribute_tensor). No edit was written back"
        )


def _format_placed(place: tuple[DeviceMesh, tuple[Placement, ...]] | None) -> str:
    return "a plain tensor" if place is None else f"a DTensor with placements {place[1]} on {place[0]}"


class _FullBuffer:
    """A full buffer of one segment, gathered where it is shown, and scattered again.

    Attributes:
        shows: Whether this rank shows it.
        views: A view for each original parameter; none where the buffer is not.
        shown: The views as modules have them: `DTensor`s where tensor parallelism has made them.
    """

    def __init__(
        self, sharded: ShardedParams, communicator: Communicator, replicas: Communicator, how: Summoning
    ) -> None:
        self._sharded, self._communicator, self._replicas, self._how = sharded, communicator, replicas, how
        self._in_first_copy = replicas.rank == 0
        self.shows = not how.rank0_only or (self._in_first_copy and communicator.rank == 0)
        self.views, self.shown = list[torch.Tensor](), list[torch.Tensor]()
        self._full: torch.Tensor | None = None
        self._edits: list[tuple[torch.Tensor, torch.Tensor]] = []

    def collect(self, write: Callable[[torch.Tensor], None]) -> None:
        """Gathers the parts, which `write` fills on each rank, to where they are shown."""
        full = self._empty(self._sharded.layout.numel) if self.shows else None
        own = (
            self._empty(self._sharded.layout.shard_numel)
            if full is None
            else self._communicator.own_part(full)
        )
        if full is not None and not self._how.rank0_only:
            self._communicator.all_gather([full], lambda: write(own)).wait()
        elif self._in_first_copy:
            write(own)
            self._communicator.gather(own, full)
        if full is not None:
            with torch.inference_mode(False):
                full = self._sharded.layout.unpack(full)
                self._lie_in(full.cpu() if self._how.offload_to_cpu else full)

    def state(self) -> object:
        """Returns what edits change: a write in place a counter, one through `.data` the sum of all bits."""
        if self._full is None:
            return None
        bits = self._full.detach().view(_BITS[self._full.element_size()])
        return len(self._edits), self._full._version, int(bits.sum(dtype=torch.int64))

    def note(self, values: Sequence[torch.Tensor | None]) -> None:
        """Notes new values, with None for zeros; copies those that lie elsewhere than their view."""
        if self._full is None:
            with torch.inference_mode(False):
                self._lie_in(
                    torch.zeros(self._sharded.layout.full_numel, dtype=self._sharded.dtype, device="cpu")
                )
        self._edits = [
            (view, torch.zeros_like(view) if held is None else held.detach().clone())
            for view, value in zip(self.views, values)
            for held in [None if value is None else to_local(value)]
            if held is None or held.data_ptr() != view.data_ptr() or held.stride() != view.stride()
        ]

    def own_part(self) -> torch.Tensor:
        """Returns this rank's part after the noted edits, of the first rank where only that shows it."""
        for view, value in self._edits:
            view.copy_(value)
        packed = None if self._full is None else self._sharded.layout.pack(self._full)
        if packed is not None and not self._how.rank0_only:
            return self._communicator.own_part(packed)
        own = self._empty(self._sharded.layout.shard_numel)
        if self._in_first_copy:
            self._communicator.scatter(own, packed if packed is None else packed.to(own.device))
        self._replicas.broadcast(own)
        return own

    def _lie_in(self, full: torch.Tensor) -> None:
        self._full, self.views = full, self._sharded.layout.views(full)
        self.shown = self._sharded.as_originals(self.views)

    def _empty(self, numel: int) -> torch.Tensor:
        return self._communicator.empty(numel, self._sharded.dtype)
