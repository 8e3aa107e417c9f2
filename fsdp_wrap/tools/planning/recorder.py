"""What happens in a step, in its order: operators, collectives, waits, and which unit they belong to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.flop_counter import flop_registry

from fsdp_wrap._core import Computing, Span, SpanKind
from fsdp_wrap._core.torch_private import all_groups, copying_operators, pytree
from fsdp_wrap.tools.planning import ledger as kinds
from fsdp_wrap.tools.planning.ledger import Ledger
from fsdp_wrap.tools.planning.plan import Place

FORWARD, BACKWARD, OPTIMIZER, STEP = "forward", "backward", "optimizer", "step"

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
"""The operators of collectives, by kind; `send` is the other end of a message."""

_KINDS = {name: kind for kind, names in _COLLECTIVES.items() for name in names}

_ROLES = {
    SpanKind.GATHER: kinds.COMMUNICATOR,
    SpanKind.AWAIT_GATHER: kinds.COMMUNICATOR,
    SpanKind.REDUCE: kinds.REDUCE_BUFFERS,
    SpanKind.AWAIT_REDUCTION: kinds.GRADIENTS,
}
"""What tensors are for that come in a span."""

_MESSAGES = {SpanKind.GATHER: "all_gather", SpanKind.REDUCE: "reduce_scatter"}
"""What messages are parts of that are sent in a span."""

_FREE = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
}
"""Operators that compute nothing."""

ALL_COPIES = -2
"""The ticket of all copies between host and device."""


class Lane(Enum):
    """Where something runs."""

    COMPUTE = "compute"
    WIRE = "wire"
    COPIES = "copies"


@dataclass(frozen=True)
class Collective:
    """One collective that was issued.

    Attributes:
        kind: What it is.
        received: Bytes that this rank receives.
        nbytes: Bytes of the full tensor.
        ranks: Those that take part.
        units: For whom.
    """

    kind: str
    received: int
    nbytes: int
    ranks: tuple[int, ...]
    units: tuple[str, ...]


@dataclass(frozen=True)
class Work:
    """Something that takes time.

    Attributes:
        lane: Where it runs.
        visit: The number of the visit of a place in which it is issued.
        nbytes: Bytes that it moves: in memory, over the wire or between host and device.
        flops: Floating-point operations.
        dtype: In which.
        collective: What it is if it runs on the wire.
        ticket: What waits name; works of one ticket run one after the other.
    """

    lane: Lane
    visit: int
    nbytes: int
    flops: int = 0
    dtype: torch.dtype = torch.float32
    collective: Collective | None = None
    ticket: int = -1


@dataclass(frozen=True)
class Wait:
    """The computation waits for works.

    Attributes:
        ticket: Theirs.
        visit: The number of the visit of a place in which it waits.
        unit: For whom.
    """

    ticket: int
    visit: int
    unit: str


class Recorder:
    """Watches a step, as a `StepWatcher`, and its operators.

    Args:
        ledger: Is told where in the step the program is.

    Attributes:
        names: Of units, by identity; others are named as they name themselves.
        entries: Works and waits, in their order.
        collectives: Those that were issued.
        gathers: How often each unit was gathered.
        reductions: How often each unit's gradients were reduced.
        payload: Bytes of the full buffers that were gathered and reduced for each unit.
        flops: Floating-point operations in all.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.names: dict[int, str] = {}
        self._computing: list[tuple[Any, Computing]] = []
        self._spans: list[tuple[Span, int]] = []
        self._phase = STEP
        self._tickets: dict[tuple[int, bool], int] = {}
        self._next_ticket = 0
        self.restart()

    def restart(self) -> None:
        """Begins to record anew."""
        self.entries: list[Work | Wait] = []
        self.collectives: list[Collective] = []
        self.gathers: Counter[str] = Counter()
        self.reductions: Counter[str] = Counter()
        self.payload: Counter[str] = Counter()
        self.flops = 0
        self._messages: list[Collective] = []

    # where in the step the program is

    def in_phase(self, phase: str) -> None:
        """Notes that another part of a step begins."""
        self._phase = phase
        self._follow()

    def _follow(self) -> None:
        place = Place("", self._phase)
        kind = kinds.OPTIMIZER_TEMPORARIES if self._phase == OPTIMIZER else kinds.ACTIVATIONS
        if self._computing:
            owner, what = self._computing[-1]
            place = Place(self._name(owner), FORWARD if what is Computing.FORWARD else BACKWARD)
        if self._spans:
            kind = _ROLES.get(self._spans[-1][0].kind, kind)
        self._ledger.come_to(place)
        self._ledger.kind = kind

    def _name(self, owner: Any) -> str:
        return self.names.get(id(owner), str(owner.fqn))

    def enter(self, owner: Any, unit: str, what: Computing) -> None:
        self._computing.append((owner, what))
        self._follow()

    def leave(self, owner: Any, unit: str, what: Computing) -> None:
        if (owner, what) in self._computing:
            self._computing.remove((owner, what))
        self._follow()

    def begin(self, span: Span) -> None:
        ticket = self._next_ticket = self._next_ticket + 1
        self._spans.append((span, ticket))
        self._follow()
        gathers = span.kind in (SpanKind.GATHER, SpanKind.AWAIT_GATHER)
        if span.kind in (SpanKind.GATHER, SpanKind.REDUCE):
            counts = self.gathers if gathers else self.reductions
            for owner in span.owners:
                self._tickets[id(owner), gathers] = ticket
                counts[self._name(owner)] += 1
        elif span.kind in (SpanKind.AWAIT_GATHER, SpanKind.AWAIT_REDUCTION):
            for owner in span.owners:
                issued = self._tickets.pop((id(owner), gathers), None)
                if issued is not None:
                    self._add(Wait(issued, self._ledger.visit, self._name(owner)))
        elif span.kind is SpanKind.AWAIT_COPIES:
            self._add(Wait(ALL_COPIES, self._ledger.visit, ""))

    def end(self, span: Span) -> None:
        if self._messages:
            messages, self._messages = self._messages, []
            size, received = len(messages[0].ranks), sum(each.received for each in messages)
            self._issue(replace(messages[0], received=received, nbytes=received * size // (size - 1)))
        if span.kind in _MESSAGES:
            sizes = {self._name(owner): owner.handle.unsharded_nbytes for owner in span.owners}
            for name, nbytes in sizes.items():
                self.payload[name] += span.nbytes * nbytes // (sum(sizes.values()) or 1)
        self._spans = [each for each in self._spans if each[0] is not span]
        self._follow()

    def hold(self, owner: Any, unit: str, nbytes: int) -> None:
        return None

    def issued(self, works: Sequence[Any]) -> None:
        return None

    def on_lane(self, purpose: str, begin: Any, end: Any) -> None:
        return None

    def resized(self, storage: torch.UntypedStorage) -> None:
        """Notes that memory of a buffer has come or gone."""
        gathers = any(span.kind in (SpanKind.GATHER, SpanKind.AWAIT_GATHER) for span, _ in self._spans)
        self._ledger.resized(storage, kinds.GATHERED if gathers else kinds.REDUCE_BUFFERS)

    # what runs

    def operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Notes an operator that was run."""
        if func.namespace in ("c10d", "_c10d_functional"):
            self._collective(func, args, kwargs, result)
            return
        tensors = [
            each for each in pytree.tree_leaves((args, kwargs, result)) if isinstance(each, torch.Tensor)
        ]
        if not tensors or func in _FREE:
            return
        formula = flop_registry.get(func.overloadpacket)
        flops = 0 if formula is None else int(formula(*_heads_alike(func, args), **kwargs, out_val=result))
        self.flops += flops
        nbytes = sum({id(each): each.nbytes for each in tensors}.values())
        floating = next((each.dtype for each in tensors if each.dtype.is_floating_point), torch.float32)
        lane, ticket = Lane.COMPUTE, -1
        if func.overloadpacket in copying_operators:
            self._take_gradients(args, kwargs)
            if self._crosses(tensors):
                lane, ticket = Lane.COPIES, self._spans[-1][1] if self._spans else -1
                nbytes = tensors[0].nbytes
        self._add(Work(lane, self._ledger.visit, nbytes, flops, floating, ticket=ticket))

    def _add(self, entry: Work | Wait) -> None:
        self.entries.append(entry)

    def _crosses(self, tensors: list[torch.Tensor]) -> bool:
        """Whether an operator copies between host and device."""
        records = (self._ledger.record_of(each) for each in tensors)
        return len({record.device.type for record in records if record is not None}) > 1

    def _take_gradients(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Notes that what is copied into a reduce buffer is gradients."""
        target, sources = (kwargs["out"], args[0]) if "out" in kwargs else (args[0], args[1:2])
        if isinstance(target, (list, tuple)):
            target, sources = (target[0] if target else None), args[1]
        there = None if target is None else self._ledger.record_of(target)
        if there is None or there.kind != kinds.REDUCE_BUFFERS:
            return
        for each in sources:
            record = self._ledger.record_of(each) if isinstance(each, torch.Tensor) else None
            if record is not None and record.kind == kinds.ACTIVATIONS:
                record.kind = kinds.GRADIENTS

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
        collective = Collective(kind, received, nbytes, ranks, units)
        if kind == "message" and span is not None:
            self._messages.append(replace(collective, kind=_MESSAGES[span.kind]))
        else:
            self._issue(collective)

    def _issue(self, collective: Collective) -> None:
        self.collectives.append(collective)
        ticket = self._spans[-1][1] if self._spans else -1
        self._add(
            Work(Lane.WIRE, self._ledger.visit, collective.nbytes, collective=collective, ticket=ticket)
        )


def _heads_alike(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Returns arguments of attention with as many heads of keys and values as of queries, which is the same.

    The formula of torch before 2.12 wants it so.
    """
    if "scaled_dot_product" not in func._schema.name:
        return args
    batches = [each for each in args if isinstance(each, torch.Tensor) and each.dim() == 4]
    heads = max(each.shape[1] for each in batches)
    return tuple(
        each[:, :1].expand(-1, heads, -1, -1) if any(each is one for one in batches) else each
        for each in args
    )


def _nbytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    return sum(map(_nbytes, value)) if isinstance(value, (list, tuple)) else 0


def _ranks(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Returns the ranks that take part in a collective, as the default group counts them."""
    for value in (*args, *kwargs.values()):
        group = None
        if isinstance(value, torch.ScriptObject) and "ProcessGroup" in str(value._type()):
            group = dist.ProcessGroup.unbox(value)
        elif isinstance(value, str):
            group = next((each for each in all_groups() if each.group_name == value), None)
        if group is not None:
            known = group in all_groups()
            return tuple(dist.get_process_group_ranks(group) if known else range(group.size()))
    return tuple(range(dist.get_world_size()))
