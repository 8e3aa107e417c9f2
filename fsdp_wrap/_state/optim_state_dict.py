"""Optimizer state dicts, full and sharded, under the names of the unwrapped module's parameters.

State is kept per sharded parameter; whatever has a sharded parameter's shape is cut like it, elementwise.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_wrap._comm import calling
from fsdp_wrap._core import OptimStateKeyType
from fsdp_wrap._core.torch_private import own_method
from fsdp_wrap._params import IntervalTensor, to_local
from fsdp_wrap._runtime import units_in
from fsdp_wrap._state.full_params import settle
from fsdp_wrap._state.full_values import FirstRank, FullValue, check_budget, copied, stream
from fsdp_wrap._state.optim_initial import initial_state
from fsdp_wrap._state.optim_params import (
    ParamGroup,
    given_groups,
    groups_of,
    options_of,
    originals_of,
    placed_like,
)
from fsdp_wrap._state.optim_pieces import State, agreed, with_empty_pieces
from fsdp_wrap._state.originals import Original, Originals
from fsdp_wrap._state.small_states import SmallStates, is_scale, small_states_of

# saving


def sharded_optim_state_dict(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    state_dict: Mapping[str, Any] | None,
    *,
    to_host: bool,
    all_names: bool = True,
    as_dtensors: bool = False,
) -> dict[str, Any]:
    """Returns this rank's pieces of the optimizer state.

    All ranks have all names in one order; a piece of what a rank holds nothing of is empty. For this the
    ranks exchange metadata, without any tensor, of the parameters that not all of them hold.

    An optimizer that was never stepped gets the state it would begin with, with a step count of zero, so
    that `torch.distributed.checkpoint` finds where to load to; loading such state leaves it never stepped.

    Args:
        model: The wrapped module, or one that contains it.
        optim: Made from its parameters.
        state_dict: The optimizer's own state dict; None to take it now.
        to_host: Copy to host memory; otherwise the pieces are the optimizer's own memory.
        all_names: Whether empty pieces are wanted; without them nothing is communicated or copied.
        as_dtensors: Whether the model is sharded by `DTensor`s alone, which are taken as they are, without
            the state that would begin.

    Returns:
        `state` by name, with `IntervalTensor`s, and `param_groups`.
    """
    names = originals_of(model, optim, "optim_state_dict()", as_dtensors)
    read = _local_state if all_names else _read_local_state
    local = read(names, optim, state_dict, not as_dtensors)
    if not all_names:
        return local.state_dict(local.pieces)
    pieces = with_empty_pieces(names, local.pieces, local.error)
    return local.state_dict(
        {fqn: {key: _kept(value, to_host) for key, value in entry.items()} for fqn, entry in pieces.items()}
    )


def full_optim_state_dict(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    state_dict: Mapping[str, Any] | None,
    *,
    to_host: bool,
    only: FirstRank | None = None,
    by_rows: bool = False,
    initial: bool = False,
) -> dict[str, Any]:
    """Gathers the optimizer state, one value after the other; collective.

    Args:
        model: The wrapped module, or one that contains it.
        optim: Made from its parameters.
        state_dict: The optimizer's own state dict; None to take it now.
        to_host: Copy to host memory.
        only: The one rank that gets the result, and the others an empty dict; None for all.
        by_rows: Whether each rank keeps its rows, as `DTensor`s, also of state that would begin.
        initial: Whether an optimizer that was never stepped gets the state it would begin with.

    Returns:
        `state` by name, every tensor in memory of its own, and `param_groups`.
    """
    with calling("optim_state_dict()"):
        state = _FullState(model, optim, state_dict, "optim_state_dict()", initial or by_rows)
        entries = {fqn: dict(entry) for fqn, entry in state.known.items()}
        how: dict[str, Any] = {"only": only, "to_host": to_host and not by_rows}
        for fqn, key, value in state.values(budget=state.unit_nbytes, **how):
            if by_rows and isinstance(state.known[fqn][key], FullValue):
                value = state.names.by_name[fqn].rows_of(value)
            moved = by_rows and to_host and isinstance(value, torch.Tensor)
            entries[fqn][key] = value.cpu() if moved else value
    return state.local.state_dict(entries) if only is None or only.is_here else {}


def iter_full_optim_state(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    *,
    budget: int | None = None,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
) -> Generator[tuple[str, str, Any]]:
    """Yields an optimizer's full state value by value, while the next ones are on their way; collective.

    May be closed early, like `fsdp_wrap.iter_full_params`.

    Args:
        model: The wrapped module, or one that contains it.
        optim: Made from its parameters. Do not step it before the iterator is closed.
        budget: Most bytes on their way; None for twice what the parameters of the largest unit take.
        rank0_only: Only the first rank gets tensors; the others yield the same names with tensors on the meta
            device.
        offload_to_cpu: Yield tensors in host memory.

    Yields:
        (parameter's name in the unwrapped module, state's name, value), in module order: a full tensor, or a
        copy of what is not cut, such as a step count.

    Raises:
        RuntimeError: At the call: inside a forward, backward or `summon_full_params`.
        TypeError: If `optim` is no optimizer, or `budget` no int.
        ValueError: If `budget` is not positive, or as `optim_state_dict`.
    """
    check_budget(budget)
    settle(units_in(model).values(), "iter_full_optim_state()")
    state = _FullState(model, optim, None, "iter_full_optim_state()")
    only = FirstRank(model) if rank0_only else None
    return state.values(budget=budget or 2 * state.unit_nbytes, only=only, to_host=offload_to_cpu)


class _FullState:
    """The state of an optimizer on all ranks; its constructor is collective.

    Attributes:
        known: By parameter name, `FullValue`s of pieces and all other values.
        unit_nbytes: Bytes of the full parameters of the largest unit.
    """

    def __init__(
        self,
        model: nn.Module,
        optim: torch.optim.Optimizer,
        state_dict: Mapping[str, Any] | None,
        doing: str,
        initial: bool = False,
    ) -> None:
        self.names = names = originals_of(model, optim, doing)
        self.local = _local_state(names, optim, state_dict, initial)
        with calling(doing):
            self.known = agreed(names, self.local.pieces, self.local.error)
        self.unit_nbytes = names.largest_unit_nbytes()

    def values(
        self, *, budget: int, only: FirstRank | None, to_host: bool
    ) -> Generator[tuple[str, str, Any]]:
        """Yields (name, key, value) of all; collective."""
        every = [(fqn, key, entry[key]) for fqn, entry in self.known.items() for key in sorted(entry)]
        cut = [value for _, _, value in every if isinstance(value, FullValue)]
        gathered, wanted = stream(cut, budget, only=only, to_host=to_host), only is None or only.is_here
        try:
            for fqn, key, value in every:
                if isinstance(value, FullValue):
                    yield fqn, key, next(gathered)[1]
                else:
                    yield fqn, key, copied(value, to_host) if wanted else _without_memory(value)
        finally:
            for _ in gathered:  # takes part in the rest, also where nothing has been gathered yet
                pass


@dataclass(frozen=True)
class _LocalState:
    """This rank's part of an optimizer's state.

    Attributes:
        pieces: State by name of parameter.
        others: State that belongs to no parameter.
        groups: The entry `param_groups`, with names, if there is one.
        error: Why it could not be read: raised once all ranks know, as others may wait for this one.
    """

    pieces: dict[str, State] = field(default_factory=dict)
    others: State = field(default_factory=dict)
    groups: State = field(default_factory=dict)
    error: ValueError | None = None

    def state_dict(self, state: Mapping[str, State]) -> dict[str, Any]:
        """Returns a state dict with this state of the parameters."""
        return {"state": {**state, **self.others}, **self.groups}


def _local_state(
    names: Originals, optim: torch.optim.Optimizer, state_dict: Mapping[str, Any] | None, initial: bool
) -> _LocalState:
    try:
        return _read_local_state(names, optim, state_dict, initial)
    except ValueError as error:
        return _LocalState(error=error)


def _read_local_state(
    names: Originals, optim: torch.optim.Optimizer, state_dict: Mapping[str, Any] | None, initial: bool
) -> _LocalState:
    saved = state_dict or own_method(optim, "state_dict")()
    groups = groups_of(names, optim, saved)
    states = saved["state"] or (_initial_state(optim, groups) if initial else {})
    params = {key: originals for group in groups for key, originals in group.params.items()}
    keys = {original.fqn: key for key, originals in params.items() for original in originals}
    own = {original.fqn: original for originals in params.values() for original in originals}
    held = {
        fqn: own[fqn]
        for fqn in names.by_name
        if fqn in own and states.get(keys[fqn]) and not own[fqn].left_out
    }
    small = small_states_of(optim)
    if small is not None:
        states = states | {keys[fqn]: _apart(small, held[fqn].source, states[keys[fqn]]) for fqn in held}
    pieces = {fqn: _pieces_of(original, states[keys[fqn]], small) for fqn, original in held.items()}
    others = {key: value for key, value in states.items() if key not in params}
    named = [_renamed(group.options or {}, group.names, group.names) for group in groups]
    return _LocalState(pieces, others, {"param_groups": named} if "param_groups" in saved else {})


def _apart(small: SmallStates, param: torch.Tensor, entry: Mapping[str, Any]) -> State:
    apart = small.taken_apart(entry, to_local(param).shape)
    return {
        key: value if is_scale(key, apart) else placed_like(param, key, value) for key, value in apart.items()
    }


def _pieces_of(original: Original, entry: Mapping[str, Any], small: SmallStates | None) -> State:
    """Returns this rank's pieces of the state of one parameter."""
    pieces: State = {}
    for key, value in entry.items():
        if small is None or not is_scale(key, entry):
            pieces[key] = _piece(original, key, value)
            continue
        scales = small.scales_of(original, value)
        if scales is not None:
            whole = original.uncut and not isinstance(original.source, DTensor)
            pieces[key] = scales.piece if whole else scales
    return pieces


def _piece(original: Original, key: str, value: Any) -> Any:
    if original.uncut:
        return value
    if isinstance(value, torch.Tensor) and value.dim() > 0:
        if value.shape == original.source.shape:
            return original.piece(original.interval.within(value))
        if (by_rows := original.piece_by_rows(value)) is not None:
            return by_rows
    original.refuse_cut(key, value)
    return value


def _kept(value: Any, to_host: bool) -> Any:
    elements = isinstance(value, IntervalTensor) or (isinstance(value, torch.Tensor) and value.dim() > 0)
    # One count may stand for many parameters.
    return value if elements and not to_host else copied(value, to_host)


def _without_memory(value: Any) -> Any:
    return value.to("meta") if isinstance(value, torch.Tensor) else value


def _renamed(options: Mapping[str, Any], names: list[str], params: Sequence[Any]) -> dict[str, Any]:
    """Returns a group with other keys of its parameters."""
    named = {"param_names": list(names)} if "param_names" in options else {}
    return {**copy.deepcopy(dict(options)), **named, "params": list(params)}


def _initial_state(optim: torch.optim.Optimizer, groups: Sequence[ParamGroup]) -> State:
    """Returns the state that a first step would make, by the keys of the groups."""
    firsts = [[originals[0] for originals in group.params.values()] for group in groups]
    params = [[first.source for first in of_group] for of_group in firsts]
    empty = {
        id(first.source) for of_group in firsts for first in of_group if not first.interval.shape.numel()
    }
    states = initial_state(optim, params, empty)
    pairs = [pair for group, entries in zip(groups, states) for pair in zip(group.params, entries)]
    return {key: entry for key, entry in pairs if entry}


# keys


def rekey_optim_state_dict(
    state_dict: Mapping[str, Any],
    key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: Any,
    optim: torch.optim.Optimizer | None,
) -> dict[str, Any]:
    """Renames parameters from names to positions in an optimizer, or back.

    Args:
        state_dict: With one or the other, and full or sharded values.
        key_type: Which one to return.
        model: The module, wrapped or not.
        optim_input: Argument that the optimizer was made from; None for `model.parameters()`.
        optim: The optimizer, if there is one; then the former must be None.

    Returns:
        A new dict with the same values.
    """
    if not isinstance(key_type, OptimStateKeyType):
        raise TypeError(f"optim_state_key_type must be an OptimStateKeyType, not {key_type!r}")
    if optim is not None and optim_input is not None:
        raise ValueError("optim and optim_input exclude each other: pass one of them")
    declared = [key for group in state_dict["param_groups"] for key in group["params"]]
    by_name = key_type is OptimStateKeyType.PARAM_NAME
    if all(isinstance(key, str if by_name else int) for key in declared):
        return dict(state_dict)
    given = optim.param_groups if optim is not None else optim_input
    grouped = given_groups(model, Originals(model), given)
    ordered = [name for group in grouped for name in group.names]
    renamed: dict[Any, Any] = dict(zip(count(), ordered) if by_name else zip(ordered, count()))
    missing = [str(key) for key in declared if key not in renamed]
    if missing:
        raise ValueError(
            f"the optimizer has {len(ordered)} parameters, and not what the state dict names: "
            f"{', '.join(missing)}; pass the optimizer that the state dict is of"
        )
    state = {renamed.get(key, key): value for key, value in state_dict["state"].items()}
    saved = state_dict["param_groups"]
    if by_name or len(grouped) == 1 < len(saved):  # the latter: which groups there are was not said
        return {"state": state, "param_groups": [_rekeyed(group, renamed, by_name) for group in saved]}
    numbered = [
        {**group.saved_in(saved, place), "params": [renamed[name] for name in group.names]}
        for place, group in enumerate(grouped)
    ]
    return {"state": state, "param_groups": numbered}


def _rekeyed(group: Mapping[str, Any], renamed: Mapping[Any, Any], by_name: bool) -> dict[str, Any]:
    """Returns a group with other keys, in the order of parameters in the optimizer."""
    pairs = [(key, renamed[key]) if by_name else (renamed[key], key) for key in group["params"]]
    positions, names = zip(*sorted(pairs)) if pairs else ((), ())
    return _renamed(options_of(group), list(names), names if by_name else positions)
