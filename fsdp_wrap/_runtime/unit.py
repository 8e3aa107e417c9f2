"""`Unit`: a wrapped module with its buffers; its verbs issue collectives and report them."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import torch
from torch import nn
from torch.autograd.graph import Node, get_gradient_edge

from fsdp_wrap._comm import Communicator
from fsdp_wrap._core import (
    NO_CASTS,
    NO_SPAN,
    UNIT_ATTR,
    WRAPPED_ATTR,
    BackwardPrefetch,
    BufferCasts,
    Computing,
    InputCasts,
    NoValuesError,
    Phase,
    PlugIn,
    PlugIns,
    Precedence,
    SpanKind,
    clean_fqn,
    everywhere,
    walk,
)
from fsdp_wrap._core.torch_private import EDITABLE, graph_task, made_by, will_run
from fsdp_wrap._params import Buffers, NoBuffers, Segment, ShardedParams, Until, Where
from fsdp_wrap._runtime.doing import Activity


@dataclass(frozen=True)
class UnitOptions:
    """Settings of one unit.

    Attributes:
        backward_prefetch: When backward issues the next unit's all-gather; None for never.
        forward_prefetch: Whether forward issues the all-gather of the unit that came next last time.
        keeps_as_root: Whether a root unit keeps its parameters for backward, which needs them first.
        reshards_within: Ranks that share the full parameters from forward to backward.
        unshards_in_backward: Whether backward needs the parameters' values.
        syncs: Whether gradients are reduced, not kept for a later backward.
        sums_over_replicas: Whether reduced gradients are summed over the replicas as well.
        counts_unused: Whether parameters that no rank used get gradients of zeros.
        reduces_apart: Whether gradients are reduced in another process group than parameters are gathered in.
        most_reducing: Bound of the reductions in flight, this unit's included.
        forward_targets: Units to prefetch in forward; none for the default.
        backward_targets: Units to prefetch in backward; none for the default.
        full_in_eval: Whether mixed precision is off while the module is in eval mode.
        travel_together_bytes: Memory for collectives that small units share; None for the device's default.
            The root's value counts.
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
    full_in_eval: bool = False
    travel_together_bytes: int | None = None

    def copied(self, memo: dict[int, Any]) -> UnitOptions:
        """Returns the options of a unit's deep copy; targets outside of the copy stay the same units."""
        forward, backward = (
            tuple(memo.get(id(unit), unit) for unit in targets)
            for targets in (self.forward_targets, self.backward_targets)
        )
        return replace(self, forward_targets=forward, backward_targets=backward)


class CastBuffers(PlugIn):
    """Shows the buffers of its unit in the buffer dtype to each forward, or as they are in full precision."""

    order = Precedence.SETTINGS

    def computes(self, unit: Unit, what: Computing) -> None:
        if what is not Computing.BACKWARD:
            casts, in_full = unit.buffer_casts, unit.buffers.segments.in_full
            (casts.show_original if in_full else casts.show_cast)()


class StepState(ABC):
    """State of the running step of a tree of units: written by `Step`, read by its units.

    Attributes:
        root: The unit whose forward is outermost.
        iteration: Number of outermost forwards that have begun.
        syncs: Whether gradients are reduced: not under `no_sync`.
        sums_over_replicas: Whether reduced gradients are summed over the replicas, unless a unit defers it.
        plug_ins: What is attached to the step.
    """

    def __init__(self, root: Unit) -> None:
        self.root = root
        self.iteration = 0
        self.plug_ins = PlugIns(everywhere)
        self.syncs = self.sums_over_replicas = True

    @abstractmethod
    def explain(self, error: BaseException) -> None:
        """Lets plug-ins add to an error that leaves the runtime."""

    @abstractmethod
    def hook_leaves(self, unit: Unit) -> None:
        """Hooks leaves that need gradients now, as their sharded parameters do, and have no hook yet."""


class Unit(Activity):
    """A wrapped module with the parameters that it owns.

    Args:
        module: The wrapped module.
        buffers: Its parameters' memory; `NoBuffers` where it owns none.
        options: Settings.
        left: Tied parameters of the module that a unit above owns.
        lenders: Units that own parameters of the module too, such as its units over other meshes; they run
            whenever this unit does.
        buffer_casts: Casts of its buffers.
        parts: Modules with a forward each, where `module` only groups them.
        initial: Describes the initial values, a line per parameter; None if they are unknown.
        mesh_label: Name of its mesh, where the module has units over several; empty for the first.

    Attributes:
        forwards: Number of forward calls since the last backward that a backward may follow, without
            recomputations.
        casts: Casts of inputs and outputs.
        step: That of its tree; None before its first use.
        plug_ins: What is attached to it, to its steps and to all steps.
        tied: Units below it that some ranks may skip: they run, and end their backwards, whenever it does.
        tied_to: The unit that has this one in its `tied`, if any.
        group: The units that end their backwards together, since some ranks may have gradients that this one
            lacks: that to which others are tied, and these. Empty if it ends alone.
        companions: All units that run whenever it does: lenders and tied ones.
        follows: Whether it is a companion that leaves prefetches to the unit with which it runs.
        hooked: The segments' `hookings` when leaves were hooked last.
        all_train: Whether every leaf needs a gradient.
        kept_module: Its module, if it keeps it alive, since other units use its parameters; else None.
    """

    lenders: Sequence[Unit] = ()
    companions: Sequence[Unit] = ()
    mesh_label = ""  # class defaults, for a deep copy that is being made
    plug_ins: PlugIns = everywhere
    _of_gone = NoBuffers()  # made before modules go, as the interpreter's end makes nothing

    def __init__(
        self,
        module: nn.Module,
        buffers: Buffers,
        options: UnitOptions,
        *,
        left: frozenset[nn.Parameter] = frozenset(),
        lenders: Sequence[Unit] = (),
        buffer_casts: BufferCasts | None = None,
        parts: Iterable[nn.Module] = (),
        initial: Callable[[Sequence[ShardedParams]], list[str]] | None = None,
        mesh_label: str = "",
    ) -> None:
        super().__init__()
        self._module = weakref.ref(module, self._dissolve)
        self.kept_module = module if parts else None  # a group of parts has no other owner
        self.parts = frozenset(parts)
        self._to_run: set[nn.Module | None] = set(self.parts)
        self.buffers, self.plug_ins = buffers, buffers.plug_ins
        for sharded in buffers.params:
            sharded.belong_to(self)
        self.options = options
        self.left = left
        self.initial = initial
        self.lenders = self.companions = lenders
        self.tied: Sequence[Unit] = ()
        self.group: Sequence[Unit] = ()
        self.tied_to: Unit | None = None
        self.mesh_label, self.follows = mesh_label, bool(mesh_label)
        self.buffer_casts = buffer_casts or BufferCasts((), None)
        if self.buffer_casts.casts:
            self.plug_ins.attach(CastBuffers())
        self.fqn = mesh_label
        self.forwards = 0
        self.nested = False
        self._choose_casts()
        self.step: StepState | None = None
        self._hooked: set[nn.Parameter] = set()
        self.hooked = -1
        self.all_train = not buffers.params

    @property
    def module(self) -> nn.Module:
        """The wrapped module. It owns the unit; graphs keep it alive by their `ForwardCall`s."""
        module = self._module()
        assert module is not None
        return module

    @property
    def segments(self) -> Sequence[Segment]:
        """The segments of its parameters; none without parameters."""
        return self.buffers.segments

    @property
    def params(self) -> Sequence[ShardedParams]:
        """Its sharded parameters, by segment; none without parameters."""
        return self.buffers.params

    @property
    def gone(self) -> bool:
        """Whether its module was garbage-collected."""
        return self._module() is None

    @property
    def trains(self) -> bool:
        """Whether its module is alive and in training mode."""
        module = self._module()
        return module is not None and module.training

    def moves_to(self, module: nn.Module) -> None:
        """Makes another module, a wrapper, the owner of the unit."""
        self._module = weakref.ref(module, self._dissolve)

    def lend(self) -> None:
        """Keeps the module alive for other units, which use its parameters and may outlive it."""
        self.kept_module = self.module

    def _dissolve(self, _: object) -> None:
        """Drops all references when the module has gone: the units of a tree reference each other."""
        self.buffers, self.initial = self._of_gone, None
        self._hooked.clear()

    @property
    def over_all_meshes(self) -> tuple[Unit, ...]:
        """All units of the module: this one first, then its units over other meshes."""
        over_others = [unit for unit in self.lenders if unit.mesh_label]
        return self, *(unit for unit in over_others if unit._module() is self._module())

    def tie(self, units: Sequence[Unit]) -> None:
        """Makes `units` run whenever this unit does; their own ties move here."""
        self.tied = tuple(dict.fromkeys((*self.tied, *units)))
        self.companions = (*self.lenders, *self.tied)
        for tied in units:
            tied.tied_to, tied.tied, tied.companions, tied.follows = self, (), tied.lenders, True
        group = (self, *self.tied) if self.tied else ()
        for member in group:
            member.group = group

    @property
    def name(self) -> str:
        """The unit's name in messages."""
        wrapped = self.module._modules.get(WRAPPED_ATTR, self.module)
        if self.fqn != self.mesh_label:
            return f"unit '{self.fqn}'"
        return f"the root unit ({type(wrapped).__name__}){self.mesh_label and f' {self.mesh_label}'}"

    def name_of(self, param: str) -> str:
        """Returns a parameter's name relative to the root, from its name relative to the unit."""
        prefix = self.fqn.split(", ")[0].removesuffix(self.mesh_label).rstrip()
        return f"{prefix}.{param}" if prefix else param

    def join(self, step: StepState, fqn: str) -> None:
        """Joins a tree's step, under a name relative to the root."""
        self.step, self.fqn = step, fqn

    def leave(self) -> None:
        """Leaves its step; the next use joins one again."""
        self.step = None
        self.plug_ins.move_below(everywhere)

    def nest(self, fqn: str) -> None:
        """Notes that another unit encloses this one, and its name there."""
        self.nested = True
        self.fqn = fqn

    def _choose_casts(self) -> None:
        casts = self.options.casts
        self.casts = NO_CASTS if self.buffers.segments.in_full or casts == NO_CASTS else casts

    def set(self, **options: Any) -> None:
        """Changes options."""
        self.options = replace(self.options, **options)
        self._choose_casts()

    def set_reshard_after_forward(self, reshard: bool) -> None:
        """Sets whether the full parameters are freed after forward, also of a root unit."""
        self.set(reshard_after_forward=reshard, keeps_as_root=not reshard, reshards_within=None)

    # communication

    def unshard(self, phase: Phase) -> None:
        """Makes the leaves usable: gathers unless prefetched, and waits for the gather."""
        buffers, at = self.buffers, self.plug_ins
        if buffers.where is Where.LENT:
            refuse_lent(self)
        for act in at.needs:
            act(self, phase)
        if buffers.where is Where.SHARDED:
            self.gather(phase)
        if buffers.where is Where.GATHERING:
            span = at.span(SpanKind.AWAIT_GATHER, phase, (self,)) if at.see_spans else NO_SPAN
            with span:
                buffers.wait()
            for act in at.full:
                act(self)

    def gather(self, phase: Phase) -> bool:
        """Issues the all-gather; returns False if the unit is unsharded, or being gathered, already."""
        buffers, at = self.buffers, self.plug_ins
        if buffers.where is not Where.SHARDED:
            return False
        valueless = buffers.segments.without_values
        if valueless:
            raise NoValuesError(
                f"parameters of {self.name} are on the meta device and have no values: "
                f"{', '.join(valueless)}; call to_empty(device=...) on the model and initialise "
                "or load them before the first forward"
            )
        if buffers.gradients.reduction is not None and buffers.gradients.in_place:
            self.finish_reduction()
        assert self.step is not None
        for act in at.to_gather:
            act((self,), phase)
        nbytes = buffers.segments.unsharded_nbytes
        span = at.span(SpanKind.GATHER, phase, (self,), nbytes) if at.see_spans else NO_SPAN
        with span:
            buffers.gather()
        for act in at.gathers:
            act(self, phase, nbytes, ())
        return True

    def reshard(self, phase: Phase, within: Communicator | None = None) -> None:
        """Frees the full parameters, unless a running forward needs them.

        Args:
            phase: Phase of the iteration.
            within: Ranks that share the full parameters until they are needed again.
        """
        buffers, at = self.buffers, self.plug_ins
        # A backward inside a forward must leave it the leaves.
        if self.running > (phase is Phase.FORWARD):
            return
        if buffers.where is Where.GATHERING:  # a gather in flight still writes
            span = at.span(SpanKind.AWAIT_GATHER, phase, (self,)) if at.see_spans else NO_SPAN
            with span:
                buffers.wait()
        if buffers.reshard(within):
            for act in at.sharded:
                act(self, phase, buffers.segments.unsharded_nbytes)

    @property
    def defers(self) -> bool:
        """Whether the sum over the replicas waits for a later reduction."""
        sums = self.options.sums_over_replicas and (self.step is None or self.step.sums_over_replicas)
        return not sums and self.buffers.replicas.size > 1

    def reduce(self, phase: Phase) -> None:
        """Issues the reduction of the gradients; no other of the unit may be in flight."""
        buffers, at = self.buffers, self.plug_ins
        assert self.step is not None
        defers = self.defers
        for act in at.to_reduce:
            act((self,), phase, defers)
        span = at.span(SpanKind.REDUCE, phase, (self,)) if at.see_spans else NO_SPAN
        with span:
            nbytes = span.nbytes = buffers.gradients.reduce(not defers, self.options.counts_unused)
        for act in at.reduces:
            act(self, phase, nbytes, ())

    def finish_reduction(self) -> None:
        """Waits for the reduction in flight, if any, and takes its result."""
        buffers, at = self.buffers, self.plug_ins
        if buffers.gradients.reduction is None:
            return
        span = at.span(SpanKind.AWAIT_REDUCTION, None, (self,)) if at.see_spans else NO_SPAN
        with span:
            buffers.gradients.finish()

    # forward

    def hold(self) -> None:
        """Lets the next iteration take over the full parameters, unless they change."""
        if self.buffers.stays is Until.NOW:
            self.buffers.stays = Until.NEXT

    def keep(self, until: Until) -> None:
        """Keeps the full parameters after a backward, and shows the sharded ones unless a forward runs."""
        self.buffers.stays = until
        if not self.running:
            self.buffers.shown.show_sharded()

    def compute_in_full(self, in_full: bool) -> None:
        """Switches a sharded unit between its master dtype and its mixed precision."""
        self.buffers.compute_in_full(in_full)
        self._choose_casts()

    def ran(self, part: nn.Module | None) -> bool:
        """Notes that a part has run; returns whether all have, and starts over then."""
        self._to_run.discard(part)
        over = not self._to_run
        if over:
            self.restart()
        return over

    @property
    def partly_ran(self) -> bool:
        """Whether some of its parts have run, but not all."""
        return self._to_run != self.parts

    def restart(self) -> None:
        """Expects the forwards of all parts again."""
        self._to_run = set(self.parts)

    def newly_trainable(self) -> list[nn.Parameter]:
        """Returns the leaves that need gradients and are not hooked yet; the caller hooks them."""
        leaves = [leaf for segment in self.segments for leaf in segment.leaves]
        trainable = [leaf for leaf in leaves if leaf.requires_grad]
        self.hooked = self.buffers.segments.hookings
        self.arrivals.expect(trainable)
        self.all_train = len(trainable) == len(leaves)
        new = [leaf for leaf in trainable if leaf not in self._hooked]
        self._hooked = {*self._hooked.intersection(leaves), *new}
        return new

    def prepare_leaves(self) -> bool:
        """Lets the leaves take gradients outside of a forward; returns False before the first use."""
        if self.step is None:
            return False
        self.step.hook_leaves(self)
        return True

    # gradients

    def gradients_to_come(self) -> bool:
        """Whether the running backward will reach a leaf whose gradient has not arrived."""
        missing = self.arrivals.missing
        if not missing:
            return False
        leaves = (leaf for segment in self.segments for leaf in segment.leaves)
        return any(will_run([get_gradient_edge(leaf).node]) for leaf in leaves if id(leaf) in missing)

    def has_gradients(self, syncs: bool) -> bool:
        """Whether there are gradients to take, or earlier ones to sum over the replicas.

        Args:
            syncs: Whether gradients are reduced now.
        """
        gradients = self.buffers.gradients
        if self.arrivals.owes or gradients.untaken:
            return True
        waits = gradients.unsummed and gradients.partly_summed and gradients.reduction is None
        return syncs and waits and not self.defers


class ForwardCall:
    """A unit's forward call whose backward may follow."""

    def __init__(self, unit: Unit, part: nn.Module | None = None) -> None:
        self.unit = unit
        self._module = unit._module()  # keeps the module alive as long as a graph
        self.part = part
        self.watched = 0
        """Number of inputs whose gradients are watched."""
        self.task = -1
        """Graph task of its running backward; -1 for none."""
        self._awaited = 0
        buffers = unit.buffers
        self.values = buffers.values
        """The buffers' `values` in the forward: the version of the leaves it computes with."""
        self.written = buffers.written
        """The buffers' `written` in the forward."""
        self.generation = buffers.segments.generation
        """The segments' `generation` in the forward: leaves of another one have replaced these."""

    def open(self, task: int, inputs: list[Node]) -> None:
        """Begins its backward in a graph task; `inputs` are the nodes of watched inputs."""
        self.task = task
        self._awaited = will_run(inputs) if len(inputs) > 1 else len(inputs)
        arrivals = self.unit.arrivals
        arrivals.open_calls += self.watched > 0
        if self.unit.group:
            arrivals.owes = self.unit.buffers.segments.trainable

    def input_done(self) -> bool:
        """Notes that an input's gradient is done; returns whether it was the last that the unit awaited."""
        self._awaited -= 1
        if self._awaited:
            return False
        self.task, arrivals = -1, self.unit.arrivals
        arrivals.open_calls -= 1
        arrivals.inputs_done = arrivals.open_calls == 0
        return arrivals.inputs_done


def refuse_lent(unit: Unit) -> NoReturn:
    """Refuses to compute with a unit whose parameters are lent."""
    if not unit.buffers.lent.summoned:
        raise RuntimeError(
            f"a state dict with the parameters of {unit.name} is being taken or loaded; run forward or "
            "backward after that"
        )
    raise RuntimeError(
        f"the parameters of {unit.name} are shown in full by summon_full_params; leave its context "
        "before running forward or backward"
    )


def hooked_for(view: torch.Tensor, inputs: list[Node]) -> torch.Tensor:
    """Returns the tensor to hook for an output that is a view: what it is a view of, if the call made that.

    An edit in place gives all views of one memory other nodes, without hooks, and keeps the node of what they
    are views of. A node older than the call needs nothing of the unit, and may be one to which the nodes of
    `inputs` lead: they would be kept alive by its hook, in a cycle that is never collected.

    Args:
        view: The output.
        inputs: The nodes of the call's watched inputs.
    """
    base = view._base
    node = None if base is None else base.grad_fn
    if base is None or node is None or made_by(view) != EDITABLE:
        return view
    if inputs and node._sequence_nr() < inputs[0]._sequence_nr():
        return view
    # Another thread, which has numbers of its own, may have made the inputs of a recomputation.
    return view if graph_task() != -1 and will_run([node]) else base


def buffers_of(units: Iterable[Unit]) -> list[Buffers]:
    """Returns the buffers of the units that have parameters."""
    return [unit.buffers for unit in units if unit.params]


def communicators_of(units: Iterable[Unit]) -> list[Communicator]:
    """Returns the communicators of units, each once: within their copies, and over the replicas."""
    return [*dict.fromkeys(ranks for unit in units for ranks in unit.buffers.communicators)]


def units_in(module: nn.Module) -> dict[str, Unit]:
    """Returns the units at and below `module` by name, parents first; the mesh label is part of the name."""
    return {
        f"{clean_fqn(name)} {unit.mesh_label}".strip(): unit
        for name, child in walk(module)
        if UNIT_ATTR in child.__dict__
        for unit in child.__dict__[UNIT_ATTR].over_all_meshes
    }
