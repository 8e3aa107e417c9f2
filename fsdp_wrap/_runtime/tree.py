"""`UnitTree`: the units below one root, what is attached to their steps, and what their errors tell."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import chain
from threading import get_ident

import torch

from fsdp_wrap._comm import GroupCommunicator, Tree
from fsdp_wrap._core.torch_private import graph_task
from fsdp_wrap._params import Where
from fsdp_wrap._runtime.finalization import BackwardEnd
from fsdp_wrap._runtime.same_model import SameModel
from fsdp_wrap._runtime.unit import StepState, Unit, communicators_of, refuse_lent, units_in

NONE_RUNS: Callable[[], object] = weakref.ref(set())
"""A dead reference, as to the final callback of a backward that is over."""


class UnitTree(StepState):
    """The units of one tree.

    Args:
        root: The unit whose forward is outermost; all units below it join.

    Attributes:
        ending: Decides when the last reduction of a backward is waited for. The user may replace it between
            two backwards.
        tree: The identity of its tree in the logs of collectives.
        ranks: Compares the tree between ranks.
        device: Device of computation.
        depth: Number of forward calls in progress.
        thread: That of the last outermost forward.
        end: Refers to the final callback of the running backward; to nothing while none runs.
    """

    def __init__(self, root: Unit) -> None:
        super().__init__(root)
        names: dict[Unit, list[str]] = {}
        for fqn, unit in units_in(root.module).items():
            names.setdefault(unit, []).append(fqn)
        self._units = [*names]
        self.depth = 0
        self.thread, self.end = get_ident(), NONE_RUNS
        before = {unit: unit.step for unit in names if isinstance(unit.step, UnitTree)}
        for unit, tree in before.items():
            tree.ending.refuse_enclosing(unit)
        self.ending: BackwardEnd = BackwardEnd()
        communicators = communicators_of(self._units)
        self._communicators = [ranks for ranks in communicators if isinstance(ranks, GroupCommunicator)]
        self.device = next((ranks.device for ranks in communicators), torch.device("cpu"))
        self._users_sums: tuple[bool, bool] | None = None  # while a backward makes other sums
        self.tree = Tree()
        self.ranks: SameModel = SameModel(self.tree, dict.fromkeys(tree.ranks for tree in before.values()))
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
        """The units that still run in this step: users may keep parts of a tree whose root has gone."""
        return [unit for unit in self._units if unit.step is self and not unit.gone]

    @property
    def in_backward(self) -> bool:
        """Whether a backward runs, in this thread or in another than the forward's."""
        return graph_task() != -1 or (self.end() is not None and get_ident() != self.thread)

    def require_ready(self, unit: Unit) -> None:
        """Raises if an outermost forward of a unit must not begin: before any state changes.

        Its parameters may be in the user's hands, gradients may not be waited for, or a process group may be
        destroyed, which meshes keep alive.
        """
        if unit.buffers.where is Where.LENT:
            refuse_lent(unit)
        self.ending.require_waited("a forward")
        for communicator in self._communicators:
            communicator.require_group()

    @property
    def shifts_alone(self) -> bool:
        """Whether a step that this rank alone leaves out would shift its reductions against the others'."""
        return not self.plug_ins.align and self.syncs and any([unit.options.syncs for unit in self._units])

    def sum_in_backward(self, syncs: bool, sums_over_replicas: bool) -> None:
        """Decides, whatever `no_sync` says, which sums the backward makes that begins now."""
        if self._users_sums is None:
            self._users_sums = self.syncs, self.sums_over_replicas
        self.syncs, self.sums_over_replicas = syncs, sums_over_replicas

    def restore_sums(self) -> None:
        """Ends `sum_in_backward`: the user decides again."""
        if self._users_sums is not None:
            self.syncs, self.sums_over_replicas = self._users_sums
            self._users_sums = None

    def fail_forward(self, error: BaseException, inside: int) -> None:
        """Explains the error of a forward, and notes it if only `inside` forward calls are in progress."""
        if self.depth == inside and graph_task() == -1:
            for act in self.plug_ins.failed:
                act(self)
        if isinstance(error, (RuntimeError, MemoryError)):
            self.explain(error)

    def explain(self, error: BaseException) -> None:
        """Lets plug-ins add to an error that leaves the runtime."""
        for act in self.plug_ins.explains:
            act(self, error)
