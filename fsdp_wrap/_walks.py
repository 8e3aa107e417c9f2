"""Walks over the modules of a tree."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import nn

__all__ = ["children_first", "walk"]


def walk(module: nn.Module, *, all_names: bool = False) -> Iterator[tuple[str, nn.Module]]:
    """Yields what `module.named_modules()` does, in its order, at a cost that does not grow with the depth.

    Args:
        module: Yielded first, without a name.
        all_names: Yield a module once for every name that it has.
    """
    stack, seen = [("", module)], set[nn.Module]()
    while stack:
        name, current = stack.pop()
        if not all_names:
            if current in seen:
                continue
            seen.add(current)
        yield name, current
        prefix = f"{name}." if name else ""
        for own, child in reversed(current._modules.items()):
            if child is not None:
                stack.append((prefix + own, child))


def children_first(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    """Reorders what `own_modules` yields, from parents before children to children before parents."""
    waiting: list[tuple[str, nn.Module]] = []
    for name, module in modules:
        while waiting and waiting[-1][0] and not name.startswith(f"{waiting[-1][0]}."):
            yield waiting.pop()
        waiting.append((name, module))
    yield from reversed(waiting)
