"""`NormInParts`: the norm of all gradients, added unit by unit."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from fsdp_wrap._params import Buffers
from fsdp_wrap._state.gradients.held import Over, gradients_by_ranks, overs_of
from fsdp_wrap._state.gradients.norms import by_kind, merged, over_ranks, power, root, scale

_P = 2.0


class NormInParts:
    """The 2-norm of gradients that ranks add unit by unit, for the buffers of all units on all ranks."""

    def __init__(self, all_buffers: Iterable[Buffers]) -> None:
        self._overs: dict[Over, None] = {}
        for buffers in all_buffers:
            for sharded in buffers.params:
                self._overs |= dict.fromkeys(overs_of(buffers, sharded))
            self._device = buffers.communicator.device
        self._powers: dict[Over, torch.Tensor] = {}

    @torch.no_grad()
    def add(self, buffers: Buffers) -> None:
        """Adds this rank's part of a unit's gradients."""
        for over, grads in gradients_by_ranks(buffers, buffers.params).items():
            if grads:
                of_unit = power(by_kind(grads), _P, grads[0].device)
                self._powers[over] = self._powers[over] + of_unit if over in self._powers else of_unit

    def forget(self) -> None:
        """Begins anew."""
        self._powers = {}

    @torch.no_grad()
    def total(self) -> torch.Tensor:
        """Returns the norm of all added gradients (0-d, float64), and starts over; collective."""
        added, self._powers = self._powers, {}
        nothing = torch.zeros(1, dtype=torch.float64, device=self._device)
        powers = {over: added.get(over, nothing).to(self._device) for over in self._overs}
        return root(merged(over_ranks(powers, _P), _P), _P).squeeze(0)


@torch.no_grad()
def scale_to(grads: Iterable[torch.Tensor], total: torch.Tensor, bound: float) -> None:
    """Scales gradients in place by the factor that brings a total norm to at most `bound`.

    Args:
        grads: This rank's parts of them.
        total: The norm, 0-d.
        bound: The most that it may be.
    """
    for kind in by_kind(grad for grad in grads if grad.numel()):
        scale([kind], total.to(kind[0].device), bound)
