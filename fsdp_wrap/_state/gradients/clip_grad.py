"""Clipping of gradients by their norm over all ranks, and their norms by name."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, MutableMapping
from functools import reduce
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from fsdp_wrap._by_hand import require_idle
from fsdp_wrap._checks import require_root, scaling_gradients
from fsdp_wrap._core import warn_caller
from fsdp_wrap._params import to_local
from fsdp_wrap._runtime import units_in
from fsdp_wrap._state.full_params import refuse_summoned
from fsdp_wrap._state.gradients.held import HeldGradients, Over, over_of
from fsdp_wrap._state.gradients.norms import (
    accumulation_dtype,
    by_kind,
    check_finite,
    checked_bound,
    checked_norm,
    exact_power_of,
    over_ranks,
    powers_and_presence,
    root,
    scale,
    summand_of,
    total_power,
)

_UNREDUCED = (
    "gradients that no_sync() has left unreduced are not clipped; call clip_grad_norm_() after a backward "
    "outside of no_sync()"
)


_known: MutableMapping[nn.Module, GradientNorms] = WeakKeyDictionary()


def norms_of(model: nn.Module) -> GradientNorms | None:
    """Returns the gradient norms of a model, or None if no module is wrapped or sharded."""
    if model not in _known and units_in(model):
        _known[model] = GradientNorms(model)
    return _known.get(model)


class GradientNorms:
    """The norms of a model's gradients.

    Their holders are looked up again only when modules or parameters have come or gone.

    Args:
        module: The model.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module: Callable[[], Any] = weakref.ref(module)  # which may hold this
        self._known: HeldGradients | None = None

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
        known = self._held_gradients("clip_grad_norm_()")
        require_root(known.units[0], "clip_grad_norm_()")
        if unreduced := known.unreduced:
            warn_caller(_UNREDUCED)
        kinds = {over: by_kind(parts) for over, parts in known.by_ranks().items()}
        total = root(total_power(kinds, p, known.params(), known.device), p).squeeze(0)
        if unreduced:
            kinds = {over: by_kind(parts) for over, parts in known.by_ranks(unreduced).items()}
        grads = [*chain.from_iterable(kinds.values())]
        if error_if_nonfinite:
            check_finite(total, p)
        trained = (param.requires_grad and param.numel() for param in known.params())
        if not (known.distributed or unreduced or grads) and any(trained):
            warn_caller("clip_grad_norm_() found no gradients: the norm is zero")
        with scaling_gradients(known.units):
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
        known = self._held_gradients("grad_norms()")
        named = known.named()
        values = {
            over: powers_and_presence([piece for _, piece in pairs], p, known.device)
            for over, pairs in named.items()
        }
        powers, present = torch.cat([part.view(2, -1) for part in over_ranks(values, p)], dim=1)
        if (exact := exact_power_of(known.params())) is not None:
            summands = [
                summand_of(over, [] if piece is None else [piece])
                for over, pairs in named.items()
                for _, piece in pairs
            ]
            powers = torch.cat([exact([summand], p, known.device) for summand in summands])
        originals = [original for pairs in named.values() for original, _ in pairs]
        rows = [row for row in zip(originals, root(powers, p), present.tolist()) if row[2]]
        rows.sort(key=lambda row: row[0].order)
        return {
            original.fqn: norm.to(accumulation_dtype(original.source.dtype)) for original, norm, _ in rows
        }

    def _held_gradients(self, doing: str) -> HeldGradients:
        known = self._known if self._known is not None and self._known.is_current else None
        units = units_in(self._module()).values() if known is None else known.units
        require_idle(units, doing)
        refuse_summoned(units, doing)
        self._known = HeldGradients(self._module()) if known is None else known
        return self._known


@torch.no_grad()
def clip_parameters(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
) -> torch.Tensor:
    """Scales gradients so that their total norm is at most `max_norm`, whatever meshes they lie on.

    Collective over the ranks of all meshes: one all-reduce of a number for each dimension over which
    parameters are cut.

    Args:
        parameters: Sharded by `fully_shard`, or with gradients that are `DTensor`s or the same on all ranks.
        max_norm: Upper bound of the norm.
        norm_type: The p of the p-norm.
        error_if_nonfinite: Refuse a norm that is not finite; else all gradients are scaled by it.

    Returns:
        The total norm before clipping: 0-d, the same on all ranks, in the widest dtype of the gradients.

    Raises:
        ValueError: If `norm_type` is not positive or `max_norm` negative.
        RuntimeError: If the norm is not finite and that is to be refused.
    """
    p, bound = checked_norm(norm_type), checked_bound(max_norm)
    params = [parameters] if isinstance(parameters, torch.Tensor) else [*parameters]
    grads = [param.grad for param in params if param.grad is not None]
    if not grads:
        return torch.tensor(0.0)
    by_ranks: dict[Over, list[torch.Tensor]] = {}
    for grad in grads:
        held = by_ranks.setdefault(over_of(grad), [])
        held += [to_local(grad)] if to_local(grad).numel() else []
    device = to_local(grads[0]).device
    kinds = {over: by_kind(parts) for over, parts in by_ranks.items()}
    total = root(total_power(kinds, p, params, device), p).squeeze(0)
    if error_if_nonfinite:
        check_finite(total, p)
    scale(chain.from_iterable(kinds.values()), total, bound)
    return total.to(reduce(torch.promote_types, {grad.dtype for grad in grads}).to_real())
