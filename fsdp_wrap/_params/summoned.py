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

__all__ = ["SummonedSegment", "Summoning"]

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
    """The full parameters of one segment; making one is collective, and so is writing back."""

    def __init__(
        self, layout: Layout, communicator: Communicator, replicas: Communicator, how: Summoning
    ) -> None:
        self._layout = layout
        self._carrier = _Carrier(layout, communicator, replicas, how)
        self._full = self._carrier.collect(layout.write_shard)
        self._grads = _SummonedGrads(layout, self._carrier) if how.with_grads else None
        self._params: list[nn.Parameter] = []
        self._edited: list[torch.Tensor | None] = []
        if self._full is not None:
            self._params = [
                nn.Parameter(view, requires_grad=source.requires_grad)
                for view, source in zip(layout.views(self._full), layout.sources)
            ]
            layout.show_full(self._params, copies=False)
            if self._grads is not None:
                self._grads.show()

    @property
    def shows_full(self) -> bool:
        """Whether this rank shows the full parameters."""
        return self._full is not None

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
        shown = [
            param if found is None else found for param, found in zip(self._params, self._layout.shown())
        ]
        # Not against the parameters: their `.data` may be what was replaced.
        for fqn, view, found in zip(self._layout.fqns, self._layout.views(self._full), shown):
            _check_fits(f"parameter '{prefix}{fqn}'", view, found)
            if self._grads is not None and found.grad is not None:
                _check_fits(f"the gradient of parameter '{prefix}{fqn}'", view, found.grad)
        self._edited = _noted(self._layout.views(self._full), [found.detach() for found in shown])
        if self._grads is not None:
            self._grads.take([found.grad for found in shown])

    def write_back(self) -> None:
        """Takes this rank's part of the noted edits into the shard; the modules show the shards again."""
        if self._full is not None:
            _fill(self._layout.views(self._full), self._edited)
        self._layout.read_shard(self._carrier.distribute(self._full))
        if self._grads is not None:
            self._grads.write_back()


def _check_fits(what: str, view: torch.Tensor, found: torch.Tensor) -> None:
    if found.shape != view.shape or found.dtype != view.dtype:
        raise ValueError(
            f"{what} was replaced inside summon_full_params by one of shape {tuple(found.shape)} and dtype "
            f"{found.dtype}; it must keep {tuple(view.shape)} and {view.dtype}. No edit was written back"
        )


def _noted(views: Sequence[torch.Tensor], values: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Returns copies of the values that do not lie in their views as they should, which may be in others."""
    return [
        value.detach().clone() if value is not None and not _is(view, value) else value
        for view, value in zip(views, values)
    ]


def _fill(views: Sequence[torch.Tensor], noted: Sequence[torch.Tensor | None]) -> None:
    for view, value in zip(views, noted):
        if value is None:
            view.zero_()
        elif not _is(view, value):
            view.copy_(value)


def _is(view: torch.Tensor, value: torch.Tensor) -> bool:
    return value.data_ptr() == view.data_ptr() and value.stride() == view.stride()


class _Carrier:
    """Brings the shards of one segment together where they are shown, and back."""

    def __init__(
        self, layout: Layout, communicator: Communicator, replicas: Communicator, how: Summoning
    ) -> None:
        self._layout, self._communicator, self._replicas = layout, communicator, replicas
        self._rank0_only = how.rank0_only
        self._offload = how.offload_to_cpu
        self._in_first_copy = replicas.rank == 0

    @property
    def shows(self) -> bool:
        """Whether this rank shows full tensors."""
        return not self._rank0_only or (self._in_first_copy and self._communicator.rank == 0)

    def collect(self, write: Callable[[torch.Tensor], None]) -> torch.Tensor | None:
        """Assembles a full buffer from what `write` puts into each rank's part; None where none is shown."""
        full = self._empty(self._layout.numel) if self.shows else None
        own = self._own_part(full)
        if not self._rank0_only:
            assert full is not None
            self._communicator.all_gather([full], lambda: write(own)).wait()
        elif self._in_first_copy:
            write(own)
            self._communicator.gather(own, full)
        with torch.inference_mode(False):
            if full is not None:
                full = self._layout.unpack(full)
            return full.cpu() if full is not None and self._offload else full

    def distribute(self, full: torch.Tensor | None) -> torch.Tensor:
        """Returns this rank's part of a full buffer that it shows, or else of the first rank's."""
        if not self._rank0_only:
            assert full is not None
            return self._communicator.own_part(self._layout.pack(full))
        own = self._empty(self._layout.shard_numel)
        if self._in_first_copy:
            packed = None if full is None else self._layout.pack(full).to(self._communicator.device)
            self._communicator.scatter(own, packed)
        self._replicas.broadcast(own)
        return own

    def any_rank(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, whether it is set on any rank that holds a part of this copy."""
        tensor = torch.tensor(flags, dtype=torch.int32, device=self._communicator.device)
        self._communicator.all_reduce([tensor], op=dist.ReduceOp.MAX).wait()
        return [bool(flag) for flag in tensor.tolist()]

    def of_first_rank(self, flags: Sequence[bool]) -> list[bool]:
        """Returns the flags of the rank whose edits count."""
        if not self._rank0_only:
            return list(flags)
        tensor = torch.tensor(flags, dtype=torch.int32, device=self._communicator.device)
        for communicator in (self._communicator, self._replicas):
            communicator.broadcast(tensor)
        return [bool(flag) for flag in tensor.tolist()]

    def _own_part(self, full: torch.Tensor | None) -> torch.Tensor:
        if full is None:
            return self._empty(self._layout.shard_numel)
        return self._communicator.own_part(full)

    def _empty(self, numel: int) -> torch.Tensor:
        return self._communicator.empty(numel, self._layout.dtype)


class _SummonedGrads:
    """The full gradients that stand beside summoned parameters; None for a parameter that no rank used."""

    def __init__(self, layout: Layout, carrier: _Carrier) -> None:
        self._layout, self._carrier = layout, carrier
        self._present = carrier.any_rank([source.grad is not None for source in layout.sources])
        self._full = carrier.collect(layout.write_gradient) if any(self._present) else None
        self._edited: list[torch.Tensor | None] = []

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
            self._edited = _noted(self._layout.views(self._full), grads)

    def write_back(self) -> None:
        """Takes this rank's part of the noted gradients."""
        if self._full is not None:
            _fill(self._layout.views(self._full), self._edited)
        present = self._carrier.of_first_rank(self._present)
        own = self._carrier.distribute(self._full) if any(present) else None
        self._layout.read_gradient(own, present)
