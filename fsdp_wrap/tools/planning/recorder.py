"""Records a step in its order: operators, collectives, waits, and the units they belong to."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist

from fsdp_wrap._core import Computing, Phase, PlugIn, Span, SpanKind
from fsdp_wrap._core.torch_private import copying_operators, groups_alive, pytree
from fsdp_wrap.tools.planning import figures
from fsdp_wrap.tools.planning.figures import BACKWARD, FORWARD, HELP, OPTIMIZER, STEP, Place
from fsdp_wrap.tools.planning.kernels import flops_of
from fsdp_wrap.tools.planning.ledger import Ledger

_COLLECTIVES = {
    "all_gather": (
        "_allgather_base_",
        "allgather_",
        "allgather_into_tensor_coalesced_",
        "all_gather_into_tensor",
    ),
    "reduce_scatter": ("_reduce_scatter_base_", "reduce_scatter_", "reduce_scatter_tensor"),
    "all_reduce": ("allreduce_", "allreduce_coalesced_", "all_reduce", "all_reduce_"),
    "all_to_all": ("alltoall_base_", "alltoall_", "all_to_all_single"),
    "broadcast": ("broadcast_", "broadcast"),
    "gather": ("gather_",),
    "scatter": ("scatter_",),
    "message": ("recv_",),
}
"""Operators of collectives by kind; `send` is left out as the other end of a message."""

_KINDS = {name: kind for kind, names in _COLLECTIVES.items() for name in names}

_ROLES = {
    SpanKind.GATHER: figures.COMMUNICATOR,
    SpanKind.AWAIT_GATHER: figures.COMMUNICATOR,
    SpanKind.REDUCE: figures.REDUCE_BUFFERS,
    SpanKind.AWAIT_REDUCTION: figures.GRADIENTS,
}
"""The use of tensors that are made in a span."""

_MESSAGES = {SpanKind.GATHER: "all_gather", SpanKind.REDUCE: "reduce_scatter"}
"""The collective that messages of a span make up."""

_CALLERS = {**_MESSAGES, SpanKind.AWAIT_GATHER: "all_gather", SpanKind.AWAIT_REDUCTION: "reduce_scatter"}
"""The collective for which tensors are made in a span."""

_FREE = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
}
"""Operators that compute nothing."""

ALL_COPIES = -2
"""The ticket of all copies between host and device."""


class Resource(Enum):
    """The resource that a work occupies while it runs."""

    COMPUTE = "compute"
    NETWORK = "network"
    COPIES = "copies"


@dataclass(frozen=True)
class CollectiveCall:
    """One collective that was issued: bytes this rank receives, bytes of the full tensor, and for whom."""

    kind: str
    received: int
    nbytes: int
    ranks: tuple[int, ...]
    units: tuple[str, ...]


@dataclass(frozen=True)
class Work:
    """An operator, collective or copy; works of one ticket run one after the other.

    `visit` is the index of the visit of a place in which it is issued; `nbytes` is moved in memory, over the
    network or between host and device. `on_host` says that the host computes beside a device.
    """

    resource: Resource
    visit: int
    nbytes: int
    flops: int = 0
    dtype: torch.dtype = torch.float32
    collective: CollectiveCall | None = None
    ticket: int = -1
    on_host: bool = False


@dataclass(frozen=True)
class Wait:
    """The computation waits for the works of a ticket, for a unit."""

    ticket: int
    visit: int
    unit: str


class PlanRecorder(PlugIn):
    """A plug-in that also sees the operators, and tells the ledger the place in the step.

    `names` are the units' by identity; other units have their own `fqn`. `gather_counts`, `reductions`,
    `payload` (bytes of full buffers) and `activations` (bytes held when a backward begins) are by unit.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.names: dict[int, str] = {}
        self._computing: list[tuple[Any, Computing]] = []
        self._spans: list[tuple[Span, int]] = []
        self._phase, self._caller = STEP, ""
        self._tickets: dict[tuple[int, bool], int] = {}
        self._next_ticket = 0
        self.restart()

    def restart(self) -> None:
        """Forgets the recorded step."""
        self.entries: list[Work | Wait] = []
        self.collectives: list[CollectiveCall] = []
        self.gather_counts: Counter[str] = Counter()
        self.reductions: Counter[str] = Counter()
        self.payload: Counter[str] = Counter()
        self.gathered: dict[str, Counter[str]] = {}
        self.activations: Counter[str] = Counter()
        self.flops = 0
        self._last: Computing | None = None
        self._arrivals: dict[int, list[int]] = {}
        self._messages: list[CollectiveCall] = []

    # the place in the step

    def in_phase(self, phase: str, caller: str = "") -> None:
        """Notes that another phase of the step begins, and who calls operators in it."""
        self._phase, self._caller = phase, caller
        self._follow()

    def _follow(self) -> None:
        place = Place("", self._phase)
        kind = figures.OPTIMIZER_TEMPORARIES if self._phase == OPTIMIZER else figures.ACTIVATIONS
        self._ledger.caller = self._caller
        if self._computing:
            owner, what = self._computing[-1]
            place = Place(self._name(owner), FORWARD if what is Computing.FORWARD else BACKWARD)
        if self._spans:
            if self._spans[0][0].kind is SpanKind.HELP:
                place = Place("", HELP)
            kind = _ROLES.get(self._spans[-1][0].kind, kind)
            self._ledger.caller = _CALLERS.get(self._spans[-1][0].kind, self._caller)
        self._ledger.come_to(place)
        self._ledger.kind = kind

    def _name(self, owner: Any) -> str:
        return self.names.get(id(owner), str(owner.fqn))

    def computes(self, unit: Any, what: Computing) -> None:
        if what is Computing.BACKWARD:  # of a group of modules it begins with each, and ends once
            self._computing = [computation for computation in self._computing if computation != (unit, what)]
        self._computing.append((unit, what))
        if what is Computing.BACKWARD and self._last is Computing.FORWARD:
            self.activations |= self._ledger.activations()
        self._last = what
        self._follow()
        if what is Computing.BACKWARD:
            self._await_arrivals(unit)

    def _await_arrivals(self, owner: Any) -> None:
        """Notes that a unit's backward waits for its activations from the host."""
        for ticket in self._arrivals.pop(id(owner), ()):
            self.entries.append(Wait(ticket, self._ledger.visit, self._name(owner)))

    def computed(self, unit: Any, what: Computing) -> None:
        if (unit, what) in self._computing:
            self._computing.remove((unit, what))
        self._follow()

    def backward_over(self, unit: Any, phase: Phase) -> None:
        self._await_arrivals(unit)  # whose copies came too late for its beginning
        self.computed(unit, Computing.BACKWARD)

    def gathers(self, unit: Any, phase: Phase, nbytes: int, together: tuple[str, ...]) -> None:
        self.gathered.setdefault(phase.value, Counter()).update(unit.buffers.segments.nbytes_by_dtype())

    def span_begins(self, span: Span) -> None:
        ticket = self._next_ticket = self._next_ticket + 1
        self._spans.append((span, ticket))
        self._follow()
        gathers = span.kind in (SpanKind.GATHER, SpanKind.AWAIT_GATHER)
        if span.kind in (SpanKind.GATHER, SpanKind.REDUCE):
            counts = self.gather_counts if gathers else self.reductions
            for owner in span.owners:
                self._tickets[id(owner), gathers] = ticket
                counts[self._name(owner)] += 1
        elif span.kind in (SpanKind.AWAIT_GATHER, SpanKind.AWAIT_REDUCTION):
            for owner in span.owners:
                if (issued := self._tickets.pop((id(owner), gathers), None)) is not None:
                    self.entries.append(Wait(issued, self._ledger.visit, self._name(owner)))
        elif span.kind is SpanKind.AWAIT_COPIES:
            self.entries.append(Wait(ALL_COPIES, self._ledger.visit, ""))

    def span_ends(self, span: Span) -> None:
        if self._messages:
            messages, self._messages = self._messages, []
            size, received = len(messages[0].ranks), sum(message.received for message in messages)
            self._issue(replace(messages[0], received=received, nbytes=received * size // (size - 1)))
        if span.kind in _MESSAGES:
            sizes = {self._name(owner): owner.buffers.segments.unsharded_nbytes for owner in span.owners}
            for name, nbytes in sizes.items():
                self.payload[name] += span.nbytes * nbytes // (sum(sizes.values()) or 1)
        self._spans = [entry for entry in self._spans if entry[0] is not span]
        self._follow()

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Notes that a buffer's memory was allocated or freed."""
        gathers = any(span.kind in (SpanKind.GATHER, SpanKind.AWAIT_GATHER) for span, _ in self._spans)
        self._ledger.resized(storage, figures.GATHERED if gathers else figures.REDUCE_BUFFERS)

    # operators and collectives

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Notes an operator that was run."""
        if func.namespace in ("c10d", "_c10d_functional"):
            self._collective(func, args, kwargs, result)
            return
        tensors = [t for t in pytree.tree_leaves((args, kwargs, result)) if isinstance(t, torch.Tensor)]
        if not tensors or func in _FREE:
            return
        flops = flops_of(func, args, kwargs, result)
        self.flops += flops
        nbytes = sum({id(tensor): tensor.nbytes for tensor in tensors}.values())
        floating = next((tensor.dtype for tensor in tensors if tensor.dtype.is_floating_point), torch.float32)
        resource, ticket = Resource.COMPUTE, -1
        if func.overloadpacket in copying_operators:
            self._take_gradients(args, kwargs)
            if self._crosses(tensors):
                resource, ticket = Resource.COPIES, self._spans[-1][1] if self._spans else -1
                nbytes = tensors[0].nbytes
                self._note_arrival(tensors[0], ticket)
        records = [record for tensor in tensors if (record := self._ledger.record_of(tensor)) is not None]
        on_host = bool(records) and all(map(self._ledger.on_host, records))
        self.entries.append(
            Work(resource, self._ledger.visit, nbytes, flops, floating, ticket=ticket, on_host=on_host)
        )

    def _note_arrival(self, target: torch.Tensor, ticket: int) -> None:
        """Notes a copy of a unit's activations to the device."""
        record = self._ledger.record_of(target)
        copies = bool(self._spans) and self._spans[-1][0].kind is SpanKind.COPY
        copies &= self._last is Computing.BACKWARD
        if copies and record is not None and not self._ledger.on_host(record):
            for owner in self._spans[-1][0].owners:
                self._arrivals.setdefault(id(owner), []).append(ticket)

    def _crosses(self, tensors: list[torch.Tensor]) -> bool:
        """Whether an operator copies between host and device."""
        records = (self._ledger.record_of(tensor) for tensor in tensors)
        return len({record.device.type for record in records if record is not None}) > 1

    def _take_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Marks tensors that are copied into a reduce buffer as gradients."""
        target, sources = (kwargs["out"], args[0]) if "out" in kwargs else (args[0], args[1:2])
        if isinstance(target, (list, tuple)):
            target, sources = (target[0] if target else None), args[1]
        there = None if target is None else self._ledger.record_of(target)
        if there is None or there.kind != figures.REDUCE_BUFFERS:
            return
        for source in sources:
            record = self._ledger.record_of(source) if isinstance(source, torch.Tensor) else None
            if record is not None and record.kind == figures.ACTIVATIONS:
                record.kind = figures.GRADIENTS

    def _collective(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        kind = _KINDS.get(func._schema.name.partition("::")[2])
        if kind is None:
            return
        nbytes = max(map(_nbytes, (*args, *kwargs.values(), result)), default=0)
        ranks = _ranks(args, kwargs)
        others = (len(ranks) - 1) / len(ranks)
        received = nbytes if kind in ("message", "broadcast") else int(nbytes * others)
        if kind == "all_reduce":
            received *= 2
        span = next((span for span, _ in reversed(self._spans) if span.kind in _MESSAGES), None)
        units = tuple(self._name(owner) for owner in span.owners) if span is not None else ()
        collective = CollectiveCall(kind, received, nbytes, ranks, units)
        if kind == "message" and span is not None:
            self._messages.append(replace(collective, kind=_MESSAGES[span.kind]))
        else:
            self._issue(collective)

    def _issue(self, collective: CollectiveCall) -> None:
        self.collectives.append(collective)
        ticket = self._spans[-1][1] if self._spans else -1
        visit, nbytes = self._ledger.visit, collective.nbytes
        self.entries.append(Work(Resource.NETWORK, visit, nbytes, collective=collective, ticket=ticket))


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(map(_nbytes, value)) if isinstance(value, (list, tuple)) else 0


def _ranks(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Returns the global ranks that take part in a collective."""
    for value in (*args, *kwargs.values()):
        group = None
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            group = dist.ProcessGroup.unbox(value)
        elif isinstance(value, str):
            group = next(
                (candidate for candidate in groups_alive().pg_map if candidate.group_name == value), None
            )
        if group is not None:
            known = group in groups_alive().pg_map
            return tuple(dist.get_process_group_ranks(group) if known else range(group.size()))
    return tuple(range(dist.get_world_size()))
