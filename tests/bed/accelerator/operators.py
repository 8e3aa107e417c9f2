"""What an operator reads and writes, and when it makes the host wait."""

from __future__ import annotations

from collections.abc import Iterator
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

_SHAPED_BY_DATA = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}


class Call:
    """One call of an operator: its tensors by what happens to them.

    Attributes:
        name: The operator.
        given: The tensors among its arguments.
        written: Those of them that it writes.
        read: Those whose numbers it looks at.
    """

    def __init__(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        schema = operator._schema
        self.operator, self.name = operator, schema.name
        self.given: list[torch.Tensor] = []
        self.written: list[torch.Tensor] = []
        others: list[torch.Tensor] = []
        for argument, value in _named(schema.arguments, args, kwargs):
            tensors = [each for each in tree_leaves(value) if isinstance(each, torch.Tensor)]
            self.given += tensors
            written = argument.alias_info is not None and argument.alias_info.is_write
            (self.written if written else others).extend(tensors)
        self.read = [] if self.name in _ONLY_METADATA else others
        self.random = torch.Tag.nondeterministic_seeded in operator.tags

    def tells_the_host(self, result: Any) -> bool:
        """Whether the host needs numbers of a tensor to go on."""
        if not self.read:
            return False
        if _SHAPED_BY_DATA & set(self.operator.tags):
            return True
        return any(isinstance(each, (bool, int, float, complex)) for each in tree_leaves(result))


def _named(arguments: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    for position, argument in enumerate(arguments):
        if position < len(args):
            yield argument, args[position]
        elif argument.name in kwargs:
            yield argument, kwargs[argument.name]
