"""`Step`: the path of a step: before and after each forward and backward. Only this file registers its hooks.

Two triggers end a unit's backward (docs/architecture.md): when all trainable leaves have their gradients the
reduction starts; when the gradients of the unit's inputs are done as well, the unit reshards. The backward's
final callback finishes the units that no trigger has reached.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from operator import attrgetter
from threading import get_ident
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.nn.utils.parametrize import ParametrizationList

from fsdp_wrap._comm import Communicator, GroupCommunicator, Tree
from fsdp_wrap._core import (
    Computing,
    Phase,
    Replaced,
    Seam,
    ValueSeam,
    map_tensors,
    step_in_backward,
    with_optimizers,
)
from fsdp_wrap._core.torch_private import execution_engine, graph_task, hook_gradient
from fsdp_wrap._params import ParamHandle, Until, Where
from fsdp_wrap._runtime.arrivals import Progress
from fsdp_wrap._runtime.finalization import BackwardEnd
from fsdp_wrap._runtime.queue import Queue
from fsdp_wrap._runtime.refusals import (
    ParametrizationGuard,
    name_sharded,
    refuse_graph,
    refuse_without_backward,
)
from fsdp_wrap._runtime.same_model import SameModel
from fsdp_wrap._runtime.stays import after_backward, after_forward, after_outermost, before_forward
from fsdp_wrap._runtime.unit import (
    ForwardCall,
    StepState,
    Unit,
    communicators_of,
    hooked_for,
    refuse_lent,
    units_in,
)

_REQUIRES_GRAD = attrgetter("requires_grad")
_NONE_RUNS: Callable[[], object] = weakref.ref(set())  # dead, as the callback of a backward that is over

out_of_memory: Seam[Callable[[BaseException, Iterable[Unit]], None]] = Seam("tools", "fsdp_wrap.tools")
"""Adds the units' memory to an out-of-memory error."""


class Step(StepState):
    """Runs the units of one tree: before and after each forward and backward.

    Args:
        root: The unit whose forward is outermost; all units below it join.

    Attributes:
        ending: Decides when the last reduction of a backward is waited for.
        tree: The identity of its tree in the logs of collectives.
        ranks: Compares the tree between ranks.
        device: Device of computation.
        depth: Number of forward calls in progress.
        gradients_came: Whether the running backward, or the last one, has brought gradients of parameters.
        queue: The collectives of its units: those in flight, and those to come.
        lasting: Forward calls whose units stay full until the outermost forward ends, each with the nodes of
            its inputs: units with parts that have not all run, and units that do not reshard after forward.
        transformed: The ends of forward calls in progress inside transforms of `torch.func`.
    """

    def __init__(self, root: Unit) -> None:
        super().__init__(root)
        units = units_in(root.module)
        names: dict[Unit, list[str]] = {}
        for fqn, unit in units.items():
            names.setdefault(unit, []).append(fqn)
        self._units = list(names)
        self._outermost = root.over_all_meshes
        self.depth = 0
        self.lasting: dict[Unit, tuple[ForwardCall, list[Node]]] = {}
        self.transformed: list[ExitStack] = []
        self._read_by_earlier: set[Unit] = set()  # in backwards of forwards before this one
        self._backward_open, self.gradients_came, self._end = False, False, _NONE_RUNS
        self._deferred: set[Unit] = set()
        self._trains, self._keeps_graph = False, False
        self._users_sums: tuple[bool, bool] | None = None  # while a backward makes other sums
        self._thread = get_ident()  # that of the last forward
        self.queue = Queue(self)
        before = {unit: unit.schedule for unit in self._units if isinstance(unit.schedule, Step)}
        below = {unit: step.ending for unit, step in before.items()}
        self.ending: BackwardEnd = BackwardEnd(below)
        self._event: Any = None
        communicators = communicators_of(self._units)
        self._communicators = [ranks for ranks in communicators if isinstance(ranks, GroupCommunicator)]
        self.device = next((ranks.device for ranks in communicators), torch.device("cpu"))
        self.tree = Tree()
        parts = dict.fromkeys(step.ranks for step in before.values())
        self.ranks: SameModel = SameModel(self.tree, parts)
        self.plug_ins.attach(self.ranks)
        for unit, fqns in names.items():
            unit.join(self, ", ".join(fqns))
        self.ranks.log(self._units)
        for act in dict.fromkeys(chain.from_iterable(unit.plug_ins.made for unit in self._units)):
            act(self)
        for unit in self._units:
            unit.plug_ins.move_below(self.plug_ins)

    @property
    def units(self) -> list[Unit]:
        """The units that still run in this schedule: users may keep parts of a tree whose root has gone."""
        return [unit for unit in self._units if unit.schedule is self and not unit.gone]

    @property
    def runs_backward(self) -> bool:
        """Whether a backward runs, and no forward inside it."""
        return self._backward_open and not self.depth

    @property
    def shifts_alone(self) -> bool:
        """Whether a step that this rank alone leaves out would shift its reductions against the others'."""
        return not self.plug_ins.align and self.syncs and any([unit.options.syncs for unit in self._units])

    def fail_forward(self, error: BaseException, inside: int) -> None:
        """Explains the error of a forward, and notes it if only `inside` forward calls are in progress."""
        if self.depth == inside and graph_task() == -1:
            for act in self.plug_ins.failed:
                act(self)
        if isinstance(error, (RuntimeError, MemoryError)):
            self.explain(error)

    def explain(self, error: BaseException) -> None:
        """Adds to an error that leaves the runtime the units' memory, or the names of sharded parameters."""
        name_sharded(error, self.units)
        if out_of_memory.filled is not None:
            out_of_memory.filled(error, self.units)

    # forward

    def pre_forward(self, unit: Unit, part: nn.Module | None = None) -> ForwardCall:
        """Begins a forward call: unshards, and shows the modules the leaves; `exit_forward` must follow."""
        recompute = graph_task() != -1  # a forward inside a backward
        handle = unit.handle
        if self.depth == 0 and not recompute:
            if handle.where is Where.LENT:
                refuse_lent(unit)  # before any state changes: other ranks may go on
            self._begin_iteration()
        what = Computing.RECOMPUTE if recompute else Computing.FORWARD
        if handle.layouts:
            for act in unit.plug_ins.enters:
                act(unit, what)
            if recompute:
                unit.unshard(Phase.BACKWARD)
            else:
                unit.forwards += self._trains
                if handle.stays is Until.EARLIER:
                    self._gather_anew(unit)
                self.queue.enter(unit)
                unit.unshard(Phase.FORWARD)
            if handle.follow_requires_grad() or unit.hooked != handle.hookings:
                self.hook_leaves(unit)
            if not recompute:
                self.queue.entered(unit)
        if unit.buffers.casts:
            (unit.buffers.show_original if handle.in_full else unit.buffers.show_cast)()
        handle.shown.show_leaves()
        for act in unit.plug_ins.computes:
            act(unit, what)
        for act in unit.plug_ins.sees:
            act(unit, ValueSeam.PARAMETERS, ())
        self.depth += 1  # last: `exit_forward` follows if nothing above has raised
        unit.running += 1
        return ForwardCall(unit, part)

    def _gather_anew(self, unit: Unit) -> None:
        """Frees what an earlier forward has left of a unit and those that come: a write may go unseen."""
        for kept in (unit, *self.queue.order.coming_in_forward(unit)):
            if kept.handle.stays is Until.EARLIER:
                kept.reshard(Phase.FORWARD)

    def watch_inputs(self, call: ForwardCall, nodes: list[Node], inputs: Any, replaced: Replaced) -> Any:
        """Replaces inputs that need gradients by views, whose hooks tell when the gradients are done.

        Args:
            call: The forward call.
            nodes: List to which the views' nodes are added.
            inputs: Positional and keyword inputs.
            replaced: List to which the replaced tensors in containers are added.

        Returns:
            The inputs to compute with.
        """
        if not call.unit.handle.layouts or call.unit.tied_to is not None or not torch.is_grad_enabled():
            return inputs
        seen: dict[int, torch.Tensor] = {}

        def watch(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad or tensor.layout != torch.strided:
                return tensor
            view = seen.get(id(tensor))
            if view is None:  # one tensor stays one: modules test `query is key`
                view = seen[id(tensor)] = tensor.view_as(tensor)
                assert view.grad_fn is not None
                view.grad_fn.register_prehook(partial(self._on_input_gradient, call))
                nodes.append(view.grad_fn)
            return view

        args, kwargs = inputs
        one = len(args) == 1 and isinstance(args[0], torch.Tensor)  # as most modules take
        args = (watch(args[0]),) if one else map_tensors(watch, args, replaced)
        inputs = args, kwargs and map_tensors(watch, kwargs, replaced)
        call.watched = len(nodes)
        return inputs

    def post_forward(self, call: ForwardCall, tensors: list[torch.Tensor], inputs: list[Node]) -> None:
        """Hooks a unit's outputs for its backward, and reshards the unit if possible.

        Args:
            call: The forward call, of a unit with parameters.
            tensors: All tensors in the module's output.
            inputs: The nodes from `watch_inputs`. Only the outputs' hooks keep them: a reference from
                `call`, which the nodes' own hooks hold, would be a cycle that is never collected.
        """
        unit, handle = call.unit, call.unit.handle
        for act in unit.plug_ins.ran:
            act(unit, tensors)
        for act in unit.plug_ins.sees:
            act(unit, ValueSeam.OUTPUTS, tensors)
        with_grad = [*filter(_REQUIRES_GRAD, tensors)] if torch.is_grad_enabled() else []
        within = unit.options.reshards_within if with_grad else None
        if unit.tied_to is not None and not with_grad:
            refuse_without_backward(unit, handle)
        self._hook_outputs(call, inputs, with_grad)
        if graph_task() != -1:
            return  # the backward that recomputes will reshard
        if with_grad or (self._trains and not torch.is_grad_enabled()):  # the latter: reentrant checkpointing
            self.queue.order.ended.append(unit)
        for act in unit.plug_ins.hooked:
            act(unit, [hooked_for(tensor, inputs) for tensor in with_grad])
        if unit.running > 1:
            return
        partly = bool(unit.parts) and not unit.ran(call.part)
        until = after_forward(call, bool(with_grad), unit in self._outermost, partly)
        if until is Until.OUTERMOST:
            self.lasting[unit] = call, inputs
        else:
            self.lasting.pop(unit, None)
            self._leave(call, until, within)

    def _hook_outputs(self, call: ForwardCall, inputs: list[Node], outputs: Iterable[torch.Tensor]) -> None:
        """Hooks outputs for their backward; views themselves also for those who watch their gradients."""
        for output in outputs:
            hooked = output if output._base is None else hooked_for(output, inputs)
            if hooked is output or call.unit.plug_ins.sees:
                hook_gradient(output, partial(self._pre_backward, call, inputs, True))
            if hooked is not output:
                hook_gradient(hooked, partial(self._pre_backward, call, inputs, False))

    def end_lasting(self, tensors: list[torch.Tensor]) -> None:
        """Ends, with the outermost forward, the forwards of units that have stayed full.

        Hooks `tensors`, the outermost outputs: their backward needs the units' parameters, with which the
        outermost forward may have computed after the units' own forwards.
        """
        with_grad = [*filter(_REQUIRES_GRAD, tensors)] if torch.is_grad_enabled() else []
        lasting, self.lasting = self.lasting, {}
        for unit, (call, inputs) in lasting.items():
            self._hook_outputs(call, inputs, with_grad)
            for act in unit.plug_ins.hooked:
                act(unit, [hooked_for(tensor, inputs) for tensor in with_grad])
            within = unit.options.reshards_within if with_grad else None
            alone = unit.partly_ran and unit.running > 0  # a single part: others may follow
            unit.restart()
            self._leave(call, after_outermost(call, bool(with_grad), unit in self._outermost, alone), within)

    def _leave(self, call: ForwardCall, until: Until, within: Communicator | None) -> None:
        """Frees or keeps the full parameters of a unit whose forward is over."""
        handle = call.unit.handle
        if until is Until.BACKWARD:
            handle.stay(until)
        elif call.unit in self._read_by_earlier and not handle.holds_changes:
            handle.stay(Until.EARLIER)
        else:
            call.unit.reshard(Phase.FORWARD, within)

    def exit_forward(self, call: ForwardCall) -> None:
        """Ends a forward call, whether it returned or raised."""
        self.depth -= 1
        unit, handle = call.unit, call.unit.handle
        unit.running -= 1
        recompute = graph_task() != -1
        for act in unit.plug_ins.computed:
            act(unit, Computing.RECOMPUTE if recompute else Computing.FORWARD)
        if recompute:
            return
        over = unit.running == 0 and unit not in self.lasting
        if over and handle.where is Where.FULL and handle.stays is not Until.BACKWARD:
            handle.shown.show_sharded()
        if self.depth == 0:
            self.queue.end_forward()
            for unit in self.lasting:  # it raised
                unit.restart()
                unit.reshard(Phase.FORWARD)
            self.lasting = {}

    def _begin_iteration(self) -> None:
        """Starts an iteration from a clean state, whatever the last one left."""
        self._trains = torch.is_grad_enabled()
        self.ending.require_waited("a forward")
        if self._backward_open:
            self._abandon_backward()
        for communicator in self._communicators:
            communicator.require_group()  # meshes may keep destroyed groups alive
        self.iteration += 1
        self._thread = get_ident()
        for act in self.plug_ins.forward_begins:
            act(self)
        for act in self.plug_ins.forward_opens:
            act(self)
        self.queue.order.begin_forward()
        self._follow_user(self._units)
        for unit in self._units:
            handle = unit.handle
            if handle.where is not Where.SHARDED or handle.post_forward_shards is not None:
                if handle.stays is Until.BACKWARD:
                    self._read_by_earlier.add(unit)
                until = before_forward(unit)
                if until is Until.NOW:
                    unit.reshard(Phase.FORWARD)
                elif until is not handle.stays:
                    handle.stay(until)
            if handle.where is Where.SHARDED:
                handle.follow_replaced()
            if unit.hooked != handle.hookings:  # gradients may come without a forward of it
                handle.follow_requires_grad()
                self.hook_leaves(unit)
        for act in self.plug_ins.forward_ready:
            act(self)

    def _follow_user(self, units: Sequence[Unit]) -> None:
        """Lets the compute stream wait for the event of `wait_for`, before shards are read."""
        event, self._event = self._event, None
        if event is not None:
            event.wait()
        for act in self.plug_ins.follows:
            act(self, units)

    def hook_leaves(self, unit: Unit) -> None:
        """Hooks leaves that need gradients and are not hooked yet."""
        leaves = unit.newly_trainable()
        sources = (source for layout in unit.layouts for source in layout.sources)
        for source in with_optimizers(sources, unit.name) if leaves else ():
            source.register_post_accumulate_grad_hook(step_in_backward)  # type: ignore[no-untyped-call]
        # Weak, since the leaf holds the hook and the unit the leaf: such a cycle is never collected.
        act = partial(type(self)._on_leaf_gradient, weakref.ref(unit))
        for leaf in leaves:
            hook = unit.arrivals.hook(leaf, act)
            leaf.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        unit.watch_own_gradients()

    # backward

    def _pre_backward(
        self, call: ForwardCall, inputs: list[Node], tells: bool, grad: torch.Tensor
    ) -> torch.Tensor | None:
        """Unshards when a gradient reaches a call's output; returns a view to watch it, if needed.

        `tells` says that the gradient is the output's own, not one of what it is a view of.
        """
        if self._end() is None:
            self._open_backward()
        unit, handle, options = call.unit, call.unit.handle, call.unit.options
        if (handle.bulky or (options.gradients_in_place and handle.sizeable)) and self.queue.busy:
            # With gradients in place, memory counts more than overlap with the first of them.
            self.queue.make_room(options.most_reducing - 1)
        try:
            self._unshard_again(call)
        except (RuntimeError, MemoryError) as error:
            self.explain(error)
            raise
        task = graph_task()
        if call.task != task:
            call.open(task, inputs)
            for act in unit.plug_ins.computes:
                act(unit, Computing.BACKWARD)
            for act in unit.plug_ins.sees:
                act(unit, ValueSeam.PARAMETERS, ())
            every = torch.is_grad_enabled() or options.gradients_in_place
            unit.arrivals.go_on(every, at_quarter=self.queue.busy)
            if unit.tied or unit.tied_to is not None:
                unit.arrivals.owes = handle.trainable
            lends = options.gradients_in_place and handle.bulky and self._takes_in_place(unit)
            self.queue.came_back(unit, lends)
        for act in unit.plug_ins.sees if tells else ():
            act(unit, ValueSeam.OUTPUT_GRADIENTS, [grad])
        return self._watched(call, grad) if torch.is_grad_enabled() else None  # create_graph

    def _unshard_again(self, call: ForwardCall) -> None:
        """Shows modules the leaves of a call's forward; raises if their values have changed."""
        unit, handle = call.unit, call.unit.handle
        for act in unit.plug_ins.enters:
            act(unit, Computing.BACKWARD)
        unshards = unit.options.unshards_in_backward
        if not unshards or handle.where is Where.FULL:  # else the gather looks
            handle.look()
        if unshards:
            self.queue.come_back(unit)
            unit.unshard(Phase.BACKWARD)
            handle.shown.show_leaves()  # checkpointing inside the unit recomputes with them
        for act in unit.plug_ins.resumes:
            act(call)

    def _watched(self, call: ForwardCall, grad: torch.Tensor | None) -> torch.Tensor | None:
        """Replaces a gradient that has a graph by a hooked view: its double backward needs the leaves."""
        if grad is None or not grad.requires_grad:
            return grad
        view = grad.view_as(grad)
        hook_gradient(view, partial(self._pre_derivative, call))
        return view

    def _pre_derivative(self, call: ForwardCall, grad: torch.Tensor) -> torch.Tensor | None:
        """Unshards when a double backward reaches a unit; returns a view to watch the gradient, if needed."""
        if self._end() is None:
            self._open_backward()
        call.unit.arrivals.enter_derivative()
        for tied in call.unit.tied:  # their inputs are not watched
            tied.unshard(Phase.BACKWARD)
        self._unshard_again(call)
        return self._watched(call, grad) if torch.is_grad_enabled() else None

    @classmethod
    def _on_leaf_gradient(cls, reference: weakref.ref[Unit], leaf: nn.Parameter) -> None:
        """Handles the gradient of a leaf: makes room, or ends the unit's backward after the last one."""
        unit = reference()
        if unit is None:
            return
        self, arrivals, options = unit.schedule or cls(unit), unit.arrivals, unit.options
        assert isinstance(self, Step)
        if torch.is_grad_enabled():  # create_graph
            refuse_graph(unit, leaf)
        if self._end() is None:
            self._open_backward()
            if not leaf.requires_grad:  # frozen since its forward
                leaf.grad = None
                return
            arrivals.expect_all_but(leaf)
        self.gradients_came = True
        if options.gradients_in_place and self._takes_in_place(unit):
            unit.handle.take_in_place(leaf)
        all_came = arrivals.go_on(every=torch.is_grad_enabled() or options.gradients_in_place)
        if unit.tied or unit.tied_to is not None:  # other ranks need not have these gradients
            if all_came:
                self._end_tied(unit.tied_to or unit)
            return
        if arrivals.quarter_came and self.queue.busy:
            self.queue.make_room(options.most_reducing - 1)
        if all_came and not arrivals.open_calls:
            # Frozen leaves may be needed for gradients of inputs after all trainable ones have theirs.
            # Hooks of watched inputs end the backward then; without them the final callback does.
            if arrivals.needed_to_end or not unit.all_train:
                self._take_gradients(unit, Phase.BACKWARD)
            else:
                self._unit_backward_over(unit)

    def _on_input_gradient(
        self, call: ForwardCall, grads: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor | None] | None:
        """Ends a unit's backward after its last watched input; returns a view of the gradient, if needed."""
        unit = call.unit
        for act in unit.plug_ins.sees:
            act(unit, ValueSeam.INPUT_GRADIENTS, grads)
        if call.task == graph_task() and call.input_done():
            if unit.tied:
                self._end_tied(unit)
            elif unit.arrivals.missing and unit.gradients_to_come():
                unit.arrivals.go_on(every=torch.is_grad_enabled() or unit.options.gradients_in_place)
            else:
                self._unit_backward_over(unit)
        return (self._watched(call, grads[0]),) if torch.is_grad_enabled() else None  # create_graph

    def _end_tied(self, unit: Unit) -> None:
        """Ends the backwards of a unit and of those tied to it, where all ranks can at the same place.

        The last watched input is such a place. The final callback ends all others.
        """
        units = (unit, *unit.tied)
        if unit.arrivals.inputs_done and unit.forwards <= 1:
            if not any([ended.gradients_to_come() for ended in units]):
                for ended in units:
                    self._unit_backward_over(ended)

    def _unit_backward_over(self, unit: Unit) -> None:
        if torch.is_grad_enabled():  # create_graph: a later backward needs the leaves
            return
        if unit.arrivals.needed_to_end:
            self._take_gradients(unit, Phase.BACKWARD)
            return
        if unit.arrivals.end():
            for act in unit.plug_ins.backward_over:
                act(unit, Phase.BACKWARD)
        self._leave_backward(unit, Phase.BACKWARD)
        self._take_gradients(unit, Phase.BACKWARD)
        self.queue.backward_over(unit)

    def _leave_backward(self, unit: Unit, phase: Phase) -> None:
        """Frees the full parameters of a unit after its backward, or keeps them for the next iteration."""
        if after_backward(unit, self.syncs) is Until.NOW:
            unit.reshard(phase)
        else:
            unit.keep()

    def _open_backward(self) -> None:
        """Begins the backward of this tree, at the first hook that runs."""
        if self._backward_open:
            self._abandon_backward()
        for act in self.plug_ins.backward_begins:
            act(self)
        self._end = weakref.ref(end := self._end_backward)  # before it is open, for other threads
        self.begin_backward()
        execution_engine.queue_callback(end)  # autograd alone holds it, as long as this backward runs

    def begin_backward(self) -> None:
        """Resets gradient bookkeeping, also when this rank follows another one (`uneven`)."""
        self._backward_open, self.gradients_came, self._deferred = True, False, set()
        self._keeps_graph = torch.is_grad_enabled()  # create_graph
        self.ending.begin()
        for act in self.plug_ins.backward_opens:
            act(self)
        self.queue.order.begin_backward()
        for unit in self._units:
            handle = unit.handle
            if handle.follow_requires_grad():  # other leaves than in the last forward
                self.hook_leaves(unit)
            if handle.keeps_gradients:
                handle.forget_zeroed()
            unit.arrivals.begin()
            if handle.stays is Until.EARLIER:  # recomputed outer forwards read them
                handle.stay(Until.BACKWARD)

    @torch.no_grad()
    def _end_backward(self) -> None:
        """Finishes, as the final callback, the units that no trigger has reached."""
        # No hook has acted where each unit got less than a quarter.
        self.gradients_came = self.gradients_came or any([unit.arrivals.some_came() for unit in self._units])
        for unit in self._units:
            handle = unit.handle
            over = unit.arrivals.progress is Progress.FINISHED
            # Where it is over, a unit may have been prefetched by mistake.
            if not (over and handle.where is Where.SHARDED):
                self._finish_backward_of(unit, handle)
            elif unit in self._deferred:
                self._take_gradients(unit, Phase.FINAL_CALLBACK)
        for act in self.plug_ins.backward_ends:
            act(self)
        self.close_backward(self.ending.waits)
        for act in self.plug_ins.backward_ended:
            act(self)

    def close_backward(self, waits: bool) -> None:
        """Ends a backward of this rank or of others; `waits` tells to wait for reductions."""
        for unit in self._units:
            if not (self.syncs and unit.options.syncs):
                unit.handle.keep_accumulated()
        try:
            self.queue.send()
        except (RuntimeError, MemoryError) as error:
            self.explain(error)
            raise
        self._close(waits)
        self._read_by_earlier.clear()
        self._backward_open, self._end = False, _NONE_RUNS
        self._restore_sums()

    def _close(self, waits: bool) -> None:
        """Ends a backward, or with `waits` all since the last end: then their gradients are complete."""
        if waits:
            self.queue.make_room()
            self.ending.finish()
            for unit in self._units:
                unit.forwards = 0
        for act in self.plug_ins.backward_closes:
            act(self, waits)

    def _finish_backward_of(self, unit: Unit, handle: ParamHandle) -> None:
        if not (self._keeps_graph and (unit.reached or handle.stays is Until.BACKWARD)):
            if unit.arrivals.end():
                for act in unit.plug_ins.backward_over:
                    act(unit, Phase.FINAL_CALLBACK)
            self._leave_backward(unit, Phase.FINAL_CALLBACK)
        else:
            unit.arrivals.forget()
            if not unit.running:
                handle.shown.show_sharded()
        self._take_gradients(unit, Phase.FINAL_CALLBACK)

    def end_failed_backward(self) -> None:
        """Shows the sharded parameters again after a backward that raised."""
        if self._backward_open and not self._in_backward:
            self._abandon_backward()

    @property
    def _in_backward(self) -> bool:
        """Whether a backward runs, in this thread or in another than the forward's."""
        return graph_task() != -1 or (self._end() is not None and get_ident() != self._thread)

    def _abandon_backward(self) -> None:
        """Cleans up after a backward that raised, whose final callback never ran."""
        if self._backward_open:
            for act in self.plug_ins.failed:
                act(self)
        self.queue.drop()
        self._read_by_earlier.clear()
        self._backward_open, self._end = False, _NONE_RUNS
        self._restore_sums()
        for act in self.plug_ins.dropped:
            act(self)
        for unit in self._units:
            unit.forwards = 0
            unit.arrivals.forget()
            unit.handle.abandon_backward()
            unit.reshard(Phase.IDLE)

    # shared steps

    def _takes_in_place(self, unit: Unit) -> bool:
        """Whether gradients may take the place of the unit's parameters now."""
        options, handle = unit.options, unit.handle
        reduced = self.syncs and options.syncs and not torch.is_grad_enabled()
        needed = unit.running or unit.arrivals.needed_to_end or handle.where is not Where.FULL
        return reduced and not needed and after_backward(unit, self.syncs) is Until.NOW

    def _take_gradients(self, unit: Unit, phase: Phase) -> None:
        """Takes a unit's gradients off its leaves, and reduces or accumulates them."""
        handle, owes = unit.handle, unit.arrivals.owes
        if not (owes or handle.holds_gradients or (handle.keeps_gradients and self._completes(unit, handle))):
            return
        self.gradients_came = self.gradients_came or unit.arrivals.some_came()
        if not (self.gradients_came or owes) and phase is not Phase.IDLE:  # autograd.grad() may bring none
            self._deferred.add(unit)
            return
        unit.arrivals.owes = False
        try:
            self.queue.before_gradients(unit, phase)
            for act in unit.plug_ins.sees:
                act(unit, ValueSeam.GRADIENTS, ())
            if self.syncs and unit.options.syncs:
                self.queue.reduce(unit, phase)
            else:
                for segment in handle.segments:
                    segment.gradients.collect()
        except (RuntimeError, MemoryError) as error:
            self.explain(error)
            raise

    def _completes(self, unit: Unit, handle: ParamHandle) -> bool:
        """Whether a backward without gradients for a unit must sum earlier ones over the replicas."""
        syncs = self.syncs and unit.options.syncs and not unit.defers
        return syncs and handle.keeps_partial and handle.reduction is None

    def sum_in_backward(self, syncs: bool, sums_over_replicas: bool) -> None:
        """Decides, whatever `no_sync` says, which sums the backward makes that begins now."""
        if self._users_sums is None:
            self._users_sums = self.syncs, self.sums_over_replicas
        self.syncs, self.sums_over_replicas = syncs, sums_over_replicas

    def _restore_sums(self) -> None:
        if self._users_sums is not None:
            self.syncs, self.sums_over_replicas = self._users_sums
            self._users_sums = None


def guard_parametrizations(unit: Unit, modules: Iterable[nn.Module]) -> None:
    """Makes parametrizations refuse sharded parameters, whose shards do not fit each other."""
    for module in modules:
        if isinstance(module, ParametrizationList):
            module.register_forward_pre_hook(ParametrizationGuard(unit))
