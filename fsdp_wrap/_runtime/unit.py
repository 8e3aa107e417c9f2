"""`Unit`: a wrapped module with its handle; its verbs communicate, and tell other ranks and observers."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge

from fsdp_wrap._comm import Communicator, UnitPositions
from fsdp_wrap._core import (
    NO_CASTS,
    NO_SPAN,
    UNIT_ATTR,
    WRAPPED_ATTR,
    BackwardPrefetch,
    BufferCasts,
    Computing,
    EventKind,
    InputCasts,
    NoSpan,
    NoValuesError,
    Phase,
    Span,
    SpanKind,
    clean_fqn,
    emit,
    observers,
    step_watchers,
    walk,
    warn_caller,
)
from fsdp_wrap._core.torch_private import will_execute
from fsdp_wrap._params import GatherShare, HandleState, Layout, ParamHandle, Segment
from fsdp_wrap._runtime.arrivals import Arrivals, Progress

Copies = Sequence[Sequence[torch.Tensor]]
"""Of the leaves, by segment."""

FULL_PRECISION_IN_EVAL = "FSDP_USE_FULL_PREC_IN_EVAL"
"""The environment variable, torch's, that leaves out mixed precision in eval mode where it is 1."""


@dataclass(frozen=True)
class UnitOptions:
    """How the schedule treats one unit.

    Attributes:
        reshard_after_forward: Free the full parameters between forward and backward.
        backward_prefetch: When backward issues the next unit's all-gather; None for never.
        forward_prefetch: Whether forward issues the all-gather of the unit that came next last time.
        keeps_as_root: Whether as the root it keeps its parameters for backward, which needs them first.
        casts: Casts of inputs and outputs.
        reshards_within: Ranks that keep the full parameters between them from forward to backward.
        reshards_after_backward: Free the full parameters after backward.
        unshards_in_backward: Whether backward needs the parameters' values at all.
        syncs: Whether gradients are reduced, or kept for a later backward.
        sums_over_replicas: Whether reduced gradients are summed over the replicas as well.
        counts_unused: Whether parameters that no rank used get gradients of zeros.
        reduces_apart: Whether gradients are reduced in another process group than parameters are gathered in.
        most_reducing: How many reductions may be in flight once this unit's is.
        forward_targets: Units whose all-gathers forward issues with this one; none for the default.
        backward_targets: The same for backward.
        gradients_in_place: Whether a gradient may take the memory of its parameter.
        full_in_eval: Whether mixed precision is left out while the module is in eval mode.
        travel_together_bytes: How much memory small units may take to travel together; None for the default
            of the device. The root's counts.
        keep_unsharded_bytes: The most bytes of kept segments in the tree, once some of this unit's are kept.
    """

    reshard_after_forward: bool = True
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    forward_prefetch: bool = False
    keeps_as_root: bool = True
    casts: InputCasts = NO_CASTS
    reshards_within: Communicator | None = None
    reshards_after_backward: bool = True
    unshards_in_backward: bool = True
    syncs: bool = True
    sums_over_replicas: bool = True
    counts_unused: bool = False
    reduces_apart: bool = False
    most_reducing: int = 1
    forward_targets: tuple[Unit, ...] = ()
    backward_targets: tuple[Unit, ...] = ()
    gradients_in_place: bool = False
    full_in_eval: bool = False
    travel_together_bytes: int | None = None
    keep_unsharded_bytes: int = 0

    def copied(self, memo: dict[int, Any]) -> UnitOptions:
        """Returns the same for a unit's deep copy; units that are not copied stay what they are."""
        forward, backward = (
            tuple(memo.get(id(unit), unit) for unit in targets)
            for targets in (self.forward_targets, self.backward_targets)
        )
        return replace(self, forward_targets=forward, backward_targets=backward)


class Updater(Protocol):
    """Updates units while a backward goes on; an add-on for optimizers brings one."""

    @property
    def communicates(self) -> bool:
        """Whether `update` does, so that all ranks must call it between the same collectives."""

    @property
    def waits(self) -> bool:
        """Whether units of the running backward are to be updated when all gradients are there."""

    def begin(self) -> None:
        """A backward begins."""

    def update(self, unit: Unit, arrive: Callable[[], None] | None) -> None:
        """Updates a unit, after `arrive`, if given, has added its gradients to the sharded parameters."""

    def finish(self, left: Sequence[Unit]) -> None:
        """All gradients are there: updates the units that are left, and waits for all updates."""

    def abandon(self, left: Sequence[Unit]) -> None:
        """The backward has failed: waits for what was begun, and drops other units' gradients."""


class StepState:
    """State of the step of a tree of units, which its units read; its schedule writes it.

    Attributes:
        root: The unit whose forward is outermost.
        iteration: Outermost forwards that have begun.
        syncs: Whether gradients are reduced: not under `no_sync`.
        sums_over_replicas: Whether they are summed over the replicas as well, where units do not defer that.
    """

    def __init__(self, root: Unit) -> None:
        self.root = root
        self.iteration = 0
        self.syncs = self.sums_over_replicas = True


class Unit:
    """A wrapped module with the parameters that it owns.

    Args:
        module: The module that the front-end made a unit.
        handle: Owner of its parameters; None where it owns none.
        options: How to schedule it.
        left: Tied parameters of the module that a unit above owns.
        lenders: Owners of parameters that the module uses as well; they run whenever this unit does. Of its
            own parameters those that lie on other meshes than this unit's.
        buffers: The casts of its buffers.
        parts: The modules of which each has a forward of its own, where `module` only holds them together.
        initial: Returns a line per parameter of the values that it began with; None if they are not known.
        mesh_label: Name of its mesh, where the module has units over several; empty for the first.

    Attributes:
        running: Forward calls in progress.
        forwards: Those that a backward may follow, since the last backward; not recomputations.
        updater: What updates it while backwards go on, if anything does.
        casts: Whether it casts inputs or outputs.
        schedule: In which it runs; None before its first use.
        positions: Where it tells other ranks what it does, once it runs in a schedule.
        arrivals: What it has got of the running backward.
        hooked: Which of the handle's `hookings` was the last.
        told_of_own_gradients: Whether a warning told that a graph leads to sharded parameters themselves.
        all_train: Whether every leaf needs a gradient.
        mesh_label: Name of its mesh, where the module has units over several; empty for the first.
        to_keep: Segments of the tree whose full parameters are kept, within the budget, when units reshard.
        frozen_to_keep: Those of them that are kept after a backward too: optimizers do not change them.
    """

    positions: UnitPositions
    lenders: Sequence[Unit] = ()
    mesh_label = ""  # these two also of one that a deep copy has yet to make

    def __init__(
        self,
        module: nn.Module,
        handle: ParamHandle | None,
        options: UnitOptions,
        *,
        left: frozenset[nn.Parameter] = frozenset(),
        lenders: Sequence[Unit] = (),
        buffers: BufferCasts | None = None,
        parts: Iterable[nn.Module] = (),
        initial: Callable[[Sequence[Layout]], list[str]] | None = None,
        mesh_label: str = "",
    ) -> None:
        self._module = weakref.ref(module, self._dissolve)
        self._keeps = module if parts else None  # for what holds parts together is held by nobody else
        self.parts = frozenset(parts)
        self._to_run: set[nn.Module | None] = set(self.parts)
        self._held = False
        self.handle = handle
        self.options = options
        self.casts = options.casts != NO_CASTS
        self.left = left
        self.initial = initial
        self.lenders = lenders
        self.mesh_label = mesh_label
        self.buffers = buffers or BufferCasts((), None)
        self.fqn = mesh_label
        self.running = self.forwards = 0
        self.updater: Updater | None = None
        self.nested = False
        self.schedule: StepState | None = None
        self._hooked: set[nn.Parameter] = set()
        self._own_gradients: list[tuple[Node, Any]] = []
        self.told_of_own_gradients = False
        self.hooked = -1
        self.all_train = handle is None
        self.to_keep: Collection[Segment] = ()
        self.frozen_to_keep: Collection[Segment] = ()
        self.arrivals = Arrivals()
        self._copies: Copies | None = None

    @property
    def module(self) -> nn.Module:
        """The module that the front-end made a unit, which holds the unit. Graphs keep it, by their calls."""
        module = self._module()
        assert module is not None
        return module

    @property
    def gone(self) -> bool:
        """Whether its module has gone."""
        return self._module() is None

    @property
    def trains(self) -> bool:
        """Whether its module is there, and in training mode."""
        module = self._module()
        return module is not None and module.training

    def moves_to(self, module: nn.Module) -> None:
        """Lets another module hold the unit: a wrapper."""
        self._module = weakref.ref(module, self._dissolve)

    @property
    def keeps_module(self) -> bool:
        """Whether it keeps its module, since other units use its parameters."""
        return self._keeps is not None

    def lend(self) -> None:
        """Lets other units, which may outlive its module, use its parameters."""
        self._keeps = self.module

    def _dissolve(self, _: object) -> None:
        """Lets go of everything when the module has gone: the units of a tree know each other."""
        self.handle = self.initial = None
        self._hooked.clear()
        self._own_gradients = []

    @property
    def over_all_meshes(self) -> tuple[Unit, ...]:
        """The units of the module that was sharded: this one first, then those over other meshes."""
        over_others = [unit for unit in self.lenders if unit.mesh_label]
        return self, *(unit for unit in over_others if unit._module() is self._module())

    @property
    def name(self) -> str:
        """The unit as messages name it."""
        wrapped = self.module._modules.get(WRAPPED_ATTR, self.module)
        if self.fqn != self.mesh_label:
            return f"unit '{self.fqn}'"
        return f"the root unit ({type(wrapped).__name__}){self.mesh_label and f' {self.mesh_label}'}"

    def name_of(self, param: str) -> str:
        """Returns the name below the root of a parameter that is given by its name within the unit."""
        prefix = self.fqn.split(", ")[0].removesuffix(self.mesh_label).rstrip()
        return f"{prefix}.{param}" if prefix else param

    def join(self, schedule: StepState, fqn: str, tell: Callable[[Unit], UnitPositions]) -> None:
        """Makes this a unit of `schedule`, under its name relative to the root.

        Args:
            schedule: The schedule.
            fqn: The name.
            tell: Makes that by which it tells other ranks what it does.
        """
        self.schedule = schedule
        self.to_keep = self.frozen_to_keep = ()
        self.fqn = fqn
        self.positions = tell(self)

    def leave(self) -> None:
        """Takes it out of its schedule; it joins one again when it is used."""
        self.schedule = None

    def nest(self, fqn: str) -> None:
        """Notes that another unit encloses this one, under its name there."""
        self.nested = True
        self.fqn = fqn

    def set(self, **options: Any) -> None:
        """Schedules it differently from now on."""
        self.options = replace(self.options, **options)
        self.casts = self.options.casts != NO_CASTS

    def set_reshard_after_forward(self, reshard: bool) -> None:
        """Decides whether the full parameters are freed after forward, as the root as well."""
        self.set(reshard_after_forward=reshard, keeps_as_root=not reshard, reshards_within=None)

    # communication

    def unshard(self, phase: Phase) -> None:
        """Makes the leaves usable: gathers unless that was done ahead, and waits for the gather.

        Raises:
            RuntimeError: If the parameters are in the user's hands or in a state dict's.
            ValueError: If they have no values.
        """
        handle = self.handle
        assert handle is not None and self.schedule is not None
        if handle.state is HandleState.SUMMONED or handle.state is HandleState.REPLACED:
            raise _not_ours(self, handle.state)
        self.positions.enter(self.schedule.iteration, phase.index)
        if handle.state is HandleState.SHARDED:
            self.gather(phase)
        if handle.state is HandleState.UNSHARDING:
            with self.span(SpanKind.AWAIT_GATHER, phase):
                handle.wait()
            if self.positions.gathers:
                self.positions.gathered()

    def gather(self, phase: Phase) -> bool:
        """Issues the all-gather; returns False if the unit is unsharded, or being gathered, already.

        Raises:
            NoValuesError: If parameters are on the meta device.
        """
        handle = self.handle
        if handle is None or handle.state is not HandleState.SHARDED:
            return False
        if handle.without_values:
            raise _no_values(self, handle)
        if handle.reduction is not None and handle.lends:
            self.finish_reduction()
        nbytes = handle.unsharded_nbytes - (self._reuse(handle, phase) if handle.kept_segments else 0)
        travels = not handle.kept_segments or bool(handle.left)
        if travels:
            assert self.schedule is not None
            note = self.positions.gather if handle.post_forward_shards is None else self.positions.gather_kept
            if handle.post_forward_shards is None and handle.kept_segments:
                note = self.positions.gather_part(handle.left)
            note.issue(phase, self.schedule.iteration)
        with self.span(SpanKind.GATHER, phase, nbytes):
            handle.gather(self._lasts(phase))
        if travels:
            self.tell(EventKind.UNSHARD, phase, nbytes)
        return True

    def _reuse(self, handle: ParamHandle, phase: Phase) -> int:
        """Returns the bytes of the kept segments whose values are still those of the shards."""
        self.drop_outdated(phase)
        kept = handle.kept_nbytes
        if kept:
            self.tell(EventKind.REUSE, phase, kept)
        return kept

    def join_gather(self, share: GatherShare, phase: Phase, together: tuple[str, ...]) -> None:
        """Takes part in the batched gather of several units; this one is sharded.

        Args:
            share: The unit's share of it.
            phase: Where in the iteration this is.
            together: Names of the units.
        """
        handle = self.handle
        assert handle is not None
        handle.gather(self._lasts(phase), share)
        self.tell(EventKind.UNSHARD, phase, handle.unsharded_nbytes, together)

    def _lasts(self, phase: Phase) -> bool:
        """Whether a later iteration may take over the full parameters that are gathered now."""
        options, schedule = self.options, self.schedule
        if phase is Phase.IDLE or self.to_keep or schedule is None or not schedule.syncs:
            return True
        if not options.reshards_after_backward or not options.reshard_after_forward:
            return True
        return options.keeps_as_root and not self.nested

    def drop_outdated(self, phase: Phase) -> None:
        """Frees kept segments that may have other values than the shards by now."""
        assert self.handle is not None
        freed = self.handle.drop_outdated()
        if freed:
            self.tell(EventKind.RESHARD, phase, freed)

    def reshard(
        self, phase: Phase, within: Communicator | None = None, keep: Collection[Segment] = ()
    ) -> None:
        """Frees the full parameters, unless a forward that is running needs them.

        Args:
            phase: Where in the iteration this is.
            within: Ranks that keep the full parameters between them.
            keep: Segments, of any units, whose full parameters this rank keeps.
        """
        handle = self.handle
        # A backward may run inside a forward, which still needs its leaves.
        if handle is None or self.running > (phase is Phase.FORWARD):
            return
        if handle.state is HandleState.UNSHARDING:  # a gather in flight still writes
            with self.span(SpanKind.AWAIT_GATHER, phase):
                handle.wait()
        before = handle.kept_nbytes if handle.kept_segments else 0
        if handle.reshard(within, keep):
            self._held, before = False, handle.unsharded_nbytes
            if handle.kept_segments:
                self.tell(EventKind.STAY, phase, handle.kept_nbytes)
        after = handle.kept_nbytes if handle.kept_segments else 0
        if before > after:
            self.tell(EventKind.RESHARD, phase, before - after)

    @property
    def defers(self) -> bool:
        """Whether its reduced gradients are summed over the replicas only with a later reduction."""
        handle, schedule = self.handle, self.schedule
        if self.options.sums_over_replicas and (schedule is None or schedule.sums_over_replicas):
            return False
        return handle is not None and handle.replicas.size > 1

    def reduce(self, phase: Phase) -> None:
        """Issues the reduction of the gradients; none may be in flight."""
        handle = self.handle
        assert handle is not None and self.schedule is not None
        defers = self.defers
        note = self.positions.reduction_in_copy if defers else self.positions.reduction
        note.issue(phase, self.schedule.iteration)
        with self.span(SpanKind.REDUCE, phase) as span:
            span.nbytes = handle.start_reduction(not defers, self.options.counts_unused)
        self.tell(EventKind.REDUCE, phase, span.nbytes)

    def finish_reduction(self) -> None:
        """Waits for the reduction in flight, if any, and hands on its result."""
        handle = self.handle
        if handle is None or handle.reduction is None:
            return
        with self.span(SpanKind.AWAIT_REDUCTION, None):
            handle.finish_reduction()
        if self.positions.reductions and not handle.has_own_reduction:  # which may have waited for nobody
            self.positions.reduced()

    # observers

    def span(
        self, kind: SpanKind, phase: Phase | None, nbytes: int = 0, units: Sequence[Unit] = ()
    ) -> Span | NoSpan:
        """Returns the span, as a context, of something that the runtime does for the unit.

        Args:
            kind: Its kind.
            phase: Where in the iteration this is.
            nbytes: Bytes of the buffers concerned.
            units: All units of a batched collective, this one first; none where it travels alone.
        """
        if not step_watchers:
            return NO_SPAN
        return Span(kind, self.fqn, phase, units or (self,), nbytes, tuple([unit.fqn for unit in units]))

    def tell(self, kind: EventKind, phase: Phase, nbytes: int = 0, together: tuple[str, ...] = ()) -> None:
        """Tells observers of an event, and watchers how many more bytes of full parameters are held."""
        if step_watchers and kind in (EventKind.UNSHARD, EventKind.RESHARD):
            grown = nbytes if kind is EventKind.UNSHARD else -nbytes
            for watcher in step_watchers:
                watcher.hold(self, self.fqn, grown)
        if observers:
            travels = self.handle is not None and kind in (EventKind.UNSHARD, EventKind.REDUCE)
            way = self.handle.communicator.way if travels else ""  # type: ignore[union-attr]
            emit(kind, self.fqn, phase, nbytes, way, together)

    def tell_entered(self, what: Computing) -> None:
        """Tells watchers that the unit begins to compute."""
        for watcher in step_watchers:
            watcher.enter(self, self.fqn, what)

    def tell_left(self, what: Computing) -> None:
        """Tells watchers that the unit has computed."""
        for watcher in step_watchers:
            watcher.leave(self, self.fqn, what)

    # forward

    def hold(self) -> None:
        """Notes that the next iteration takes over its full parameters, unless they change."""
        self._held = True

    @property
    def survives(self) -> bool:
        """Whether a new iteration takes over all of its full parameters, whatever may stay of others."""
        handle, wanted = self.handle, self._held or not self.options.reshards_after_backward
        if not wanted or handle is None or not handle.is_current:
            return False
        return handle.in_full == self.leaves_mixed_precision

    @property
    def leaves_mixed_precision(self) -> bool:
        """Whether a forward that begins now leaves out the unit's mixed precision."""
        options = self.options
        if not options.full_in_eval or (self.module._modules.get(WRAPPED_ATTR) or self.module).training:
            return False
        if self.handle is None:
            return not options.casts.restores_outputs  # those are to full precision
        return self.handle.mixes

    def show_buffers(self) -> None:
        """Lets the modules compute with buffers in the dtype of a forward that begins now."""
        if self.leaves_mixed_precision:
            self.buffers.show_original()
        else:
            self.buffers.show_cast()

    def follow_mode(self) -> None:
        """Lets a sharded unit compute in the precision that its module's mode asks for.

        Raises:
            RuntimeError: If that changes while gradients in the former precision wait for a backward.
        """
        in_full, handle = self.leaves_mixed_precision, self.handle
        if handle is None or handle.in_full == in_full:
            return
        if handle.accumulates:
            raise RuntimeError(
                f"{self.name} went to {'eval' if in_full else 'train'} mode, and so to another precision "
                f"({FULL_PRECISION_IN_EVAL}=1), on rank {dist.get_rank()} while gradients left by no_sync "
                "wait for a backward; evaluate before or after the accumulation"
            )
        handle.compute_in_full(in_full)

    def keeps_parameters(self, call: ForwardCall, has_grad_outputs: bool, as_root: bool) -> bool:
        """Whether its full parameters stay for the backward of a call, after the forward."""
        if not torch.is_grad_enabled():
            return False
        if not has_grad_outputs:  # gradients may enter through something that no hook can see
            return call.watched > 0 or (self.handle is not None and self.handle.trainable)
        if as_root and self.options.keeps_as_root:
            return self.trains
        return not self.options.reshard_after_forward

    def ran(self, part: nn.Module | None) -> bool:
        """Notes that the forward of a part is over; returns whether all have run, and begins anew then."""
        self._to_run.discard(part)
        over = not self._to_run
        if over:
            self.restart()
        return over

    @property
    def partly_ran(self) -> bool:
        """Whether some of its parts have run and others not."""
        return self._to_run != self.parts

    def restart(self) -> None:
        """Waits for the forwards of all parts again."""
        self._to_run = set(self.parts)

    def show_copies(self, copies: Copies | None) -> Copies | None:
        """Lets the modules compute with copies of the leaves, by segment, or with the leaves again.

        Returns:
            The copies that they computed with before, if they did.
        """
        before, self._copies = self._copies, copies
        for number, segment in enumerate([] if self.handle is None else self.handle.segments):
            if copies is None:
                segment.layout.display.show_leaves()
            else:
                segment.layout.show(copies[number])
        return before

    def newly_trainable(self) -> list[nn.Parameter]:
        """Returns the leaves that need gradients and were not returned before."""
        handle = self.handle
        assert handle is not None
        leaves = [leaf for segment in handle.segments for leaf in segment.leaves]
        trainable = [leaf for leaf in leaves if leaf.requires_grad]
        self.hooked = handle.hookings
        self.arrivals.expect(trainable)
        self.all_train = len(trainable) == len(leaves)
        new = [leaf for leaf in trainable if leaf not in self._hooked]
        self._hooked = {*self._hooked.intersection(leaves), *new}
        return new

    @torch.inference_mode(False)
    def watch_own_gradients(self) -> None:
        """Watches gradients that reach sharded parameters themselves, not by their leaves."""
        handle, this = self.handle, weakref.ref(self)
        assert handle is not None
        for _, watching in self._own_gradients:
            watching.remove()
        self._own_gradients = []
        for segment in handle.segments:
            sources = {source: index for index, source in enumerate(segment.layout.sources)}
            for source, index in sources.items():
                if source.requires_grad and source.numel():  # torch makes no view of an empty `DTensor`
                    node = get_gradient_edge(source).node  # which only a graph would keep
                    watching = node.register_prehook(partial(_on_own_gradient, this, segment, index))
                    self._own_gradients.append((node, watching))

    # backward

    def gradients_to_come(self) -> bool:
        """Whether the running backward will reach a leaf whose gradient has not arrived."""
        missing = self.arrivals.missing
        if self.handle is None or not missing:
            return False
        leaves = (leaf for segment in self.handle.segments for leaf in segment.leaves)
        return any(_will_run([get_gradient_edge(leaf).node]) for leaf in leaves if id(leaf) in missing)

    def end_backward(self, phase: Phase) -> None:
        """Notes that its backward is over, if one was running."""
        if self.arrivals.end():
            self.tell_left(Computing.BACKWARD)
            self.tell(EventKind.POST_BACKWARD, phase)

    def end_unsharded(self, phase: Phase) -> None:
        """Reshards where a backward has ended, or shows the sharded parameters at least.

        Under `no_sync` the next forward takes over what has stayed from forward to backward.
        """
        options, schedule = self.options, self.schedule
        accumulates = schedule is not None and not schedule.syncs
        if options.reshards_after_backward and (options.reshard_after_forward or not accumulates):
            self.reshard(
                phase, keep=self.to_keep if accumulates or not options.syncs else self.frozen_to_keep
            )
        elif self.handle is not None:
            self.hold()
            if not self.running:
                self.handle.shown.show_sharded()

    @property
    def reached(self) -> bool:
        """Whether the running backward of the tree has reached the unit and not left it."""
        return self.arrivals.progress is Progress.RUNNING


class ForwardCall:
    """One forward call of a unit whose backward may follow."""

    def __init__(self, unit: Unit, part: nn.Module | None = None) -> None:
        self.unit = unit
        self._module = unit._module()  # which a graph keeps
        self.part = part
        self.watched = 0
        """How many of its inputs report when their gradients are done."""
        self.task = -1
        """The graph task in which its backward is open."""
        self._awaited = 0
        handle = unit.handle
        self.values = 0 if handle is None else handle.values
        """How often the leaves had got other values before those that it computes with."""
        self.written = [] if handle is None else handle.written
        """What the layouts said when these were gathered."""
        self._generation = 0 if handle is None else handle.generation

    @property
    def converted(self) -> bool:
        """Whether the leaves it computed with have been replaced by others of another dtype."""
        handle = self.unit.handle
        return handle is not None and self._generation != handle.generation

    def open(self, task: int, inputs: list[Node]) -> None:
        """Begins its backward in a graph task."""
        self.task = task
        self._awaited = _will_run(inputs) if len(inputs) > 1 else len(inputs)
        self.unit.arrivals.open_calls += self.watched > 0

    def input_done(self) -> bool:
        """Notes that an input's gradient is done; returns whether no call of the unit awaits any more."""
        self._awaited -= 1
        if self._awaited:
            return False
        self.task = -1
        self.unit.arrivals.open_calls -= 1
        return self.unit.arrivals.open_calls == 0


def _on_own_gradient(
    reference: weakref.ref[Unit], segment: Segment, index: int, grads: tuple[torch.Tensor | None, ...]
) -> tuple[None] | None:
    """Acts where a graph leads to a sharded parameter itself.

    If every rank has the whole, the gradient goes to the leaf, and is averaged with the others. Of a part it
    is taken as it is, with a warning: nobody knows here whether ranks computed the same.
    """
    unit, layout = reference(), segment.layout
    if unit is None or grads[0] is None:
        return None
    if not layout.sharded and layout.sources[index] is not layout.flat_param:
        segment.take_gradient(index, grads[0])
        for hook in (segment.leaves[index]._post_accumulate_grad_hooks or {}).values():
            hook(segment.leaves[index])
        return (None,)
    if not unit.told_of_own_gradients:
        unit.told_of_own_gradients = True
        warn_caller(
            f"a gradient reached the sharded parameter '{unit.name_of(layout.fqns[index])}' itself on rank "
            f"{dist.get_rank()}, since a graph uses it outside of the forward of {unit.name}. It is taken "
            "as it is, not averaged: right for what all ranks compute alike, or each with its own elements "
            "(a penalty), wrong for what depends on their batches. For that use full_tensor() of the "
            "parameter itself (fully_shard), the module's forward, or one unit for all that uses it"
        )
    return None


def _no_values(unit: Unit, handle: ParamHandle) -> NoValuesError:
    return NoValuesError(
        f"parameters of {unit.name} are on the meta device and have no values: "
        f"{', '.join(handle.without_values)}; call to_empty(device=...) on the model and initialise "
        "or load them before the first forward"
    )


def _not_ours(unit: Unit, state: HandleState) -> RuntimeError:
    if state is HandleState.REPLACED:
        return RuntimeError(
            f"a state dict with the parameters of {unit.name} is being taken or loaded; run forward or "
            "backward after that"
        )
    return RuntimeError(
        f"the parameters of {unit.name} are shown in full by summon_full_params; leave its context "
        "before running forward or backward"
    )


def _will_run(nodes: Iterable[Node]) -> int:
    """Counts the nodes that the running backward will execute."""
    try:
        return sum(will_execute(node) for node in nodes)
    except RuntimeError:  # leaves captured by torch.autograd.grad: they are not executed
        return 0


def units_in(module: nn.Module) -> dict[str, Unit]:
    """Returns the units at and below `module` by name, parents before children.

    Where a module has several, over several meshes, the first has the module's name.
    """
    return {
        f"{clean_fqn(name)} {unit.mesh_label}".strip(): unit
        for name, child in walk(module)
        if UNIT_ATTR in child.__dict__
        for unit in child.__dict__[UNIT_ATTR].over_all_meshes
    }
