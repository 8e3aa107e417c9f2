"""Gathers and reductions by messages between every two ranks of a process group, in place of its own.

Made for gloo, whose all-gather and reduce-scatter (an all-reduce in disguise, so twice the bytes) first copy
what they are given. Here every byte goes once, from where it lies to where it is wanted. All messages are on
their way when the caller gets its work: nothing is left to drive, so a rank that computes holds up no other.

Messages of two ranks match in the order of their issue, apart for each of the tags below, which are ours.
Unlike a collective's, the works of messages must be waited for without a limit: to gloo, one that ends is the
end of the connections. The group's own limit holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["exchange_gather", "exchange_reduce"]

_GATHER_TAG, _REDUCE_TAG = 0x66736470, 0x66736472  # side by side; no user is likely to choose them


def exchange_gather(group: dist.ProcessGroup, rank: int, parts: Sequence[torch.Tensor]) -> _Messages:
    """Starts to fill the parts of all other ranks by what they send, and to send them this rank's.

    Args:
        group: The process group.
        rank: This process's rank in it.
        parts: One contiguous tensor per rank, of sizes and dtypes that all ranks agree on.
    """
    received = [group.recv([parts[peer]], peer, _GATHER_TAG) for peer in _sources(rank, len(parts))]
    sent = [group.send([parts[rank]], peer, _GATHER_TAG) for peer in _targets(rank, len(parts))]
    return _Messages(received, sent)


def exchange_reduce(
    group: dist.ProcessGroup, rank: int, shard: torch.Tensor, parts: Sequence[torch.Tensor]
) -> _Messages:
    """Starts to sum this rank's parts of all ranks into `shard`, always in the same order.

    Takes memory for two parts less than there are ranks until the end; for one less where parts are narrower.

    Args:
        group: The process group.
        rank: This process's rank in it.
        shard: A contiguous 1-D tensor, overwritten.
        parts: What this rank has to give to each; tensors like `shard`, or of a narrower dtype.
    """
    own = parts[rank]
    if own.dtype == shard.dtype:
        addends = [own, *(torch.empty_like(own) for _ in parts[2:])]
        places = [shard, *addends[1:]]  # the first to come takes the place of the sum
    else:
        places = addends = [torch.empty_like(own) for _ in parts[1:]]
        shard.copy_(own)
    sources = _sources(rank, len(parts))
    received = [group.recv([place], peer, _REDUCE_TAG) for place, peer in zip(places, sources)]
    sent = [group.send([parts[peer]], peer, _REDUCE_TAG) for peer in _targets(rank, len(parts))]
    return _Sum(received, sent, shard, addends)


def _sources(rank: int, size: int) -> list[int]:
    # Every rank begins with another one, so that no rank is asked by all at once.
    return [(rank - step) % size for step in range(1, size)]


def _targets(rank: int, size: int) -> list[int]:
    return [(rank + step) % size for step in range(1, size)]


class _Messages:
    """Messages in flight."""

    def __init__(self, received: list[Any], sent: list[Any]) -> None:
        self._works = deque((*received, *sent))

    def wait(self) -> None:
        """Waits for all of them; raises a `RuntimeError`, also when called again, if one failed."""
        while self._works:
            self._works[0].wait()
            self._works.popleft()
            self._ended()

    def _ended(self) -> None:
        """Called after each work, the received messages in their order first."""


class _Sum(_Messages):
    """Messages whose contents are summed as they come."""

    def __init__(
        self, received: list[Any], sent: list[Any], total: torch.Tensor, addends: Sequence[torch.Tensor]
    ) -> None:
        super().__init__(received, sent)
        self._total = total
        self._addends = deque(addends)

    def _ended(self) -> None:
        if self._addends:
            self._total.add_(self._addends.popleft())
