"""Optimizers whose kernels could be fused: torch's fused ones make no temporaries in their step."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

_FUSED = "fused"


def _groups(optimizers: Iterable[Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields groups of parameters that could be fused and are not, with the names of their classes."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            if _FUSED in group and not group[_FUSED]:
                yield type(optimizer).__name__, group


def unfused(optimizers: Iterable[Any]) -> tuple[str, ...]:
    """Returns the names of the classes of optimizers that take `fused=True` and do not have it."""
    return tuple(dict.fromkeys(name for name, _ in _groups(optimizers)))


def fused(setup: Callable[[], Any]) -> Callable[[], Any]:
    """Makes a setup like another, whose optimizers are fused where they take it."""

    def made() -> Any:
        model, optimizer, step = setup()
        for _, group in _groups(listed(optimizer)):
            group.update(fused=True, foreach=False)
        return model, optimizer, step

    return made


def listed(optimizer: Any) -> list[Any]:
    """Returns the optimizers of a setup, which may be one or several."""
    return [*optimizer] if isinstance(optimizer, (list, tuple)) else [optimizer]
