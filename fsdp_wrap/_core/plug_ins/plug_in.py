"""`PlugIn`: the one way to attach something to the steps of models.

A step calls the moments that plug-ins override, and no others: without plug-ins it enters no frame for them.
`everywhere` holds the plug-ins of all steps of this process. Each step holds its own besides, and each unit
holds those of its own moments.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from itertools import repeat
from operator import attrgetter
from threading import RLock
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from fsdp_wrap._core.plug_ins.kinds import Computing, Phase, SpanKind, ValueSeam


class Precedence(IntEnum):
    """The order of plug-ins at one moment, the first ones first."""

    RANKS = 0
    """Keeps ranks together that run different steps: nothing may be issued or noted before they agree."""
    CHECKS = 1
    """Notes what this rank does and compares it with what others do, before anything can raise."""
    SETTINGS = 2
    """Changes how units compute, or travel: before anyone looks at them."""
    VALUES = 3
    """Looks at values before anyone else may change them, and raises before others note a step."""
    LEADER = 4
    """Tells joined ranks of a collective before this rank issues it."""
    EVENTS = 5
    """Calls functions of users, which may raise: after what keeps ranks together."""
    RANGES = 6
    """Ranges of the profiler enclose only what the recorders below note."""
    RECORDS = 7
    """Takes times late, so that the work of the others is not in them."""
    SAVED = 8
    """Sees what autograd saves for a unit, and not what other plug-ins compute."""
    HOST = 9
    """Copies shards and gradients between host and device: gradients have come before a unit is updated."""
    UPDATES = 10
    """Updates parameters, and frees their gradients, when all others have done with these."""


@dataclass(eq=False, slots=True)
class Span:
    """One activity of the runtime, as a context; plug-ins get the same object at its beginning and end.

    Attributes:
        kind: Kind of activity.
        unit: Fully qualified name of the (first) unit, "" for the root.
        phase: Phase of the iteration; None if unknown.
        owners: The units as objects: units of two models may have equal names. Several share a collective.
        nbytes: Bytes of the buffers on this rank; set by the end of the span for a reduction.
        beside: Whether it runs in a thread of its own, concurrently with computation.
        plug_ins: Those that see it.
    """

    kind: SpanKind
    unit: str
    phase: Phase | None
    owners: Sequence[Any]
    nbytes: int
    beside: bool
    plug_ins: PlugIns

    def __enter__(self) -> Span:
        for act in self.plug_ins.span_begins:
            act(self)
        return self

    def __exit__(self, *_: object) -> None:
        for act in self.plug_ins.span_ends:
            act(self)


class NoSpan:
    """Null object in place of a span that no plug-in sees."""

    nbytes = 0  # written, never read

    def __enter__(self) -> NoSpan:
        return self

    def __exit__(self, *_: object) -> None:
        pass


NO_SPAN = NoSpan()


class PlugIn:
    """Something that attaches to steps: a base of which no moment does anything.

    Moments are called in the thread in which they happen. Of a step that began before the plug-in was
    attached, it sees the rest: an end without its beginning.

    Attributes:
        order: Its place among other plug-ins.
        copied: Whether it is attached to the deep copies of its unit, too.
    """

    order: int = Precedence.RECORDS
    copied: bool = False

    @property
    def aligns(self) -> bool:
        """Whether it keeps the ranks together: they need not run the same forwards and backwards."""
        return False

    @property
    def separates(self) -> bool:
        """Whether not all ranks come to the same places: other collectives than the runtime's must wait."""
        return False

    @property
    def shadowed(self) -> bool:
        """Whether a rank without a batch takes part in the step, which computes nothing."""
        return False

    @property
    def updated_units(self) -> Collection[Any]:
        """The units whose parameters it updates in their backward: gradients do not stay there."""
        return ()

    @property
    def averages_notes(self) -> bool:
        """Whether `averaged` averages over more ranks, and with the gradients what tells which are used."""
        return False

    # of a step

    def made(self, step: Any) -> None:
        """The step of a tree was made: what keeps something for one tree is attached to it here.

        The plug-ins of all steps, and of its units, see it.
        """

    def follows(self, step: Any, units: Sequence[Any]) -> None:
        """The step goes on after the user, who may have written to shards of the units, perhaps unnoticed.

        A forward follows, of this rank or of others that it helps (`uneven`), or a gather by hand.
        """

    def forward_begins(self, step: Any) -> None:
        """An outermost forward of this rank begins; nothing of it was gathered.

        It may communicate where all ranks run the forward, and may raise.
        """

    def forward_opens(self, step: Any) -> None:
        """An outermost forward begins, of this rank or of others that it helps (`uneven`).

        It may communicate where all ranks run the forward, and may raise.
        """

    def forward_ready(self, step: Any) -> None:
        """The units have taken over what the user has changed, before a forward. It may raise."""

    def backward_begins(self, step: Any) -> None:
        """A backward of this rank has reached the first unit. No gradient has come."""

    def backward_opens(self, step: Any) -> None:
        """The units get ready for gradients: of a backward of this rank, or of others that it helps."""

    def before_reduction(self, step: Any) -> None:
        """A reduction will be issued next. All ranks are between the same collectives: it may communicate."""

    def backward_ends(self, step: Any) -> None:
        """All gradients of a backward have come. Reductions may be in flight."""

    def backward_closes(self, step: Any, complete: bool) -> None:
        """A backward is over, of this rank or of one that it helps, or the user ends several by hand.

        Args:
            step: The step.
            complete: Whether all reductions have ended, too. Else a later backward waits for them.
        """

    def backward_ended(self, step: Any) -> None:
        """A backward has ended: its reductions too, unless they wait for a later one.

        It may communicate where all ranks run the backward, and may raise.
        """

    def failed(self, step: Any) -> None:
        """A forward has raised, or a backward has that is known to be over."""

    def explains(self, step: Any, error: BaseException) -> None:
        """An error leaves the step: more may be added to its message."""

    def rests(self, step: Any) -> None:
        """The user asks for something between steps, none of which runs: what was left open ends here."""

    def dropped(self, step: Any) -> None:
        """What backwards have left is dropped: one has raised, or the user has asked for it.

        Reductions in flight have not been waited for.
        """

    # of a unit

    def trains(self, unit: Any) -> None:
        """Other leaves of a unit train than before, and have the hooks of the step."""

    def enters(self, unit: Any, what: Computing) -> None:
        """A unit with parameters will compute, and is not gathered for it yet.

        Its forward or its recomputation begins, or a gradient has reached one of its outputs. It may
        communicate where all ranks run the unit, and may raise.
        """

    def computes(self, unit: Any, what: Computing) -> None:
        """A unit begins to compute; other units may begin before it ends. Its parameters are full."""

    def computed(self, unit: Any, what: Computing) -> None:
        """A unit's forward, or its recomputation, is over, perhaps by an error."""

    def ran(self, unit: Any, outputs: Sequence[torch.Tensor]) -> None:
        """A unit's forward, or its recomputation, has returned; its parameters are full. It may raise."""

    def resumes(self, call: Any) -> None:
        """A gradient has reached a forward call, whose unit shows the full parameters again. It may raise."""

    def hooked(self, unit: Any, outputs: Sequence[torch.Tensor]) -> None:
        """A forward has given hooks to `outputs`, whose gradients will begin the unit's backward."""

    def runs(self, unit: Any, compute: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """A unit is about to call `compute(*args, **kwargs)`, with its full parameters shown."""

    def expects(self, unit: Any) -> None:
        """The gather of this unit is expected next, and no prefetch issues it now; None for no known unit."""

    def needs(self, unit: Any, phase: Phase) -> None:
        """The full parameters of a unit are needed now. They may be there, or be on their way."""

    def to_gather(self, units: tuple[Any, ...], phase: Phase) -> None:
        """One all-gather for these units is about to be issued, all of them sharded. It may raise."""

    def full(self, unit: Any) -> None:
        """A unit's gather was waited for, since its full parameters are needed. It may raise."""

    def gathers(self, unit: Any, phase: Phase, nbytes: int, together: tuple[str, ...]) -> None:
        """The all-gather of a unit was issued, into `nbytes` of new memory.

        `together` names the units that share it; empty for a unit alone.
        """

    def sharded(self, unit: Any, phase: Phase, nbytes: int) -> None:
        """A unit's full parameters were freed, `nbytes` of memory."""

    def to_reduce(self, units: tuple[Any, ...], phase: Phase, in_copy: bool) -> None:
        """One reduction of the gradients of these units is about to be issued. It may raise.

        Args:
            units: The units.
            phase: Phase of the iteration.
            in_copy: Whether it sums over the ranks of this copy alone, and a later one over the replicas.
        """

    def reduces(self, unit: Any, phase: Phase, nbytes: int, together: tuple[str, ...]) -> None:
        """The reduction of a unit's gradients, `nbytes` of them, was issued; `together` as in `gathers`."""

    def awaits_reduction(self, unit: Any) -> None:
        """A unit's reduction is waited for next."""

    def reduced(self, unit: Any) -> None:
        """A unit's reduction has ended: its result is in the shards' gradients, or on its way to the host.

        It may raise.
        """

    def brings(self, unit: Any, leaf: nn.Parameter) -> None:
        """A backward has brought a leaf a gradient, the only one or the first."""

    def backward_over(self, unit: Any, phase: Phase) -> None:
        """A unit's backward is over: several times for some backwards, never for failed ones."""

    # of work

    def span_begins(self, span: Span) -> None:
        """The runtime begins to issue, to wait or to update; spans of one thread nest."""

    def span_ends(self, span: Span) -> None:
        """The span is over, perhaps by an error."""

    def issued(self, works: Sequence[Any]) -> None:
        """The running span has issued collectives; `works` are their `Work` objects."""

    def on_lane(self, purpose: str, begin: Any, end: Any) -> None:
        """Work was issued on a stream of an accelerator.

        Args:
            purpose: Purpose of the stream: "gather", "reduce", "to device", "to host", or of activations.
            begin: Timing event before the work.
            end: Timing event after the work.
        """

    # of values, which must stay as they are

    def sees(self, owner: Any, seam: ValueSeam, values: Sequence[torch.Tensor | None]) -> None:
        """Values pass a seam of the step.

        Args:
            owner: The unit, or its `ShardedParams`.
            seam: Place in the step.
            values: None of `PARAMETERS` and `GRADIENTS`, which the leaves of the unit hold.
        """

    def sends(self, sharded: Any, full: torch.Tensor) -> None:
        """A reduce buffer is complete, as it will be sent."""

    # of values, which may change

    def takes(self, gradients: Any, segments: Sequence[Any], full: Sequence[torch.Tensor]) -> None:
        """A unit's gradients are complete, and nothing of them was sent.

        A plug-in may take them into a reduction of its own, and overwrite them: it calls `gradients.join`.

        Args:
            gradients: The unit's `UnitGradients`.
            segments: The segments that take part.
            full: The unsharded gradients of each.
        """

    def averaged(self, sharded: Any, reduced: torch.Tensor) -> None:
        """This rank's part of a reduction is summed and divided. No sharded parameter has it yet.

        It may be changed in place. The last `sharded.layout.noted_numel` elements are no gradients: they
        tell which parameters were used.
        """


MOMENTS = tuple(name for name, value in vars(PlugIn).items() if callable(value))
"""The names of the moments."""

_ALL_MOMENTS_OF = attrgetter(*MOMENTS)

Moment = tuple[Callable[..., None], ...]
"""The methods to call at a moment, in their order."""


_changing = RLock()
"""Held while plug-ins change: threads may attach some at the same time."""


class PlugIns:
    """Plug-ins of a unit, of a step or of all steps: an attribute for each moment has the methods to call.

    Args:
        above: Plug-ins that count here, too; None for none.

    Attributes:
        own: Those that are attached here, and not above.
        attached: All plug-ins, in their order.
        see_spans: Whether any of them sees spans.
    """

    __slots__ = (
        *MOMENTS,
        "own",
        "attached",
        "see_spans",
        "_above",
        "_below",
        "__weakref__",
    )  # each unit has one

    made: Moment
    follows: Moment
    forward_begins: Moment
    forward_opens: Moment
    forward_ready: Moment
    backward_begins: Moment
    backward_opens: Moment
    before_reduction: Moment
    backward_ends: Moment
    backward_closes: Moment
    backward_ended: Moment
    failed: Moment
    explains: Moment
    rests: Moment
    dropped: Moment
    trains: Moment
    enters: Moment
    computes: Moment
    computed: Moment
    hooked: Moment
    runs: Moment
    ran: Moment
    resumes: Moment
    expects: Moment
    needs: Moment
    to_gather: Moment
    full: Moment
    gathers: Moment
    sharded: Moment
    to_reduce: Moment
    reduces: Moment
    awaits_reduction: Moment
    reduced: Moment
    brings: Moment
    backward_over: Moment
    span_begins: Moment
    span_ends: Moment
    issued: Moment
    on_lane: Moment
    sees: Moment
    sends: Moment
    takes: Moment
    averaged: Moment
    see_spans: bool

    def __init__(self, above: PlugIns | None = None) -> None:
        self.own: tuple[PlugIn, ...] = ()
        self.attached: tuple[PlugIn, ...] = ()
        self._above: PlugIns | None = None
        self._below: WeakSet[PlugIns] | None = None
        if above is None:
            self._collect()
        else:
            self.move_below(above)

    def move_below(self, above: PlugIns) -> None:
        """Lets other plug-ins than before count here, besides its own."""
        with _changing:
            if self._above is not None and self._above._below is not None:
                self._above._below.discard(self)
            if above._below is None:
                above._below = WeakSet()
            above._below.add(self)
            self._above = above
            self._collect()

    def attach(self, plug_in: PlugIn) -> None:
        """Attaches a plug-in, after those that have the same place."""
        with _changing:
            self.own = (*self.own, plug_in)
            self._collect()

    def detach(self, plug_in: PlugIn) -> None:
        """Detaches a plug-in; what runs now may call it once more."""
        with _changing:
            own = [*self.own]
            own.remove(plug_in)
            self.own = (*own,)
            self._collect()

    @contextmanager
    def having(self, plug_in: PlugIn) -> Iterator[None]:
        """Attaches a plug-in while the context is open."""
        self.attach(plug_in)
        try:
            yield
        finally:
            self.detach(plug_in)

    def span(
        self,
        kind: SpanKind,
        phase: Phase | None,
        units: Sequence[Any],
        nbytes: int = 0,
        beside: bool = False,
    ) -> Span | NoSpan:
        """Returns a span of units as a context, the issuing one first; `NO_SPAN` if no plug-in sees spans."""
        if not self.see_spans:
            return NO_SPAN
        return Span(kind, units[0].fqn, phase, units, nbytes, beside, self)

    @property
    def align(self) -> bool:
        """Whether any of them keeps the ranks together."""
        return any([plug_in.aligns for plug_in in self.attached])

    @property
    def separate(self) -> bool:
        """Whether not all ranks come to the same places."""
        return any([plug_in.separates for plug_in in self.attached])

    @property
    def shadowed(self) -> bool:
        """Whether a rank without a batch takes part in the step."""
        return any([plug_in.shadowed for plug_in in self.attached])

    def updates(self, unit: Any) -> bool:
        """Whether any of them updates the unit's parameters in its backward."""
        return any([unit in plug_in.updated_units for plug_in in self.attached])

    @property
    def average_notes(self) -> bool:
        """Whether any of them averages which gradients are used."""
        return any([plug_in.averages_notes for plug_in in self.attached])

    def _collect(self) -> None:
        above = self._above
        if above is not None and not self.own:  # as most units
            self.attached, self.see_spans = above.attached, above.see_spans
            for _ in map(setattr, repeat(self), MOMENTS, _ALL_MOMENTS_OF(above)):
                pass
        else:
            others = () if above is None else above.attached
            self.attached = (*sorted((*others, *self.own), key=lambda plug_in: plug_in.order),)
            for moment in MOMENTS:
                base = getattr(PlugIn, moment)
                overriding = (one for one in self.attached if getattr(type(one), moment) is not base)
                setattr(self, moment, tuple(getattr(one, moment) for one in overriding))
            self.see_spans = bool(self.span_begins or self.span_ends)
        for below in self._below or ():
            below._collect()


everywhere = PlugIns()
"""The plug-ins of all steps of this process."""
