"""Reads and writes of operators, and the operators that make the host wait."""

from __future__ import annotations

from collections.abc import Sequence
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


class Facts:
    """Facts about an operator from its schema.

    Attributes:
        name: Its qualified name.
        tensors_in: Arguments that may hold tensors: position, name, whether they are written.
        is_view: Whether it only looks at the same memory in another way.
        random: Whether it draws numbers.
        shaped_by_data: Whether the host needs numbers to know the shape of its result.
    """

    def __init__(self, operator: Any) -> None:
        self.name: str = operator._schema.name
        self.tensors_in = tuple(
            (position, argument.name, argument.alias_info is not None and argument.alias_info.is_write)
            for position, argument in enumerate(operator._schema.arguments)
            if "Tensor" in str(argument.type)
        )
        self.is_view: bool = operator.is_view
        self.random = torch.Tag.nondeterministic_seeded in operator.tags
        self.shaped_by_data = not _SHAPED_BY_DATA.isdisjoint(operator.tags)


_FACTS: dict[int, Facts] = {}


def facts_of(operator: Any) -> Facts:
    """Returns what is known of an operator; operators live as long as the process."""
    known = _FACTS.get(id(operator))
    if known is None:
        known = _FACTS[id(operator)] = Facts(operator)
    return known


class Call:
    """One call of an operator: its tensors by their use.

    Attributes:
        name: The operator.
        places: Arguments that hold tensors: the position or the name, and the value.
        given: The tensors among its arguments.
        written: The arguments that it writes.
        read: The arguments whose numbers it reads.
        leaves_undefined: Whether its result holds whatever was there before.
        random: Whether it draws numbers.
    """

    def __init__(self, operator: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        facts = facts_of(operator)
        self.operator, self.name = operator, facts.name
        self.places: list[tuple[int | str, Any]] = []
        self.given: list[torch.Tensor] = []
        self.written: list[torch.Tensor] = []
        others: list[torch.Tensor] = []
        for position, name, writes in facts.tensors_in:
            place = position if position < len(args) else name
            value = args[position] if position < len(args) else kwargs.get(name)
            if isinstance(value, torch.Tensor):
                tensors = [value]
            elif isinstance(value, (list, tuple)):
                tensors = [each for each in value if isinstance(each, torch.Tensor)]
            else:
                continue  # a number may stand for a tensor
            self.places.append((place, value))
            self.given += tensors
            (self.written if writes else others).extend(tensors)
        self.read = [] if self.name in _ONLY_METADATA else others
        self.leaves_undefined = self.name in _WRITES_NOTHING
        self.random, self._shaped_by_data = facts.random, facts.shaped_by_data

    def tells_the_host(self, result: Any) -> bool:
        """Whether the host needs numbers of a tensor to go on."""
        if not self.read:
            return False
        return self._shaped_by_data or any(
            isinstance(each, (bool, int, float, complex)) for each in leaves(result)
        )


def leaves(result: Any) -> Sequence[Any]:
    """Returns the leaves of an operator's result."""
    return (result,) if isinstance(result, torch.Tensor) else tree_leaves(result)
