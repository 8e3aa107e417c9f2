"""`Step`: the path of a step, from the outermost forward to the final callback, in its order.

`stays.py` decides how long full parameters stay, `ends.py` when a unit's backward is over, `queue.py` what is
in flight, and when. Plug-ins do what not every step does.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from operator import attrgetter
from threading import get_ident

import torch
from torch import nn
from torch.autograd.graph import Node

from fsdp_wrap._core import Computing, Phase, ValueSeam, step_in_backward, with_optimizers
from fsdp_wrap._core.torch_private import execution_engine, graph_task, hook_gradient
from fsdp_wrap._params import Until, Where
from fsdp_wrap._runtime.doing import Doing
from fsdp_wrap._runtime.double_backward import watched
from fsdp_wrap._runtime.ends import Done, ends
from fsdp_wrap._runtime.queue import Queue
from fsdp_wrap._runtime.refusals import refuse_graph
from fsdp_wrap._runtime.stays import Stays, after_backward
from fsdp_wrap._runtime.tree import NONE_RUNS, UnitTree
from fsdp_wrap._runtime.unit import ForwardCall, Unit, hooked_for

_REQUIRES_GRAD = attrgetter("requires_grad")


class Step(UnitTree):
    """Runs the units of one tree: before and after each forward and backward.

    Args:
        root: The unit whose forward is outermost; all units below it join.

    Attributes:
        backward_open: Whether a backward has begun that has not ended: it runs, or has raised.
        gradients_came: Whether the running backward, or the last one, has brought gradients of parameters.
        queue: The collectives of its units: those in flight, and those to come. Plug-ins may replace it
            between two forwards.
        stays: Frees or keeps full parameters.
    """

    def __init__(self, root: Unit) -> None:
        self.stays = Stays(root.over_all_meshes)
        self.backward_open = self.gradients_came = self._trains = self._keeps_graph = False
        self.queue = Queue(self)
        super().__init__(root)  # last: plug-ins that see a new tree may use all of it

    # forward

    def before_forward(self, unit: Unit, part: nn.Module | None = None) -> ForwardCall:
        """Begins a forward call: unshards, and shows the modules the leaves; `exit_forward` must follow."""
        recompute = graph_task() != -1  # a forward inside a backward
        buffers = unit.buffers
        if self.depth == 0 and not recompute:
            self.require_ready(unit)
            self._begin_iteration()
        what = Computing.RECOMPUTE if recompute else Computing.FORWARD
        if buffers.params:
            for act in unit.plug_ins.enters:
                act(unit, what)
            if recompute:
                unit.unshard(Phase.BACKWARD)
            else:
                unit.forwards += self._trains
                if buffers.stays is Until.EARLIER:
                    self.stays.gather_anew((unit, *self.queue.order.coming_in_forward(unit)))
                self.queue.enter(unit)
                unit.unshard(Phase.FORWARD)
                self.queue.entered(unit)
            self.hook_leaves(unit)
        buffers.shown.show_leaves()
        for act in unit.plug_ins.computes:
            act(unit, what)
        for act in unit.plug_ins.sees:
            act(unit, ValueSeam.PARAMETERS, ())
        self.depth += 1  # last: `exit_forward` follows if nothing above has raised
        unit.begin_call(recompute)
        return ForwardCall(unit, part)

    def _begin_iteration(self) -> None:
        """Starts an iteration from a clean state, whatever the last one left."""
        self.abandon_backward()
        self._trains = torch.is_grad_enabled()
        self.iteration += 1
        self.thread = get_ident()
        for act in self.plug_ins.forward_begins:
            act(self)
        for act in self.plug_ins.forward_opens:
            act(self)
        self.queue.order.begin_forward()
        for act in self.plug_ins.follows:
            act(self, self._units)
        for unit in self._units:
            buffers = unit.buffers
            if buffers.where is not Where.SHARDED or buffers.post_forward_shards is not None:
                self.stays.begin_iteration(unit)
            if buffers.where is Where.SHARDED:
                buffers.follow_replaced()
            if unit.hooked != buffers.segments.hookings:  # gradients may come without a forward of it
                self.hook_leaves(unit)
        for act in self.plug_ins.forward_ready:
            act(self)

    def hook_leaves(self, unit: Unit) -> None:
        """Hooks leaves that need gradients and are not hooked yet, as their sharded parameters do now."""
        segments = unit.buffers.segments
        segments.follow_requires_grad()
        if unit.hooked == segments.hookings:
            return
        leaves = unit.newly_trainable()
        sources = (source for sharded in unit.params for source in sharded.sources)
        for source in with_optimizers(sources, unit.name) if leaves else ():
            source.register_post_accumulate_grad_hook(step_in_backward)  # type: ignore[no-untyped-call]
        # Weak, since the leaf holds the hook and the unit the leaf: such a cycle is never collected.
        arrived = partial(type(self)._gradient_arrived, weakref.ref(unit))
        for leaf in leaves:
            hook = unit.arrivals.hook(leaf, arrived)
            leaf.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
        for act in unit.plug_ins.trains:
            act(unit)

    def after_forward(self, call: ForwardCall, tensors: list[torch.Tensor], inputs: list[Node]) -> None:
        """Hooks the tensors of a forward's output for its backward, and reshards the unit if possible.

        Only the outputs' hooks keep `inputs`, the nodes of watched inputs: a reference from `call`, which the
        nodes' own hooks hold, would be a cycle that is never collected.
        """
        unit = call.unit
        for act in unit.plug_ins.ran:
            act(unit, tensors)
        for act in unit.plug_ins.sees:
            act(unit, ValueSeam.OUTPUTS, tensors)
        with_grad = [*filter(_REQUIRES_GRAD, tensors)] if torch.is_grad_enabled() else []
        self._hook_outputs(call, inputs, with_grad)
        if graph_task() != -1:
            return  # the backward that recomputes will reshard
        if with_grad or (self._trains and not torch.is_grad_enabled()):  # the latter: reentrant checkpointing
            self.queue.order.ended.append(unit)
        for act in unit.plug_ins.hooked:
            act(unit, [hooked_for(tensor, inputs) for tensor in with_grad])
        if unit.running == 1:
            self.stays.end_forward(call, inputs, bool(with_grad))

    def _hook_outputs(self, call: ForwardCall, inputs: list[Node], outputs: Iterable[torch.Tensor]) -> None:
        """Hooks outputs for their backward; views themselves also for those who watch their gradients."""
        for output in outputs:
            hooked = output if output._base is None else hooked_for(output, inputs)
            if hooked is output or call.unit.plug_ins.sees:
                hook_gradient(output, partial(self._before_backward, call, inputs, True))
            if hooked is not output:
                hook_gradient(hooked, partial(self._before_backward, call, inputs, False))

    def end_outermost(self, tensors: list[torch.Tensor]) -> None:
        """Ends, with the outermost forward, the forwards of units that have stayed full.

        Hooks `tensors`, the outermost outputs: their backward needs the units' parameters, with which the
        outermost forward may have computed after the units' own forwards.
        """
        with_grad = [*filter(_REQUIRES_GRAD, tensors)] if torch.is_grad_enabled() else []
        for call, inputs in self.stays.take_waiting():
            self._hook_outputs(call, inputs, with_grad)
            for act in call.unit.plug_ins.hooked:
                act(call.unit, [hooked_for(tensor, inputs) for tensor in with_grad])
            self.stays.end_outermost(call, bool(with_grad))

    def exit_forward(self, call: ForwardCall) -> None:
        """Ends a forward call, whether it returned or raised."""
        self.depth -= 1
        unit, buffers = call.unit, call.unit.buffers
        unit.end_call()
        recompute = graph_task() != -1
        for act in unit.plug_ins.computed:
            act(unit, Computing.RECOMPUTE if recompute else Computing.FORWARD)
        if recompute:
            return
        over = unit.running == 0 and unit not in self.stays.waiting
        if over and buffers.where is Where.FULL and buffers.stays is not Until.BACKWARD:
            buffers.shown.show_sharded()
        if self.depth == 0:
            self.queue.end_forward()
            self.stays.drop_waiting()

    # backward

    def _before_backward(
        self, call: ForwardCall, inputs: list[Node], tells: bool, grad: torch.Tensor
    ) -> torch.Tensor | None:
        """Unshards when a gradient reaches a call's output: its own (`tells`), or of what it is a view of."""
        unit, task = call.unit, graph_task()
        self.unshard_again(call)
        if call.task != task:
            call.open(task, inputs)
            for act in unit.plug_ins.computes:
                act(unit, Computing.BACKWARD)
            for act in unit.plug_ins.sees:
                act(unit, ValueSeam.PARAMETERS, ())
            unit.reach()
            unit.arrivals.go_on(at_quarter=self.queue.busy)
            self.queue.came_back(unit)
        for act in unit.plug_ins.sees if tells else ():
            act(unit, ValueSeam.OUTPUT_GRADIENTS, [grad])
        return watched(self.unshard_again, call, grad) if torch.is_grad_enabled() else None  # create_graph

    def unshard_again(self, call: ForwardCall) -> None:
        """Shows modules the leaves of a call's forward; raises if their values have changed."""
        if self.end() is None:
            self._open_backward()
        unit, buffers = call.unit, call.unit.buffers
        try:
            self.queue.make_room_for(unit)
            for act in unit.plug_ins.enters:
                act(unit, Computing.BACKWARD)
            unshards = unit.options.unshards_in_backward
            if not unshards or buffers.where is Where.FULL:  # else the gather looks
                buffers.look()
            if unshards:
                self.queue.come_back(unit)
                unit.unshard(Phase.BACKWARD)
                buffers.shown.show_leaves()  # checkpointing inside the unit recomputes with them
            for act in unit.plug_ins.resumes:
                act(call)
        except (RuntimeError, MemoryError) as error:
            self.explain(error)
            raise

    def _open_backward(self) -> None:
        """Begins the backward of this tree, at the first hook that runs."""
        self.abandon_backward()
        for act in self.plug_ins.backward_begins:
            act(self)
        self.end = weakref.ref(end := self._end_backward)  # before it is open, for other threads
        self.begin_backward()
        execution_engine.queue_callback(end)  # autograd alone holds it, as long as this backward runs

    def begin_backward(self) -> None:
        """Resets gradient bookkeeping, also when this rank follows another one (`uneven`)."""
        self.backward_open, self.gradients_came = True, False
        self._keeps_graph = torch.is_grad_enabled()  # create_graph
        self.ending.begin()
        for act in self.plug_ins.backward_opens:
            act(self)
        self.queue.order.begin_backward()
        self.stays.begin_backward()
        for unit in self._units:
            self.hook_leaves(unit)  # others may train than in the last forward
            unit.await_backward(every=self._keeps_graph or bool(unit.plug_ins.brings))

    @classmethod
    def _gradient_arrived(cls, reference: weakref.ref[Unit], leaf: nn.Parameter) -> None:
        """Handles the gradient of a leaf: makes room, or ends the unit's backward after the last one."""
        unit = reference()
        if unit is None:
            return
        self, arrivals = unit.step or cls(unit), unit.arrivals
        assert isinstance(self, Step)
        if torch.is_grad_enabled():  # create_graph
            refuse_graph(unit, leaf)
        if self.end() is None:
            self._open_backward()
            if not leaf.requires_grad:  # frozen since its forward
                leaf.grad = None
                return
            arrivals.expect_all_but(leaf)
        self.gradients_came = True
        for act in unit.plug_ins.brings:
            act(unit, leaf)
        unit.reach()
        arrivals.go_on()
        self.queue.gradients_come(unit)
        self._end_backward_of(unit, last_input=False)

    def input_gradient_arrived(
        self, call: ForwardCall, grads: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor | None] | None:
        """Ends a unit's backward after its last watched input; returns a view of the gradient, if needed."""
        unit = call.unit
        for act in unit.plug_ins.sees:
            act(unit, ValueSeam.INPUT_GRADIENTS, grads)
        if call.task == graph_task() and call.input_done():
            if unit.arrivals.missing and not unit.tied:
                unit.arrivals.go_on()
            self._end_backward_of(unit, last_input=True)
        return (watched(self.unshard_again, call, grads[0]),) if torch.is_grad_enabled() else None

    def _end_backward_of(self, unit: Unit, last_input: bool) -> None:
        """Ends the backward of a unit, and of those that end with it, as far as it is over."""
        over = ends(unit, last_input)
        if over is Done.NOTHING:
            return
        for ended in unit.group or (unit,):
            if over is Done.ALL:
                self.leave_backward(ended, Phase.BACKWARD)
            self.take_gradients(ended, Phase.BACKWARD)
            if over is Done.ALL:
                self.queue.backward_over(ended)

    def leave_backward(self, unit: Unit, phase: Phase) -> None:
        """Frees the full parameters of a unit after its backward, or keeps them."""
        until = after_backward(unit, self.syncs, self._keeps_graph)
        if until is Until.FORWARD:
            unit.forget_backward()
        elif unit.end_backward():
            for act in unit.plug_ins.backward_over:
                act(unit, phase)
        if until is Until.NOW:
            unit.reshard(phase)
        else:
            unit.keep(until)

    def take_gradients(self, unit: Unit, phase: Phase) -> None:
        """Takes a unit's gradients off its leaves, and reduces or accumulates them."""
        syncs = self.syncs and unit.options.syncs
        if not unit.has_gradients(syncs):
            return
        owes = unit.arrivals.owes
        self.gradients_came = self.gradients_came or unit.arrivals.some_came()
        if not (self.gradients_came or owes) and phase is not Phase.IDLE:
            return  # autograd.grad() may bring none; the final callback asks again
        unit.arrivals.owes = False
        try:
            self.queue.before_gradients(unit, phase)
            for act in unit.plug_ins.sees:
                act(unit, ValueSeam.GRADIENTS, ())
            if syncs:
                self.queue.reduce(unit, phase)
            else:
                unit.buffers.gradients.collect()
        except (RuntimeError, MemoryError) as error:
            self.explain(error)
            raise

    @torch.no_grad()
    def _end_backward(self) -> None:
        """Finishes, as the final callback, the units that no trigger has reached."""
        # No hook has acted where each unit got less than a quarter.
        self.gradients_came = self.gradients_came or any([unit.arrivals.some_came() for unit in self._units])
        for unit in self._units:
            buffers = unit.buffers
            over = unit.doing is Doing.OVER and buffers.where is Where.SHARDED
            # Where its backward is over, it may have been gathered ahead by mistake, or earlier sums wait.
            if not over or buffers.gradients.unsummed:
                self.leave_backward(unit, Phase.FINAL_CALLBACK)
                self.take_gradients(unit, Phase.FINAL_CALLBACK)
        for act in self.plug_ins.backward_ends:
            act(self)
        self.close_backward(self.ending.waits)
        for act in self.plug_ins.backward_ended:
            act(self)

    def close_backward(self, waits: bool) -> None:
        """Ends a backward of this rank or of others; `waits` tells to wait for reductions."""
        self.queue.send()
        self.close(waits)
        self._forget_backward()

    def close(self, waits: bool) -> None:
        """Ends a backward, or with `waits` all since the last end: then their gradients are complete."""
        if waits:
            self.queue.make_room()
            self.ending.finish()
            for unit in self._units:
                unit.forwards = 0
        for act in self.plug_ins.backward_closes:
            act(self, waits)

    def _forget_backward(self) -> None:
        self.stays.end_backward()
        self.backward_open, self._keeps_graph, self.end = False, False, NONE_RUNS
        self.restore_sums()

    def abandon_backward(self) -> None:
        """Cleans up after a backward that raised, if there is one: its final callback never ran."""
        if self.backward_open:
            for act in self.plug_ins.failed:
                act(self)
            self.drop_backward()

    def drop_backward(self) -> None:
        """Drops what backwards have left, in flight and on the leaves."""
        self.queue.drop()
        self._forget_backward()
        for act in self.plug_ins.dropped:
            act(self)
        for unit in self._units:
            unit.forwards = 0
            unit.forget_backward()
            unit.buffers.abandon_backward()
            unit.reshard(Phase.IDLE)
