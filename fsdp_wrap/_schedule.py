"""`Schedule`: which unit runs when. The only registrar of runtime hooks.

Two triggers end a unit's backward (docs/architecture.md): when all trainable leaves have their gradients the
reduction starts; when the gradients of the unit's inputs are done as well, the unit reshards. What no trigger
reached is finished in the backward's final callback.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.nn.utils.parametrize import ParametrizationList

from fsdp_wrap._errors import NotIdleError
from fsdp_wrap._events import EventKind, Phase, emit, observers
from fsdp_wrap._exec_order import ExecOrder, OrderCheck
from fsdp_wrap._finalization import BackwardEnd
from fsdp_wrap._gradient_hooks import step_in_backward, with_optimizers
from fsdp_wrap._handle import HandleState, ParamHandle
from fsdp_wrap._refusals import (
    ParametrizationGuard,
    refuse_changes,
    refuse_edits,
    refuse_graph,
    refuse_outdated,
)
from fsdp_wrap._returned import without_parameters
from fsdp_wrap._torch_private import execution_engine
from fsdp_wrap._traffic import Traffic
from fsdp_wrap._tree import map_tensors
from fsdp_wrap._unit import Unit, Use, graph_task, units_in
from fsdp_wrap.api import BackwardPrefetch

__all__ = ["Schedule", "require_idle", "schedule_of"]


class Schedule:
    """Runs the units of one tree: before and after each forward and backward.

    Args:
        root: The unit whose forward is outermost; all units below it join.

    Attributes:
        ending: Who waits for the last reduction of a backward.
    """

    def __init__(self, root: Unit) -> None:
        self.root = root
        units = units_in(root.module)
        names: dict[Unit, list[str]] = {}
        for fqn, unit in units.items():
            names.setdefault(unit, []).append(fqn)
        self._units = list(names)
        self._order: ExecOrder[Unit] = ExecOrder()
        self._order_check = OrderCheck()
        self._depth = 0
        self._backward_open = False
        self._trains = False
        self._syncs = True
        self._keeps_graph = False
        self._prefetching_later: Unit | None = None
        self._prefetched: list[Unit] = []
        below = {unit: unit.schedule for unit in self._units if isinstance(unit.schedule, Schedule)}
        self.ending: BackwardEnd = BackwardEnd({unit: schedule.ending for unit, schedule in below.items()})
        self._event: Any = None
        handles = (unit.handle for unit in self._units if unit.handle is not None)
        self._device = next((handle.communicator.device for handle in handles), torch.device("cpu"))
        for unit, fqns in names.items():
            unit.join(self, ", ".join(fqns))
        self._traffic = Traffic(self._units)

    # forward

    @property
    def moves_inputs_to(self) -> torch.device | None:
        """The device of this tree, where an outermost forward would begin now and inputs may be elsewhere."""
        return self._device if self._depth == 0 and self._device.type != "cpu" else None

    def pre_forward(self, unit: Unit, part: nn.Module | None = None) -> Use:
        """Begins a forward call: unshards, and lets the modules compute with the leaves.

        `exit_forward` must follow, whatever happens in between.

        Raises:
            RuntimeError: If the unit's parameters are in the user's hands.
        """
        recompute = graph_task() != -1  # a forward inside a backward
        if self._depth == 0 and not recompute:
            self._begin_iteration()
        if unit.handle is not None:
            if not recompute:
                self._order_check.enter(unit)
            self._traffic.unshard(unit, Phase.BACKWARD if recompute else Phase.FORWARD)
            self._hook_leaves(unit)
            if not recompute:
                self._prefetch_forward(unit)
        self._depth += 1
        unit.running += 1
        if unit.options.full_in_eval and unit.leaves_mixed_precision:
            unit.buffers.show_original()
        else:
            unit.buffers.show_cast()
        if unit.handle is not None:
            unit.handle.shown.show_leaves()
        return Use(unit, part)

    def watch_inputs(self, use: Use, args: Any, kwargs: Any) -> tuple[Any, Any, list[Node]]:
        """Puts a view between each input that needs a gradient and this use, to see when that is done.

        Returns:
            The inputs to compute with, and the views' nodes.
        """
        seen: dict[int, torch.Tensor] = {}
        nodes: list[Node] = []

        def watch(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.requires_grad or tensor.layout != torch.strided:
                return tensor
            if id(tensor) not in seen:  # what was one tensor stays one: modules test `query is key`
                view = seen[id(tensor)] = tensor.view_as(tensor)
                assert view.grad_fn is not None
                view.grad_fn.register_prehook(lambda grads: self._on_input_gradient(use, grads))
                nodes.append(view.grad_fn)
            return seen[id(tensor)]

        if use.unit.handle is not None and torch.is_grad_enabled():
            args, kwargs = map_tensors(watch, args), kwargs and map_tensors(watch, kwargs)
            use.watched = len(nodes)
        return args, kwargs, nodes

    def post_forward(self, use: Use, output: Any, inputs: list[Node]) -> Any:
        """Hooks a unit's outputs for its backward, and reshards it where nothing speaks against it.

        Args:
            use: The forward call.
            output: What the module returned.
            inputs: The nodes from `watch_inputs`. Only the outputs' hooks keep them: a reference from
                `use`, which the nodes' own hooks hold, would be a cycle that is never collected.

        Returns:
            The output, with copies in the place of parameters.

        Raises:
            RuntimeError: If the forward has written to a parameter.
        """
        unit = use.unit
        if unit.handle is None:
            return output
        refuse_edits(unit, unit.handle)
        output, tensors = without_parameters(unit.handle, output)
        with_grad = [tensor for tensor in tensors if tensor.requires_grad] if torch.is_grad_enabled() else []
        if with_grad:
            use.written = unit.handle.written()
        for tensor in with_grad:
            tensor.register_hook(  # type: ignore[no-untyped-call]
                lambda grad: self._pre_backward(use, inputs, grad)
            )
        if graph_task() != -1:
            return output  # the backward that recomputes will reshard
        if with_grad or (self._trains and not torch.is_grad_enabled()):  # the latter: reentrant checkpointing
            self._order.record(unit)
        over = unit.running == 1 and unit.ran(use.part)
        if over and not unit.keeps_parameters(use, bool(with_grad), unit is self.root):
            self._traffic.reshard(unit, Phase.FORWARD, unit.options.reshards_within if with_grad else None)
        elif over:
            unit.handle.shown.show_kept()
        return output

    def exit_forward(self, use: Use) -> None:
        """Ends a forward call, whether it returned or raised."""
        self._depth -= 1
        unit = use.unit
        unit.running -= 1
        if unit.handle is not None and unit.running == 0 and graph_task() == -1:
            unit.handle.shown.end_forward()
        if self._depth == 0 and graph_task() == -1:
            self._end_outermost_forward()

    def _end_outermost_forward(self) -> None:
        prefetched, self._prefetched = self._prefetched, []
        for unit in prefetched:  # they did not run after all
            self._traffic.reshard(unit, Phase.FORWARD)
        for unit in self._units:
            if unit.parts and unit.partly_ran:
                unit.restart()
                if unit.options.reshard_after_forward:
                    self._traffic.reshard(unit, Phase.FORWARD)

    def _prefetch_forward(self, unit: Unit) -> None:
        expected, options = self._order.next_in_forward(unit), unit.options
        if unit in self._prefetched:
            self._prefetched.remove(unit)
        elif not options.forward_targets and options.forward_prefetch:
            for wrong in self._prefetched:  # the order has changed
                self._traffic.reshard(wrong, Phase.FORWARD)
            self._prefetched = []
        targets = options.forward_targets
        if options.forward_prefetch and expected is not None:
            targets = targets or (expected,)
        for target in targets:
            if self._traffic.gather(target, Phase.FORWARD):
                self._prefetched.append(target)

    def _begin_iteration(self) -> None:
        """Starts from a clean state, whatever the last forward or backward left."""
        self.ending.require_waited("a forward")
        self._trains = torch.is_grad_enabled()
        iteration = self._traffic.begin_iteration()
        self._order.begin_forward()
        self._order_check.begin_forward(self._trains and self.root.module.training, iteration)
        if self._backward_open:
            self._abandon_backward()
        self._await_event()
        for unit in self._units:  # kept for a backward that has not come: may be stale by now
            if unit.survives:
                continue
            self._traffic.reshard(unit, Phase.FORWARD)
            if unit.handle is not None and unit.handle.state is HandleState.SHARDED:
                unit.handle.follow_replaced()
                if unit.options.full_in_eval:
                    unit.follow_mode()
                refuse_changes(unit, unit.handle)

    def _hook_leaves(self, unit: Unit) -> None:
        assert unit.handle is not None
        leaves = unit.newly_trainable()
        sources = (source for segment in unit.handle.segments for source in segment.layout.sources)
        for source in with_optimizers(sources, unit.name) if leaves else ():
            source.register_post_accumulate_grad_hook(step_in_backward)  # type: ignore[no-untyped-call]
        for leaf, number, index in leaves:
            leaf.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                unit.arrivals.hook(leaf, _look_after(unit, number, index))
            )

    # backward

    def _pre_backward(self, use: Use, inputs: list[Node], grad: torch.Tensor) -> torch.Tensor | None:
        """Runs when a gradient reaches one of a use's outputs.

        Returns:
            What stands for the gradient from now on, if it has to be watched.

        Raises:
            RuntimeError: If the unit's parameters have other values than in the use's forward.
        """
        if not self._backward_open:
            self._open_backward()
        unit, handle = use.unit, use.unit.handle
        assert handle is not None  # or its outputs had not been hooked
        if handle.bulky:
            self._make_room()
        self._unshard_again(use)
        if use.open(graph_task(), inputs):
            unit.look()
            if unit.options.backward_prefetch is BackwardPrefetch.BACKWARD_PRE:
                self._prefetch_with_room(unit)
        return self._watched(use, grad) if torch.is_grad_enabled() else None  # create_graph

    def _unshard_again(self, use: Use) -> None:
        """Lets the modules of a unit show what they computed with in a use's forward.

        Raises:
            RuntimeError: If the unit's parameters have other values now.
        """
        unit, handle = use.unit, use.unit.handle
        if unit.options.unshards_in_backward:
            self._traffic.unshard(unit, Phase.BACKWARD)
            if handle is not None:
                handle.shown.show_leaves()  # checkpointing inside of the unit computes with them again
        if use.outdated or (handle is not None and handle.shown.changed):
            self._traffic.reshard(unit, Phase.BACKWARD)
            refuse_outdated(use)

    def _watched(self, use: Use, grad: torch.Tensor | None) -> torch.Tensor | None:
        """Puts a view in the place of a gradient with a graph, where it enters or leaves a unit's backward.

        A later backward, which needs the leaves, comes that way.
        """
        if grad is None or not grad.requires_grad:
            return grad
        view = grad.view_as(grad)
        view.register_hook(lambda outer: self._pre_derivative(use, outer))  # type: ignore[no-untyped-call]
        return view

    def _pre_derivative(self, use: Use, grad: torch.Tensor) -> torch.Tensor | None:
        """Runs when a gradient reaches one that an earlier backward has computed with a unit's leaves.

        Returns:
            What stands for the gradient from now on, if it has to be watched.

        Raises:
            RuntimeError: If the unit's parameters have other values than in the use's forward.
        """
        if not self._backward_open:
            self._open_backward()
        use.unit.enter_derivative()
        self._unshard_again(use)
        return self._watched(use, grad) if torch.is_grad_enabled() else None

    def on_leaf_gradient(self, unit: Unit, leaf: nn.Parameter, number: int, index: int) -> None:
        """Looks after a leaf, given with its place, has its gradient of the running backward.

        Raises:
            RuntimeError: If the gradient has a graph of its own.
        """
        if torch.is_grad_enabled():  # create_graph
            refuse_graph(unit, leaf)
        if not self._backward_open:
            self._open_backward()
            unit.arrivals.begin_with(leaf)
        if unit.options.gradients_in_place and self._takes_in_place(unit):
            assert unit.handle is not None
            unit.handle.segments[number].take_in_place(index)
        all_came = unit.look()
        if (self._traffic.reducing or self._prefetching_later) and unit.arrivals.crowded:
            self._make_room()
        if all_came and not unit.awaits_inputs:
            if unit.needed_for_inputs:
                self._take_gradients(unit, Phase.BACKWARD)
            else:
                self._unit_backward_over(unit)

    def _on_input_gradient(
        self, use: Use, grads: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor | None] | None:
        """Runs when the gradient of one of a use's watched inputs is done.

        Returns:
            What stands for it from now on, if it has to be watched.
        """
        unit = use.unit
        if use.task == graph_task() and use.input_done() and unit.close(use):
            if unit.gradients_to_come():
                unit.look()
            else:
                self._unit_backward_over(unit)
        return (self._watched(use, grads[0]),) if torch.is_grad_enabled() else None  # create_graph

    def _unit_backward_over(self, unit: Unit) -> None:
        if torch.is_grad_enabled():  # create_graph: a later backward needs the leaves
            return
        if unit.needed_to_end:
            self._take_gradients(unit, Phase.BACKWARD)
            return
        unit.end_backward()
        if observers:
            emit(EventKind.POST_BACKWARD, unit.fqn, Phase.BACKWARD)
        self._end_unsharded_backward(unit, Phase.BACKWARD)
        self._take_gradients(unit, Phase.BACKWARD)
        if unit.options.backward_prefetch is BackwardPrefetch.BACKWARD_POST:
            self._prefetch(unit)

    def _end_unsharded_backward(self, unit: Unit, phase: Phase) -> None:
        if unit.options.reshards_after_backward:
            self._traffic.reshard(unit, phase)
        elif unit.handle is not None and not unit.running:
            unit.handle.shown.show_sharded()

    def _open_backward(self) -> None:
        """Begins the backward of this tree, at the first hook that runs."""
        self._backward_open = True
        self._keeps_graph = torch.is_grad_enabled()  # create_graph
        self.ending.begin()
        self._order.begin_backward()
        self._order_check.begin_backward()
        for unit in self._units:
            unit.begin_backward()
        execution_engine.queue_callback(self._end_backward)

    @torch.no_grad()
    def _end_backward(self) -> None:
        """The final callback: finishes what no trigger reached."""
        for unit in self._units:
            handle = unit.handle
            if handle is None:
                continue
            if not unit.finished or handle.state is not HandleState.SHARDED:  # a mistaken prefetch, perhaps
                self._finish_backward_of(unit, handle)
            if not self._reduces(unit):
                handle.keep_accumulated()
        if self.ending.automatic:
            self._make_room()
            self.ending.finish()
        self._backward_open = False

    def _finish_backward_of(self, unit: Unit, handle: ParamHandle) -> None:
        if not (self._keeps_graph and unit.reached):
            if unit.end_backward() and observers:
                emit(EventKind.POST_BACKWARD, unit.fqn, Phase.FINAL_CALLBACK)
            self._end_unsharded_backward(unit, Phase.FINAL_CALLBACK)
        else:
            unit.arrivals.end()
            if not unit.running:
                handle.shown.show_sharded()
        self._take_gradients(unit, Phase.FINAL_CALLBACK)

    def end_failed_backward(self) -> None:
        """Shows the sharded parameters again after a backward that raised."""
        if self._backward_open and graph_task() == -1:
            self._abandon_backward()
            for unit in self._units:
                self._traffic.reshard(unit, Phase.IDLE)

    def _abandon_backward(self) -> None:
        """Cleans up after a backward that raised, whose final callback never ran."""
        self._traffic.forget_reduction()
        self._prefetching_later = None
        self._backward_open = False
        for unit in self._units:
            unit.arrivals.end()
            if unit.handle is not None:
                unit.handle.abandon_backward()

    # by hand

    def unshard(self, unit: Unit) -> None:
        """Issues a unit's all-gather; the next iteration takes its parameters over unless they change."""
        if unit.handle is None:
            return
        if not unit.handle.is_current and graph_task() == -1 and not self._depth:
            self._traffic.reshard(unit, Phase.IDLE)
            if unit.handle.state is HandleState.SHARDED:
                unit.handle.follow_replaced()
                unit.follow_mode()
        self._traffic.gather(unit, Phase.IDLE)
        unit.hold(True)

    def show_unsharded(self, unit: Unit) -> None:
        """Lets the modules of a unit show its full parameters, until it is resharded or its forward ends."""
        if unit.handle is not None:
            self._traffic.unshard(unit, Phase.IDLE)
            self._hook_leaves(unit)
            unit.handle.shown.show_leaves()

    def reshard(self, unit: Unit) -> None:
        """Frees a unit's full parameters, unless its forward is running."""
        self._traffic.reshard(unit, Phase.IDLE)
        if unit.handle is not None and not unit.running:
            unit.handle.reshard()  # what it keeps within a smaller group as well

    @torch.no_grad()
    def finalize(self) -> None:
        """Ends the backwards since the last end, by hand, save for `await_reduction`."""
        if not self._traffic.iteration:
            return
        if any(unit.handle is not None and unit.handle.replicas.size > 1 for unit in self._units):
            self._make_room()  # sums over replicas begin there
        self.ending.check(self.root, self._units, self._backward_open or graph_task() != -1)
        for unit in self._units:
            self.end_backwards_of(unit)

    @torch.no_grad()
    def end_backwards_of(self, unit: Unit) -> None:
        """Ends the backwards that one unit has had, by hand, save for `await_reduction`."""
        if unit.handle is not None:
            unit.handle.forget_zeroed()
            self._end_unsharded_backward(unit, Phase.IDLE)
            self._take_gradients(unit, Phase.IDLE)

    def await_reduction(self) -> None:
        """Waits for the last reduction."""
        self._make_room()
        self.ending.finish()

    def wait_for(self, event: Any) -> None:
        """Lets the next iteration begin after an event on another stream."""
        self._event = event

    def _await_event(self) -> None:
        event, self._event = self._event, None
        if event is not None:
            event.wait()

    def reset(self) -> None:
        """Drops whatever a forward or backward left, and gradients that wait for a reduction."""
        self._abandon_backward()
        self.ending.finish()
        for unit in self._units:
            self._traffic.reshard(unit, Phase.IDLE)
            if unit.handle is not None:
                unit.handle.drop_gradients()

    # steps that several of the above share

    def _prefetch_with_room(self, unit: Unit) -> None:
        """Prefetches once the memory of gradients that still travel is free again."""
        assert unit.handle is not None
        in_place = unit.options.gradients_in_place and self._takes_in_place(unit)
        crowds = self._traffic.reducing is not None or (in_place and unit.handle.bulky)
        if crowds and unit.handle.trainable:
            self._prefetching_later = unit
        else:
            self._prefetch(unit)

    def _takes_in_place(self, unit: Unit) -> bool:
        """Whether nothing speaks against gradients in the place of the unit's parameters."""
        freed = unit.options.reshards_after_backward and not unit.running and not unit.needed_to_end
        return freed and self._reduces(unit) and not torch.is_grad_enabled()

    def _prefetch(self, unit: Unit) -> None:
        expected = self._order.next_in_backward(unit)
        for target in unit.options.backward_targets or (expected,):
            if target is not None and target.options.unshards_in_backward:
                self._traffic.gather(target, Phase.BACKWARD)

    def _take_gradients(self, unit: Unit, phase: Phase) -> None:
        """Takes what gradients a unit has off its leaves, to be reduced or kept."""
        if unit.handle is None or not unit.handle.holds_gradients:
            return
        if self._traffic.reducing or self._prefetching_later:
            self._make_room()  # one is in flight at most
        if self._reduces(unit):
            self._traffic.reduce(unit, phase)
        else:
            unit.handle.accumulate_gradients()

    def _reduces(self, unit: Unit) -> bool:
        return self._syncs and unit.options.syncs

    def _make_room(self) -> None:
        """Finishes the reduction in flight, and issues the prefetch that waited for its memory."""
        self._traffic.finish_reduction()
        waiting, self._prefetching_later = self._prefetching_later, None
        if waiting is not None:
            self._prefetch(waiting)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulates gradients without communication while the context is open."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def require_idle(self, doing: str) -> None:
        """Refuses what must not happen in the middle of a forward or backward.

        Raises:
            NotIdleError: If a unit's forward is running or a backward is in progress.
        """
        running = next((unit for unit in self._units if unit.running), None)
        if running is not None or graph_task() != -1:
            where = f"the forward of {running.name}" if running is not None else "a backward"
            raise NotIdleError(f"{doing} must not run inside {where}")


def schedule_of(unit: Unit) -> Schedule:
    """Returns the schedule that a unit runs in; one of its own (as root) where it has none yet."""
    schedule = unit.schedule
    return schedule if isinstance(schedule, Schedule) else Schedule(unit)


def require_idle(units: Iterable[Unit], doing: str) -> None:
    """Refuses what must not happen in the middle of a forward or backward of any of the units.

    Raises:
        NotIdleError: As `Schedule.require_idle`.
    """
    for schedule in dict.fromkeys(map(schedule_of, units)):
        schedule.require_idle(doing)


def guard_parametrizations(unit: Unit, modules: Iterable[nn.Module]) -> None:
    """Refuses to compute a parametrised tensor from sharded parameters, which do not fit each other."""
    for module in modules:
        if isinstance(module, ParametrizationList):
            module.register_forward_pre_hook(ParametrizationGuard(unit))


def _look_after(unit: Unit, number: int, index: int) -> Callable[[nn.Parameter], None]:
    reference = weakref.ref(unit)  # the leaf holds this hook, and the unit the leaf: a cycle would never go

    def look(leaf: nn.Parameter) -> None:
        unit = reference()
        if unit is not None:
            schedule_of(unit).on_leaf_gradient(unit, leaf, number, index)

    return look
