"""Multiples at which a rank's part of a parameter may begin; integers rounded up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch


def ceil_div(number: int, divisor: int) -> int:
    """Returns the quotient rounded up."""
    return -(-number // divisor)


def round_up(number: int, multiple: int) -> int:
    """Returns the least multiple that is not below a number."""
    return -(-number // multiple) * multiple


@dataclass(frozen=True)
class ShardAlignment:
    """Parts of a parameter begin at multiples of so many of its elements, or at its rows (None)."""

    elements: int | None

    @classmethod
    def of(cls, value: object) -> ShardAlignment | None:
        """Reads the argument `shard_alignment`: a number of elements, "rows", or None for no alignment.

        Raises a TypeError or a ValueError for anything else.
        """
        if value is None:
            return None
        if isinstance(value, str):
            if value != "rows":
                raise ValueError(f"shard_alignment must be 'rows' or a number of elements, not {value!r}")
            return cls(None)
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(
                f"shard_alignment must be a number of elements, 'rows' or None (the default), not {value!r}"
            )
        if value < 1:
            raise ValueError(f"shard_alignment must be positive, but is {value}; None is for anywhere")
        return cls(value)

    @property
    def argument(self) -> int | str:
        """The argument that gives this alignment."""
        return "rows" if self.elements is None else self.elements

    def __str__(self) -> str:
        return "rows" if self.elements is None else f"{self.elements} elements"

    def grain(self, shape: torch.Size) -> int:
        """Returns the number of elements in multiples of which a parameter of this shape is cut."""
        return max(1, shape[1:].numel()) if self.elements is None else self.elements

    def common_grain(self, fqns: Sequence[str], shapes: Sequence[torch.Size]) -> int:
        """Returns the least number of elements that the grains of all these parameters divide.

        Raises a ValueError, with their names, if one rank would have all of them, as their rows coincide so
        seldom.
        """
        grains = [self.grain(shape) for shape in shapes]
        common = math.lcm(*grains)
        numel = sum(shape.numel() for shape in shapes)
        if self.elements is None and common > max(numel, max(grains)):
            named = [*zip(fqns, grains)]
            pairs = [(one, two) for index, one in enumerate(named) for two in named[:index]]
            # Those that coincide most seldom.
            (first, one), (second, other) = max(pairs, key=lambda pair: math.lcm(pair[0][1], pair[1][1]))
            raise ValueError(
                f"shard_alignment='rows' cannot hold for parameters '{first}', with rows of {one} elements, "
                f"and '{second}', with rows of {other}, in one unit of {numel} elements: even shards end at "
                f"rows of all its parameters every {common} elements only. Wrap the modules that hold them "
                "apart, or give a number of elements"
            )
        return common
