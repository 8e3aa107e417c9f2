"""Clipping of gradients by their norm over all ranks, and their norms by name."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import nn

from fsdp_wrap._core import warn_caller
from fsdp_wrap._runtime import require_idle, require_root, units_in
from fsdp_wrap._state.full_params import refuse_summoned
from fsdp_wrap._state.gradients.held import HeldGradients, Named, Share
from fsdp_wrap._state.gradients.norms import (
    Summand,
    accumulation_dtype,
    by_kind,
    check_finite,
    checked_bound,
    checked_norm,
    exact_power_of,
    merged,
    over_ranks,
    power,
    powers_and_presence,
    root,
    scale,
    sums_over,
)
from fsdp_wrap._state.gradients.over_meshes import power_over, summed_over

_UNREDUCED = (
    "gradients that no_sync() has left unreduced are not clipped; call clip_grad_norm_() after a backward "
    "outside of no_sync()"
)


class GradientNorms:
    """The norms of a model's gradients.

    Their holders are looked up again only when modules or parameters have come or gone.

    Args:
        module: The model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module: Callable[[], Any] = weakref.ref(module)  # which may hold this
        self._known: HeldGradients | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> GradientNorms:
        return GradientNorms(copy.deepcopy(self._module(), memo))

    @torch.no_grad()
    def clip(self, max_norm: float, norm_type: float, error_if_nonfinite: bool = False) -> torch.Tensor:
        """Scales all gradients so that their total norm is at most `max_norm`.

        One all-reduce; none where no unit is sharded; more only where units are sharded over groups of which
        none holds the others. Gradients of parameters that no unit owns must be the same on all ranks. A
        gradient that `no_sync` has left unreduced is passed over, with a warning.

        Args:
            max_norm: Upper bound of the norm.
            norm_type: The p of the p-norm.
            error_if_nonfinite: Refuse a norm that is not finite.

        Returns:
            The total norm before clipping, a 0-d tensor on the device of the sharded parameters, the same on
            all ranks. It is computed in float32 at least, and returned in the widest dtype of the gradients,
            also of those that are not there. One that is not finite scales the gradients of all ranks alike.

        Raises:
            RuntimeError: Inside a forward, a backward or `summon_full_params`, or below the root; if the norm
                is not finite and that is to be refused.
            ValueError: If `norm_type` is not positive or `max_norm` negative.
        """
        p, bound = checked_norm(norm_type), checked_bound(max_norm)
        known = self._found("clip_grad_norm_()")
        require_root(known.units[0], "clip_grad_norm_()")
        if unreduced := known.unreduced:
            warn_caller(_UNREDUCED)
        if known.distributed:  # one all-reduce for each mesh, or dimension of one, over which it is cut
            of_ranks = known.by_ranks()
            powers = [power_over(over, parts, p, known.device) for over, parts in of_ranks.items()]
            kept = known.by_ranks(unreduced) if unreduced else of_ranks
            grads = by_kind(chain.from_iterable(kept.values()))
        else:
            held = {share: by_kind(known.held(share)) for share in known.shares}
            exact = exact_power_of(known.params())
            if exact is None:
                powers = over_ranks({share: power(each, p, known.device) for share, each in held.items()}, p)
            else:
                summands = [_summand(share, chain.from_iterable(kinds)) for share, kinds in held.items()]
                powers = [exact(summands, p, known.device)]
            if unreduced:
                held = {share: by_kind(known.held(share, without=unreduced)) for share in known.shares}
            grads = [*chain.from_iterable(held.values())]
        total = root(merged(powers, p), p).squeeze(0)
        if error_if_nonfinite:
            check_finite(total, p)
        trained = (each.requires_grad and each.numel() for each in known.params())
        if not (known.distributed or unreduced or grads) and any(trained):
            warn_caller("clip_grad_norm_() found no gradients: the norm is zero")
        scale(grads, total, bound)
        return total.to(next(known.params(), total).device, known.widest_dtype())

    @torch.no_grad()
    def by_name(self, norm_type: float) -> dict[str, torch.Tensor]:
        """Returns the norm of each parameter's gradient, over all ranks and without unsharding.

        Collective, with the all-reduces of `clip`; of a reproducible model with two for each parameter.

        Args:
            norm_type: The p of the p-norm.

        Returns:
            0-d tensors by the names, and in the order, of the unwrapped module's `named_parameters()`, the
            same on all ranks: float64 for float64 parameters, else float32. A parameter without a gradient is
            left out; with `use_orig_params=False` it has a zero gradient, and so a norm of zero, where
            another parameter beside it has one.

        Raises:
            RuntimeError: Inside a forward, a backward or `summon_full_params`.
            ValueError: If `norm_type` is not positive.
        """
        p = checked_norm(norm_type)
        known = self._found("grad_norms()")
        named, values = _powers_by_mesh(known, p) if known.distributed else _powers_by_share(known, p)
        powers, present = torch.cat([part.view(2, -1) for part in values], dim=1)
        originals = [original for each in named for original, _ in each]
        found = [each for each in zip(originals, root(powers, p), present.tolist()) if each[2]]
        found.sort(key=lambda each: each[0].order)
        return {each.fqn: norm.to(accumulation_dtype(each.source.dtype)) for each, norm, _ in found}

    def _found(self, doing: str) -> HeldGradients:
        known = self._known if self._known is not None and self._known.is_current else None
        units = units_in(self._module()).values() if known is None else known.units
        require_idle(units, doing)
        refuse_summoned(units, doing)
        self._known = HeldGradients(self._module()) if known is None else known
        return self._known


def _powers_by_share(known: HeldGradients, p: float) -> tuple[list[Named], list[torch.Tensor]]:
    """Returns parameters, and for each list the powers of their norms and which there are, over all ranks."""
    named = known.named()
    values = {
        share: powers_and_presence([piece for _, piece in each], p, known.device)
        for share, each in named.items()
    }
    found, exact = over_ranks(values, p), exact_power_of(known.params())
    if exact is None:
        return [*named.values()], found
    for number, (share, each) in enumerate(named.items()):
        summands = [_summand(share, [] if piece is None else [piece]) for _, piece in each]
        powers = [exact([summand], p, known.device) for summand in summands]
        found[number] = torch.cat([*powers, found[number][len(each) :]])
    return [*named.values()], found


def _summand(share: Share, tensors: Iterable[torch.Tensor]) -> Summand:
    """Returns this rank's parts of tensors as a summand of their norm over all ranks."""
    all_reduces = [] if share.group is None else [sums_over(share.group)]
    return Summand([each for each in tensors if each.numel()], all_reduces, share.copies)


def _powers_by_mesh(known: HeldGradients, p: float) -> tuple[list[Named], list[torch.Tensor]]:
    """The same, where tensor parallelism has distributed parameters: ranks of two meshes hold them."""
    named = known.named_by_ranks()
    values = [
        summed_over(over, powers_and_presence([piece for _, piece in each], p, known.device), p)
        for over, each in named.items()
    ]
    return [*named.values()], values
