"""The full parameters, and gradients, of one segment while the user holds them.

They are memory of their own, not the leaves': references that the user keeps stay valid.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from fsdp_wrap._comm import Communicator
from fsdp_wrap._core import refuse_in_steps
from fsdp_wrap._params.layout import Layout

_REASON = (
    "was made inside summon_full_params and holds '{}' as shown there, which training does not reach: "
    "make it outside, or wrap with use_orig_params=True"
)


@dataclass(frozen=True)
class Summoning:
    """How full parameters are shown.

    Attributes:
        rank0_only: Show them on the first rank only; the others keep showing the sharded parameters, and
            get the first rank's edits.
        offload_to_cpu: Show them in host memory.
        with_grads: Show the full gradients as well.
    """

    rank0_only: bool = False
    offload_to_cpu: bool = False
    with_grads: bool = False


class SummonedSegment:
    """The full parameters of one segment; making one is collective, and so is writing back.

    Attributes:
        shows_full: Whether this rank shows the full parameters.
    """

    def __init__(
        self, layout: Layout, communicator: Communicator, replicas: Communicator, how: Summoning
    ) -> None:
        self._layout = layout
        self._carrier = _Carrier(layout, communicator, replicas, how)
        self.shows_full = self._carrier.shows
        self._full = self._carrier.collect(layout.write_shard)
        self._grads = _SummonedGrads(layout, self._carrier) if how.with_grads else None
        self._params: list[nn.Parameter] = []
        self._edits: _Moves = []
        if self._full is not None:
            self._params = [
                nn.Parameter(view, requires_grad=source.requires_grad)
                for view, source in zip(layout.views(self._full), layout.sources)
            ]
            layout.show_full(self._params, copies=False)
            if self._grads is not None:
                self._grads.show()

    def leave(self) -> None:
        """Leaves the shown parameters to whoever keeps them; optimizers are told so when they step."""
        refuse_in_steps(
            (param, functools.partial(_REASON.format, fqn))
            for fqn, param in zip(self._layout.fqns, self._params)
        )

    def take_edits(self, prefix: str) -> None:
        """Notes what the modules show now, for `write_back`, or refuses what does not fit.

        Raises:
            ValueError: If a parameter or gradient was replaced by one of another shape or dtype.
        """
        if self._full is None:
            return
        views = self._layout.views(self._full)
        shown = [
            param if found is None else found for param, found in zip(self._params, self._layout.shown())
        ]
        # Not against the parameters: their `.data` may be what was replaced.
        for fqn, view, found in zip(self._layout.fqns, views, shown):
            _check_fits(f"parameter '{prefix}{fqn}'", view, found)
            if self._grads is not None and found.grad is not None:
                _check_fits(f"the gradient of parameter '{prefix}{fqn}'", view, found.grad)
        self._edits = _moves(shown, views)
        if self._grads is not None:
            self._grads.take([found.grad for found in shown])

    def write_back(self) -> None:
        """Takes this rank's part of the noted edits into the shard; the modules show the shards again."""
        _carry_out(self._edits)
        self._layout.read_shard(self._carrier.distribute(self._full))
        if self._grads is not None:
            self._grads.write_back()


def _check_fits(what: str, view: torch.Tensor, found: torch.Tensor) -> None:
    if found.shape != view.shape or found.dtype != view.dtype:
        raise ValueError(
            f"{what} was replaced inside summon_full_params by one of shape {tuple(found.shape)} and dtype "
            f"{found.dtype}; it must keep {tuple(view.shape)} and {view.dtype}. No edit was written back"
        )


_Moves = list[tuple[torch.Tensor, torch.Tensor]]
"""Places in full buffers, and what is to be copied there."""


def _moves(values: Sequence[torch.Tensor | None], views: Sequence[torch.Tensor]) -> _Moves:
    """Returns copies of the values that do not lie in their views, which may be in others; zeros for None."""
    return [
        (view, torch.zeros_like(view) if value is None else value.detach().clone())
        for view, value in zip(views, values)
        if value is None or value.data_ptr() != view.data_ptr() or value.stride() != view.stride()
    ]


def _carry_out(moves: _Moves) -> None:
    for view, value in moves:
        view.copy_(value)


class _Carrier:
    """Brings the shards of one segment together where they are shown, and back.

    Attributes:
        shows: Whether this rank shows full tensors.
    """

    def __init__(
        self, layout: Layout, communicator: Communicator, replicas: Communicator, how: Summoning
    ) -> None:
        self._layout, self._communicator, self._replicas = layout, communicator, replicas
        self._rank0_only, self._offload = how.rank0_only, how.offload_to_cpu
        self._in_first_copy = replicas.rank == 0
        self.shows = not how.rank0_only or (self._in_first_copy and communicator.rank == 0)

    def collect(self, write: Callable[[torch.Tensor], None]) -> torch.Tensor | None:
        """Assembles a full buffer from what `write` puts into each rank's part; None where none is shown."""
        full = self._empty(self._layout.numel) if self.shows else None
        own = self._empty(self._layout.shard_numel) if full is None else self._communicator.own_part(full)
        if full is not None and not self._rank0_only:
            self._communicator.all_gather([full], lambda: write(own)).wait()
        elif self._in_first_copy:
            write(own)
            self._communicator.gather(own, full)
        if full is None:
            return None
        with torch.inference_mode(False):
            full = self._layout.unpack(full)
            return full.cpu() if self._offload else full

    def distribute(self, full: torch.Tensor | None) -> torch.Tensor:
        """Returns this rank's part of a full buffer that it shows, or else of the first rank's."""
        packed = None if full is None else self._layout.pack(full)
        if packed is not None and not self._rank0_only:
            return self._communicator.own_part(packed)
        own = self._empty(self._layout.shard_numel)
        if self._in_first_copy:
            self._communicator.scatter(own, packed if packed is None else packed.to(own.device))
        self._replicas.broadcast(own)
        return own

    def any_rank(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, whether it is set on any rank that holds a part of this copy."""
        tensor = torch.tensor(flags, dtype=torch.int32, device=self._communicator.device)
        self._communicator.all_reduce([tensor], op=dist.ReduceOp.MAX).wait()
        return [bool(flag) for flag in tensor.tolist()]

    def of_first_rank(self, flags: list[bool]) -> list[bool]:
        """Returns the flags of the rank whose edits count."""
        for communicator in (self._communicator, self._replicas) if self._rank0_only else ():
            flags = communicator.broadcast_object(flags)
        return flags

    def _empty(self, numel: int) -> torch.Tensor:
        return self._communicator.empty(numel, self._layout.dtype)


class _SummonedGrads:
    """The full gradients that stand beside summoned parameters; None for a parameter that no rank used."""

    def __init__(self, layout: Layout, carrier: _Carrier) -> None:
        self._layout, self._carrier = layout, carrier
        self._present = carrier.any_rank([source.grad is not None for source in layout.sources])
        self._full = carrier.collect(layout.write_gradient) if any(self._present) else None
        self._edits: _Moves = []

    def show(self) -> None:
        """Gives the parameters that are shown their gradients."""
        if self._full is None:
            return
        for param, view, present in zip(self._layout.shown(), self._layout.views(self._full), self._present):
            if param is not None and present:
                param.grad = view

    def take(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Notes the gradients that the parameters have now."""
        self._present = [grad is not None for grad in grads]
        if self._full is None and any(self._present):
            with torch.inference_mode(False):
                self._full = torch.zeros(self._layout.full_numel, dtype=self._layout.dtype)
        if self._full is not None:
            self._edits = _moves(grads, self._layout.views(self._full))

    def write_back(self) -> None:
        """Takes this rank's part of the noted gradients."""
        _carry_out(self._edits)
        present = self._carrier.of_first_rank(self._present)
        own = self._carrier.distribute(self._full) if any(present) else None
        self._layout.read_gradient(own, present)
