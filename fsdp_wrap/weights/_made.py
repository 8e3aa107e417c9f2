"""What an engine wants of a model's tensors: one as it is, one with adapters merged, or several joined."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import torch

Fetch = Callable[[], torch.Tensor]
"""Returns the next of the tensors, in memory of its own."""


class Made(Protocol):
    """A tensor that is made of a model's tensors, and is known before these are there.

    Attributes:
        shape: Its shape.
        dtype: Its dtype.
    """

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def takes(self) -> list[Taken]:
        """The tensors of which it is made, in the order in which they are wanted."""

    @property
    def nbytes_beside(self) -> int:
        """The most bytes alive while it is made, and afterwards, beside one of the tensors that it takes."""

    def make(self, fetch: Fetch) -> torch.Tensor:
        """Makes it of what `fetch` returns, in that order."""


@dataclass(frozen=True)
class Taken:
    """One tensor as it is.

    Attributes:
        key: Its name in the model.
        shape: Its shape.
        dtype: That in which it travels.
    """

    key: str
    shape: torch.Size
    dtype: torch.dtype

    @property
    def takes(self) -> list[Taken]:
        return [self]

    @property
    def nbytes_beside(self) -> int:
        return 0

    def make(self, fetch: Fetch) -> torch.Tensor:
        return fetch()


@dataclass(frozen=True)
class LowRank:
    """What one adapter adds to a weight: scale x (second @ first).

    Attributes:
        first: The matrix that takes the input: (rank, in features).
        second: That which gives the output: (out features, rank).
        scale: The factor.
    """

    first: Taken
    second: Taken
    scale: float


@dataclass(frozen=True)
class Merged:
    """A weight with what adapters add to it, computed in the wider of their dtypes.

    Attributes:
        base: The weight: (out features, in features).
        added: By each adapter.
        dtype: Of the sum.
        transposed: Whether the weight is (in features, out features) instead.
    """

    base: Taken
    added: Sequence[LowRank]
    dtype: torch.dtype
    transposed: bool = False

    @property
    def shape(self) -> torch.Size:
        return self.base.shape

    @property
    def takes(self) -> list[Taken]:
        return [*chain.from_iterable((each.first, each.second) for each in self.added), self.base]

    @property
    def nbytes_beside(self) -> int:
        factors = sum(taken.shape.numel() * taken.dtype.itemsize for taken in self.takes[:-1])
        copies = sum(dtype.itemsize for dtype in {self._wide, self.dtype} - {self.base.dtype})
        return factors + self.shape.numel() * copies

    @property
    def _wide(self) -> torch.dtype:
        return torch.promote_types(self.base.dtype, self.added[0].first.dtype)

    def make(self, fetch: Fetch) -> torch.Tensor:
        pairs = [(fetch(), fetch()) for _ in self.added]
        weight = fetch()
        wide = weight.to(self._wide)
        target = wide.t() if self.transposed else wide
        for (first, second), each in zip(pairs, self.added):
            target.addmm_(second.to(wide.dtype), first.to(wide.dtype), alpha=each.scale)
        return wide.to(self.dtype)


@dataclass(frozen=True)
class Joined:
    """Several tensors as one: one after the other along the first dimension, or stacked along a new one.

    Attributes:
        parts: The tensors, of one dtype and shape, but for the first dimension where they are not stacked.
        stacked: Whether they are stacked.
    """

    parts: Sequence[Made]
    stacked: bool = False

    @property
    def shape(self) -> torch.Size:
        first = self.parts[0].shape
        if self.stacked:
            return torch.Size((len(self.parts), *first))
        return torch.Size((sum(part.shape[0] for part in self.parts), *first[1:]))

    @property
    def dtype(self) -> torch.dtype:
        return self.parts[0].dtype

    @property
    def takes(self) -> list[Taken]:
        return [*chain.from_iterable(part.takes for part in self.parts)]

    @property
    def nbytes_beside(self) -> int:
        beside = max(part.nbytes_beside for part in self.parts)
        return self.shape.numel() * self.dtype.itemsize + beside

    def make(self, fetch: Fetch) -> torch.Tensor:
        whole: torch.Tensor | None = None
        for part, place in zip(self.parts, self._places()):
            made = part.make(fetch)
            if whole is None:
                whole = torch.empty(self.shape, dtype=self.dtype, device=made.device)
            whole[place] = made
            del made  # the next one is made beside the whole alone
        assert whole is not None
        return whole

    def _places(self) -> Iterator[int | slice]:
        begin = 0
        for number, part in enumerate(self.parts):
            if self.stacked:
                yield number
            else:
                yield slice(begin, begin := begin + part.shape[0])
