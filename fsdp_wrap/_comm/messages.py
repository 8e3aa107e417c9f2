"""Gathers and reductions by messages between every two ranks of a process group, in place of its own.

Made for gloo, whose all-gather and reduce-scatter (an all-reduce in disguise, so twice the bytes) first copy
what they are given. Here every byte goes once, from where it lies to where it is wanted. All messages are on
their way when the caller gets its work: nothing is left to drive, so a rank that computes holds up no other.

Messages of two ranks match in the order of their issue, apart for each of the tags below, which are ours.
Unlike a collective's, the works of messages must be waited for without a limit: to gloo, one that ends is the
end of the connections. So a thread waits, and who wants to look around meanwhile waits for the thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fsdp_wrap._comm.groups import Ranks
from fsdp_wrap._comm.lanes import Pending
from fsdp_wrap._comm.objects import as_transport
from fsdp_wrap._comm.process_group import Fill, GroupCommunicator, Tensors

_GATHER_TAG, _REDUCE_TAG = 0x66736470, 0x66736472  # side by side; no user is likely to choose them
_IN_VAIN = "a rank died before all of its messages had come"


def _lives(peer: int) -> bool:
    return True


def exchange_gather(
    group: dist.ProcessGroup,
    rank: int,
    parts: Mapping[int, torch.Tensor],
    lives: Callable[[int], bool] = _lives,
) -> Messages:
    """Starts to fill the parts of some other ranks by what they send, and to send them this rank's.

    Args:
        group: The process group.
        rank: This process's rank in it.
        parts: One contiguous tensor for each rank that takes part, of sizes and dtypes that they agree on.
        lives: Tells whether another rank lives, as far as can be known.
    """
    sources, targets = _sources(rank, parts), _targets(rank, parts)
    received = [(peer, group.recv([parts[peer]], peer, _GATHER_TAG)) for peer in sources]
    sent = [(peer, group.send([parts[rank]], peer, _GATHER_TAG)) for peer in targets]
    return Messages([*received, *sent], lives)


def exchange_reduce(
    group: dist.ProcessGroup,
    rank: int,
    shard: torch.Tensor,
    parts: Mapping[int, torch.Tensor],
    lives: Callable[[int], bool] = _lives,
) -> Messages:
    """Starts to sum this rank's parts of some ranks into `shard`, always in the same order.

    Takes memory for two parts less than there are ranks until the end; for one less where parts are narrower.

    Args:
        group: The process group.
        rank: This process's rank in it.
        shard: A contiguous 1-D tensor, overwritten.
        parts: What this rank has to give to each that takes part: like `shard`, or of a narrower dtype.
        lives: Tells whether another rank lives, as far as can be known.
    """
    own, sources, targets = parts[rank], _sources(rank, parts), _targets(rank, parts)
    if own.dtype == shard.dtype:
        addends = [own, *(torch.empty_like(own) for _ in sources[1:])]
        places = [shard, *addends[1:]]  # the first to come takes the place of the sum
    else:
        places = addends = [torch.empty_like(own) for _ in sources]
        shard.copy_(own)
    received = [(peer, group.recv([place], peer, _REDUCE_TAG)) for place, peer in zip(places, sources)]
    sent = [(peer, group.send([parts[peer]], peer, _REDUCE_TAG)) for peer in targets]

    def add() -> None:
        for addend in addends:
            shard.add_(addend)

    return Messages([*received, *sent], lives, add)


def _sources(rank: int, ranks: Iterable[int]) -> list[int]:
    # Every rank begins with another one, so that no rank is asked by all at once.
    return _targets(rank, ranks)[::-1]


def _targets(rank: int, ranks: Iterable[int]) -> list[int]:
    every = list(ranks)
    own = every.index(rank)
    return every[own + 1 :] + every[:own]


class Messages:
    """Messages in flight; takes the place of a process group's work.

    Args:
        works: Of each message, in the order to wait for them, with the peer.
        lives: Tells whether a peer lives, as far as can be known.
        finish: What is to be done when all have come.
    """

    def __init__(
        self,
        works: Sequence[tuple[int, Any]],
        lives: Callable[[int], bool],
        finish: Callable[[], object] = lambda: None,
    ) -> None:
        self._works, self._lives, self._finish = works, lives, finish
        self._awaited = works[0][0]
        self._suspect: int | None = None
        self._ended = False
        self._failure: str | None = None
        self._thread: threading.Thread | None = None

    def is_completed(self) -> bool:
        """Whether there is nothing left to wait for: all have come, or one has failed."""
        return self._ended

    def wait(self, limit: timedelta | None = None) -> None:
        """Waits until all have come.

        Args:
            limit: How long at most; they go on.

        Raises:
            RuntimeError: If that takes longer, or one has failed, then also when called again.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._wait_for_all, daemon=True)
            self._thread.start()
        while not self._ended:
            self._thread.join(1.0 if limit is None else limit.total_seconds())
            if not self._thread.is_alive():
                self._ended = True
                if self._failure is None:
                    self._try_to_finish()
            elif self._is_awaited_in_vain():
                self._ended, self._failure = True, _IN_VAIN
            elif limit is not None:
                raise RuntimeError("the bytes are on their way still")
        if self._failure is not None:
            raise RuntimeError(self._failure)

    def _wait_for_all(self) -> None:
        try:
            for peer, work in self._works:
                self._awaited = peer
                work.wait()
        except RuntimeError as error:
            self._failure = str(error)

    def _try_to_finish(self) -> None:
        try:
            self._finish()
        except RuntimeError as error:
            self._failure = str(error)

    def _is_awaited_in_vain(self) -> bool:
        """Whether a peer is dead and was so the last time: what it had sent would have come."""
        peer, before = self._awaited, self._suspect
        self._suspect = None if self._lives(peer) else peer
        return self._suspect == before == peer


class ExchangeCommunicator(GroupCommunicator):
    """Messages between every two ranks where tensors are large enough, else the group's own collectives.

    Args:
        ranks: The group, over gloo.
        device: The CPU.
        least: From how many bytes on a full tensor is exchanged, the same on all ranks; infinite for never.
    """

    def __init__(self, ranks: Ranks, device: torch.device, least: float) -> None:
        super().__init__(ranks, device)
        self._least = least

    def _gather(self, full: Tensors, fill: Fill, group: dist.ProcessGroup, async_op: bool) -> list[Any]:
        works = super()._gather([each for each in full if each.nbytes < self._least], fill, group, async_op)
        for each in full:
            if each.nbytes >= self._least:
                parts = self._by_rank(as_transport(each))
                works.append(exchange_gather(group, self.rank, parts, self._lives))
        return works

    def reduce_scatter(self, shards: Tensors, full: Tensors) -> Pending:
        if any(each.nbytes < self._least for each in full):
            return super().reduce_scatter(shards, full)
        return self._issue(self._reduce_lane, partial(self._reduce, shards, full))

    def _reduce(self, shards: Tensors, full: Tensors, group: dist.ProcessGroup, async_op: bool) -> list[Any]:
        works = []
        for shard, each in zip(shards, full):
            if each.nbytes < self._least:
                works += super()._reduce([shard], [each], group, async_op)
            else:
                works.append(exchange_reduce(group, self.rank, shard, self._by_rank(each), self._lives))
        return works

    def _by_rank(self, full: torch.Tensor) -> dict[int, torch.Tensor]:
        return dict(enumerate(full.chunk(self.size)))

    def _lives(self, rank: int) -> bool:
        assert self.positions is not None
        return self.positions.lives(dist.get_global_rank(self._group, rank))
