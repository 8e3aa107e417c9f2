"""Ranks of a group find out which of them share a host, and open a channel: all, or none.

Each offers its memory, by process id and descriptor, and reaches that of the others through `/proc`. This
way takes no name that could be left behind, and is granted to processes of the same user only.
"""

from __future__ import annotations

import os
import pickle
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from fsdp_wrap._comm.groups import Ranks, host_id
from fsdp_wrap._comm.shared_memory.channel import LENDER, Board, Channel, Peer
from fsdp_wrap._comm.shared_memory.memory import PeerMemory, own_memory
from fsdp_wrap._comm.shared_memory.signals import Life, require_futex
from fsdp_wrap._comm.watching.watch import Watch
from fsdp_wrap._comm.works import InFlight
from fsdp_wrap._core import warn_caller
from fsdp_wrap._core.torch_private import default_store


@dataclass(frozen=True)
class _Address:
    """The process, memory and board that a rank offers."""

    process: int
    memory: int  # its descriptor
    word: bytes  # the beginning of the memory
    board: int
    private: bool  # whether the host allows private maps


def _offer(ranks: Ranks) -> _Address:
    """Begins a board, and returns its address; raises an OSError if the host does not allow it."""
    require_futex()
    memory = own_memory()
    begin = memory.take(Board.nbytes(ranks.size))
    Board(memory, begin, ranks.size).clear()
    return _Address(os.getpid(), memory.door, memory.word, begin, memory.private is not None)


def _connect(ranks: Ranks, addresses: list[_Address]) -> Channel:
    """Returns the channel to addresses, given by rank; raises an OSError if one cannot be reached."""
    lends = all(address.private for address in addresses)
    peers = {
        rank: _peer(there, ranks.size, lends and rank == LENDER)
        for rank, there in enumerate(addresses)
        if rank != ranks.rank
    }
    return Channel(ranks.members, ranks.rank, own_memory(), addresses[ranks.rank].board, peers, lends)


def _peer(there: _Address, size: int, private: bool) -> Peer:
    key = there.process, there.word
    memory = _memories.get(key) or PeerMemory(there.process, there.memory, there.word)
    life = _lives.get(key) or Life(there.process)
    _memories[key], _lives[key] = memory, life
    if private:
        memory.map_privately()
    return Peer(Board(memory, there.board, size), life)


# Of other processes, for all groups with them.
_memories: weakref.WeakValueDictionary[tuple[int, bytes], PeerMemory] = weakref.WeakValueDictionary()
_lives: weakref.WeakValueDictionary[tuple[int, bytes], Life] = weakref.WeakValueDictionary()


_PAUSE = 0.002  # seconds between looks into the store


class StoreGather(InFlight):
    """A gather of picklable values through the store, since collectives may be counted or fail."""

    def __init__(self, ranks: Ranks, value: Any, watch: Watch) -> None:
        super().__init__(watch)
        self._members = ranks.members
        self._store = default_store()
        name = f"fsdp_wrap/exchange/{ranks.group.group_name}"
        turn = self._store.add(f"{name}/{ranks.rank}", 1)  # the store may have seen another group of the name
        self._keys = [f"{name}/{other}/{turn}" for other in range(ranks.size)]
        self._store.set(self._keys[ranks.rank], pickle.dumps(value).hex())

    def _wait_for(self, seconds: float) -> bool:
        begin = time.monotonic()
        while not self._store.check(self._keys):  # stores differ in how they tell that a wait was too long
            if time.monotonic() - begin > seconds:
                self._refuse_ended()
                return False
            time.sleep(_PAUSE)
        return True

    def _refuse_ended(self) -> None:
        """Raises a RuntimeError if a rank has ended before it wrote its value."""
        silent = [rank for rank, key in enumerate(self._keys) if not self._store.check([key])]
        for rank in filter(self._watch.has_ended, silent):
            if not self._store.check([self._keys[rank]]):  # nor has it just before its end
                raise RuntimeError(f"rank {self._members[rank]} has ended")

    def values(self) -> list[Any]:
        """Waits, and returns the values by rank."""
        self.wait()
        return [pickle.loads(bytes.fromhex(self._store.get(key).decode())) for key in self._keys]


def can_share() -> bool:
    """Whether this process can share memory, and buffers can swap theirs for it."""
    try:
        require_futex()
        own_memory()
    except _REFUSALS:
        return False
    return hasattr(torch.UntypedStorage, "_swap_data_ptr_")


_REFUSALS = (AttributeError, OSError, ValueError)  # no such call here, refused, or too large a map

GatherObjects = Callable[[Any], list[Any]]
"""Gathers a small picklable value from all ranks, by rank."""


def find_hosts(ranks: Ranks, gather_objects: GatherObjects) -> list[str] | None:
    """Returns the host of each rank, the same for ranks that can share memory.

    None where a rank cannot tell, of which the first rank warns.
    """
    hosts = gather_objects(_or_error(_host))
    return None if _refused(hosts, ranks) else hosts


def open_channel(ranks: Ranks, gather_objects: GatherObjects) -> Channel | None:
    """Opens the channel of a group on one host; None, with a warning of the first rank, if it is not allowed.

    `gather_objects` is called twice, whatever comes out.
    """
    addresses = gather_objects(_or_error(lambda: _offer(ranks)))
    channel = None if _refused(addresses, ranks) else _or_error(lambda: _connect(ranks, addresses))
    return (
        None
        if _refused(gather_objects(channel if isinstance(channel, _Refusal) else None), ranks)
        else channel
    )


class _Refusal(str):
    """The text of an error by which a rank cannot share memory."""


def _or_error(make: Callable[[], Any]) -> Any:
    """Returns the result of `make`, or a `_Refusal` for the other ranks."""
    try:
        return make()
    except _REFUSALS as error:
        return _Refusal(f"{type(error).__name__}: {error}")


def _refused(answers: list[Any], ranks: Ranks) -> bool:
    """Whether a rank has reported an error, of which the first rank warns."""
    by_rank = zip(ranks.members, answers)
    errors = [f"rank {rank}: {answer}" for rank, answer in by_rank if isinstance(answer, _Refusal)]
    if errors and ranks.rank == 0:
        warn_caller(
            f"the ranks of this host cannot share memory ({errors[0]}), so they communicate through the "
            "process group, which is slower; with FSDP_WRAP_SHARED_MEMORY=0 this is not tried"
        )
    return bool(errors)


def _host() -> str:
    require_futex()
    return host_id()
