"""Gathers and reductions over gloo in one step, in place of the group's own collectives.

gloo's own pass parts from neighbour to neighbour: a gather takes one step less than there are ranks, and a
reduction twice as many, since a reduce-scatter is an all-reduce in disguise. There are two ways.

*Messages*, for large tensors. gloo would first copy its input. Here every byte travels once, and arrives in
place. All messages are under way when the caller gets its work, so a rank that computes holds up no other.
Messages of two ranks match in the order of their issue, for each of the tags below. Unlike a collective's,
their works must be waited for without a limit: gloo closes the connections when such a wait ends. So a thread
waits, and callers wait for the thread.

*At once*, for small tensors. A step wakes threads in turn, which takes far longer than a small tensor takes
to travel. One all-to-all of gloo's sends all parts at once, for a second tensor of the full size. Its work
takes a limit, and no thread of ours waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fsdp_wrap._comm.buffers import resize_watchers, tell_resized
from fsdp_wrap._comm.collectives import REDUCTIONS, as_transport, combine
from fsdp_wrap._comm.groups import Ranks, listening
from fsdp_wrap._comm.lanes import Pending
from fsdp_wrap._comm.process_group import SUM, Fill, GroupCommunicator, Op, Tensors
from fsdp_wrap._comm.works import Works
from fsdp_wrap._core.torch_private import number_of_dispatch_modes

_GATHER_TAG, _REDUCE_TAG = 0x66736470, 0x66736472  # side by side; no user is likely to choose them
_MOST_GATHERED = 1 << 20
"""Bytes of all ranks' tensors together up to which an all-reduce is a gather and a sum."""

_Operation = Callable[..., torch.Tensor]
_CPU, _NO_LIMIT = torch.device("cpu"), timedelta(0)
_IN_VAIN = "a rank died before all of its messages had come"


def exchange_gather(
    group: dist.ProcessGroup,
    rank: int,
    parts: Mapping[int, torch.Tensor],
    lives: Callable[[int], bool] = lambda peer: True,
) -> Messages:
    """Starts to fill the parts of the other ranks by their messages, and sends them this rank's part.

    `parts` has one contiguous tensor for each rank that takes part, of sizes and dtypes that they agree on.
    """
    sources, targets = _peers(rank, parts)
    received = [(peer, group.recv([parts[peer]], peer, _GATHER_TAG)) for peer in sources]
    sent = [(peer, group.send([parts[rank]], peer, _GATHER_TAG)) for peer in targets]
    return Messages([*received, *sent], lives)


def exchange_reduce(
    group: dist.ProcessGroup,
    rank: int,
    shard: torch.Tensor,
    parts: Mapping[int, torch.Tensor],
    lives: Callable[[int], bool] = lambda peer: True,
) -> Messages:
    """Starts to sum this rank's parts of some ranks into `shard`, always in the same order.

    `shard` is contiguous, 1-D and overwritten. `parts` has this rank's addend for each rank that takes part,
    of the shard's dtype or a narrower one. Takes memory for two parts less than there are ranks until the
    end; for one less where parts are narrower.
    """
    own, (sources, targets) = parts[rank], _peers(rank, parts)
    if own.dtype == shard.dtype:
        addends = [own, *(torch.empty_like(own) for _ in sources[1:])]
        places = [shard, *addends[1:]]  # the first to come takes the place of the sum
    else:
        places = addends = [torch.empty_like(own) for _ in sources]
        shard.copy_(own)
    received = [(peer, group.recv([place], peer, _REDUCE_TAG)) for place, peer in zip(places, sources)]
    sent = [(peer, group.send([parts[peer]], peer, _REDUCE_TAG)) for peer in targets]

    def add() -> None:
        for addend in addends:  # torch would widen a narrower one by a copy that no plan sees
            shard.add_(addend if addend.dtype == shard.dtype else addend.to(shard.dtype))
        _free(place for place in places if place is not shard)

    return Messages([*received, *sent], lives, add)


def _peers(rank: int, ranks: Iterable[int]) -> tuple[list[int], list[int]]:
    """Returns the ranks from which to receive and to which to send, in order."""
    every = list(ranks)
    own = every.index(rank)
    # Every rank begins with another one, so that no rank is asked by all at once.
    targets = every[own + 1 :] + every[:own]
    return targets[::-1], targets


class Messages:
    """Messages in flight; takes the place of a process group's work.

    `works` are (peer, work) in the order to wait for them; `finish` is called when all have come.
    """

    def __init__(
        self,
        works: Sequence[tuple[int, Any]],
        lives: Callable[[int], bool],
        finish: Callable[[], object] = lambda: None,
    ) -> None:
        self._works, self._lives, self._finish, self._awaited = works, lives, finish, works[0][0]
        self._suspect: int | None = None
        self._ended = False
        self._failure: str | None = None
        self._thread: threading.Thread | None = None
        self._note: Callable[[], object] = lambda: None

    def is_completed(self) -> bool:
        """Whether all messages have come, or one has failed."""
        return self._ended

    def when_completed(self, note: Callable[[], object]) -> bool:
        """Lets the waiting thread begin now, and call `note` when all have come; returns True."""
        self._note = note
        self._begin_to_wait()
        return True

    def _begin_to_wait(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._wait_for_all, daemon=True)
            self._thread.start()

    def wait(self, limit: timedelta | None = None) -> None:
        """Waits until all messages have come, and finishes.

        Raises a RuntimeError after the limit, or if a message cannot come any more.
        """
        self._begin_to_wait()
        assert self._thread is not None
        while not self._ended:
            self._thread.join(1.0 if limit is None else limit.total_seconds())
            if not self._thread.is_alive():
                self._ended = True
                if self._failure is None:
                    try:
                        self._finish()
                    except RuntimeError as error:
                        self._failure = str(error)
            elif self._is_awaited_in_vain():
                self._ended, self._failure = True, _IN_VAIN
            elif limit is not None:
                raise RuntimeError("the time for these bytes is over, and they are still on their way")
        if self._failure is not None:
            raise RuntimeError(self._failure)

    def _wait_for_all(self) -> None:
        try:
            for peer, work in self._works:
                self._awaited = peer
                work.wait()
            self._note()
        except RuntimeError as error:
            self._failure = str(error)

    def _is_awaited_in_vain(self) -> bool:
        """Whether a peer is dead and was at the last look: its messages would have come by now."""
        peer, before = self._awaited, self._suspect
        self._suspect = None if self._lives(peer) else peer
        return self._suspect == before == peer


def gather_at_once(group: dist.ProcessGroup, rank: int, size: int, full: torch.Tensor) -> Any:
    """Starts to fill an evenly sharded 1-D tensor of any dtype, which has this rank's part."""
    full = as_transport(full)
    length = full.numel() // size
    own = full[rank * length : (rank + 1) * length]
    if number_of_dispatch_modes():
        listening(rank, size)._allgather_base(full.clone(), own)
    copy = own.repeat(size)
    return AllToAll(group, full, copy, spare=[copy])


def reduce_at_once(
    group: dist.ProcessGroup, rank: int, size: int, shard: torch.Tensor, full: torch.Tensor
) -> AllToAll:
    """Starts to sum this rank's part of a 1-D tensor of each rank into `shard`.

    `full` is of the shard's dtype, or a narrower one.
    """
    if number_of_dispatch_modes():
        listening(rank, size)._reduce_scatter_base(shard, full, dist.ReduceScatterOptions())
    parts = torch.empty_like(full)
    end = partial(combine, parts.view(size, shard.numel()).unbind(), shard)
    return AllToAll(group, as_transport(parts), as_transport(full), [parts], end)


def all_reduce_at_once(
    group: dist.ProcessGroup, rank: int, size: int, tensor: torch.Tensor, operation: _Operation
) -> AllToAll:
    """Starts to combine a contiguous tensor of each rank in place."""
    if number_of_dispatch_modes():
        listening(rank, size).allreduce([tensor])
    row = tensor.detach().view(-1)
    every, copy = row.new_empty(size, row.numel()), row.repeat(size)
    end = partial(combine, every.unbind(), row, operation)
    return AllToAll(group, as_transport(every.view(-1)), as_transport(copy), [every, copy], end)


class AllToAll:
    """An all-to-all of even parts in flight; takes the place of a process group's work.

    It holds the sent tensor, so that gloo's thread does not free that. When all parts have come, it calls
    `end` once, and frees the spare tensors. Callers tell dispatch modes.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        received: torch.Tensor,
        sent: torch.Tensor,
        spare: Tensors,
        end: Callable[[], None] | None = None,
    ) -> None:
        backend: Any = group._get_backend(_CPU)
        self._work = backend.alltoall_base(received, sent, [], [])
        self.is_completed, self._sent, self._spare, self._end = self._work.is_completed, sent, spare, end

    def wait(self, limit: timedelta = _NO_LIMIT) -> None:
        """Waits until all parts have come; raises a RuntimeError after the limit."""
        self._work.wait(limit)
        if self._end is not None:
            self._end()
        _free(self._spare)
        self._spare, self._end = [], None


def _free(tensors: Iterable[torch.Tensor]) -> None:
    """Frees the memory of our tensors now: gloo's thread keeps sent ones for a while."""
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)
        if resize_watchers:
            tell_resized(tensor.untyped_storage())


def when_completed(work: Any, note: Callable[[], object]) -> bool:
    """Calls `note` once, in whatever thread, when what a `GroupCommunicator` has issued is complete.

    Returns whether it will be called: works of some collectives, gloo's reduce-scatter among them, do not
    tell.
    """
    if isinstance(work, Messages):
        return work.when_completed(note)
    try:
        work.get_future().add_done_callback(lambda _: note())
    except (RuntimeError, NotImplementedError, AttributeError):  # a stand-in for a work may lack the method
        return False
    return True


class ExchangeCommunicator(GroupCommunicator):
    """A communicator over gloo that takes one step: messages for large tensors, else an all-to-all.

    `least` is the number of bytes from which on a full tensor travels by messages, the same on all ranks.
    """

    def __init__(self, ranks: Ranks, device: torch.device, least: float) -> None:
        super().__init__(ranks, device)
        self._least = least
        self._reduction_in_flight = Works

    def _gather(self, full: Tensors, fill: Fill, group: dist.ProcessGroup, async_op: bool) -> list[Any]:
        fill()
        return [
            gather_at_once(group, self.rank, self.size, tensor)
            if tensor.nbytes < self._least
            else exchange_gather(group, self.rank, self._by_rank(as_transport(tensor)), self._lives)
            for tensor in full
        ]

    def _reduce(self, shards: Tensors, full: Tensors, group: dist.ProcessGroup, async_op: bool) -> list[Any]:
        return [
            reduce_at_once(group, self.rank, self.size, shard, tensor)
            if tensor.nbytes < self._least
            else exchange_reduce(group, self.rank, shard, self._by_rank(tensor), self._lives)
            for shard, tensor in zip(shards, full)
        ]

    def all_reduce(self, tensors: Tensors, op: Op = SUM) -> Pending:
        most = min(self._least, _MOST_GATHERED)
        if op not in REDUCTIONS or any(self.size * tensor.nbytes >= most for tensor in tensors):
            return super().all_reduce(tensors, op)

        def start(group: dist.ProcessGroup, async_op: bool) -> list[Any]:
            operation = REDUCTIONS[op]
            return [all_reduce_at_once(group, self.rank, self.size, tensor, operation) for tensor in tensors]

        return self._issue("reduce", start)

    def _by_rank(self, full: torch.Tensor) -> dict[int, torch.Tensor]:
        return dict(enumerate(full.chunk(self.size)))

    def _lives(self, rank: int) -> bool:
        assert self.positions is not None
        return self.positions.lives(dist.get_global_rank(self.group, rank))
