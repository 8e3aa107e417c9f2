"""Reads and writes of operators, and the operators that make the host wait."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

_ONLY_METADATA = frozenset(
    f"aten::{name}"
    for name in (
        "empty_like new_empty new_zeros new_ones new_full new_empty_strided zeros_like ones_like full_like "
        "rand_like randn_like is_same_size is_pinned sym_size sym_stride sym_numel sym_storage_offset "
        "is_strides_like_format is_non_overlapping_and_dense dim size stride"
    ).split()
)
"""Operators that look at no number of their arguments."""

_WRITES_NOTHING = frozenset(
    f"aten::{name}" for name in ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided")
)

_SHAPED_BY_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


@cache
def tensors_in(operator: Any) -> tuple[tuple[int, str, bool], ...]:
    """Returns the arguments that may hold tensors: position, name, and whether they are written."""
    return tuple(
        (position, argument.name, argument.alias_info is not None and argument.alias_info.is_write)
        for position, argument in enumerate(operator._schema.arguments)
        if "Tensor" in str(argument.type)
    )


class Call:
    """One call of an operator: its tensors by their use.

    Attributes:
        given: The tensors among its arguments.
        written: The arguments that it writes.
        read: The arguments whose numbers it reads.
        leaves_undefined: Whether its result holds whatever was there before.
    """

    def __init__(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.operator, self.name = operator, operator._schema.name
        self.given: list[torch.Tensor] = []
        self.written: list[torch.Tensor] = []
        others: list[torch.Tensor] = []
        for position, name, writes in tensors_in(operator):
            value = args[position] if position < len(args) else kwargs.get(name)
            if isinstance(value, torch.Tensor):
                tensors = [value]
            elif isinstance(value, (list, tuple)):
                tensors = [item for item in value if isinstance(item, torch.Tensor)]
            else:
                continue  # a number may stand for a tensor
            self.given += tensors
            (self.written if writes else others).extend(tensors)
        self.read = [] if self.name in _ONLY_METADATA else others
        self.leaves_undefined = self.name in _WRITES_NOTHING
        self.random = torch.Tag.nondeterministic_seeded in operator.tags

    def tells_the_host(self, result: Any) -> bool:
        """Whether the host needs numbers of a tensor to go on."""
        if not self.read:
            return False
        numbers = (isinstance(leaf, (bool, int, float, complex)) for leaf in leaves(result))
        return not _SHAPED_BY_DATA.isdisjoint(self.operator.tags) or any(numbers)


def leaves(result: Any) -> Sequence[Any]:
    """Returns the leaves of an operator's result."""
    return (result,) if isinstance(result, torch.Tensor) else tree_leaves(result)
