"""The ranks that hold the boxes of a tensor, and what each writes. Tensors that are cut alike share it."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from fsdp_wrap.checkpoint._manifest import Box
from fsdp_wrap.checkpoint._planning.divisions import Division, is_empty
from fsdp_wrap.checkpoint._planning.holding import PICKLED_BOX, Sharing, box_of


class Ownership(ABC):
    """The boxes of a tensor and the ranks that hold them.

    Attributes:
        part: Its properties.
        owners: By replica and piece: the rank, numbered among those that save.
    """

    def __init__(self, part: Sharing, owners: torch.Tensor) -> None:
        self.part, self.owners = part, owners

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        return self.part.cut.shape

    @cached_property
    def chunks(self) -> list[ChunkStorageMetadata]:
        """The boxes, as DCP's metadata have them."""
        return [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in self.boxes()
        ]

    @abstractmethod
    def nbytes(self) -> torch.Tensor:
        """Returns the bytes of each piece."""

    @abstractmethod
    def boxes(self) -> Sequence[Box]:
        """Returns all boxes."""

    @abstractmethod
    def due(self, rank: int, replica: int, items: Sequence[WriteItem]) -> Sequence[WriteItem] | None:
        """Returns which of its items a rank writes; None if it lacks some.

        Args:
            rank: The rank.
            replica: The replica that writes.
            items: What the rank holds of the tensor.
        """


class OwnedOnce(Ownership):
    """No two ranks hold the same: each writes what it holds. The pieces are all that a rank holds."""

    def __init__(self, part: Sharing, cut: Division, ranks: torch.Tensor) -> None:
        super().__init__(part, ranks.unsqueeze(0))
        self._cut = cut

    def nbytes(self) -> torch.Tensor:
        return self._cut.numels() * itemsize_of(self.part)

    def boxes(self) -> Sequence[Box]:
        return [box for of_place in self._cut.boxes() for box in of_place if not is_empty(box)]

    def due(self, rank: int, replica: int, items: Sequence[WriteItem]) -> Sequence[WriteItem] | None:
        held = [box_of(item) for item in items]
        numel = sum(math.prod(sizes) for _, sizes in held)
        if numel != int(self._cut.numels()[self.owners[0] == rank].sum()):
            return None
        return [item for item, box in zip(items, held) if not is_empty(box)]


class OwnedInCopies(Ownership):
    """Boxes of which several ranks may hold the same; each of them is a piece."""

    def __init__(self, part: Sharing, holders: Mapping[Box, Sequence[int]]) -> None:
        replicas = min(map(len, holders.values()), default=0)
        by_replica = [[ranks[replica] for ranks in holders.values()] for replica in range(replicas)]
        super().__init__(part, torch.tensor(by_replica))
        self._boxes = [*holders]
        self._nbytes = torch.tensor([math.prod(sizes) * itemsize_of(part) for _, sizes in holders])
        self._due: dict[tuple[int, int], set[Box]] = {}

    def nbytes(self) -> torch.Tensor:
        return self._nbytes

    def boxes(self) -> Sequence[Box]:
        return self._boxes

    def due(self, rank: int, replica: int, items: Sequence[WriteItem]) -> Sequence[WriteItem] | None:
        wanted = self._due.get((rank, replica))
        if wanted is None:
            own = (self.owners[replica] == rank).nonzero().flatten().tolist() if self._boxes else []
            wanted = self._due[rank, replica] = {self._boxes[number] for number in own}
        if not wanted:
            return []
        there = {_place_of(item): item for item in items}
        if not wanted <= there.keys():
            return None
        return [item for box, item in there.items() if box in wanted]


def itemsize_of(part: Sharing) -> int:
    """Returns the bytes of an element; what is pickled counts as one."""
    return 1 if part.kind is None else part.kind.dtype.itemsize


def _place_of(item: WriteItem) -> Box:
    return PICKLED_BOX if item.type is WriteItemType.BYTE_IO else box_of(item)
