"""Norms of gradients over all ranks, and clipping by them.

Each rank takes its own pieces to the power of p; the sums travel. Where a group holds several copies of a
gradient, each rank's share is divided by their number, so that one all-reduce over the widest group counts
every element once. An infinite p needs maxima in place of sums, and no division.
"""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn

from fsdp_wrap._collectives import Communicator
from fsdp_wrap._gradient_mark import held_by_this_rank
from fsdp_wrap._handle import ParamHandle
from fsdp_wrap._modules import Place, clean_fqn, is_owned
from fsdp_wrap._schedule import schedule_of
from fsdp_wrap._unit import Unit, units_in
from fsdp_wrap.full_params import is_summoned

__all__ = ["clip_grad_norm", "grad_norms"]

_Owner = ParamHandle | None
"""Who reduces a gradient; None where no unit does."""


@torch.no_grad()
def clip_grad_norm(module: nn.Module, max_norm: float, norm_type: float) -> torch.Tensor:
    """Scales all gradients of a wrapped module so that their total norm is at most `max_norm`.

    One all-reduce; none where no unit is sharded; more only where units are sharded over groups of which none
    holds the others. Gradients of parameters that no unit owns must be the same on all ranks. A gradient that
    `no_sync` has left unreduced is passed over, with a warning.

    Args:
        module: The root wrapper.
        max_norm: Upper bound of the norm.
        norm_type: The p of the p-norm.

    Returns:
        The total norm before clipping, a 0-d tensor on the device of the sharded parameters, the same on all
        ranks. It is computed in float32 at least, and returned in the widest dtype of the parameters that
        need gradients. One that is not finite scales the gradients of all ranks alike.

    Raises:
        RuntimeError: Inside a forward, a backward or `summon_full_params`, or below the root.
        ValueError: If `norm_type` is not positive or `max_norm` negative.
    """
    p, bound = _norm_type(norm_type), float(max_norm)
    if not bound >= 0:
        raise ValueError(f"max_norm must not be negative, but is {max_norm}")
    units = _idle_units(module, "clip_grad_norm_()")
    _require_root(units)
    params = _params_by_owner(module, units.values())
    device = _computing_device(params)
    grads = {owner: _gradients(owned) for owner, owned in params.items()}
    values = {owner: _merged(_powers(owned, p, device), p) for owner, owned in grads.items()}
    _reduce(values, p)
    total = _root(_merged(torch.cat(list(values.values())), p), p).squeeze(0)
    _scale(_reduced(grads), torch.clamp(bound / (total + 1e-6), max=1.0))
    every = [param for owned in params.values() for param in owned]
    _warn_without_gradients(every)
    return total.to(every[0].device if every else device, _widest_dtype(every))


@torch.no_grad()
def grad_norms(module: nn.Module, norm_type: float) -> dict[str, torch.Tensor]:
    """Returns the norm of each parameter's gradient, over all ranks and without unsharding.

    Collective, with the all-reduces of `clip_grad_norm`.

    Args:
        module: Any wrapper; parameters of all units at and below it are told.
        norm_type: The p of the p-norm.

    Returns:
        0-d tensors by the names, and in the order, of the unwrapped module's `named_parameters()`, the same
        on all ranks: float64 for float64 parameters, else float32. A parameter without a gradient is left
        out; with `use_orig_params=False` it has a zero gradient, and so a norm of zero, where another
        parameter beside it has one.

    Raises:
        RuntimeError: Inside a forward, a backward or `summon_full_params`.
        ValueError: If `norm_type` is not positive.
    """
    p = _norm_type(norm_type)
    gradients = _named_gradients(module, _idle_units(module, "grad_norms()").values())
    device = _computing_device(gradients)
    values = {owner: _powers_and_presence(owned, p, device) for owner, owned in gradients.items()}
    _reduce(values, p)
    powers, present = torch.cat([part.view(2, -1) for part in values.values()], dim=1)
    every = [gradient for owned in gradients.values() for gradient in owned]
    found = zip(every, _root(powers, p), present.tolist())
    norms = {gradient: norm.to(_accumulation_dtype(gradient.dtype)) for gradient, norm, any_ in found if any_}
    return {gradient.name: norms[gradient] for gradient in sorted(norms, key=lambda each: each.number)}


def _norm_type(norm_type: float) -> float:
    p = float(norm_type)
    if not p > 0:
        raise ValueError(f"norm_type must be positive, but is {norm_type}: it is the p of the p-norm")
    return p


def _idle_units(module: nn.Module, doing: str) -> dict[str, Unit]:
    units = units_in(module)
    for unit in units.values():
        schedule_of(unit).require_idle(doing)
        if is_summoned(unit):
            raise RuntimeError(f"{doing} must not run inside summon_full_params, which hides gradients")
    return units


def _require_root(units: Mapping[str, Unit]) -> None:
    root = next(iter(units.values()))
    if root.nested:
        raise RuntimeError(
            f"clip_grad_norm_() must be called on the root, and this is {root.name}: gradients are clipped "
            "by the norm of all of them"
        )


# which gradients there are


def _sharded_params(handle: ParamHandle) -> list[nn.Parameter]:
    sources = (param for segment in handle.segments for param in segment.layout.sources)
    return list({id(param): param for param in sources}.values())


def _params_by_owner(module: nn.Module, units: Iterable[Unit]) -> dict[_Owner, list[nn.Parameter]]:
    handles = [unit.handle for unit in units if unit.handle is not None]
    replicated = list(_replicated_params(module, handles).values())
    return {**{handle: _sharded_params(handle) for handle in handles}, None: replicated}


def _replicated_params(module: nn.Module, handles: Iterable[ParamHandle]) -> dict[str, nn.Parameter]:
    """Returns the parameters that no unit owns; tied ones of a unit elsewhere count there."""
    sharded = {id(param) for handle in handles for param in _sharded_params(handle)}
    named = module.named_parameters()
    return {
        clean_fqn(name): param for name, param in named if id(param) not in sharded and not is_owned(param)
    }


def _gradients(params: Iterable[nn.Parameter]) -> list[torch.Tensor]:
    held = (_strided(param) for param in params if param.grad is not None)
    return [grad for grad in held if grad.numel() > 0]


def _strided(param: nn.Parameter) -> torch.Tensor:
    """Returns the gradient's memory on this rank: of a sparse one the values, each element's once."""
    assert param.grad is not None
    if not param.grad.is_sparse:
        return held_by_this_rank(param.grad)
    param.grad = param.grad.coalesce()
    return param.grad.values()


@dataclass(frozen=True, eq=False)
class _NamedGradient:
    """This rank's piece of one original parameter's gradient, if there is any.

    Attributes:
        number: Where the parameter stands among those of the module.
        name: Its original name, the first if it is tied.
        dtype: That of the parameter.
        piece: The gradient's piece.
    """

    number: int
    name: str
    dtype: torch.dtype
    piece: torch.Tensor | None


def _named_gradients(module: nn.Module, units: Iterable[Unit]) -> dict[_Owner, list[_NamedGradient]]:
    names = _names(module)
    handles = [unit.handle for unit in units if unit.handle is not None]
    result: dict[_Owner, list[_NamedGradient]] = {
        handle: [
            _NamedGradient(*_first(places, names), segment.layout.dtype, piece)
            for segment in handle.segments
            for places, piece in zip(segment.layout.places, segment.layout.gradients())
        ]
        for handle in handles
    }
    numbers = {name: number for number, name in names.values()}
    result[None] = [
        _NamedGradient(numbers[name], name, param.dtype, None if param.grad is None else _strided(param))
        for name, param in _replicated_params(module, handles).items()
    ]
    return result


def _names(module: nn.Module) -> dict[Place, tuple[int, str]]:
    """Numbers and names every place that shows a parameter, or would if it were not sharded."""
    places = (
        (place, clean_fqn(f"{prefix}.{place[1]}" if prefix else place[1]))
        for prefix, owner in module.named_modules()
        for place in ((owner, key) for key in owner._parameters)
    )
    return {place: (number, name) for number, (place, name) in enumerate(places)}


def _first(places: Iterable[Place], names: Mapping[Place, tuple[int, str]]) -> tuple[int, str]:
    return min(names[place] for place in places if place in names)


def _computing_device(owners: Iterable[_Owner]) -> torch.device:
    return next((handle.communicator.device for handle in owners if handle is not None), torch.device("cpu"))


def _widest_dtype(params: Iterable[nn.Parameter]) -> torch.dtype:
    # Of the parameters, not of the gradients, of which this rank may have none.
    dtypes = [param.dtype for param in params if param.requires_grad]
    return functools.reduce(torch.promote_types, dtypes) if dtypes else torch.float32


# norms of what this rank holds


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _by_kind(tensors: Iterable[torch.Tensor]) -> list[tuple[torch.dtype, list[int], list[torch.Tensor]]]:
    """Groups tensors for the kernels that take many at once: those of one dtype on one device."""
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[int, torch.Tensor]]] = {}
    for number, tensor in enumerate(tensors):
        groups.setdefault((tensor.device, tensor.dtype), []).append((number, tensor))
    return [
        (dtype, [number for number, _ in group], [tensor for _, tensor in group])
        for (_, dtype), group in groups.items()
    ]


def _powers(grads: Iterable[torch.Tensor], p: float, device: torch.device) -> torch.Tensor:
    """Returns each gradient's norm to the power of p, or for infinite p its norm; 1-D, float64."""
    kinds = _by_kind(grads)
    norms = torch.zeros(sum(len(numbers) for _, numbers, _ in kinds), dtype=torch.float64, device=device)
    for dtype, numbers, group in kinds:
        # Other powers take no faster way, and their sums leave the range of float32 more easily.
        wide = _accumulation_dtype(dtype) if p in (1.0, 2.0, math.inf) else torch.float64
        norms[numbers] = torch.stack(torch._foreach_norm(group, p, dtype=wide)).to(norms)
    return norms if math.isinf(p) else norms**p


def _merged(powers: torch.Tensor, p: float) -> torch.Tensor:
    """Returns the power of the norm of all, 1-D; zero for none."""
    powers = torch.cat([powers, powers.new_zeros(1)])
    return powers.amax(0, keepdim=True) if math.isinf(p) else powers.sum(0, keepdim=True)


def _powers_and_presence(gradients: Sequence[_NamedGradient], p: float, device: torch.device) -> torch.Tensor:
    """Returns the powers of all gradients, and then for each a number that is not zero if there is one."""
    values = torch.zeros(2, len(gradients), dtype=torch.float64, device=device)
    present = [number for number, gradient in enumerate(gradients) if gradient.piece is not None]
    values[1, present] = 1.0
    filled = {n: piece for n in present if (piece := gradients[n].piece) is not None and piece.numel()}
    values[0, list(filled)] = _powers(filled.values(), p, device)
    return values.flatten()


def _root(powers: torch.Tensor, p: float) -> torch.Tensor:
    return powers if math.isinf(p) else powers ** (1.0 / p)


# and over the ranks


def _reduce(values: dict[_Owner, torch.Tensor], p: float) -> None:
    """Sums 1-D values, for infinite p maximises them, over the ranks that hold one copy of a gradient.

    One all-reduce for all owners of whose gradients the widest group holds whole copies, and so on.
    """
    left = dict(values)
    members = functools.cache(lambda communicator: communicator.members)  # many units share a group
    for group in _groups(values):
        copies = {owner: count for owner in left if (count := _copies(owner, group, members))}
        if not any(owner is not None and owner.communicator == group for owner in copies):
            continue  # a wider group has them
        divisors = (1 if math.isinf(p) else count for count in copies.values())
        travelling = torch.cat([left.pop(owner) / divisor for owner, divisor in zip(copies, divisors)])
        reduced = _all_reduce(group, travelling.to(group.device), p).to(travelling.device)
        values.update(zip(copies, torch.split(reduced, [values[owner].numel() for owner in copies])))


def _groups(owners: Iterable[_Owner]) -> list[Communicator]:
    """Returns those over which handles are sharded, the widest first."""
    found = dict.fromkeys(handle.communicator for handle in owners if handle is not None)
    return sorted((group for group in found if group.size > 1), key=lambda group: -group.size)


def _copies(owner: _Owner, group: Communicator, members_of: Callable[[Communicator], frozenset[int]]) -> int:
    """Returns how many copies of an owner's gradients a group holds; 0 if it does not hold whole ones."""
    if owner is None:
        return group.size
    members, shard, replicas = map(members_of, (group, owner.communicator, owner.replicas))
    if members == shard:
        return 1
    if len(shard) == 1 and members <= replicas:
        return group.size
    whole = len(shard) * len(replicas) == group.size and shard | replicas <= members
    return len(replicas) if whole else 0


def _all_reduce(group: Communicator, values: torch.Tensor, p: float) -> torch.Tensor:
    if not math.isinf(p):
        group.all_reduce([values]).wait()
        return values
    # Backends drop a NaN from a maximum, or not, by the order of the ranks.
    both = torch.stack([values.nan_to_num(nan=0.0, posinf=math.inf), values.isnan().to(values)])
    group.all_reduce([both], dist.ReduceOp.MAX).wait()
    return both[0].masked_fill(both[1] > 0, math.nan)


# clipping


def _reduced(grads: Mapping[_Owner, list[torch.Tensor]]) -> list[torch.Tensor]:
    """Returns the gradients of owners whose last backward reduced them; warns of the others."""
    unsynced = {owner for owner in grads if owner is not None and owner.holds_gradients}
    if unsynced:
        warnings.warn(
            "gradients that no_sync() has left unreduced are not clipped; call clip_grad_norm_() after a "
            "backward outside of no_sync()",
            stacklevel=5,
        )
    return [grad for owner, owned in grads.items() if owner not in unsynced for grad in owned]


def _scale(grads: Iterable[torch.Tensor], factor: torch.Tensor) -> None:
    for dtype, _, group in _by_kind(grads):
        torch._foreach_mul_(group, factor.to(group[0].device, _accumulation_dtype(dtype)))


def _warn_without_gradients(params: Iterable[nn.Parameter]) -> None:
    trainable = [param for param in params if param.requires_grad and param.numel() > 0]
    if trainable and all(param.grad is None for param in trainable):
        warnings.warn("clip_grad_norm_() found no gradients: the norm is zero", stacklevel=5)
