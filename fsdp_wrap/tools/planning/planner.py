"""`plan()`: runs the runtime on tensors without values, and records what it does."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from fsdp_wrap._comm import PlannedRounds, planned_rounds, resize_watchers
from fsdp_wrap._core import everywhere, tells_keywords
from fsdp_wrap._core.torch_private import clear_sharding_caches, pytree
from fsdp_wrap._params import ShardedParams, to_local
from fsdp_wrap._runtime import Unit, units_in
from fsdp_wrap.tools.planning import figures
from fsdp_wrap.tools.planning.fake_device import FakeDevice
from fsdp_wrap.tools.planning.figures import HostMemory, Moment, UnitPlan
from fsdp_wrap.tools.planning.ledger import History, Ledger
from fsdp_wrap.tools.planning.machine import Machine
from fsdp_wrap.tools.planning.plan import Plan
from fsdp_wrap.tools.planning.prediction import Prediction, predicted
from fsdp_wrap.tools.planning.recalled import gathered_bytes, remember
from fsdp_wrap.tools.planning.recorder import PlanRecorder
from fsdp_wrap.tools.planning.tensors import CPU, MetaDispatch, PlanningError
from fsdp_wrap.tools.planning.world import world_of

Setup = Callable[[], tuple[nn.Module, Any, Callable[[], object]]]
"""Returns a model, its optimizer (or several), and a function for one step."""

__all__ = ["PlanningError", "Setup", "plan"]

MOST_RANKS = 16384
_DEVICES = ("cpu", "cuda")


@tells_keywords()
def plan(
    setup: Setup,
    ranks: int = 8,
    *,
    device: str = "cpu",
    machine: Machine | None = None,
    rank: int = 0,
    helps: int | None = None,
) -> Plan:
    """Predicts memory, communication and time of a training step without running it.

    `setup` and two steps run in this process, as one rank of many, on tensors that have shapes and no values;
    by the second step the optimizer has its state. Nothing is allocated, and neither the device nor other
    ranks need exist. The real runtime runs, so the plan is of what it does.

    The step must not depend on values: no `loss.item()`, no `print(loss)`, no `if loss.isnan()`. Attention by
    `scaled_dot_product_attention` is planned with a fused kernel wherever there is one. `torch.compile` is
    not followed. `torch.autocast` is, by torch's own rules for the device.

    Args:
        setup: Builds the model (under `torch.device("meta")` or not), shards it by `fully_shard` or
            `FullyShardedDataParallel`, makes the optimizer, and returns (model, optimizer, step); `step()`
            makes a batch and trains on it once. Several optimizers come in a list. It may make meshes.
        ranks: Number of ranks, up to 16,384.
        device: Type of the device on which the model computes: "cpu" or "cuda".
        machine: The machine for predicted times; None for no prediction.
        rank: The rank that is planned.
        helps: A rank that `rank` helps when it has no batch left inside `fsdp_wrap.uneven`. The step tells
            by `torch.distributed.get_rank()` how many batches it has; `setup` and two steps run as this rank
            first. The predicted time leaves out that `rank` waits until the other one has computed.

    Returns:
        The plan.

    Raises:
        ValueError: If there is a process group already, an argument is out of range, or the step depends on
            values.
        TypeError: If `setup` returns something else.

    Example:
        ```python
        def setup():
            with torch.device("meta"):
                model = Transformer()
            model = FullyShardedDataParallel(model, auto_wrap_policy=policy, device_id=0)
            optimizer = torch.optim.AdamW(model.parameters())

            def step():
                optimizer.zero_grad()
                model(torch.randint(50257, (4, 1024), device="cuda")).backward()
                optimizer.step()

            return model, optimizer, step

        print(fsdp_wrap.plan(setup, ranks=64, device="cuda"))
        ```
    """
    _check(setup, ranks, device, rank, helps)
    before = planned_rounds.set(None if helps is None else PlannedRounds(rank))
    try:
        if helps is not None:
            _planned(setup, ranks, device, machine, helps, False)
        return remember(_planned(setup, ranks, device, machine, rank, helps is not None))
    finally:
        planned_rounds.reset(before)


def _planned(setup: Setup, ranks: int, device: str, machine: Machine | None, rank: int, helps: bool) -> Plan:
    with world_of(ranks, rank, device), torch.random.fork_rng(devices=[]):
        gc.collect()  # so that earlier garbage is not freed during the plan
        planner = _Planner(device)
        try:
            with planner.watching():
                planner.build(setup, helps)
                first = planner.run()
                second = planner.run()
            return planner.make_plan(first, second, ranks, rank, machine)
        finally:
            planner.forget()
            clear_sharding_caches()  # of meshes of this world


def _check(setup: Setup, ranks: int, device: str, rank: int, helps: int | None) -> None:
    if not callable(setup):
        raise TypeError(f"setup must be a function that returns (model, optimizer, step), not {setup!r}")
    if not isinstance(ranks, int) or not 1 <= ranks <= MOST_RANKS:
        raise ValueError(f"ranks must be a number from 1 to {MOST_RANKS}, not {ranks!r}")
    if not isinstance(rank, int) or not 0 <= rank < ranks:
        raise ValueError(f"rank must be a number from 0 to {ranks - 1}, not {rank!r}")
    if helps is not None and (helps == rank or helps not in range(ranks)):
        raise ValueError(f"helps must be a rank from 0 to {ranks - 1} other than {rank}, not {helps!r}")
    if device not in _DEVICES:
        raise ValueError(f"device must be one of {_DEVICES}, not {device!r}")


@contextmanager
def many_plans() -> Iterator[None]:
    """Makes the garbage collections of many plans skip the objects that live before."""
    freezes = not gc.get_freeze_count()
    if freezes:
        gc.collect()
        gc.freeze()
    try:
        yield
    finally:
        if freezes:
            gc.unfreeze()


class _Planner:
    """One run of a user's setup and steps."""

    def __init__(self, device_type: str) -> None:
        self._device_type = device_type
        self._ledger = Ledger(device_type)
        self._recorder = PlanRecorder(self._ledger)
        self._dispatch = MetaDispatch(self._ledger, self._recorder.operator)
        self._setup_peak = 0

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Runs tensors without values, and records the runtime."""
        with ExitStack() as stack:
            resize_watchers.append(self._recorder.resized)
            stack.callback(resize_watchers.remove, self._recorder.resized)
            stack.enter_context(everywhere.having(self._recorder))
            fake = FakeDevice(self._ledger, self._dispatch)
            stack.enter_context(fake.autocast.followed(self._device_type))
            stack.enter_context(fake.in_hooks())
            stack.enter_context(fake)
            stack.enter_context(self._dispatch)
            stack.callback(setattr, torch, "get_rng_state", get := torch.get_rng_state)
            torch.get_rng_state = partial(self._noted, get)
            yield

    def _noted(self, get: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Notes a state of the random generator, which checkpoints keep and no operator makes."""
        state = get()
        self._ledger.add(state, CPU).known = True
        return state

    def build(self, setup: Setup, helps: bool) -> None:
        """Runs the user's setup."""
        self._model, self._optimizers, self._step = _checked(setup())
        self._setup_peak = self._ledger.history().peak.nbytes
        names = {unit: name for name, unit in reversed(units_in(self._model).items())}
        self._units = {name: unit for unit, name in reversed(names.items())}  # a group by its first module
        if helps:  # numbers would tell which parameters other ranks use
            for unit in self._units.values():
                unit.set(counts_unused=True)
        self._recorder.names = {id(unit): name for name, unit in self._units.items()}
        for optimizer in self._optimizers:
            optimizer.register_step_pre_hook(lambda stepping, *_: self._begin_optimizer(stepping))
            optimizer.register_step_post_hook(lambda *_: self._end_optimizer())
        self._assign()

    def _begin_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        self._recorder.in_phase(figures.OPTIMIZER, f"{type(optimizer).__name__}'s step")

    def _end_optimizer(self) -> None:
        self._assign()
        self._recorder.in_phase(figures.STEP)

    def _assign(self) -> None:
        """Tells the ledger the storages of parameters, gradients and optimizer state."""
        params = [*self._model.parameters()]
        params += [sharded.flat_param for unit in self._units.values() for sharded in unit.params]
        grads = [param.grad for param in params if param.grad is not None]
        state = pytree.tree_leaves([dict(optimizer.state) for optimizer in self._optimizers])
        self._ledger.assign(map(to_local, params), figures.SHARDS)
        self._ledger.assign(map(to_local, grads), figures.GRADIENTS)
        tensors = (leaf for leaf in state if isinstance(leaf, torch.Tensor))
        self._ledger.assign(map(to_local, tensors), figures.OPTIMIZER_STATE)

    def run(self) -> tuple[History, History]:
        """Runs one step; returns the histories of the device's and of the host's memory."""
        self._ledger.begin()
        self._recorder.restart()
        self._recorder.in_phase(figures.STEP)
        self._step()
        self._assign()
        return self._ledger.history(), self._ledger.history(on_host=True)

    def forget(self) -> None:
        """Frees the user's objects: none is to outlive the plan."""
        self.__dict__.clear()
        gc.collect()

    def make_plan(
        self,
        first: tuple[History, History],
        second: tuple[History, History],
        ranks: int,
        rank: int,
        machine: Machine | None,
    ) -> Plan:
        """Returns the plan of the recorded steps."""
        recorder, history = self._recorder, second[0]
        prediction = Prediction()
        if machine is not None:
            prediction = predicted(recorder.entries, self._ledger.places, machine)
        units = tuple(self._unit(name, unit, prediction) for name, unit in self._units.items())
        wire, payload = Counter[str](), Counter[str]()
        for collective in recorder.collectives:
            wire[collective.kind] += collective.received
            payload[collective.kind] += collective.nbytes
        return Plan(
            ranks=ranks,
            rank=rank,
            device=self._device_type,
            parameters=sum(unit.parameters for unit in units),
            rest_bytes=sum(history.rest.values()),
            rest_by_kind=_without_zeros(history.rest),
            peak_bytes=history.peak.nbytes,
            peak_by_kind=_without_zeros(history.peak.by_kind),
            peak_at=history.peak.place,
            peak_operator=history.peak.operator,
            first_peak_bytes=first[0].peak.nbytes,
            setup_peak_bytes=self._setup_peak,
            moments=tuple(
                Moment(place, _without_zeros(held), prediction.begins.get(visit) if machine else None)
                for visit, place, _, held in history.spans
            ),
            units=units,
            wire_bytes=dict(wire),
            collectives=dict(Counter(collective.kind for collective in recorder.collectives)),
            payload_bytes=dict(payload),
            gathered_bytes={phase: dict(by_dtype) for phase, by_dtype in recorder.gathered.items()},
            host=self._host(second[1]),
            unfused=_unfused(self._optimizers),
            flops=recorder.flops,
            machine=machine,
            predicted_seconds=prediction.seconds,
            compute_seconds=prediction.compute_seconds,
            communication_seconds=prediction.communication_seconds,
            exposed_seconds=prediction.exposed_seconds,
            predicted_range=prediction.between,
        )

    def _unit(self, name: str, unit: Unit, prediction: Prediction) -> UnitPlan:
        params = unit.params
        wire = Counter[str]()
        for collective in self._recorder.collectives:
            if name in collective.units:
                wire[collective.kind] += round(collective.received * self._share(name, collective.units))
        return UnitPlan(
            name=name,
            parameters=sum(map(_full_numel, params)),
            shard_bytes=sum(sharded.layout.shard_numel * sharded.dtype.itemsize for sharded in params),
            gathered_bytes=gathered_bytes(unit),
            gathers=self._recorder.gather_counts[name],
            reductions=self._recorder.reductions[name],
            payload_bytes=self._recorder.payload[name],
            activation_bytes=self._recorder.activations[name],
            wire_bytes=dict(wire),
            padding_bytes=sum(
                sharded.layout.padding_numel * sharded.dtype.itemsize
                for sharded in params
                if sharded.layout.alignment is not None
            ),
            **prediction.of_unit(name),
        )

    def _share(self, name: str, units: Sequence[str]) -> float:
        """Returns a unit's share of a collective for several units."""
        sizes = {unit: gathered_bytes(self._units[unit]) for unit in units if unit in self._units}
        return sizes.get(name, 0) / (sum(sizes.values()) or 1)

    def _host(self, history: History) -> HostMemory:
        live = self._ledger.live
        offloaded = [record for record in live if self._ledger.on_host(record)]
        saved = [record for record in live if record.kind in (figures.SHARDS, figures.OPTIMIZER_STATE)]
        params = [sharded for unit in self._units.values() for sharded in unit.params]
        return HostMemory(
            offloaded=sum(record.nbytes for record in offloaded),
            pinned=sum(record.nbytes for record in offloaded if record.pinned),
            peak=history.peak.nbytes,
            loading=sum(sharded.dtype.itemsize * _full_numel(sharded) for sharded in params),
            checkpoint=sum(record.nbytes for record in saved),
        )


def _unfused(optimizers: Iterable[torch.optim.Optimizer]) -> tuple[str, ...]:
    """Returns the names of the classes of optimizers that take `fused=True` and do not have it."""
    groups = (
        (type(optimizer).__name__, group) for optimizer in optimizers for group in optimizer.param_groups
    )
    return tuple(dict.fromkeys(name for name, group in groups if not group.get("fused", True)))


def _checked(made: Any) -> tuple[nn.Module, list[Any], Callable[[], object]]:
    """Checks the return value of a user's setup."""
    if not isinstance(made, tuple) or len(made) != 3:
        returned = f"a tuple of {len(made)}" if isinstance(made, tuple) else type(made).__name__
        raise TypeError(f"setup() must return (model, optimizer, step), and returned {returned}")
    model, optimizer, step = made
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model that setup() returns must be an nn.Module, not {type(model).__name__}")
    optimizers = [*optimizer] if isinstance(optimizer, (list, tuple)) else [optimizer]
    for candidate in optimizers:
        if not isinstance(candidate, torch.optim.Optimizer):
            raise TypeError(
                "the optimizer that setup() returns must be a torch.optim.Optimizer, not "
                f"{type(candidate).__name__}"
            )
    if not callable(step):
        raise TypeError(f"the step that setup() returns must be a function, not {type(step).__name__}")
    if not units_in(model):
        raise ValueError(
            "no module of the model that setup() returns is sharded: wrap it by FullyShardedDataParallel or "
            "fully_shard in setup(), and return what that gives"
        )
    return model, optimizers, step


def _full_numel(sharded: ShardedParams) -> int:
    return sum(extent.shape.numel() for extent in sharded.layout.extents)


def _without_zeros(held: dict[str, int]) -> dict[str, int]:
    return {kind: nbytes for kind, nbytes in held.items() if nbytes}
