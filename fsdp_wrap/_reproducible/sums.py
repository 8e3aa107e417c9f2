"""Sums of gradients over micro-batches, ranks and replicas by one tree.

A rank first adds the gradients of its own micro-batches, which are consecutive. After its last backward each
rank gets its part of the sums of all ranks, and adds them itself. Over replicas it gets a piece of that part,
so that no element is added twice.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from fsdp_wrap._comm import Communicator, Finished, Pending
from fsdp_wrap._core import PlugIn, Precedence, ceil_div
from fsdp_wrap._params import Buffers, Segment, ShardedParams, UnitGradients
from fsdp_wrap._reproducible.tree import Node, SumTree

_NOTHING = -0.0
"""The sum of micro-batches that did not use a unit: to add it changes no number, whatever its sign."""


class TreeSums(PlugIn):
    """The sums of one unit, to which it is attached, from the first backward of a step to the last.

    Args:
        buffers: The unit's.
        leaves: Number of micro-batches in a step.

    Attributes:
        per_rank: Number of micro-batches of each rank.
    """

    order = Precedence.RANKS

    def __init__(self, buffers: Buffers, leaves: int) -> None:
        self._ranks, self._replicas = buffers.communicator, buffers.replicas
        self._copies, self._leaves = buffers.replicas.size, leaves
        self.per_rank = leaves // (self._ranks.size * self._copies)
        self._index = 0  # of the running backward among this rank's
        self._refusal: RuntimeError | None = None
        self._trees: dict[ShardedParams, SumTree] = {}
        self._added: dict[ShardedParams, int] = {}

    def begin(self, index: int, refusal: RuntimeError | None = None) -> None:
        """Begins this rank's backward of a number, which may bring no gradients, or must not."""
        self._index, self._refusal = index, refusal

    def drop(self) -> None:
        """Drops all sums."""
        self._trees.clear()
        self._added.clear()

    def takes(
        self, gradients: UnitGradients, segments: Sequence[Segment], full: Sequence[torch.Tensor]
    ) -> None:
        """Adds the gradients of one backward, which it spoils; issues their exchange after the last one."""
        if self._refusal is not None:
            raise self._refusal
        first = self._first_of(self._ranks.rank)
        for segment, own in zip(segments, full):
            params = segment.params
            if self._added.get(params) == self._index:
                raise _came_twice(segment)
            self._added[params] = self._index
            tree = self._trees.setdefault(params, SumTree(first, segment.dtypes.reduce))
            tree.push(Node(first + self._index, 1, own))
            if self._index + 1 < self.per_rank:
                tree.settle()
                segment.gradients.drop()
        gradients.join(self._exchange([] if self._index + 1 < self.per_rank else segments))

    def averaged(self, sharded: ShardedParams, reduced: torch.Tensor) -> None:
        """Makes zeros positive, as the notes of used parameters do with the first element on each rank."""
        reduced[: reduced.numel() - sharded.layout.noted_numel].add_(0.0)

    def finish_without(self, segments: Sequence[Segment]) -> None:
        """Hands over sums of earlier backwards where the last one brought nothing; collective."""
        left = [segment for segment in segments if segment.params in self._trees]
        if left:
            self._exchange(left).finish()
        self._added.clear()

    def _first_of(self, rank: int) -> int:
        """Returns the first micro-batch of a rank of this copy."""
        return (self._replicas.rank * self._ranks.size + rank) * self.per_rank

    def _exchange(self, segments: Sequence[Segment]) -> TreeReduction:
        """Issues the exchange of this copy's sums; of none before the last backward."""
        spans = [nodes_within(self._first_of(rank), self.per_rank) for rank in range(self._ranks.size)]
        trees = [self._trees.pop(segment.params) for segment in segments]
        for tree in trees:
            tree.fill(self._first_of(self._ranks.rank) + self.per_rank)
        exchanges = [
            Exchange(self._ranks, tree.nodes, spans, segment.layout.shard_numel)
            for segment, tree in zip(segments, trees)
        ]
        return TreeReduction(self, segments, exchanges)

    def add(self, segment: Segment, nodes: Sequence[Node]) -> None:
        """Adds the sums of all ranks of this copy, and of the other copies; hands the total over."""
        dtype, replicas = segment.dtypes.reduce, self._replicas
        if replicas.size > 1:
            nodes = self._over_replicas(nodes, dtype)
        tree = SumTree(0, dtype)
        for node in nodes:
            tree.push(node)
        total = tree.total(self._leaves)
        assert total.value is not None
        shard = self._gathered(total.value, segment) if replicas.size > 1 else total.value
        if shard is total.value and not total.own:
            shard = shard.to(dtype, copy=True)
        segment.gradients.add_reduced(shard)

    def _over_replicas(self, nodes: Sequence[Node], dtype: torch.dtype) -> list[Node]:
        """Exchanges sums with the other copies; returns all sums, for a piece of this rank's part."""
        number = self._ranks.size * self.per_rank
        own = SumTree(self._replicas.rank * number, dtype)
        for node in nodes:
            own.push(node)
        spans = [nodes_within(copy * number, number) for copy in range(self._copies)]
        numel = max(node.value.numel() for node in own.nodes if node.value is not None)
        exchange = Exchange(self._replicas, own.nodes, spans, ceil_div(numel, self._copies))
        return exchange.wait()

    def _gathered(self, piece: torch.Tensor, segment: Segment) -> torch.Tensor:
        """Returns the whole of this rank's part, of which each replica has a piece."""
        replicas = self._replicas
        full = replicas.empty(replicas.size * piece.numel(), segment.dtypes.reduce)
        replicas.all_gather([full], lambda: replicas.own_part(full).copy_(piece)).wait()
        return full[: segment.layout.shard_numel]


class Exchange:
    """Sums of one tensor on their way: each rank gets its part of those of all ranks.

    Args:
        ranks: The ranks.
        nodes: This rank's sums.
        spans: (start, length) of each rank's sums.
        part: Number of elements of a rank's part.
    """

    def __init__(
        self, ranks: Communicator, nodes: Sequence[Node], spans: Sequence[list[tuple[int, int]]], part: int
    ) -> None:
        self._spans, self._part = [span for of_rank in spans for span in of_rank], part
        self._pending: Pending = Finished()
        self._nodes = [*nodes]
        values = [node.value for node in nodes if node.value is not None]
        if ranks.size == 1:
            self._received: torch.Tensor | None = None
            return
        dtype = max((value.dtype for value in values), key=lambda candidate: candidate.itemsize)
        if len(nodes) == 1 and values[0].numel() == ranks.size * part:
            sent = values[0]
        else:
            sent = ranks.empty(ranks.size * len(nodes) * part, dtype)
            for number, node in enumerate(nodes):
                _cut(node.value, sent.view(ranks.size, len(nodes), part)[:, number])
        self._received = ranks.empty(len(self._spans) * part, dtype)
        coming, going = [len(of_rank) * part for of_rank in spans], [len(nodes) * part] * ranks.size
        lengths = None if coming == going else (coming, going)
        self._pending = ranks.all_to_all(self._received, sent, lengths)

    def wait(self) -> list[Node]:
        """Waits, and returns this rank's part of all ranks' sums."""
        self._pending.wait()
        if self._received is None:
            return self._nodes
        parts = self._received.view(len(self._spans), self._part).unbind()
        return [Node(*span, part) for span, part in zip(self._spans, parts)]


class TreeReduction:
    """A unit's sums after its last backward, on their way to the ranks that add them."""

    partial = False

    def __init__(self, sums: TreeSums, segments: Sequence[Segment], exchanges: Sequence[Exchange]) -> None:
        self._sums, self._segments, self._exchanges = sums, segments, [*exchanges]

    def finish(self) -> None:
        """Waits, and gives the sums of the step to the sharded parameters."""
        received = [exchange.wait() for exchange in self._exchanges]
        self._exchanges.clear()
        for segment, nodes in zip(self._segments, received):
            self._sums.add(segment, nodes)

    def abandon(self) -> None:
        """Waits, and drops the gradients."""
        for exchange in self._exchanges:
            exchange.wait()
        for segment in self._segments:
            segment.gradients.drop()


def _came_twice(segment: Segment) -> RuntimeError:
    return RuntimeError(
        f"the gradient of '{segment.layout.fqns[0]}' came in two parts of one backward, whose sum depends on "
        "the number of ranks: use checkpoints with use_reentrant=False"
    )


def nodes_within(first: int, number: int) -> list[tuple[int, int]]:
    """Returns (start, length) of the nodes to which leaves from `first` on add up."""
    tree = SumTree(first, torch.float32)
    tree.fill(first + number)
    return [(node.start, node.length) for node in tree.nodes]


def _cut(value: torch.Tensor | None, pieces: torch.Tensor) -> None:
    """Copies a sum into rows, one for each rank, and fills up the last ones."""
    pieces.fill_(_NOTHING)
    length = pieces.shape[1]
    for row, part in zip(pieces, () if value is None or not length else torch.split(value, length)):
        row[: part.numel()].copy_(part)
