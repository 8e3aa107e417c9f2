"""`Peers`: ranks that keep together by small agreements of all, and by orders that one sends to some."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from fsdp_wrap._comm import (
    CARRY_NOTHING,
    Collective,
    Communicator,
    GroupPositions,
    Messages,
    Note,
    Watch,
    Works,
    host_group_over,
    make_communicator,
    ranks_in,
)
from fsdp_wrap._core import Phase

_TAG = 0x66736475  # of orders; no user is likely to choose it
_CPU = torch.device("cpu")


class Peers:
    """The ranks of a group that sends from host memory; made by all of them.

    Args:
        members: Their global ranks.

    Attributes:
        members: Their global ranks, sorted.
        size: Their number.
        together: Groups of ranks of which either all or none have a batch.
    """

    def __init__(self, members: Iterable[int]) -> None:
        self.members = sorted(members)
        self.size = len(self.members)
        self.together: set[frozenset[int]] = set()
        self._sent: list[tuple[int, Any]] = []
        self._alone = self.size == 1
        self._communicator: Communicator = make_communicator(None, _CPU)
        if not self._alone:
            group = host_group_over(self.members)
            self._alone = dist.get_backend(group) in CARRY_NOTHING  # planned: all ranks do alike
            self._communicator = make_communicator(ranks_in(group), _CPU)
            self._watch = Watch(group, _CPU, self._positions)

    @property
    def lives(self) -> bool:
        """Whether the group was not destroyed."""
        return self.size == 1 or self._watch.lives

    @property
    def _positions(self) -> GroupPositions:
        assert self._communicator.positions is not None
        return self._communicator.positions

    def agree(
        self, note: Note, own: Sequence[float], iteration: int, beside: Iterable[GroupPositions] = ()
    ) -> dict[int, list[float]]:
        """Returns the numbers of every rank, by global rank; blocks.

        Args:
            note: Names the agreement in messages.
            own: This rank's numbers, of one length on all ranks.
            iteration: The iteration of the model, for messages.
            beside: Other groups whose ranks come here before they communicate there again.
        """
        if self._alone:
            return {member: [*own] for member in self.members}
        places = dict.fromkeys([self._positions, *beside])
        Collective([(positions, note) for positions in places]).issue(Phase.FORWARD, iteration)
        every = self._communicator.buffer(self.size * len(own), torch.float64)
        part = torch.tensor(own, dtype=torch.float64, device="cpu")
        communicator = self._communicator
        with self._positions.agreement.unheard():
            communicator.gather_into([every], lambda: communicator.own_part(every.data).copy_(part)).wait()
        rows = every.data.view(self.size, -1).tolist()
        every.free()
        return dict(zip(self.members, rows))

    def share(self, value: Any) -> dict[int, Any]:
        """Returns the small picklable values of all ranks, by global rank; blocks."""
        if self._alone:
            return dict.fromkeys(self.members, value)
        return dict(zip(self.members, self._communicator.all_gather_object(value)))

    def send(self, order: Sequence[int], to: Iterable[int]) -> None:
        """Sends numbers to some ranks, by global rank; `settle` must follow."""
        group = self.group
        numbers = torch.tensor(order, dtype=torch.int64, device="cpu")
        for peer in map(self.members.index, to):
            with self._deaths_told():
                self._sent.append((peer, group.send([numbers], peer, _TAG)))

    def settle(self) -> None:
        """Waits until all sent numbers have arrived."""
        sent, self._sent = self._sent, []
        if sent:
            self._wait(sent)

    def receive(self, length: int, sender: int) -> list[int]:
        """Returns the next numbers that a rank has sent; blocks. Raises a RuntimeError if the rank dies."""
        numbers = torch.empty(length, dtype=torch.int64, device="cpu")
        peer = self.members.index(sender)
        with self._deaths_told():
            work = self.group.recv([numbers], peer, _TAG)
        self._wait([(peer, work)])
        return [*map(int, numbers.tolist())]

    def tell(self, error: str) -> None:
        """Leaves an error for ranks that wait for a collective, or `look`."""
        if not self._alone:
            self._positions.agreement.tell(error)

    def look(self) -> None:
        """Raises a RuntimeError that a rank has left."""
        self._positions.agreement.look()

    def withdraw(self) -> None:
        """Takes back an error that all ranks have read."""
        self._positions.agreement.withdraw()

    @property
    def group(self) -> dist.ProcessGroup:
        """Their process group, which sends from host memory."""
        return self._communicator.group or host_group_over(self.members)

    @contextmanager
    def _deaths_told(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:  # the connection is closed
            raise self._watch.failure(error) from error

    def _wait(self, works: Sequence[tuple[int, Any]]) -> None:
        with self._positions.agreement.unheard():
            Works(self._watch, [Messages(works, self._lives)]).wait()

    def _lives(self, peer: int) -> bool:
        return self._positions.lives(self.members[peer])
