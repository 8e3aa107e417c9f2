"""Full tensors one after the other, the next ones on their way while one is in use, within a budget."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_wrap._device import Pending
from fsdp_wrap._full_values import FullValue, gather

__all__ = ["check_budget", "stream"]

_SMALL, _BATCH = 2**16, 2**20
"""Most bytes of a tensor that travels with others, as a message costs more than a copy; and of them all."""


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
    Small tensors travel together.

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
            value, make = window.take()
            held = value.nbytes if wanted else 0
            if wanted:
                full = make().cpu() if to_host else make()
            else:
                full = torch.empty(value.shape, dtype=value.dtype, device="meta")
            del make  # with what it is made of
            yield value.key, full
            del full
    except GeneratorExit:
        while window.fill(0):
            window.take()
        raise


def _batches(values: Iterable[FullValue], budget: int) -> Iterator[list[FullValue]]:
    """Puts small values together that travel in one message from each rank.

    The same ones on every rank, whatever it keeps. Beside what arrived, two tensors made of it may be alive,
    or one and that before the batch: twice a batch's size must fit into the budget beside the latter.
    """
    batch: list[FullValue] = []
    room = budget // 2
    for value in values:
        nbytes = sum(each.nbytes for each in (*batch, value))
        small = value.nbytes <= _SMALL and nbytes <= min(_BATCH, room)
        if batch and not (small and batch[0].nbytes <= _SMALL and value.travels_with(batch[0])):
            yield batch
            room = (budget - batch[-1].nbytes) // 2
            batch = []
        batch.append(value)
    if batch:
        yield batch


@dataclass(frozen=True)
class _Issued:
    """A value on its way.

    Attributes:
        value: The value.
        make: Makes the full tensor.
        pending: What to wait for before.
        nbytes: The bytes that are no longer on their way once it is taken.
    """

    value: FullValue
    make: Callable[[], torch.Tensor]
    pending: Pending
    nbytes: int


class _Window:
    """The gathers on their way, oldest first, and what follows them."""

    def __init__(self, values: Iterable[FullValue], budget: int) -> None:
        self._waiting = deque(_batches(values, budget))
        self._issued: deque[_Issued] = deque()
        self._budget = budget

    def fill(self, held: int) -> bool:
        """Issues what fits beside `held` bytes, and one in any case; returns whether any is on its way."""
        used = held + sum(each.nbytes for each in self._issued)
        while self._waiting:
            used += _nbytes(self._waiting[0])
            if self._issued and used > self._budget:
                break
            self._issue(self._waiting.popleft())
        return bool(self._issued)

    def _issue(self, batch: list[FullValue]) -> None:
        makers, pending = gather(batch)
        nbytes = [0] * (len(batch) - 1) + [_nbytes(batch)]  # it all arrives at once, and goes with the last
        self._issued += map(_Issued, batch, makers, [pending] * len(batch), nbytes)

    def take(self) -> tuple[FullValue, Callable[[], torch.Tensor]]:
        """Waits for the oldest and hands it out, with what makes the full tensor."""
        oldest = self._issued.popleft()
        oldest.pending.wait()
        return oldest.value, oldest.make


def _nbytes(batch: list[FullValue]) -> int:
    """Returns the bytes that a batch takes, with what is made of it."""
    nbytes = sum(value.nbytes for value in batch)
    return nbytes if len(batch) == 1 else 2 * nbytes
