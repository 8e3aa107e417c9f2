"""`UnitParams`: the parameters of one unit in an optimizer, which steps with just these."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fsdp_wrap._params import to_local
from fsdp_wrap.optim._on_shards import exchange_shards


class UnitParams:
    """The parameters of one unit in an optimizer, which steps with these alone.

    Meanwhile its groups and state have nothing else. Groups begin each step with their public options.
    Changes of these (counts, say) become public by `commit`, so that each unit begins with the same options.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, params: Sequence[nn.Parameter]) -> None:
        self._optimizer, self._params = optimizer, params
        self._own = frozenset(params)
        self._state: defaultdict[Any, Any] = defaultdict(dict)
        self._lists: list[list[nn.Parameter]] = []  # of each group of the optimizer
        self._sizes: list[int] = []
        self._changed: dict[int, dict[str, Any]] = {}
        self._shards: Any = None

    @property
    def has_gradients(self) -> bool:
        """Whether any parameter has a gradient."""
        return any(param.grad is not None for param in self._params)

    def gradients(self) -> list[torch.Tensor]:
        """Returns this rank's local gradients."""
        return [to_local(param.grad) for param in self._params if param.grad is not None]

    def free(self) -> None:
        """Frees the gradients."""
        for param in self._params:
            param.grad = None

    @property
    def groups(self) -> list[dict[str, Any]]:
        """The groups of the optimizer with these parameters alone; those without any are left out."""
        groups = self._optimizer.param_groups
        sizes = [len(group["params"]) for group in groups]
        if sizes != self._sizes:
            self._sizes = sizes
            self._lists = [[param for param in group["params"] if param in self._own] for group in groups]
        return [{**group, "params": params} for group, params in zip(groups, self._lists) if params]

    def step(self) -> None:
        """Steps the optimizer with these parameters."""
        with self._alone():
            self._optimizer.step()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        optimizer = self._optimizer
        groups, state = optimizer.param_groups, optimizer.state
        own = self.groups
        numbers = [number for number, params in enumerate(self._lists) if params]
        for param in self._params:
            if param in state:
                self._state[param] = state[param]
            else:
                self._state.pop(param, None)
        optimizer.param_groups, optimizer.state = own, self._state
        whole = exchange_shards(optimizer, self._shards)
        try:
            yield
        finally:
            self._shards = exchange_shards(optimizer, whole)
            optimizer.param_groups, optimizer.state = groups, state
            state.update(self._state)
            for number, used in zip(numbers, own):
                self._note_changes(number, groups[number], used)

    def _note_changes(self, number: int, group: dict[str, Any], used: dict[str, Any]) -> None:
        changed = {
            key: value
            for key, value in used.items()
            if key != "params" and (key not in group or group[key] is not value)
        }
        if changed:
            self._changed[number] = changed

    def commit(self) -> None:
        """Makes the steps' changes to the options of groups public."""
        changed, self._changed = self._changed, {}
        for number, options in changed.items():
            self._optimizer.param_groups[number].update(options)


class ScaledUnit:
    """One unit's parameters in the form in which a `GradScaler` takes an optimizer."""

    def __init__(self, part: UnitParams) -> None:
        self._part, self._work = part, _nothing
        self.stepped = False

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The unit's groups."""
        return self._part.groups

    def offer(self, work: Callable[[], None]) -> None:
        """Sets the work of the next `step`."""
        self._work, self.stepped = work, False

    def step(self) -> None:
        """Does the work."""
        work, self._work, self.stepped = self._work, _nothing, True
        work()


def _nothing() -> None:
    """Does nothing, in place of the work of a unit that is not to step."""
