"""Collectives of ranks that share memory: what this rank shows, and what it takes from the others."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from fsdp_wrap._comm.lanes import Work
from fsdp_wrap._comm.shared_memory.channel import Channel, Kind

__all__ = ["Collective", "Part", "Room", "SharedCollective"]

_PAUSE = 0.001  # seconds between looks for room


@dataclass
class Part:
    """What one tensor of a collective is for this rank.

    Attributes:
        shown: What the others may read; None for nothing.
        wanted: By rank, what is like this rank's share of what that one shows.
        nbytes: How much each of those shows; None where that may differ, and the share is all of it.
        offset: Bytes from the begin of what is shown to this rank's share.
        take: Uses the shares, by rank; otherwise they are copied into what was wanted.
        in_place: Whether what is shown may be read where it lies, as it does not change before it is freed.
    """

    shown: torch.Tensor | None
    wanted: Mapping[int, torch.Tensor]
    nbytes: int | None
    offset: int = 0
    take: Callable[[dict[int, torch.Tensor]], object] | None = None
    in_place: bool = False


class Collective(Work):
    """A collective that was issued, and completes when it is waited for.

    Args:
        channel: The way to the other ranks.
        issue: Posts what this rank shows; returns the number.
    """

    def __init__(self, channel: Channel, issue: Callable[[], int]) -> None:
        self._channel = channel
        self._number: int | None = None
        self._number = issue()

    @abstractmethod
    def _take(self, number: int) -> None:
        """Takes what the others have posted."""

    def _wait_for(self, seconds: float) -> bool:
        assert self._number is not None  # which it is until that has ended
        if not self._channel.arrived(self._number, seconds):
            return False
        try:
            self._take(self._number)
        finally:
            self._release()
        return True

    def _release(self) -> None:
        if self._number is not None:
            self._channel.release(self._number)
            self._number = None

    def __del__(self) -> None:
        self._release()  # of a wait that was given up, so that the peers' memory is free again


class SharedCollective(Collective):
    """One in which each rank reads what others show.

    Args:
        channel: The way to the other ranks.
        kind: Which it is.
        part: What this rank has to do with it.
    """

    def __init__(self, channel: Channel, kind: Kind, part: Part) -> None:
        self._kind, self._part = kind, part
        super().__init__(channel, lambda: channel.post(kind, part.shown, part.in_place))

    def _take(self, number: int) -> None:
        part = self._part
        shares = {rank: self._share(number, rank, like) for rank, like in part.wanted.items()}
        if part.take is not None:
            part.take(shares)
            return
        for rank, share in shares.items():
            part.wanted[rank].copy_(share)

    def _share(self, number: int, rank: int, like: torch.Tensor) -> torch.Tensor:
        part = self._part
        shown = self._channel.read(number, self._kind, rank, part.nbytes)
        numel = like.numel() if part.nbytes is not None else shown.nbytes // like.element_size()
        if numel == 0:
            return like.new_empty(0)
        return self._channel.peers[rank].memory.tensor(shown.begin + part.offset, numel, like.dtype)


class Room(Work):
    """Waits until so many more collectives may be issued."""

    def __init__(self, channel: Channel, number: int) -> None:
        self._channel, self._number = channel, number

    def _wait_for(self, seconds: float) -> bool:
        begin = time.monotonic()
        while not self._channel.has_room(self._number):
            if time.monotonic() - begin > seconds:
                return False
            time.sleep(_PAUSE)
        return True
