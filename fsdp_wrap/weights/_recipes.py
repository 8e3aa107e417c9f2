"""Recipes for an engine's tensors: one of the model as it is, one with adapters merged, or several joined."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Protocol

import torch

Fetch = Callable[[], torch.Tensor]
"""Returns the next of the tensors, in memory of its own."""


class Formula(Protocol):
    """How to make one of an engine's tensors from a model's; shape and dtype are known before."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def sources(self) -> list[SourceTensor]:
        """The tensors of which it is made, in order."""

    @property
    def nbytes_beside(self) -> int:
        """The most bytes alive while it is made, and afterwards, beside one of its sources."""

    def make(self, fetch: Fetch) -> torch.Tensor:
        """Makes the tensor from its sources, which `fetch` returns in order."""


@dataclass(frozen=True)
class SourceTensor:
    """A tensor of the model as it is; `dtype` is the one in which it travels."""

    key: str
    shape: torch.Size
    dtype: torch.dtype

    @property
    def sources(self) -> list[SourceTensor]:
        return [self]

    @property
    def nbytes_beside(self) -> int:
        return 0

    def make(self, fetch: Fetch) -> torch.Tensor:
        return fetch()


@dataclass(frozen=True)
class LowRank:
    """The update of a weight by one adapter: scale x (second: out x rank) @ (first: rank x in)."""

    first: SourceTensor
    second: SourceTensor
    scale: float


@dataclass(frozen=True)
class Merged:
    """A weight plus its adapters' updates, computed in the wider of their dtypes."""

    base: SourceTensor  # (out features, in features)
    added: Sequence[LowRank]
    dtype: torch.dtype
    transposed: bool = False  # whether the base is (in features, out features)

    @property
    def shape(self) -> torch.Size:
        return self.base.shape

    @property
    def sources(self) -> list[SourceTensor]:
        return [*chain.from_iterable((low_rank.first, low_rank.second) for low_rank in self.added), self.base]

    @property
    def nbytes_beside(self) -> int:
        factors = sum(taken.shape.numel() * taken.dtype.itemsize for taken in self.sources[:-1])
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
        for (first, second), low_rank in zip(pairs, self.added):
            target.addmm_(second.to(wide.dtype), first.to(wide.dtype), alpha=low_rank.scale)
        return wide.to(self.dtype)


@dataclass(frozen=True)
class Joined:
    """Several tensors as one: one after the other along the first dimension, or stacked along a new one."""

    parts: Sequence[Formula]
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
    def sources(self) -> list[SourceTensor]:
        return [*chain.from_iterable(part.sources for part in self.parts)]

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
