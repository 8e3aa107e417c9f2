"""The channel of a group whose ranks share a host: data from rank to rank through shared memory.

A rank *posts* data: it copies them into its own memory and tells the readers where. They read there when they
wait, and say so, upon which the piece is free again. Nobody waits for readers, so a collective completes as
soon as all ranks have posted it, in whatever order they wait. Short data travel within the message.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import select
import time
import weakref
from collections.abc import Iterable, Sequence
from enum import IntEnum

import torch

from fsdp_wrap._shared_memory import PeerMemory, SharedMemory
from fsdp_wrap._signals import Inbox, Message, Outbox

__all__ = ["Channel", "Kind", "Peer"]

_SHORT = 2048
"""Up to so many bytes travel within the message."""

_LARGE = 1 << 20
"""From so many bytes on, their owner learns at once that it has them back; else with the next message."""

_ALIGNMENT = 64
_UNSENT_PAUSE = 0.001  # seconds between attempts to write where a pipe was full


class Kind(IntEnum):
    """What is posted; DONE says that a piece was read."""

    DONE = 0
    ALL_GATHER = 1
    REDUCE_SCATTER = 2
    ALL_REDUCE = 3
    GATHER = 4
    SCATTER = 5
    OBJECT = 6
    ALL_TO_ALL = 7


class Peer:
    """One other rank: the ways to and from it, and what it has posted that this rank has not read yet.

    Args:
        inbox: What it writes.
        outbox: What it reads.
        memory: Where it puts data.
    """

    def __init__(self, inbox: Inbox, outbox: Outbox, memory: PeerMemory) -> None:
        self.inbox, self.outbox, self._memory = inbox, outbox, memory
        self.posted: dict[int, Message] = {}
        self._unwanted: set[int] = set()

    def note(self, message: Message) -> None:
        """Notes that it has posted something."""
        self.posted[message.number] = message
        if message.number in self._unwanted:
            self._unwanted.remove(message.number)
            self.release(message.number)

    def data(self, number: int) -> torch.Tensor:
        """Returns the bytes that it has posted, until `release`."""
        message = self.posted[number]
        if message.begin:
            return self._memory.tensor(message.begin, message.nbytes)
        return torch.frombuffer(bytearray(message.payload or b"\0"), dtype=torch.uint8)[: message.nbytes]

    def release(self, number: int) -> None:
        """Ends the reading, or the wish to read, of what it has posted or will post."""
        message = self.posted.pop(number, None)
        if message is None:
            self._unwanted.add(number)
        elif message.begin:
            self.outbox.add(Message(Kind.DONE, begin=message.begin).encoded())
            if message.nbytes >= _LARGE:
                self.outbox.flush()


class Channel:
    """Data from rank to rank, in collectives that all ranks number alike.

    Args:
        memory: This rank's.
        peers: The other ranks of the group.
    """

    def __init__(self, memory: SharedMemory, peers: dict[int, Peer]) -> None:
        self.peers = peers
        self._memory = memory
        self._numbers = itertools.count(1)
        self._readers: dict[int, tuple[int, int]] = {}  # how many are still to read a piece, and its bytes
        self._poll = select.poll()
        for peer in peers.values():
            self._poll.register(peer.inbox.end.number, select.POLLIN)
        self._process = os.getpid()
        _channels.add(self)

    def close(self) -> None:
        """Ends all communication."""
        for peer in self.peers.values():
            peer.inbox.end.close()
            peer.outbox.end.close()

    def begin(self) -> int:
        """Returns the number of the next collective."""
        return next(self._numbers)

    def post(self, kind: Kind, number: int, tensors: Sequence[torch.Tensor], ranks: Iterable[int]) -> None:
        """Makes tensors readable to some ranks; they may be changed afterwards."""
        self._require_same_process()
        peers = [self.peers[rank] for rank in ranks]
        places, nbytes = _places(tensors)
        if nbytes <= _SHORT:
            message = Message(kind, number, nbytes, payload=_joined(tensors, places, nbytes))
        else:
            message = Message(kind, number, nbytes, self._place(tensors, places, nbytes, len(peers)))
        encoded = message.encoded()
        for peer in peers:
            peer.outbox.add(encoded)
            peer.outbox.flush()

    def _place(self, tensors: Sequence[torch.Tensor], places: list[int], nbytes: int, readers: int) -> int:
        self._receive()  # tells which pieces are free again
        begin = self._memory.take(nbytes)
        self._readers[begin] = readers, nbytes
        piece = self._memory.tensor(begin, nbytes)
        for view, tensor in zip(_views(piece, tensors, places), tensors):
            view.copy_(tensor)
        return begin

    def arrived(self, number: int, ranks: Iterable[int], limit: float) -> bool:
        """Waits until some ranks have posted, and all that this one has posted is on its way.

        Args:
            number: Of the collective.
            ranks: Which.
            limit: Seconds to wait at most.

        Raises:
            RuntimeError: If a rank has ended.
        """
        deadline = time.monotonic() + limit
        while True:
            sent = all([peer.outbox.flush() for peer in self.peers.values()])
            missing = [rank for rank in ranks if number not in self.peers[rank].posted]
            if sent and not missing:
                return True
            for rank in missing:
                if self.peers[rank].inbox.ended:
                    raise RuntimeError(f"rank {rank} of the group has ended")
            left = deadline - time.monotonic()
            if left <= 0:
                return False
            self._require_same_process()
            self._poll.poll(1000 * (left if sent else min(left, _UNSENT_PAUSE)))
            self._receive()

    def _receive(self) -> None:
        for peer in self.peers.values():
            if peer.inbox.ended:
                continue
            for message in peer.inbox.receive():
                if message.kind == Kind.DONE:
                    self._note_read(message.begin)
                else:
                    peer.note(message)
            if peer.inbox.ended:
                self._poll.unregister(peer.inbox.end.number)

    def _note_read(self, begin: int) -> None:
        readers, nbytes = self._readers.pop(begin)
        if readers > 1:
            self._readers[begin] = readers - 1, nbytes
        else:
            self._memory.give_back(begin, nbytes)

    def read(
        self, kind: Kind, number: int, rank: int, like: Sequence[torch.Tensor] | None
    ) -> list[torch.Tensor]:
        """Returns what a rank has posted, until it is released.

        Args:
            kind: Of the collective.
            number: Of the collective.
            rank: Who has posted.
            like: Tensors of the same shapes and dtypes; None for all bytes in one.

        Raises:
            RuntimeError: If it has posted something else.
        """
        message, data = self.peers[rank].posted[number], self.peers[rank].data(number)
        places, nbytes = ([], message.nbytes) if like is None else _places(like)
        if (message.kind, message.nbytes) != (kind, nbytes):
            raise RuntimeError(
                f"ranks communicate differently: this one takes part in {kind.name} of {nbytes} bytes while "
                f"rank {rank} of the group takes part in {Kind(message.kind).name} of {message.nbytes}"
            )
        return [data] if like is None else _views(data, like, places)

    def release(self, number: int, ranks: Iterable[int]) -> None:
        """Ends the reading of what some ranks have posted, or the wish to."""
        for rank in ranks:
            self.peers[rank].release(number)

    def _require_same_process(self) -> None:
        if os.getpid() != self._process:
            raise RuntimeError(
                "a forked process cannot communicate in its parent's groups: make a group in it"
            )


def _places(tensors: Sequence[torch.Tensor]) -> tuple[list[int], int]:
    """Returns where tensors begin that are stored one after the other, and the bytes of all."""
    ends = [0]
    for tensor in tensors:
        ends.append(-(-(ends[-1] + tensor.nbytes) // _ALIGNMENT) * _ALIGNMENT)
    return ends[:-1], ends[-1]


def _views(data: torch.Tensor, like: Sequence[torch.Tensor], places: list[int]) -> list[torch.Tensor]:
    return [
        data.narrow(0, place, tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        for tensor, place in zip(like, places)
    ]


def _joined(tensors: Sequence[torch.Tensor], places: list[int], nbytes: int) -> bytes:
    data = bytearray(nbytes)
    for tensor, place in zip(tensors, places):
        source = tensor.contiguous()
        data[place : place + tensor.nbytes] = ctypes.string_at(source.data_ptr(), tensor.nbytes)
    return bytes(data)


_channels: weakref.WeakSet[Channel] = weakref.WeakSet()


def _close_all() -> None:
    for channel in list(_channels):
        channel.close()


# A copy of a process must neither read what its parent waits for nor hide that it has ended.
os.register_at_fork(after_in_child=_close_all)
