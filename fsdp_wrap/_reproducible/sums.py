"""Sums of gradients over ranks, replicas and micro-batches by one tree.

Each rank gets its part of every rank's gradients, and adds them itself. Over replicas it gets a piece of that
part, so that no element is added twice; the sums are gathered after the last backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from fsdp_wrap._comm import Communicator, Pending
from fsdp_wrap._core import ceil_div
from fsdp_wrap._params import Layout, ParamHandle, Segment
from fsdp_wrap._reproducible.tree import Node, SumTree


class Row(NamedTuple):
    """The micro-batches of one backward of all ranks, which are consecutive.

    Attributes:
        first: The first one.
        is_last: Whether no other backward of the step follows.
    """

    first: int
    is_last: bool


class TreeSums:
    """The sums of one unit, from the first backward of a step to the last.

    Args:
        handle: The unit's.
        leaves: Number of micro-batches in a step.
    """

    def __init__(self, handle: ParamHandle, leaves: int) -> None:
        self._ranks, self._replicas, self._leaves = handle.communicator, handle.replicas, leaves
        self.row = Row(0, True)
        self._trees: dict[Layout, SumTree] = {}
        self._added: dict[Layout, Row] = {}

    def drop(self) -> None:
        """Drops all sums."""
        self._trees.clear()
        self._added.clear()

    def start(self, segments: Sequence[Segment], full: Sequence[torch.Tensor]) -> TreeReduction:
        """Issues the exchange of the gradients of one backward, which it spoils."""
        return TreeReduction(self, self._ranks, segments, full, self.row)

    def finish_without(self, segments: Sequence[Segment]) -> None:
        """Hands over sums of earlier backwards where the last one brought nothing."""
        for segment in segments:
            if segment.layout in self._trees:
                self.add(segment, [], Row(self._leaves, is_last=True))
        self._added.clear()

    def add(self, segment: Segment, parts: Sequence[torch.Tensor], row: Row) -> None:
        """Adds the ranks' gradients of this rank's part; hands the sum over after the last backward.

        Args:
            segment: Owner of the gradients.
            parts: One tensor for each rank that shards, in their order; they are spoiled.
            row: The micro-batches.
        """
        dtype, replicas = segment.dtypes.reduce, self._replicas
        if self._added.get(segment.layout) == row:
            raise _came_twice(segment)
        self._added[segment.layout] = row
        first = row.first + replicas.rank * self._ranks.size
        nodes = [Node(number, 1, part) for number, part in enumerate(parts, first)]
        if replicas.size > 1 and nodes:
            nodes = self._exchanged(nodes, row.first, dtype)
        tree = self._trees.setdefault(segment.layout, SumTree(0, dtype))
        for node in nodes:
            tree.push(node)
        if not row.is_last:
            tree.settle()
            segment.gradients.drop()
            return
        del self._trees[segment.layout]
        total = tree.total(self._leaves)
        assert total.value is not None
        shard = self._gathered(total.value, segment) if replicas.size > 1 else total.value
        if shard is total.value and not total.own:
            shard = shard.to(dtype, copy=True)
        segment.gradients.add_reduced(shard)

    def _exchanged(self, leaves: Sequence[Node], first: int, dtype: torch.dtype) -> list[Node]:
        """Exchanges sums of this copy's leaves for those of all replicas, of a piece of this rank's part."""
        replicas, ranks = self._replicas, self._ranks.size
        own = SumTree(leaves[0].start, dtype)
        for leaf in leaves:
            own.push(leaf)
        spans = [_nodes_within(first + copy * ranks, ranks) for copy in range(replicas.size)]
        numel = max(each.value.numel() for each in own.nodes if each.value is not None)
        piece = ceil_div(numel, replicas.size)
        sent = replicas.empty(replicas.size * len(own.nodes) * piece, dtype)
        pieces = sent.view(replicas.size, len(own.nodes), piece)
        for index, node in enumerate(own.nodes):
            assert node.value is not None
            _cut(node.value, pieces[:, index])
        received = replicas.empty(sum(map(len, spans)) * piece, dtype)
        coming, going = [len(each) * piece for each in spans], [len(own.nodes) * piece] * replicas.size
        lengths = None if coming == going else (coming, going)
        replicas.all_to_all(received, sent, lengths).wait()
        flat = [span for each in spans for span in each]
        return [Node(*span, part) for span, part in zip(flat, received.view(-1, piece).unbind())]

    def _gathered(self, piece: torch.Tensor, segment: Segment) -> torch.Tensor:
        """Returns the whole of this rank's part, of which each replica has a piece."""
        replicas = self._replicas
        full = replicas.empty(replicas.size * piece.numel(), segment.dtypes.reduce)
        replicas.all_gather([full], lambda: replicas.own_part(full).copy_(piece)).wait()
        return full[: segment.layout.shard_numel]


class TreeReduction:
    """A unit's gradients of one backward on their way to the ranks that add them."""

    partial = False

    def __init__(
        self,
        sums: TreeSums,
        ranks: Communicator,
        segments: Sequence[Segment],
        full: Sequence[torch.Tensor],
        row: Row,
    ) -> None:
        self._sums, self._segments, self._row = sums, segments, row
        self._received, self._pending = list[torch.Tensor](), list[Pending]()
        self._size = ranks.size
        for each in full:
            received = each
            if ranks.size > 1:
                received = ranks.empty(each.numel(), each.dtype)
                self._pending.append(ranks.all_to_all(received, each))
            self._received.append(received)

    def finish(self) -> None:
        """Waits, and adds the gradients to the sums of the step."""
        self._wait()
        received, self._received = self._received, []
        for segment, each in zip(self._segments, received):
            self._sums.add(segment, each.view(self._size, -1).unbind(), self._row)

    def abandon(self) -> None:
        """Waits, and drops the gradients."""
        self._wait()
        self._received = []
        for segment in self._segments:
            segment.gradients.drop()

    def _wait(self) -> None:
        for each in self._pending:
            each.wait()


def _came_twice(segment: Segment) -> RuntimeError:
    return RuntimeError(
        f"the gradient of '{segment.layout.fqns[0]}' came in two parts of one backward, whose sum depends on "
        "the number of ranks: use checkpoints with use_reentrant=False"
    )


def _nodes_within(first: int, number: int) -> list[tuple[int, int]]:
    """Returns (start, length) of the nodes to which leaves from `first` on add up."""
    tree = SumTree(first, torch.float32)
    for leaf in range(first, first + number):
        tree.push(Node(leaf, 1, None))
    return [(node.start, node.length) for node in tree.nodes]


def _cut(value: torch.Tensor, pieces: torch.Tensor) -> None:
    """Copies a tensor into rows, one for each replica, and fills up the last ones by zeros."""
    length = pieces.shape[1]
    for row, part in zip(pieces, torch.split(value, length) if length else ()):
        row[: part.numel()].copy_(part)
        row[part.numel() :].zero_()
    for row in pieces[ceil_div(value.numel(), length) if length else 0 :]:
        row.zero_()
