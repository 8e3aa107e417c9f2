"""Full tensors one after the other, the next ones on their way while one is in use, within a budget."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any

import torch

from fsdp_wrap._comm import Pending
from fsdp_wrap._state.full_values import FullValue, gather

__all__ = ["check_budget", "stream"]

_SMALL, _BATCH = 2**16, 2**20
"""Most bytes of a tensor that travels with others, as a message costs more than a copy; and of them all."""

_Issued = tuple[list[FullValue], list[Callable[[], torch.Tensor]], Pending]
"""A batch on its way, what makes each of its full tensors, and what to wait for before."""


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
    waiting, issued, held = deque(_batches(values, budget)), deque[_Issued](), 0
    try:
        while _issue(waiting, issued, budget - held):
            batch, makers = _arrived(issued.popleft())
            for value in batch:
                held = value.nbytes if wanted else 0
                full = _made(value, makers.pop(0), wanted, to_host)
                yield value.key, full
                del full
    except GeneratorExit:
        while _issue(waiting, issued, budget):
            _arrived(issued.popleft())
        raise


def _issue(waiting: deque[list[FullValue]], issued: deque[_Issued], room: int) -> bool:
    """Issues what fits, and one gather in any case; returns whether any is on its way."""
    room -= sum(_nbytes(batch) for batch, _, _ in issued)
    while waiting and (not issued or _nbytes(waiting[0]) <= room):
        batch = waiting.popleft()
        room -= _nbytes(batch)
        issued.append((batch, *gather(batch)))
    return bool(issued)


def _arrived(issued: _Issued) -> tuple[list[FullValue], list[Callable[[], torch.Tensor]]]:
    batch, makers, pending = issued  # which may hold what arrives: it is not to outlive this call
    pending.wait()
    return batch, makers


def _made(value: FullValue, make: Callable[[], torch.Tensor], wanted: bool, to_host: bool) -> torch.Tensor:
    if not wanted:
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    return make().cpu() if to_host else make()


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


def _nbytes(batch: list[FullValue]) -> int:
    """Returns the bytes that a batch takes, with what is made of it."""
    nbytes = sum(value.nbytes for value in batch)
    return nbytes if len(batch) == 1 else 2 * nbytes
