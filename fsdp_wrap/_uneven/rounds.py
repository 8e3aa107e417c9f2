"""`Rounds`: keeps ranks with different numbers of batches together.

A round begins with an agreement: each rank has a forward, or has joined those that wait for the others (the
word of `torch.distributed.algorithms.Join`). The lowest rank with a forward leads. It tells the
joined ranks, one by one, which collectives it issues, and they issue the same. So nothing must be known in
advance, and no rank computes without a batch. The next agreement of the leader ends the round.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping, Sequence
from enum import IntEnum
from typing import NoReturn

import torch.distributed as dist

from fsdp_wrap._by_hand import reset, sum_in_backward
from fsdp_wrap._comm import GroupPositions, Note
from fsdp_wrap._core import PlugIn, Precedence, SpanKind
from fsdp_wrap._runtime import ExecOrder, Step, communicators_of
from fsdp_wrap._uneven.models import Models, Totals
from fsdp_wrap._uneven.options import RoundOptions
from fsdp_wrap._uneven.orders import Follower, Instruction, Leader
from fsdp_wrap._uneven.peers import Peers
from fsdp_wrap._uneven.pooling import Pool

AGREES = Note("agrees on who has a batch")


class Turn(IntEnum):
    """Reasons for which a rank comes to an agreement."""

    FORWARD = 0
    JOINED = 1
    FAILED = 2


_OF_MODELS = 4  # where the numbers of the models begin in an agreement


class LeftByError(RuntimeError):
    """A rank has left the context by an error."""


class Rounds(PlugIn):
    """The rounds of some models.

    Args:
        steps: The steps of the models, the same on all ranks.
        peers: All ranks that compute with them.
        options: Options of the units that change while ranks have joined.
        pool: Their gradients, where nothing but backwards may change them before all ranks have joined.

    Attributes:
        leader: Tells joined ranks what this one does; a plug-in.
        shadows: Number of forwards of others that this rank has shadowed.
        weight: Weight of the backwards that begin now.
        models: The models, which may share units.
        totals: For each model, what all ranks have done, once all have joined.
        orders: For each model, the order of its units when the first rank joined.
    """

    order = Precedence.RANKS
    make_leader = Leader

    def __init__(
        self, steps: Sequence[Step], peers: Peers, options: RoundOptions, pool: Pool | None = None
    ) -> None:
        self._steps, self._peers, self._options, self._pool = steps, peers, options, pool
        self.leader, self._follower = self.make_leader(steps, peers), Follower(steps, peers)
        self._rank = dist.get_rank()
        self._active = peers.members
        self._shadowed = self._failed = False
        self.shadows = 0
        self.weight = 1.0
        self.models = Models(steps)
        self._running, self._ran = set[Step](), set[Step]()
        self._backwards = [(0.0, 0)] * len(steps)
        self._owing = [False] * len(steps)
        self.totals: list[Totals] = []
        self._wanted, self._agreed = [(True, True)] * len(steps), [(True, True)] * len(steps)
        self.orders: list[ExecOrder] = []

    @property
    def aligns(self) -> bool:
        return True

    @property
    def separates(self) -> bool:
        """True: ranks come to different places, and gradients are pooled when the context ends."""
        return True

    @property
    def shadowed(self) -> bool:
        return self._shadowed

    # agreements

    def enter(self) -> None:
        """Agrees with all ranks that the context begins; collective."""
        units = (unit for step in self._steps for unit in step.units)
        every = [communicator.positions for communicator in communicators_of(units)]
        self._agree(Turn.FORWARD, beside=[positions for positions in every if positions is not None])

    def join(self) -> None:
        """Shadows the forwards and backwards of the others, for a rank that has no further batch."""
        if self._pool is not None:
            self._pool.check()
            self._pool = None  # what follows are gradients of others
        while self.shadow_round():
            pass

    def shadow_round(self) -> bool:
        """Shadows one round of the others; returns False if no rank has a batch, and sets `totals`."""
        self.leader.end_round()
        rows = self._agree(Turn.JOINED)
        if not self._active:
            sums = [sum(column) for column in zip(*rows.values())][_OF_MODELS:]
            self.totals = [Totals(*sums[begin : begin + 3]) for begin in range(0, len(sums), 3)]
            return False
        self._options.follow_others()
        self._begin_round(rows)
        self.shadows += 1
        leader = self._active[0]
        step = self._steps[int(rows[leader][1])]
        for act in step.plug_ins.forward_opens:  # steps have the same numbers on all ranks
            act(step)
        with step.plug_ins.span(SpanKind.HELP, None, (step.root,)):
            try:
                self._follower.follow(leader)
            except BaseException as error:
                self._tell(error)  # first: the leader may wait for this rank
                self._follower.skip()
                raise
        return True

    def fail(self, error: BaseException) -> None:
        """Tells all ranks that this one leaves the context by an error; collective.

        Raises a LeftByError if it fails since another rank has left.
        """
        if self._failed:
            return
        self.leader.end_round()
        self._tell(error)
        self._reset()
        try:
            self._agree(Turn.FAILED)
        except LeftByError as first:
            if isinstance(error, RuntimeError) and not str(first).startswith(f"rank {self._rank} "):
                raise first from error

    def _tell(self, error: BaseException) -> None:
        """Leaves an error for the ranks that wait for this one."""
        self._peers.tell(
            f"rank {self._rank} left uneven() by {type(error).__name__}: {error}. The gradients on all ranks "
            "are those from before the context"
        )

    def _agree(
        self, turn: Turn, model: int = 0, beside: Iterable[GroupPositions] = ()
    ) -> Mapping[int, Sequence[float]]:
        """Returns each rank's numbers; raises a LeftByError on all ranks if one has failed."""
        own: list[float] = [turn, model, *self._wanted[model]]
        for totals, owes in zip(self._backwards, self._owing):
            own += [*totals, owes]
        rows = self._peers.agree(AGREES, own, self._steps[model].iteration, beside)
        failed = [rank for rank, row in rows.items() if row[0] == Turn.FAILED]
        if failed:
            self._share_failure(failed[0])
        self._active = [rank for rank, row in rows.items() if row[0] == Turn.FORWARD]
        return rows

    def _share_failure(self, first: int) -> NoReturn:
        """Raises on all ranks the error that the first failed one has left."""
        self._failed, told = True, f"rank {first} left uneven() by an error"
        try:
            self._peers.look()
        except RuntimeError as error:
            told = str(error)
        self._reset()
        self._peers.agree(AGREES, [0.0], 0)  # all have read it
        if self._rank == first:
            self._peers.withdraw()
        raise LeftByError(told)

    def _reset(self) -> None:
        """Resets the models' steps, while the error ends all waiting."""
        for step in self._steps:
            with contextlib.suppress(RuntimeError):  # what is in flight may never end
                reset(step)

    # rounds

    def forward_begins(self, step: Step) -> None:
        """Agrees with all ranks that an outermost forward begins; collective."""
        if self._failed:
            raise LeftByError("a rank has left uneven() by an error: leave it on all ranks")
        self.leader.end_round()
        self._running.clear()  # of a backward that has failed
        model = self._steps.index(step)
        self._wanted[model] = _wanted_by(step)
        active = self._begin_round(self._agree(Turn.FORWARD, model))
        self._agreed[model] = all(row[2] for row in active), all(row[3] for row in active)

    def _begin_round(self, rows: Mapping[int, Sequence[float]]) -> list[Sequence[float]]:
        """Returns the numbers of the ranks with a forward; refuses forwards of different models."""
        leader, *others = self._active
        other = next((rank for rank in others if rows[rank][1] != rows[leader][1]), None)
        if other is not None:
            models = [int(rows[rank][1]) for rank in (leader, other)]
            names = [f"{self._steps[model].root.name}, model {model + 1}," for model in models]
            raise ValueError(
                f"rank {leader} begins a forward of {names[0]} inside uneven() while rank {other} begins one "
                f"of {names[1]} another model: ranks that have a batch must run the same models in one order"
            )
        for group in self._peers.together:
            if not group.isdisjoint(self._active) and not group.issubset(self._active):
                raise ValueError(
                    f"ranks {sorted(group)} hold parts of the same parameters (tensor or expert "
                    f"parallelism), and only {sorted(group.intersection(self._active))} of them begin a "
                    "forward inside uneven(): give these ranks equally many batches"
                )
        joined = [rank for rank in self._peers.members if rank not in self._active]
        if joined and not self._shadowed:
            self._shadowed = True
            self.orders = [step.queue.order.copy() for step in self._steps]
            self._options.share_nothing()
        self._options.average_over(len(self._active) / self._peers.size)
        self.leader.begin_round(joined if self._rank == leader else ())
        return [rows[rank] for rank in self._active]

    # backwards

    def backward_begins(self, step: Step) -> None:
        """Sets up the sums that the ranks agreed on at the forward, and tells joined ranks."""
        if not self._running:  # else the backward has begun in another model
            self._ran.clear()
            if self._pool is not None:
                self._pool.check()
        self._running.add(step)
        self._ran.add(step)
        model = self._steps.index(step)
        if _wanted_by(step) != self._wanted[model]:
            raise ValueError(
                f"no_sync was entered or left between a forward and a backward of {step.root.name} on "
                f"rank {self._rank}: inside uneven() the ranks agree on it at the forward"
            )
        agreed = self._agreed[model]
        sum_in_backward(step, *agreed)
        self.leader.tell(Instruction.BEGIN_BACKWARD, model, detail=2 * agreed[0] + agreed[1])

    def backward_ends(self, step: Step) -> None:
        """Tells joined ranks to end their part of the backward."""
        self.leader.tell(Instruction.END_BACKWARD, self._steps.index(step), detail=step.ending.waits)

    def backward_ended(self, step: Step) -> None:
        """Counts the backward."""
        model = self._steps.index(step)
        if step.gradients_came:
            self._owing[model] = self._agreed[model] != (True, True)
        if self._pool is not None:
            (self._pool.note if step.ending.waits else self._pool.forget)(step)
        self._running.discard(step)
        for counting in () if self._running else self.models.of_backward(self._ran):
            weights, number = self._backwards[counting]
            self._backwards[counting] = weights + self.weight, number + 1


def _wanted_by(step: Step) -> tuple[bool, bool]:
    """Returns whether a backward that begins now would reduce gradients, and sum them over replicas."""
    options = [unit.options for unit in step.units]
    syncs = step.syncs and all([own.syncs for own in options])
    return syncs, step.sums_over_replicas and all([own.sums_over_replicas for own in options])
