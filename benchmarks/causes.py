"""Costs of a unit to the host by cause: calls of Python functions, and microseconds.

The model's step is profiled, forward and backward apart, on a group that sends nothing. A function belongs to
the cause of its file, together with the C++ that it calls. The costs of a unit are the difference of two
models, of which one has more units; the costs of a leaf, of two whose units have more parameters.
"""

from __future__ import annotations

import cProfile
import gc
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType
from typing import Any

import fsdp_wrap
from benchmarks.implementations import PLAIN, Trained
from benchmarks.models import stacked

HOOKS, DECIDING, SHOWING = "hooks", "deciding", "showing parameters"
COPIES, COLLECTIVES, POSITIONS = "shards and gradients", "buffers and collectives", "positions and waiting"
TORCH = "torch's functions"
_OF_FILES = {
    "": HOOKS,  # the front-ends
    "_attributes.py:__getattr__": TORCH,  # it is called in place of torch.nn.Module's
    "_attributes.py:telling": TORCH,
    "_runtime/": DECIDING,
    "_runtime/forward.py": HOOKS,
    "_runtime/arrivals.py": HOOKS,
    "_runtime/same_model.py": POSITIONS,
    "_params/": COPIES,
    "_params/buffers.py": DECIDING,
    "_params/showing.py": SHOWING,
    "_core/": DECIDING,
    "_core/modules.py": SHOWING,
    "_comm/": COLLECTIVES,
    "_comm/positions/": POSITIONS,
    "_comm/works.py": POSITIONS,
    "_comm/watching/watch.py": POSITIONS,
}
"""By the beginning of a file's path in the package, and of a function's name; the longest that fits."""
CAUSES = (HOOKS, DECIDING, SHOWING, COPIES, COLLECTIVES, POSITIONS, TORCH)
FORWARD, BACKWARD = "forward", "backward"

_PACKAGE = f"{Path(fsdp_wrap.__file__).parent}/"
_WARM, _STEPS = 12, 30  # by the twelfth step positions have found whom they look for

Costs = dict[str, Counter[str]]
"""By phase and cause."""


def cause_of(code: CodeType) -> str:
    """Returns the cause to which a function belongs."""
    if not code.co_filename.startswith(_PACKAGE):
        return TORCH
    name = getattr(code, "co_qualname", code.co_name)  # up to Python 3.10 without its class
    inside = f"{code.co_filename.removeprefix(_PACKAGE)}:{name}"
    return _OF_FILES[max((start for start in _OF_FILES if inside.startswith(start)), key=len)]


class Profiled:
    """One implementation's model, whose steps are profiled.

    Args:
        name: The implementation's name.
        units: How many blocks it has.
        params: How many parameters each has.
        reduces: Whether backward reduces; if not, gradients accumulate.
    """

    def __init__(self, name: str, units: int, params: int, reduces: bool = True) -> None:
        self._trained = Trained(name, stacked(units, params))
        model = self._trained.model
        if not reduces and hasattr(model, "set_requires_gradient_sync"):
            model.set_requires_gradient_sync(False)
            model.set_reshard_after_backward(False)
        self._not_reducing: Callable[[], Any] | None = None
        if not reduces and hasattr(model, "no_sync"):
            self._not_reducing = model.no_sync
        for _ in range(_WARM):
            self.step()

    def step(self, profiles: Mapping[str, cProfile.Profile] | None = None) -> None:
        """Runs one forward and backward, in profiles by phase if there are any."""
        if self._not_reducing is None:
            self._pass_through(profiles)
            return
        with self._not_reducing():
            self._pass_through(profiles)

    def _pass_through(self, profiles: Mapping[str, cProfile.Profile] | None) -> None:
        if profiles is None:
            self._trained.forward().backward()
            return
        loss = profiles[FORWARD].runcall(self._trained.forward)
        profiles[BACKWARD].runcall(loss.backward)

    def calls(self) -> Costs:
        """Returns the calls of Python functions in a step."""
        return self._profiled()[0]

    def microseconds(self) -> Costs:
        """Returns the time of the fastest of some steps, by the shares of a profile, which takes longer."""
        fastest = min(self._seconds() for _ in range(_STEPS))
        shares = min((self._profiled()[1] for _ in range(_STEPS)), key=_total)
        scale = 1e6 * fastest / _total(shares)
        return {
            phase: Counter({cause: scale * share for cause, share in by_cause.items()})
            for phase, by_cause in shares.items()
        }

    def _seconds(self) -> float:
        begin = time.thread_time()
        self.step()
        return time.thread_time() - begin

    def _profiled(self) -> tuple[Costs, Costs]:
        """Returns calls and seconds of a step."""
        profiles = {phase: cProfile.Profile() for phase in (FORWARD, BACKWARD)}
        gc.collect()
        gc.disable()  # what it calls for earlier models, whenever that is, is no part of a step
        self.step(profiles)
        gc.enable()
        calls: Costs = {phase: Counter() for phase in profiles}
        seconds: Costs = {phase: Counter() for phase in profiles}
        for phase, profile in profiles.items():
            for entry in profile.getstats():
                if isinstance(entry.code, str):  # of C++, which its callers have
                    continue
                cause = cause_of(entry.code)
                calls[phase][cause] += entry.callcount
                built_in = (called for called in entry.calls or () if isinstance(called.code, str))
                spent = entry.inlinetime + sum(called.inlinetime for called in built_in)
                seconds[phase][cause] += spent  # type: ignore[assignment]  # Counter's type knows integers only
        return calls, seconds


def _total(costs: Costs) -> float:
    return sum(sum(by_cause.values()) for by_cause in costs.values())


Table = dict[str, dict[str, float]]


LEAF = "a leaf more"


def per_unit_and_leaf(measure: Callable[[int, int], Costs]) -> Table:
    """Costs of one more unit of four parameters, forward and backward, and of one more leaf; by cause.

    Args:
        measure: Returns the costs of a step with so many units of so many parameters.
    """
    few, more, wide = measure(2, 4), measure(6, 4), measure(6, 16)
    table: Table = {}
    for cause in CAUSES:
        row = table[cause] = {phase: (more[phase][cause] - few[phase][cause]) / 4 for phase in few}
        row[LEAF] = sum(wide[phase][cause] - more[phase][cause] for phase in few) / 6 / 12
    return table


def calls_by_cause(name: str, due: bool) -> Table:
    """Returns calls of Python functions for one more unit and leaf, beyond the plain model's.

    Args:
        name: The implementation's name.
        due: Whether units gather and reduce; if not, it must be one that keeps its parameters.
    """
    ours = per_unit_and_leaf(lambda units, params: Profiled(name, units, params, due).calls())
    plain = per_unit_and_leaf(lambda units, params: Profiled(PLAIN, units, params).calls())
    return {
        cause: {column: value - plain[cause][column] for column, value in row.items()}
        for cause, row in ours.items()
    }


def by_cause(name: str, due: bool) -> Table:
    """Returns calls and microseconds by cause; torch's own functions are in the noise of the model's."""
    calls = calls_by_cause(name, due)
    spent = per_unit_and_leaf(lambda units, params: Profiled(name, units, params, due).microseconds())
    del spent[TORCH]
    table = {
        cause: {f"{column}, calls": value for column, value in row.items()}
        | {f"{column}, us": value for column, value in spent.get(cause, {}).items()}
        for cause, row in calls.items()
    }
    columns = [f"{column}, {figure}" for figure in ("calls", "us") for column in (FORWARD, BACKWARD, LEAF)]
    table["all"] = {column: sum(row.get(column, 0.0) for row in table.values()) for column in columns}
    return table
