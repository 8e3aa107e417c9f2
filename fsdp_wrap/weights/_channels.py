"""From a trainer to one receiver: buckets of bytes, one at a time on its way."""

from __future__ import annotations

import mmap
import os
import socket
import struct
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from fsdp_wrap._core import nbytes_of
from fsdp_wrap._core.torch_private import PrefixStore, TCPStore, gloo_group

_NUMBER = struct.Struct("<q")
_ACCEPTED = b"!"


class PeerLost(RuntimeError):
    """The other side of a channel has ended, or did not answer in time; this side is closed."""


class Channel(ABC):
    """One side of a way for buckets of bytes, which come in the order in which they are sent.

    Args:
        peer: What the other side is called in messages.
        timeout: Seconds to wait for it at most.
        bucket: The most bytes of one bucket.
    """

    def __init__(self, peer: str, timeout: float, bucket: int) -> None:
        self._peer, self._timeout, self.bucket = peer, timeout, bucket
        self._closed = False

    def put(self, data: torch.Tensor) -> None:
        """Sends a bucket: a uint8 tensor in host memory, which may be written to afterwards.

        Returns before it has come, and waits until the one before it has.

        Raises:
            PeerLost: If the other side is gone, or does not take the one before within the time limit.
        """
        with self._told("take what was sent"):
            self._put(data)

    def take(self) -> torch.Tensor:
        """Returns the next bucket, in memory of its own.

        Raises:
            PeerLost: If the other side is gone, or sends nothing within the time limit.
        """
        with self._told("send anything"):
            return self._take()

    def flush(self) -> None:
        """Waits until all that was put has come.

        Raises:
            PeerLost: As `put`.
        """
        with self._told("take what was sent"):
            self._flush()

    def close(self) -> None:
        """Ends this side; may be called twice."""
        if not self._closed:
            self._closed = True
            self._close()

    @contextmanager
    def _told(self, verb: str) -> Iterator[None]:
        if self._closed:
            raise PeerLost(f"the channel to the {self._peer} is closed: open another")
        begin = time.monotonic()
        try:
            yield
        except (OSError, RuntimeError, EOFError) as error:
            self.close()
            waited = time.monotonic() - begin
            late = f"did not {verb} within {self._timeout:g} s"
            gone = f"has ended, or cannot be reached any more (after {waited:.1f} s)"
            raise PeerLost(
                f"the {self._peer} {late if waited >= self._timeout else gone}; open another channel when it "
                "is back, and send all weights"
            ) from error

    @abstractmethod
    def _put(self, data: torch.Tensor) -> None: ...

    @abstractmethod
    def _take(self) -> torch.Tensor: ...

    @abstractmethod
    def _flush(self) -> None: ...

    @abstractmethod
    def _close(self) -> None: ...


class GlooChannel(Channel):
    """Over a gloo process group of two, beside all others of the two processes.

    Both listen on the interface of that address only.

    Args:
        address: "host:port", where the sender listens and the receiver asks.
        receives: Which side this is.
        timeout: As for `Channel`.
        bucket: As for `Channel`; the sender's counts.

    Raises:
        OSError: If the sender cannot listen there.
        PeerLost: If the other side does not come within the time limit.
        ValueError: If `address` is none.
    """

    def __init__(
        self, address: str, *, receives: bool, timeout: float = 60.0, bucket: int | str = "64MB"
    ) -> None:
        super().__init__("sender" if receives else "receiver", timeout, nbytes_of(bucket, "bucket"))
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise ValueError(f"address must be 'host:port', not {address!r}")
        limit, listener = timedelta(seconds=timeout), None if receives else _listening(host, int(port))
        self._other, self._limit = int(not receives), limit
        self._pending: list[tuple[Any, torch.Tensor]] = []
        with self._told("come"):
            store = TCPStore(
                host,
                int(port),
                is_master=not receives,
                timeout=limit,
                wait_for_workers=False,
                master_listen_fd=listener,
            )
            own = PrefixStore("fsdp_wrap.weights", store)
            self._group = gloo_group(own, int(receives), 2, limit, _own_address(host, int(port)))

    def _put(self, data: torch.Tensor) -> None:
        data = data.clone()
        self._flush()
        for tensor in (torch.tensor([len(data)]), data):
            self._pending.append((self._group.send([tensor], self._other, 0), tensor))

    def _flush(self) -> None:
        for work, _ in self._pending:
            work.wait(self._limit)
        self._pending = []

    def _take(self) -> torch.Tensor:
        size = torch.zeros(1, dtype=torch.int64)
        self._group.recv([size], self._other, 0).wait(self._limit)
        data = torch.empty(int(size), dtype=torch.uint8)
        self._group.recv([data], self._other, 0).wait(self._limit)
        return data

    def _close(self) -> None:
        self._pending, self._group = [], None


def _resolved(host: str, port: int) -> tuple[int, tuple[Any, ...]]:
    """Returns the family and address of a host, of IPv4 where it has one: both sides choose alike."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, *_, address = min(found, key=lambda each: each[0] != socket.AF_INET)
    return family, address


def _listening(host: str, port: int) -> int:
    """Returns a descriptor of a socket that listens on one address."""
    family, address = _resolved(host, port)
    return socket.create_server(address[:2], family=family).detach()


def _own_address(host: str, port: int) -> str:
    """Returns this host's address on the way to another, or to itself; nothing is sent."""
    family, address = _resolved(host, port)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])


class SharedMemoryChannel(Channel):
    """Through memory that two processes of one host share; a socket between them tells what lies there.

    Args:
        path: Of the socket, which the sender makes; a short path in a folder that both can write to.
        receives: Which side this is.
        timeout: As for `Channel`.
        bucket: As for `Channel`; the sender's counts.

    Raises:
        PeerLost: If the other side does not come within the time limit.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        receives: bool,
        timeout: float = 60.0,
        bucket: int | str = "64MB",
    ) -> None:
        super().__init__("sender" if receives else "receiver", timeout, nbytes_of(bucket, "bucket"))
        self._path, self._awaited = Path(path), False
        with self._told("come"):
            self._socket = self._connected() if receives else self._accepted()
            self._socket.settimeout(timeout)
            self._memory = self._received() if receives else self._offered()
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)

    def _accepted(self) -> socket.socket:
        with socket.socket(socket.AF_UNIX) as listener:
            self._path.unlink(missing_ok=True)
            listener.bind(str(self._path))
            listener.listen(1)
            listener.settimeout(self._timeout)
            try:
                return listener.accept()[0]
            finally:
                self._path.unlink(missing_ok=True)

    def _connected(self) -> socket.socket:
        end = time.monotonic() + self._timeout
        while True:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(str(self._path))
                return connection
            except (FileNotFoundError, ConnectionRefusedError):
                connection.close()
                if time.monotonic() > end:
                    raise
                time.sleep(0.01)

    def _offered(self) -> mmap.mmap:
        with tempfile.TemporaryFile(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as file:
            os.posix_fallocate(file.fileno(), 0, self.bucket)  # now, not when it is written to
            socket.send_fds(self._socket, [_NUMBER.pack(self.bucket)], [file.fileno()])
            return mmap.mmap(file.fileno(), self.bucket)

    def _received(self) -> mmap.mmap:
        data, (descriptor, *_), *_ = socket.recv_fds(self._socket, _NUMBER.size, 1)
        self.bucket = _NUMBER.unpack(data)[0]
        try:
            return mmap.mmap(descriptor, self.bucket)
        finally:
            os.close(descriptor)

    def _put(self, data: torch.Tensor) -> None:
        self._flush()
        self._bytes[: len(data)] = data
        self._socket.sendall(_NUMBER.pack(len(data)))
        self._awaited = True

    def _flush(self) -> None:
        if self._awaited:
            self._read(len(_ACCEPTED))
            self._awaited = False

    def _take(self) -> torch.Tensor:
        data = self._bytes[: _NUMBER.unpack(self._read(_NUMBER.size))[0]].clone()
        self._socket.sendall(_ACCEPTED)
        return data

    def _read(self, count: int) -> bytes:
        found = b""
        while len(found) < count:
            some = self._socket.recv(count - len(found))
            if not some:
                raise EOFError
            found += some
        return found

    def _close(self) -> None:
        self._bytes = torch.empty(0)
        if "_socket" in self.__dict__:
            self._socket.close()
