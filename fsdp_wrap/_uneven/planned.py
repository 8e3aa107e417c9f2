"""`PlannedPeers`: the other ranks of a planned rank that helps one of them, or that one of them helps."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import torch.distributed as dist

from fsdp_wrap._comm import GroupPositions, Note, PlannedRounds, planned_rounds
from fsdp_wrap._uneven.peers import Peers
from fsdp_wrap._uneven.rounds import Turn


def peers_over(members: Iterable[int]) -> Peers:
    """Returns the ranks of a model as peers; made by all of them."""
    rounds = planned_rounds.get()
    return Peers(members) if rounds is None else PlannedPeers(members, rounds)


class PlannedPeers(Peers):
    """Stands in for absent peers: they help a planned rank that leads, and lead one that helps.

    Args:
        members: Their global ranks, and the planned one.
        rounds: The leader's rounds: it adds to them, and the helper takes them away.
    """

    def __init__(self, members: Iterable[int], rounds: PlannedRounds) -> None:
        super().__init__(members)
        self._rank, self._told = dist.get_rank(), rounds.told
        self._leads = self._rank != rounds.helper
        self._orders = deque[Sequence[int]]()

    def agree(
        self, note: Note, own: Sequence[float], iteration: int, beside: Iterable[GroupPositions] = ()
    ) -> dict[int, list[float]]:
        others = self._joined_by(own) if self._leads else self._led(own)
        return {member: [*(own if member == self._rank else others)] for member in self.members}

    def _joined_by(self, own: Sequence[float]) -> Sequence[float]:
        self._orders = deque()
        self._told.append((own, self._orders))
        return [Turn.JOINED, *own[1:]]

    def _led(self, own: Sequence[float]) -> Sequence[float]:
        if not self._told:
            raise ValueError(
                f"rank {self._rank} enters uneven() more often in a plan than the rank that it helps"
            )
        others, orders = self._told[0]
        if own[0] == Turn.JOINED or others[0] == Turn.FORWARD:
            self._told.popleft()
            self._orders = orders
        return others

    def send(self, order: Sequence[int], to: Iterable[int]) -> None:
        self._orders.append(order)

    def receive(self, length: int, sender: int) -> list[int]:
        return [*self._orders.popleft()]
