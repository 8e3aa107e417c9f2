"""Short messages between two ranks of one host: a pipe in each direction, which ends with its process.

Pipes have no name. A peer opens the end that it writes to through `/proc`, which the kernel grants to
processes of the same user only. What was written stays readable when the writer has ended.
"""

from __future__ import annotations

import os
import struct
import weakref
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["Descriptor", "Inbox", "Message", "Outbox"]

_HEADER = struct.Struct("=BQQQI")  # as `Message`, with the payload's length
_READ_AT_ONCE = 1 << 16


class Descriptor:
    """A file descriptor that is closed with its last user.

    Attributes:
        number: What the system calls take; -1 when it is closed.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self._close = weakref.finalize(self, os.close, number)

    def close(self) -> None:
        """Closes it, unless that was done."""
        self._close()
        self.number = -1


class Message(NamedTuple):
    """What one rank tells another.

    Attributes:
        kind: What it is about.
        number: Of a collective.
        nbytes: How much data belongs to it.
        begin: Where in the sender's memory the data lies.
        payload: The data itself, if short.
    """

    kind: int
    number: int = 0
    nbytes: int = 0
    begin: int = 0
    payload: bytes = b""

    def encoded(self) -> bytes:
        """Returns the message as `Inbox.receive` reads it."""
        return _HEADER.pack(*self[:4], len(self.payload)) + self.payload


class Inbox:
    """What one peer writes to this rank.

    Attributes:
        end: To wait for.
        door: Through which the peer reaches the other end; to be closed once it has.
        ended: Whether nothing more can come, since the peer has ended.
    """

    def __init__(self) -> None:
        self.end, self.door = map(Descriptor, os.pipe())
        os.set_blocking(self.end.number, False)
        self.ended = False
        self._unread = b""

    def receive(self) -> Iterator[Message]:
        """Yields what has come, without waiting."""
        try:
            data = os.read(self.end.number, _READ_AT_ONCE)
        except BlockingIOError:
            return
        self.ended = not data
        data, position = self._unread + data, 0
        while len(data) - position >= _HEADER.size:
            kind, number, nbytes, begin, length = _HEADER.unpack_from(data, position)
            end = position + _HEADER.size + length
            if end > len(data):
                break
            yield Message(kind, number, nbytes, begin, data[position + _HEADER.size : end])
            position = end
        self._unread = data[position:]


class Outbox:
    """What this rank writes to one peer.

    Args:
        process: The peer's id.
        door: The descriptor, in that process, of the pipe's end.

    Raises:
        OSError: If it cannot be reached.
    """

    def __init__(self, process: int, door: int) -> None:
        self.end = Descriptor(os.open(f"/proc/{process}/fd/{door}", os.O_WRONLY | os.O_NONBLOCK))
        self._unsent = b""

    def add(self, message: bytes) -> None:
        """Adds a message to what the next `flush` writes."""
        self._unsent += message

    def flush(self) -> bool:
        """Writes as much of what was added as there is room for; returns whether that is all."""
        try:
            while self._unsent:
                self._unsent = self._unsent[os.write(self.end.number, self._unsent) :]
        except BlockingIOError:
            return False
        except OSError:  # it has ended, and so misses nothing, or this is a fork, which has nothing to say
            self._unsent = b""
        return True
