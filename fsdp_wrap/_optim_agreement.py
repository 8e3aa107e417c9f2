"""Optimizer state on all ranks: what each has of it, told to the others, and whether that is enough."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from fsdp_wrap._collectives import Communicator
from fsdp_wrap._interval_tensor import IntervalTensor
from fsdp_wrap._originals import Original, Originals

__all__ = ["merged"]

State = dict[str, Any]


def merged(names: Originals, pieces: Mapping[str, State], error: ValueError | None) -> dict[str, State]:
    """Returns, for every parameter with state on any rank, the dtype of what is cut, the value of all else.

    A rank whose slice of a parameter is empty has no state of it. Any rank's error is raised on all.

    Raises:
        RuntimeError: If a rank lacks state of what it holds, and another has it.
    """
    mine = {
        fqn: {key: v.dtype if isinstance(v, IntervalTensor) else v for key, v in entry.items()}
        for fqn, entry in pieces.items()
    }
    by_group: dict[Communicator, list[Original]] = {}
    for original in names.by_name.values():
        if original.handle is not None and not original.uncut:
            by_group.setdefault(original.handle.communicator, []).append(original)
    found, errors = dict(mine), list[Exception | None]([error])
    for communicator, originals in by_group.items():
        own = _Told.of(originals, mine, error)
        told: list[_Told] = communicator.all_gather_object(own)
        for each in told:
            errors.append(each.error)
            for fqn, entry in each.states.items():
                found.setdefault(fqn, entry)
        errors.append(_error_of_lacking(told))
    for each_error in errors:
        if each_error is not None:
            raise each_error
    return {fqn: found[fqn] for fqn in names.by_name if fqn in found}


@dataclass(frozen=True)
class _Told:
    """What a rank tells the others of its optimizer's state.

    Attributes:
        rank: The rank, as the default group counts.
        states: What it has, by name: dtypes of what is cut, values of all else.
        lacking: What it has none of, though it holds elements.
        error: Why it cannot go on.
    """

    rank: int
    states: dict[str, State]
    lacking: list[str]
    error: Exception | None

    @classmethod
    def of(cls, originals: Iterable[Original], mine: Mapping[str, State], error: Exception | None) -> _Told:
        """Returns what this rank tells of these parameters."""
        states = {each.fqn: mine[each.fqn] for each in originals if each.fqn in mine}
        lacking = [each.fqn for each in originals if each.fqn not in mine and not each.left_out]
        return cls(dist.get_rank() if dist.is_initialized() else 0, states, lacking, error)


def _error_of_lacking(told: Iterable[_Told]) -> RuntimeError | None:
    """Returns an error if a rank lacks what another has: zeros in its place would be wrong."""
    having = {fqn: each.rank for each in reversed(list(told)) for fqn in each.states}
    for each in told:
        lost = [fqn for fqn in each.lacking if fqn in having]
        if lost:
            more = f" (and of {len(lost) - 1} more)" if len(lost) > 1 else ""
            return RuntimeError(
                f"rank {each.rank} has no optimizer state of parameter '{lost[0]}'{more}, of which rank "
                f"{having[lost[0]]} has: every rank holds a part of it, so make all ranks' optimizers of the "
                "same parameters"
            )
    return None
