"""Loads optimizer state dicts by name: cuts them to this rank's shards, and keeps dtypes as saved."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from fsdp_wrap._core import watch_loads
from fsdp_wrap._params import IntervalTensor, to_local
from fsdp_wrap._state.full_values import FirstRank, copied, is_sharded, shape_of, unsharded
from fsdp_wrap._state.optim_initial import initial_state, initial_state_of, innermost
from fsdp_wrap._state.optim_params import (
    given_groups,
    groups_of,
    originals_of,
    placed_like,
    same_values,
)
from fsdp_wrap._state.optim_pieces import State
from fsdp_wrap._state.originals import Original, Originals, uncompiled_fqn
from fsdp_wrap._state.small_states import SmallStates, bounds_in, is_scale, small_states_of

_NEVER_ELEMENTWISE = frozenset({"step"})
"""State of parameters without dimensions that is no elementwise state: torch's step counts."""


def load_optim_state_dict(
    model: nn.Module,
    optim: torch.optim.Optimizer | None,
    state_dict: Mapping[str, Any] | None,
    *,
    optim_input: Any = None,
    from_first_rank: bool = False,
    by_name: bool = False,
    only_known: bool = False,
    as_dtensors: bool = False,
    own: bool = False,
) -> dict[str, Any]:
    """Cuts an optimizer state dict by names to what this rank's optimizer takes.

    Args:
        model: The wrapped module, or one that contains it.
        optim: Made from its parameters; None to go by `optim_input`.
        state_dict: Values may be full tensors, `IntervalTensor`s of this rank, or torch's own kinds of
            sharded tensors (then this is collective).
        optim_input: Argument of the optimizer that would be made; None for `model.parameters()`.
        from_first_rank: Whether the first rank alone has a state dict; then this is collective.
        by_name: Whether the optimizer takes names even if its own keys are numbers.
        only_known: Leave out, also of the groups, parameters of no unit that the state dict does not have:
            the caller adds what else it knows of them.
        as_dtensors: Whether the model is sharded by `DTensor`s alone, whose values fit as they are.
        own: Whether nobody else has the values, so that pieces that fit need no copies.

    Returns:
        The argument of `optim.load_state_dict`, in memory of its own save for `DTensor`s and with `own`;
        without `param_groups` where those are not given.
    """
    names = originals_of(model, optim, "optim_state_dict_to_load()", as_dtensors)
    if optim is not None:
        watch_loads(innermost(optim))
    small = None if optim is None else small_states_of(optim)
    if small is not None:
        state_dict = _apart(small, names, state_dict)
    first = FirstRank(model) if from_first_rank else None
    states, saved = _read(names, state_dict if first is None else first.announced(state_dict))
    saved = saved if first is None else first.fetched(saved)  # a learning rate may be a tensor
    pieces, others = _pieces(names, states, first)
    groups = given_groups(model, names, optim_input) if optim is None else groups_of(names, optim, {})
    if only_known:
        names_given = {*pieces, *_declared(saved)}
        groups = [replace(group, params=_known(group.params, names_given)) for group in groups]
    if by_name:
        groups = [replace(group, params=_by_name(group.params)) for group in groups]
    state = {
        key: _as_kept(small, optim, originals[0].source, built)
        for group in groups
        for key, originals in group.params.items()
        if (built := _source_state(originals, pieces, small, own))
    }
    result: dict[str, Any] = {"state": {**state, **others}}
    if saved is not None:
        result["param_groups"] = [group.saved_in(saved, place) for place, group in enumerate(groups)]
    return result


def _apart(small: SmallStates, names: Originals, state_dict: Any) -> Any:
    """Dequantises the state dict of a plain low-bit optimizer: values and scales in place of codes."""
    if not isinstance(state_dict, Mapping) or not isinstance(state_dict.get("state"), Mapping):
        return state_dict
    known, states = names.by_name, state_dict["state"]
    native = {name: entry for name, entry in states.items() if name in known and small.is_native(entry)}
    apart = {name: small.taken_apart(entry, known[name].shape) for name, entry in native.items()}
    return {**state_dict, "state": {**states, **apart}}


def _as_kept(
    small: SmallStates | None, optim: torch.optim.Optimizer | None, source: nn.Parameter, entry: State
) -> State:
    """Returns the state of a sharded parameter as the optimizer keeps it."""
    held = to_local(source)
    if small is None or optim is None or not held.numel():
        return entry
    own = nn.Parameter(held.detach(), source.requires_grad) if isinstance(source, DTensor) else source
    local = {key: to_local(value) for key, value in entry.items()}
    if small.is_native(local):  # sharded state, as torch's own functions give it
        return entry
    kept = small.put_together(local, initial_state_of(optim, source, own))
    return {key: placed_like(source, key, value) for key, value in kept.items()}


def _known(params: Mapping[Any, list[Original]], given: Collection[str]) -> dict[Any, list[Original]]:
    """Returns the parameters that a state dict names or a unit owns."""
    return {
        key: originals
        for key, originals in params.items()
        if any(original.owned or original.fqn in given for original in originals)
    }


def _by_name(params: Mapping[Any, list[Original]]) -> dict[Any, list[Original]]:
    return {originals[0].fqn if isinstance(key, int) else key: originals for key, originals in params.items()}


def _read(names: Originals, state_dict: Any) -> tuple[dict[str, Any], list[dict[str, Any]] | None]:
    """Returns states by name, and any groups; raises unless it is a state dict of the model."""
    if not isinstance(state_dict, Mapping) or "state" not in state_dict:
        content = list(state_dict) if isinstance(state_dict, Mapping) else type(state_dict).__name__
        raise TypeError(
            f"an optimizer state dict has the entries 'state' and 'param_groups', and this has {content}: "
            "pass what optim_state_dict() or the optimizer's state_dict() returned"
        )
    given: dict[str, Any] = state_dict["state"]
    groups: list[dict[str, Any]] | None = state_dict.get("param_groups")
    if any(isinstance(name, int) for name in (*_declared(groups), *given)):
        raise ValueError(
            "the optimizer state dict goes by parameter ids, which do not tell which parameters they mean: "
            "rekey_optim_state_dict(..., OptimStateKeyType.PARAM_NAME, ...) names them"
        )
    states = {uncompiled_fqn(name): entry for name, entry in given.items()}
    if groups is not None:
        groups = [{**group, "params": [*map(uncompiled_fqn, group["params"])]} for group in groups]
    unknown = [str(name) for name in _declared(groups) if name not in names.by_name]
    if unknown:
        raise ValueError(
            f"the optimizer state dict has parameters that the model does not have: {', '.join(unknown)}; "
            "pass the model that it was saved of"
        )
    return states, groups


def _declared(groups: Iterable[Mapping[str, Any]] | None) -> list[Any]:
    return [name for group in groups or () for name in group.get("params", ())]


def _pieces(
    names: Originals, states: Mapping[str, Any], first: FirstRank | None
) -> tuple[dict[str, State], State]:
    """Returns this rank's pieces of all states by name, and the entries that belong to no parameter."""
    counted = {  # beside what is never elementwise: what has no dimensions though its parameter has
        key
        for name, entry in states.items()
        if name in names.by_name and names.by_name[name].shape
        for key, value in entry.items()
        if not shape_of(value, ())
    } | _NEVER_ELEMENTWISE
    pieces: dict[str, State] = {}
    others: State = {}
    for name, entry in states.items():
        if name not in names.by_name:
            others[name] = entry if first is None else first.fetched(entry)
            continue
        original, pieces[name] = names.by_name[name], {}
        for key, given in entry.items():  # tensors of the first rank travel one by one
            value, of_blocks = given if first is None else first.fetched(given), is_scale(key, entry)
            if isinstance(original.source, DTensor) and not of_blocks:
                value = _as_dtensor(original.source, value)
            else:
                value = unsharded(value)
                cut = _cut(original, key, value, counted, of_blocks)
                # A full tensor that is not the caller's is freed at once.
                value = cut.clone() if isinstance(cut, IntervalTensor) and value is not given else cut
            pieces[name][key] = value
    return pieces, others


def _as_dtensor(source: DTensor, value: Any) -> Any:
    """Returns a full tensor of a parameter's shape as a `DTensor` like it, in memory of its own."""
    if not isinstance(value, torch.Tensor) or is_sharded(value) or value.shape != source.shape:
        return value
    mesh, placements = source.device_mesh, source.placements
    held = value.detach().to(source.device)
    return distribute_tensor(held, mesh, placements, src_data_rank=None).clone()  # not a view of all


def _cut(original: Original, key: str, value: Any, counted: Collection[str], of_blocks: bool) -> Any:
    """Returns this rank's piece of a value, in its memory, or the whole value where it is not elementwise.

    Names in `counted` are never elementwise. With `of_blocks` the value has one element per block.
    """
    if not isinstance(value, torch.Tensor):
        if not original.uncut:
            original.refuse_cut(key, value)
        return value
    own = bounds_in(original, value.shape, of_blocks)
    if isinstance(value, IntervalTensor):
        part = None if of_blocks else original.interval.part
        if (value.start, value.stop) != own or value.part != part:
            held = "nothing that fits" if own is None else f"{own[0]} to {own[1]}"
            raise ValueError(
                f"optimizer state '{key}' of parameter '{original.fqn}' has elements {value.start} to "
                f"{value.stop} of {tuple(value.shape)}, this rank {held} of "
                f"{tuple(original.shape)}: torch.distributed.checkpoint fits it to other ranks and wrappings"
            )
        return value
    if value.shape == original.shape and (value.dim() > 0 or key not in counted) and not of_blocks:
        return original.piece(original.interval.own(value))
    if own is not None and value.dim() > 0 and (of_blocks or not original.uncut):
        return IntervalTensor(value.shape, own[0], value.reshape(-1)[own[0] : own[1]])
    if not original.uncut:
        original.refuse_cut(key, value)
    return value


def _source_state(
    originals: Sequence[Original], pieces: Mapping[str, State], small: SmallStates | None, own: bool
) -> State:
    """Joins the originals' pieces into the state of their sharded parameter.

    Scales are spread to all elements for a low-bit optimizer, and dropped for others.
    """
    if originals[0].left_out:
        return {}
    # Parameters without elements are never stepped.
    originals = [original for original in originals if original.shape.numel()] or originals
    stepped = [
        (original, pieces[original.fqn]) for original in originals if _is_stepped(pieces.get(original.fqn))
    ]
    having = {original.fqn for original, _ in stepped}
    without = next((original.fqn for original in originals if original.fqn not in having), None)
    keys = dict.fromkeys(key for _, entry in stepped for key in entry)
    scales, source = [key for key in keys if is_scale(key, keys)], originals[0].source
    state = {
        key: _source_value(
            key, [(original, entry[key]) for original, entry in stepped if key in entry], without, own
        )
        for key in keys
        if key not in scales
    }
    for key in scales if small is not None else ():
        state[key] = spread = torch.full(to_local(source).shape, torch.nan, device=source.device)
        for original, entry in stepped:
            if small is not None and isinstance(entry.get(key), IntervalTensor):
                small.spread(original, entry[key], spread)
    return state


def _source_value(key: str, values: Sequence[tuple[Original, Any]], without: str | None, own: bool) -> Any:
    """Joins pieces of tensors; any other value must be the same for all parameters of a FlatParameter."""
    first, value = values[0]
    if isinstance(value, IntervalTensor) and value.shape != first.shape:  # by rows
        return value.piece.to(first.source.device, copy=not own).view(-1, *value.shape[1:])
    if isinstance(value, IntervalTensor) and value.piece.numel() == first.source.numel():
        return value.piece.to(first.source.device, copy=not own).view(first.source.shape)
    if isinstance(value, IntervalTensor):
        full = torch.zeros(first.source.shape, dtype=value.dtype, device=first.source.device)
        for original, piece in values:
            original.interval.within(full).copy_(piece.piece)
        return full
    others = [] if without is None else [(without, "missing")]
    others += [(original.fqn, repr(other)) for original, other in values[1:] if not same_values(value, other)]
    for fqn, other in others:
        raise ValueError(
            f"optimizer state '{key}' is {value!r} for parameter '{first.fqn}' and {other} for '{fqn}', but "
            "both are part of one FlatParameter, which has one such value: wrap the module with "
            "use_orig_params=True, or wrap the two apart"
        )
    return value if isinstance(first.source, DTensor) else copied(value)


def _is_stepped(state: State | None) -> bool:
    return bool(state and (state.get("step") is None or float(state["step"]) != 0))


# as saved


def as_saved(
    name_of: Callable[[nn.Parameter], str],
    optim: torch.optim.Optimizer,
    state_dict: Mapping[str, Any],
    dtypes: Mapping[str, Any],
) -> Callable[[], None]:
    """Returns a function that makes an optimizer's state exactly that of a state dict which it has loaded.

    Torch casts floats to the dtype of the parameter, also integers and what an optimizer keeps in float32,
    and makes generators of strings. The cast stands where the parameter had another dtype when it was saved.

    Args:
        name_of: Returns the name of a parameter that the optimizer holds.
        optim: The optimizer.
        state_dict: The state dict that it will load.
        dtypes: Dtypes of the saved parameters, by name.
    """
    inner, states = innermost(optim), state_dict["state"]
    groups = zip(inner.param_groups, state_dict["param_groups"])
    params = {
        key: param
        for own, group in groups
        for key, param in zip(group["params"], own["params"])
        if states.get(key)
    }
    begins = _begins_with(inner, state_dict, params)
    for key, param in params.items():
        if missing := [name for name in begins[key] if name not in states[key]]:
            raise ValueError(
                f"the saved optimizer state of '{name_of(param)}' has {', '.join(states[key])}, and "
                f"{type(inner).__name__} needs {', '.join(missing)}: it is of another optimizer. Make that "
                "one, or pass optim=None"
            )

    def restore() -> None:
        for key, param in params.items():
            entry = inner.state.get(param, {})
            saved_dtype = dtypes.get(name_of(param), param.dtype)
            for name in entry.keys() & states[key].keys() - {"step"}:
                begun = getattr(begins[key].get(name), "dtype", None)
                entry[name] = _exact(states[key][name], entry[name], saved_dtype != param.dtype, begun)

    return restore if small_states_of(inner) is None else lambda: None  # those have few bits of their own


def _begins_with(
    inner: Any, state_dict: Mapping[str, Any], params: Mapping[Any, Any]
) -> dict[Any, Mapping[str, Any]]:
    """Makes initial state by a first step of small tensors; empty for optimizers that are not torch's."""
    by_key: dict[Any, Mapping[str, Any]] = dict.fromkeys(params, {})
    if not inspect.unwrap(type(inner).step).__module__.startswith("torch.optim."):
        return by_key
    saved = state_dict["param_groups"]
    options = [{**own, **group} for own, group in zip(inner.param_groups, saved)]
    small = [{_kind(params[key]): key for key in group["params"] if key in params} for group in saved]
    zeros = [[_small(params[key]) for key in kinds.values()] for kinds in small]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it may need more than gradients
        begun = initial_state(inner, zeros, groups=options)
    for group, kinds, states in zip(saved, small, begun):
        by_kind = dict(zip(kinds, states))
        by_key |= {key: by_kind[_kind(params[key])] for key in group["params"] if key in params}
    return by_key


def _kind(param: torch.Tensor) -> tuple[Any, ...]:
    return param.dim(), param.dtype, param.device


def _small(param: torch.Tensor) -> nn.Parameter:
    shape = [min(size, 2) for size in param.shape]
    return nn.Parameter(torch.zeros(shape, dtype=param.dtype, device=param.device))


def _exact(saved: Any, loaded: Any, recast: bool, begun: torch.dtype | None) -> Any:
    """Returns the saved value in place of the loaded one, where the optimizer can have it.

    Args:
        saved: The saved value.
        loaded: The same as the optimizer has cast it.
        recast: Whether the parameter had another dtype when it was saved.
        begun: The dtype of the optimizer's initial state, if known.
    """
    if isinstance(saved, str):
        return saved if isinstance(loaded, str) else loaded
    if isinstance(saved, dict) and isinstance(loaded, dict):
        return {
            key: _exact(saved[key], value, recast, begun) if key in saved else value
            for key, value in loaded.items()
        }
    if isinstance(saved, (list, tuple)) and type(loaded) is type(saved) and len(loaded) == len(saved):
        return type(saved)(_exact(*pair, recast, begun) for pair in zip(saved, loaded))
    if not isinstance(saved, torch.Tensor) or not isinstance(loaded, torch.Tensor):
        return loaded
    if saved.dtype == loaded.dtype or saved.shape != loaded.shape:
        return loaded
    if saved.is_floating_point() and loaded.is_floating_point():
        widened = torch.promote_types(saved.dtype, loaded.dtype) == loaded.dtype
        if recast or (widened and begun == loaded.dtype):  # of an optimizer that keeps fewer bits
            return loaded
    return saved.to(loaded.device)
