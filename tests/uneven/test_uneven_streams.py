"""`uneven` on the simulated accelerator: no two streams touch the same bytes, whatever rank has no batch.

Ranks are threads there. They tell each other by the host's memory, not by a process group.
"""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from bed.accelerator import Simulation, run_simulated
from bed.accelerator.group import Meeting
from bed.patience import NEVER
from fsdp_wrap import uneven
from fsdp_wrap._core import Span
from fsdp_wrap._uneven import context, members
from fsdp_wrap._uneven.orders import Leader
from fsdp_wrap._uneven.rounds import Rounds
from stream_programs import BF16, OFFLOAD, batch, wrapped


class _Exchange:
    """Gives each rank what all have brought."""

    def work(self, data: Sequence[tuple[Any, list[Any]]]) -> None:
        for _, gathered in data:
            gathered += [value for value, _ in data]


class ThreadPeers:
    """Takes the place of `Peers` where all ranks are threads of one process."""

    lives = True

    def __init__(self, ranks: Sequence[int], meeting: Meeting, boxes: dict[Any, Any]) -> None:
        self.members, self.size = [*ranks], len(ranks)
        self.together: set[frozenset[int]] = set()
        self._rank, self._meeting, self._boxes = dist.get_rank(), meeting, boxes

    def share(self, value: Any) -> dict[int, Any]:
        gathered: list[Any] = []
        self._meeting.come(self._rank, (value, gathered), _Exchange())
        return dict(zip(self.members, gathered))

    def agree(self, note: object, own: Sequence[float], *_: object) -> dict[int, list[float]]:
        return self.share(own)

    def send(self, order: Sequence[int], to: Iterable[int]) -> None:
        for rank in to:
            self._boxes[self._rank, rank].put(order)

    def settle(self) -> None:
        """Sends nothing later."""

    def receive(self, length: int, sender: int) -> list[int]:
        order: list[int] = self._boxes[sender, self._rank].get(timeout=NEVER)
        assert len(order) == length
        return [*map(int, order)]


class _OwnLeader(Leader):
    """Hears the spans of its own thread alone."""

    def span_begins(self, span: Span) -> None:
        if span.owners[0] in self._places:
            super().span_begins(span)


@contextlib.contextmanager
def uneven_threads(world_size: int) -> Iterator[None]:
    """Lets `uneven` run on ranks that are threads, all of one group."""
    ranks = range(world_size)
    meeting, boxes = Meeting(world_size), {(one, two): queue.Queue[Any]() for one in ranks for two in ranks}
    with (
        mock.patch.object(members, "peers_over", lambda group: ThreadPeers(sorted(group), meeting, boxes)),
        mock.patch.object(members, "ranks_of", lambda *_: {*ranks}),
        mock.patch.object(Rounds, "make_leader", _OwnLeader),
        mock.patch.object(
            context, "register_optimizer_step_pre_hook", lambda _: mock.Mock()
        ),  # for all threads
    ):
        yield


def runs_dry(rank: int, device: Simulation, front: str, **options: Any) -> object:
    """Trains with other numbers of batches on each rank: each is without one for a time."""
    model = wrapped(front, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    for step in range(2):
        with uneven(model):
            for number in range([[2, 0], [1, 3]][step][rank]):
                model(batch(rank, number)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        device.end_step()
    return model, optimizer


@pytest.mark.parametrize(
    "front", ["composable", *(pytest.param(front, marks=pytest.mark.slow) for front in ("flat", "orig"))]
)
def test_every_order_has_the_same_outcome_where_ranks_run_dry(front):
    with uneven_threads(2):
        run_simulated(2, partial(runs_dry, front=front), records=True, seeds=1)


@pytest.mark.parametrize(
    "options", [{"cpu_offload": OFFLOAD}, {"mixed_precision": BF16}], ids=["offload", "bf16"]
)
def test_options_where_ranks_run_dry(options):
    with uneven_threads(2):
        run_simulated(2, partial(runs_dry, front="orig", **options), records=True, seeds=1)
