"""Counts the steps of all optimizers in this process: their kernels do not always move version counters."""

from __future__ import annotations

import functools
from typing import Any

from torch.optim.optimizer import register_optimizer_step_post_hook

__all__ = ["steps_taken"]


class _Counter:
    def __init__(self) -> None:
        self.steps = 0

    def __call__(self, *_: Any) -> None:
        self.steps += 1


@functools.cache
def _counter() -> _Counter:
    counter = _Counter()
    register_optimizer_step_post_hook(counter)
    return counter


def steps_taken() -> int:
    """Returns how many steps optimizers have taken since the first call."""
    return _counter().steps
