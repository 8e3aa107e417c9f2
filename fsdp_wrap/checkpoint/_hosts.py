"""The ranks that share a host's memory, and transfers of bytes between ranks."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from fsdp_wrap._core import own_folder
from fsdp_wrap.checkpoint._places.folder import MARK
from fsdp_wrap.checkpoint._team import Team

T = TypeVar("T")
_CHUNK = 2**22


@dataclass(frozen=True)
class Hosts:
    """The hosts of a team: for each rank the first rank (head) of its host, which sees the same folder."""

    team: Team
    firsts: Sequence[int]

    @classmethod
    def of(cls, team: Team, folder: Path) -> Hosts:
        """Finds the hosts by a file that each rank makes in the folder; collective."""
        mark = folder / f"{MARK}{secrets.token_hex(8)}"

        def make() -> None:
            own_folder(folder, alone=True)
            mark.touch(exist_ok=False)

        try:
            team.together(make)
            marks = team.gather(mark.name)
            looks = team.gather([(folder / name).exists() for name in marks])
        finally:
            with suppress(OSError):
                mark.unlink()
        return cls(team, [seen.index(True) for seen in looks])

    @property
    def first(self) -> int:
        """The first rank of this one's host."""
        return self.firsts[self.team.rank]

    @property
    def is_first(self) -> bool:
        """Whether this rank names, renames and deletes for its host."""
        return self.first == self.team.rank

    @property
    def heads(self) -> list[int]:
        """The first ranks of all hosts, in order."""
        return sorted(set(self.firsts))

    def ranks_of(self, head: int) -> list[int]:
        """Returns the ranks of the host with this first rank."""
        return [rank for rank, first in enumerate(self.firsts) if first == head]

    def on_first(self, decide: Callable[[], T]) -> T:
        """Calls a function on each head; its host's ranks get the result, all ranks any error."""
        values = self.team.gather(self.team.together(lambda: decide() if self.is_first else None))
        return values[self.first]  # type: ignore[return-value]

    def neighbour(self, rank: int) -> int | None:
        """Returns the rank on the next host that keeps a copy of this one's pieces; None on a single host."""
        heads = self.heads
        if len(heads) == 1:
            return None
        head = self.firsts[rank]
        there = self.ranks_of(heads[(heads.index(head) + 1) % len(heads)])
        return there[self.ranks_of(head).index(rank) % len(there)]


@dataclass(frozen=True, order=True)
class Move:
    """A transfer of some bytes of a file between two ranks of the team.

    All ranks take the same moves in the same order, so that no two wait for each other.
    """

    giver: int
    taker: int
    file: str
    offset: int
    length: int

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Yields offset and size of each message."""
        for start in range(self.offset, self.offset + self.length, _CHUNK):
            yield start, min(_CHUNK, self.offset + self.length - start)


def carry_out(
    team: Team, moves: Iterable[Move], folder: Path, take: Callable[[Move, Iterator[torch.Tensor]], None]
) -> None:
    """Carries out this rank's moves: sends in one thread and receives in another, a few MB at once.

    All ranks pass the same moves in the same order. `take` must use up the bytes of each move to this rank.
    After an error, of which the first is raised, the rest is still carried out: other ranks wait for it.
    """
    failures: list[Exception] = []
    own = [move for move in moves if team.rank in (move.giver, move.taker)]
    with ThreadPoolExecutor(1, "fsdp_wrap.checkpoint.gives") as aside, team.collectives():
        giving = aside.submit(_give, team, [move for move in own if move.giver == team.rank], folder)
        for move in own:
            if move.taker == team.rank:
                arriving = _arriving(team, move)
                try:
                    take(move, arriving)
                except _Broken as broken:
                    raise RuntimeError(str(broken)) from broken.__cause__
                except Exception as error:  # others wait for what this rank is to take and to give
                    failures.append(error)
                    for _ in arriving:
                        pass
        giving.result()
    if failures:
        raise failures[0]


class _Broken(Exception):
    """A message that did not arrive."""


def _give(team: Team, moves: Sequence[Move], folder: Path) -> None:
    failure: OSError | None = None
    for move in moves:
        for start, size in move.chunks():
            data = bytearray()
            try:
                with open(folder / move.file, "rb") as file:
                    file.seek(start)
                    data += file.read(size)
            except OSError as error:
                failure = failure or error
            data += bytes(size - len(data))
            dist.send(torch.frombuffer(data, dtype=torch.uint8), team.ranks[move.taker], group=team.group)
    if failure is not None:
        raise failure


def _arriving(team: Team, move: Move) -> Iterator[torch.Tensor]:
    for _, size in move.chunks():
        chunk = torch.empty(size, dtype=torch.uint8, device="cpu")
        try:
            dist.recv(chunk, team.ranks[move.giver], group=team.group)
        except RuntimeError as error:
            raise _Broken(str(error)) from error
        yield chunk
