"""What is written of parameters: tensors under the names of the files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

Described = Mapping[str, tuple[Sequence[int], torch.dtype]]
"""Shape and dtype of tensors by their names."""
Tensors = dict[str, torch.Tensor]
Make = Callable[[Tensors], Tensors]


@dataclass(frozen=True)
class StoredParams:
    """Tensors of files that are made of one or several parameters.

    Attributes:
        params: Names of these.
        described: The tensors.
        make: Makes them.
    """

    params: tuple[str, ...]
    described: Described
    make: Make

    @classmethod
    def renamed(cls, param: str, name: str, described: tuple[Sequence[int], torch.dtype]) -> StoredParams:
        """Returns what is stored of a parameter as it is."""
        return cls((param,), {name: described}, lambda given: {name: given[param]})

    @classmethod
    def converted(cls, params: Sequence[str], described: Described, make: Make) -> StoredParams:
        """Describes the tensors that `make` makes of parameters, by calling it on the meta device."""
        empty = {
            param: torch.empty(tuple(described[param][0]), dtype=described[param][1], device="meta")
            for param in params
        }
        made = {name: (value.shape, value.dtype) for name, value in make(empty).items()}
        return cls(tuple(params), made, make)
