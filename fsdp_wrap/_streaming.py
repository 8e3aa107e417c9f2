"""Full tensors one after the other, the next ones on their way while one is in use, within a budget."""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Iterable
from typing import Any

import torch

from fsdp_wrap._device import Pending
from fsdp_wrap._full_values import FullValue

__all__ = ["check_budget", "stream"]


def check_budget(budget: int | None) -> None:
    """Refuses what is no number of bytes.

    Raises:
        TypeError: If it is neither an int nor None.
        ValueError: If it is not positive.
    """
    if budget is None:
        return
    if isinstance(budget, bool) or not isinstance(budget, int):
        raise TypeError(f"budget must be a number of bytes or None, not {budget!r}")
    if budget <= 0:
        raise ValueError(f"budget must be a positive number of bytes, not {budget}")


def stream(
    values: Iterable[FullValue], budget: int, *, wanted: bool = True, to_host: bool = False
) -> Generator[tuple[Any, torch.Tensor]]:
    """Gathers tensors in order; collective.

    As many as fit into the budget are on their way; one is in any case. A caller that closes the iterator
    early takes part in the remaining gathers nevertheless: the other ranks cannot know, and wait for it.

    Args:
        values: The same ones on every rank.
        budget: The most bytes of what is on its way, of the tensor that is yielded, and of the one before,
            which a loop's variable still holds while the next tensor is fetched.
        wanted: Whether this rank keeps them; otherwise it yields tensors on the meta device.
        to_host: Yield them in host memory.

    Yields:
        (key, full tensor in memory of its own).
    """
    window = _Window(values, budget)
    held = 0
    try:
        while window.fill(held):
            value, full = window.take()
            held = value.nbytes if wanted else 0
            full = (full.cpu() if to_host else full) if wanted else full.to("meta")
            yield value.key, full
            del full
    except GeneratorExit:
        while window.fill(0):
            window.take()
        raise


class _Window:
    """The gathers on their way, oldest first, and what follows them."""

    def __init__(self, values: Iterable[FullValue], budget: int) -> None:
        self._waiting = deque(values)
        self._issued: deque[tuple[FullValue, torch.Tensor, Pending]] = deque()
        self._budget = budget

    def fill(self, held: int) -> bool:
        """Issues what fits beside `held` bytes, and one in any case; returns whether any is on its way."""
        used = held + sum(value.nbytes for value, _, _ in self._issued)
        while self._waiting:
            used += self._waiting[0].nbytes
            if self._issued and used > self._budget:
                break
            value = self._waiting.popleft()
            self._issued.append((value, *value.gather()))
        return bool(self._issued)

    def take(self) -> tuple[FullValue, torch.Tensor]:
        """Waits for the oldest and hands it out."""
        value, full, pending = self._issued.popleft()
        pending.wait()
        return value, full
