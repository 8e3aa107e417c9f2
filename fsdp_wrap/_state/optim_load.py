"""Optimizer state dicts by name, cut to what this rank's optimizer takes."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from fsdp_wrap._params import IntervalTensor
from fsdp_wrap._runtime import units_in
from fsdp_wrap._state.full_values import FirstRank, handles_of, unsharded
from fsdp_wrap._state.optim_params import given_groups, groups_of, originals_of, same_values
from fsdp_wrap._state.optim_pieces import State
from fsdp_wrap._state.originals import Original, Originals

__all__ = ["load_optim_state_dict"]

_NEVER_ELEMENTWISE = frozenset({"step"})
"""Names of state that torch's optimizers count with, for parameters without dimensions."""


def load_optim_state_dict(
    model: nn.Module,
    optim: torch.optim.Optimizer | None,
    state_dict: Mapping[str, Any] | None,
    *,
    optim_input: Any = None,
    from_first_rank: bool = False,
    by_name: bool = False,
    only_known: bool = False,
) -> dict[str, Any]:
    """Cuts an optimizer state dict by names to what this rank's optimizer takes.

    Args:
        model: The wrapped module, or one that contains it.
        optim: Made from its parameters; None to go by `optim_input`.
        state_dict: Values may be full tensors, `IntervalTensor`s of this rank, or torch's own kinds of
            sharded tensors (then this is collective).
        optim_input: What an optimizer would be made from; None for `model.parameters()`.
        from_first_rank: Whether the first rank alone has a state dict; then this is collective.
        by_name: Whether the optimizer takes names even if its own keys are numbers.
        only_known: Leave out, also of the groups, parameters of no unit that the state dict does not have:
            the caller adds what else it knows of them.

    Returns:
        What `optim.load_state_dict` takes, in memory of its own; without `param_groups` where those are not
        given.

    Raises:
        ValueError: If it names parameters that the model does not have, does not name them at all, or what it
            holds does not fit.
        TypeError: If it is no optimizer state dict.
    """
    names = originals_of(model, optim, "optim_state_dict_to_load()")
    first = FirstRank(handles_of(units_in(model).values())) if from_first_rank else None
    given = _given(names, state_dict, first)
    pieces = _pieces(names, given, state_dict, first)
    if optim is None:
        groups = given_groups(model, names, optim_input)
    else:
        groups = groups_of(names, optim, optim.state_dict())
    if only_known:
        groups = [replace(group, params=given.known(group.params)) for group in groups]
    if by_name:
        groups = [replace(group, params=_by_name(group.params)) for group in groups]
    state = {
        key: built
        for group in groups
        for key, originals in group.params.items()
        if (built := _source_state(originals, pieces))
    }
    result: dict[str, Any] = {"state": {**state, **given.others}}
    if given.groups is not None:
        result["param_groups"] = [group.saved_in(given.groups) for group in groups]
    return result


def _by_name(params: Mapping[Any, list[Original]]) -> dict[Any, list[Original]]:
    return {each[0].fqn if isinstance(key, int) else key: each for key, each in params.items()}


@dataclass(frozen=True)
class _Tensor:
    """Describes a tensor, where that is enough or the tensor travels by itself."""

    shape: torch.Size
    dtype: torch.dtype


@dataclass(frozen=True)
class _Given:
    """What a state dict to load has, in a few bytes.

    Attributes:
        states: By name of parameter; tensors with dimensions, and pieces, are only described.
        others: What belongs to no parameter.
        groups: The parameter groups; None where the state dict has none.
    """

    states: dict[str, State]
    others: State
    groups: list[dict[str, Any]] | None

    def known(self, params: Mapping[Any, list[Original]]) -> dict[Any, list[Original]]:
        """Returns those parameters of which the state dict says anything, or that a unit owns."""
        told = {*self.states, *_declared(self.groups)}
        return {
            key: originals
            for key, originals in params.items()
            if any(each.handle is not None or each.fqn in told for each in originals)
        }


def _given(names: Originals, state_dict: Any, first: FirstRank | None) -> _Given:
    """Returns what the state dict has, on every rank alike, wherever it is."""
    given: Any = None
    if first is None or first.is_here:
        try:
            given = _described(names, state_dict)
        except (TypeError, ValueError) as error:
            given = error
    if first is not None:
        given = first.object(given)  # an error as well: no rank waits for tensors in vain
    if isinstance(given, Exception):
        raise given
    assert isinstance(given, _Given)
    return given


def _described(names: Originals, state_dict: Any) -> _Given:
    """Describes a state dict, or refuses what is none."""
    if not isinstance(state_dict, Mapping) or "state" not in state_dict:
        found = list(state_dict) if isinstance(state_dict, Mapping) else type(state_dict).__name__
        raise TypeError(f"an optimizer state dict has the entries 'state' and 'param_groups'; found {found}")
    states, groups = state_dict["state"], state_dict.get("param_groups")
    if any(isinstance(name, int) for name in (*_declared(groups), *states)):
        raise ValueError(
            "the optimizer state dict goes by parameter ids, which do not say which parameters they mean: "
            "rekey_optim_state_dict(..., OptimStateKeyType.PARAM_NAME, ...) names them"
        )
    unknown = [str(name) for name in _declared(groups) if name not in names.by_name]
    if unknown:
        raise ValueError(
            f"the optimizer state dict is of parameters that the model does not have: {', '.join(unknown)}"
        )
    described = {
        name: {key: _description(value) for key, value in entry.items()}
        for name, entry in states.items()
        if name in names.by_name
    }
    others = {name: value for name, value in states.items() if name not in names.by_name}
    return _Given(described, others, None if groups is None else [dict(group) for group in groups])


def _declared(groups: Iterable[Mapping[str, Any]] | None) -> list[Any]:
    return [name for group in groups or () for name in group.get("params", ())]


def _description(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and (value.dim() > 0 or isinstance(value, IntervalTensor)):
        return _Tensor(value.shape, value.dtype)
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _pieces(
    names: Originals, given: _Given, state_dict: Mapping[str, Any] | None, first: FirstRank | None
) -> dict[str, State]:
    """Returns what this rank holds of all states; tensors of the first rank travel one by one."""
    counted = set(_NEVER_ELEMENTWISE)  # and what has no dimensions though its parameter has
    for name, entry in given.states.items():
        if names.by_name[name].shape:
            counted.update(key for key, value in entry.items() if not isinstance(value, _Tensor))
    values = state_dict["state"] if state_dict and (first is None or first.is_here) else None
    pieces: dict[str, State] = {}
    for name, entry in given.states.items():
        pieces[name] = {}
        for key, value in entry.items():
            if isinstance(value, _Tensor):
                own = values[name][key] if values else None
                value = own if first is None else first.tensor(own, value.shape, value.dtype)
            pieces[name][key] = _cut(names.by_name[name], key, value, counted)
    return pieces


def _cut(original: Original, key: str, value: Any, counted: Collection[str]) -> Any:
    """Returns this rank's piece of a value, or the value where it is not elementwise."""
    interval, value = original.interval, unsharded(value)
    if isinstance(value, IntervalTensor):
        if (value.shape, value.start, value.stop) != (interval.shape, interval.start, interval.stop):
            raise ValueError(
                f"optimizer state '{key}' of parameter '{original.fqn}' holds elements {value.start} to "
                f"{value.stop} of shape {tuple(value.shape)}, this rank elements {interval.start} to "
                f"{interval.stop} of shape {tuple(original.shape)}: load by torch.distributed.checkpoint, "
                "which fits it to other ranks and wrappings"
            )
        return value
    is_tensor = isinstance(value, torch.Tensor)
    if is_tensor and value.shape == original.shape and (value.dim() > 0 or key not in counted):
        return original.piece_of(value)
    if not original.uncut:
        original.refuse_cut(key, value)
    return value


def _source_state(originals: Sequence[Original], pieces: Mapping[str, State]) -> State:
    """Puts the state of one sharded parameter together from that of what it stands for."""
    if originals[0].left_out:
        return {}
    found = [(each, pieces[each.fqn]) for each in originals if pieces.get(each.fqn)]
    found = [(each, entry) for each, entry in found if not _never_stepped(entry)]
    having = {each.fqn for each, _ in found}
    without = next((each.fqn for each in originals if each.fqn not in having), None)
    keys = dict.fromkeys(key for _, entry in found for key in entry)
    return {
        key: _source_value(key, [(each, entry[key]) for each, entry in found if key in entry], without)
        for key in keys
    }


def _source_value(key: str, values: Sequence[tuple[Original, Any]], without: str | None) -> Any:
    """Joins pieces; of all else a FlatParameter has one value, which all of its parameters must have."""
    first, value = values[0]
    if isinstance(value, IntervalTensor):
        full = torch.zeros(first.source.shape, dtype=value.dtype, device=first.source.device)
        for original, piece in values:
            original.interval.within(full).copy_(piece.piece)
        return full
    one_value = (
        "both are part of one FlatParameter, which has one such value: wrap the module with "
        "use_orig_params=True, or wrap the two apart"
    )
    if without is not None:
        raise ValueError(
            f"there is optimizer state '{key}' of parameter '{first.fqn}' and none of '{without}', but "
            + one_value
        )
    for original, other in values[1:]:
        if not same_values(value, other):
            raise ValueError(
                f"optimizer state '{key}' is {value!r} for parameter '{first.fqn}' and {other!r} for "
                f"'{original.fqn}', but {one_value}"
            )
    return copy.deepcopy(value)


def _never_stepped(state: Mapping[str, Any]) -> bool:
    step = state.get("step")
    return step is not None and float(step) == 0
