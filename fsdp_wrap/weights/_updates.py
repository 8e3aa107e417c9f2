"""Weights through a channel: a trainer's side, which goes on when the receiver is lost, and a receiver's."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from fsdp_wrap._state import FirstRank
from fsdp_wrap.weights._changes import Change, Changes, apply_changes
from fsdp_wrap.weights._channels import Channel, PeerLost
from fsdp_wrap.weights._source import WeightMeta, WeightSource

_FULL, _CHANGES, _END = "full", "changes", "end"


class WeightSender:
    """Sends a model's weights, whole or what changed, to one receiver.

    Every rank makes one and calls `send`; the first rank, which alone has a channel, also calls
    `send_changes`. What is sent is numbered.

    Args:
        channel: To the receiver; None on all other ranks.

    Attributes:
        version: The number of what was sent last.
    """

    def __init__(self, channel: Channel | None) -> None:
        self._channel, self.version = channel, 0

    def send(self, source: WeightSource) -> None:
        """Sends all tensors of a source, while the next are gathered; collective.

        Raises:
            PeerLost: On every rank, when all have come to the end: training can go on.
            TypeError: If a tensor is of a tensor subclass; before anything is gathered, on every rank.
        """
        source.refuse_subclasses("WeightSender.send()")
        self.version += 1
        FirstRank(source.model).uses(iter(source), partial(self._send, source), "WeightSender.send()")

    def _send(self, source: WeightSource, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        if self._channel is None:
            raise ValueError("the first rank sends, and has no channel: give it there")
        self._announce(_FULL, source.metadata(), {})
        buckets = _Buckets(self._channel)
        for _, tensor in tensors:
            buckets.add(tensor)
        buckets.finish()

    def send_changes(self, changes: Changes) -> None:
        """Sends what `WeightChanges.collect` has found; the receiver must have all that was sent before.

        Raises:
            PeerLost: If the receiver is gone, or does not take it within the time limit.
        """
        self.version += 1
        if self._channel is None:
            return
        described = [WeightMeta(each.name, each.value.dtype, (len(each.index),)) for each in changes]
        self._announce(_CHANGES, described, changes.checksums)
        buckets = _Buckets(self._channel)
        for each in changes:
            buckets.add(each.index)
            buckets.add(each.value)
        buckets.finish()

    def close(self) -> None:
        """Tells the receiver that nothing more comes."""
        if self._channel is None:
            return
        with suppress(PeerLost):  # who need not be told then
            self._announce(_END, [], {})
            self._channel.flush()
        self._channel.close()

    def _announce(self, kind: str, described: Sequence[WeightMeta], checksums: Mapping[str, int]) -> None:
        if self._channel is None:
            return
        tensors = [(name, str(dtype).removeprefix("torch."), shape) for name, dtype, shape in described]
        header = {"version": self.version, "kind": kind, "tensors": tensors, "checksums": checksums}
        text = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
        self._channel.put(torch.tensor([len(text)]).view(torch.uint8))
        for begin in range(0, len(text), self._channel.bucket):
            self._channel.put(text[begin : begin + self._channel.bucket])


class _Buckets:
    """Fills buckets with the bytes of tensors, one after the other."""

    def __init__(self, channel: Channel) -> None:
        self._channel, self._filled = channel, 0
        self._bucket = torch.empty(channel.bucket, dtype=torch.uint8)

    def add(self, tensor: torch.Tensor) -> None:
        data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        while len(data):
            some = data[: len(self._bucket) - self._filled]
            self._bucket[self._filled : self._filled + len(some)] = some
            self._filled, data = self._filled + len(some), data[len(some) :]
            if self._filled == len(self._bucket):
                self._put()

    def finish(self) -> None:
        if self._filled:
            self._put()
        self._channel.flush()

    def _put(self) -> None:
        self._channel.put(self._bucket[: self._filled])
        self._filled = 0


class Contents(Protocol):
    """The tensors of an update, which are asked for in its order."""

    def tensor(self, meta: WeightMeta) -> torch.Tensor:
        """Returns a tensor, or the elements of it that changed."""

    def index(self, meta: WeightMeta) -> torch.Tensor:
        """Returns which elements of it changed: int64, 1-D."""


@dataclass(frozen=True)
class Update:
    """What has come of one `send` or `send_changes`. It must be used up before the next.

    Attributes:
        version: Its number.
        whole: Whether it has all tensors; else only what changed.
        metadata: Name, dtype and shape of the tensors; of changes, how many elements of each there are.
    """

    version: int
    whole: bool
    metadata: list[WeightMeta]
    _checksums: dict[str, int]
    _contents: Contents

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields (name, tensor) of an update that is whole, each as soon as it is there."""
        for meta in self.metadata if self.whole else ():
            yield meta.name, self._contents.tensor(meta)

    def changes(self) -> Changes:
        """Returns the changes of an update that is not whole.

        Raises:
            ValueError: If it is.
        """
        if self.whole:
            raise ValueError(f"version {self.version} is whole, and has no changes: iterate over it")
        found = []
        for meta in self.metadata:
            index = self._contents.index(meta)  # which comes first
            found.append(Change(meta.name, index, self._contents.tensor(meta)))
        return Changes(found, self._checksums)

    def apply(self, state_dict: Mapping[str, torch.Tensor]) -> None:
        """Writes what has come into tensors, in place.

        Args:
            state_dict: Tensors by the names that the source has.

        Raises:
            ValueError: If a name is missing, or a tensor has another shape or dtype; nothing is written.
            RuntimeError: If changes do not fit to what is there, by their checksums; nothing is written.
            PeerLost: If the sender ends before all has come: some tensors may be new, the others old.
        """
        if not self.whole:
            apply_changes(state_dict, self.changes())
            return
        for name, dtype, shape in self.metadata:
            found = state_dict.get(name)
            if found is None or (found.dtype, tuple(found.shape)) != (dtype, shape):
                has = "there is none" if found is None else f"here it is {found.dtype}, {tuple(found.shape)}"
                raise ValueError(f"'{name}' comes as {dtype}, {shape}, and {has}")
        for name, tensor in self:
            state_dict[name].detach().copy_(tensor)


def received(channel: Channel) -> Iterator[Update]:
    """Yields what a `WeightSender` sends, until that is closed.

    What is left of an update when the next one is asked for is passed over.

    Raises:
        PeerLost: If the sender ends without closing, or sends nothing within the time limit of the channel.
    """
    while True:
        header = _header(channel)
        if header["kind"] == _END:
            channel.close()
            return
        metadata = [
            WeightMeta(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in header["tensors"]
        ]
        whole = header["kind"] == _FULL
        left = sum(_nbytes(each, whole) for each in metadata)
        arriving = _Arriving(channel, left)
        yield Update(header["version"], whole, metadata, header["checksums"], arriving)
        arriving.skip()


def _header(channel: Channel) -> dict[str, Any]:
    left, text = int(channel.take().view(torch.int64)), b""
    while len(text) < left:
        text += bytes(channel.take().tolist())
    header: dict[str, Any] = json.loads(text)
    return header


def _nbytes(meta: WeightMeta, whole: bool) -> int:
    numel = torch.Size(meta.shape).numel()
    return numel * (meta.dtype.itemsize if whole else meta.dtype.itemsize + torch.int64.itemsize)


class _Arriving:
    """The bytes of an update, as they come.

    Args:
        channel: From where.
        left: How many there are.
    """

    def __init__(self, channel: Channel, left: int) -> None:
        self._channel, self._left = channel, left
        self._bucket = torch.empty(0, dtype=torch.uint8)

    def tensor(self, meta: WeightMeta) -> torch.Tensor:
        return self._next(meta.dtype, meta.shape)

    def index(self, meta: WeightMeta) -> torch.Tensor:
        return self._next(torch.int64, meta.shape)

    def _next(self, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        whole = torch.empty(torch.Size(shape), dtype=dtype)
        place = whole.view(-1).view(torch.uint8)
        while len(place):
            some = self._some(len(place))
            place[: len(some)] = some
            place = place[len(some) :]
        return whole

    def skip(self) -> None:
        """Passes over what is left."""
        while self._left:
            self._some(self._left)

    def _some(self, most: int) -> torch.Tensor:
        if not len(self._bucket):
            self._bucket = self._channel.take()
        some, self._bucket = self._bucket[:most], self._bucket[most:]
        self._left -= len(some)
        return some
