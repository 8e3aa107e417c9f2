"""`NonFinite`: a tensor with NaN or infinite elements, where it was found, and the error that tells of it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

from fsdp_wrap._params import to_local

T = TypeVar("T")


@dataclass(frozen=True)
class NonFinite:
    """A tensor with elements that are not finite, the first that one rank has seen in a step.

    Attributes:
        rank: The rank that has seen it.
        iteration: Number of the outermost forward.
        look: Number of looks at tensors since that began: comparable between ranks, which run one program.
        made: Whether it was made there, not passed on.
        phase: Spot in the step, such as "output" or "gradient".
        unit: Fully qualified name of the unit, "" for the root.
        module: Fully qualified name of the module, "" for the root.
        tensor: Name of the tensor, such as "parameter 'blocks.0.up.weight'".
        origin: A sentence about how it came to be.
        index: Index of the first element that is not finite; None if it is unknown.
        shape: Shape of the tensor.
        nan: Number of NaN; -1 if unknown.
        inf: Number of infinite elements; -1 if unknown.
        least: Smallest finite element.
        largest: Largest finite element.
        before: The looks before: what was looked at, and its largest absolute value.
    """

    rank: int
    iteration: int
    look: int
    made: bool
    phase: str
    unit: str
    module: str
    tensor: str
    origin: str
    index: tuple[int, ...] | None
    shape: tuple[int, ...]
    nan: int
    inf: int
    least: float
    largest: float
    before: tuple[tuple[str, float], ...]

    @property
    def order(self) -> tuple[int, bool, int]:
        """Sort key: the first in an iteration is smallest; values made here before values that came in."""
        return self.look, not self.made, self.rank

    def describe(self) -> str:
        """Returns the finding as sentences."""
        where = f"module {quoted(self.module)} of unit {quoted(self.unit)}"
        count = f"{self.tensor} of shape {self.shape} is not finite"
        if self.index is not None:
            numel = torch.Size(self.shape).numel()
            count = (
                f"{self.tensor} has {self.nan} NaN and {self.inf} infinite of {numel} elements, the first at "
                f"{[*self.index]} in shape {[*self.shape]}"
            )
        told = f"rank {self.rank}, {where}, phase {self.phase}: {count}. {self.origin}."
        if not math.isnan(self.least):
            told += f" Its finite elements lie between {self.least:.4g} and {self.largest:.4g}."
        if self.before:
            looks = ", ".join(f"{name} {largest:.4g}" for name, largest in self.before)
            told += f" Largest absolute values before it: {looks}."
        return told


class FoundError(RuntimeError, Generic[T]):
    """An error with findings that all ranks know; it can be pickled."""

    def __init__(self, text: str, first: T, also: Sequence[T]) -> None:
        super().__init__(text)
        self.first, self.also = first, also

    def __reduce__(self) -> tuple[type[FoundError[T]], tuple[str, T, Sequence[T]]]:
        return type(self), (str(self), self.first, self.also)


class NonFiniteError(FoundError[NonFinite]):
    """A step had NaN or infinite values; the same on all ranks.

    Args:
        text: The message.

    Attributes:
        first: Where they were first.
        also: Where each other rank has first seen any.
    """


def raise_first(findings: Sequence[NonFinite]) -> None:
    """Raises the error about the findings of all ranks, which all ranks know, the earliest first."""
    first, *also = findings
    seen = "".join(
        f" It was seen on rank {finding.rank} as {finding.phase} of {quoted(finding.unit)}."
        for finding in also
    )
    raise NonFiniteError(
        f"find_nonfinite(): iteration {first.iteration}, {first.describe()}{seen}"
        " The step has ended on all ranks: call zero_grad() before the next",
        first,
        also,
    )


def quoted(name: str) -> str:
    """Returns the name of a module or unit in messages."""
    return f"'{name}'" if name else "(root)"


def ranked(ranks: Sequence[int]) -> str:
    """Returns ranks as words; "" for none."""
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}" if ranks else ""


def looked_at(tensor: torch.Tensor) -> torch.Tensor | None:
    """Returns what can be looked at of a tensor, without autograd: None if it cannot hold NaN."""
    local = to_local(tensor).detach()
    if local.layout is not torch.strided or not local.numel() or local.is_meta:
        return None
    if local.is_complex():
        local = torch.view_as_real(local)
    if not local.is_floating_point() or local.element_size() == 1:
        return None
    return local


def not_finite(tensor: torch.Tensor) -> bool:
    """Whether a tensor has elements that are not finite."""
    seen = looked_at(tensor)
    return seen is not None and not bool(torch.isfinite(seen).all())


def first_true(flags: torch.Tensor) -> int:
    """Returns the place of the first true element of a flattened tensor."""
    return int(flags.reshape(-1).to(torch.uint8).argmax())


def index_at(place: int, shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the index of an element by its place in the flattened tensor."""
    return tuple(int(index) for index in torch.unravel_index(torch.tensor(place), tuple(shape)))
