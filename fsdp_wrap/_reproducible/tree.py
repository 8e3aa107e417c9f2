"""`SumTree`: sums of a step's micro-batches, always added in the same pairs.

Leaf number i is micro-batch i. Two neighbours of the same length, the first of which begins at a multiple of
twice that, are added as soon as both are there. Where the number of leaves is no power of two, what is left
at the end is added from the right. So it never matters how the leaves are spread over ranks and backwards.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(eq=False)
class Node:
    """The sum of consecutive leaves.

    Attributes:
        start: The first leaf.
        length: How many there are.
        value: Their sum, 1-D; None for nothing, as of a unit that no micro-batch used.
        own: Whether the memory is the node's own, to be kept.
    """

    start: int
    length: int
    value: torch.Tensor | None
    own: bool = False


class SumTree:
    """The sums of the leaves from `first` on, in as few nodes as possible.

    Args:
        first: The first leaf.
        dtype: The dtype of the sums, not narrower than that of the leaves.
    """

    def __init__(self, first: int, dtype: torch.dtype) -> None:
        self._next, self._dtype = first, dtype
        self.nodes: list[Node] = []

    def push(self, node: Node) -> None:
        """Adds a node behind the others; its memory may be written to. Leaves that were left out are None."""
        self.fill(node.start)
        self._join(node)

    def fill(self, end: int) -> None:
        """Counts leaves that were left out, up to one that has not come."""
        while self._next < end:
            self._join(Node(self._next, 1, None))

    def _join(self, node: Node) -> None:
        self._next = node.start + node.length
        nodes = self.nodes
        while nodes and nodes[-1].length == node.length and nodes[-1].start % (2 * node.length) == 0:
            node = self._add(nodes.pop(), node)
        nodes.append(node)

    def settle(self) -> None:
        """Copies sums whose memory is not their own."""
        for node in self.nodes:
            if node.value is not None and not node.own:
                node.value, node.own = node.value.to(self._dtype, copy=True), True

    def total(self, leaves: int) -> Node:
        """Returns the sum of all leaves, given their number."""
        self.fill(leaves)
        total = self.nodes.pop()
        while self.nodes:
            total = self._add(self.nodes.pop(), total)
        return total

    def _add(self, left: Node, right: Node) -> Node:
        """Returns a node with the sum of two neighbours, in the memory of one of them if that fits."""
        start, length = left.start, left.length + right.length
        if left.value is None or right.value is None:
            kept = right if left.value is None else left
            return Node(start, length, kept.value, kept.own)
        into, other = (right, left) if right.own and not left.own else (left, right)
        assert into.value is not None and other.value is not None
        wide = into.value.dtype == self._dtype
        total = into.value if wide else into.value.to(self._dtype)
        return Node(start, length, total.add_(other.value), into.own or not wide)
