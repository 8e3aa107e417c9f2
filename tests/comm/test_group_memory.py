"""Memory and process groups that `fully_shard`'s units communicate by, on simulated accelerators."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._pytree import tree_leaves

from bed.accelerator import Simulation, run_simulated
from bed.accelerator.group import SimulatedGroup
from fsdp_wrap import FSDPModule, MixedPrecisionPolicy, fully_shard
from stream_programs import net, one_step

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def sharded(mesh: Any = None, **options: Any) -> Any:
    model = net()
    for part in (*model, model):
        fully_shard(part, mesh=mesh, **options)
    return model


def alone(**options: Any) -> Any:
    """Each unit travels by itself."""
    return sharded(travel_together_bytes=0, **options)


def units(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


class Backend:
    """A backend with an allocator; the memory of its pools is that of a simulation."""

    def __init__(self, name: str = "nccl", allocates: bool = True) -> None:
        self._name, self._allocates = name, allocates
        self.mem_allocator = object()
        self.pools: list[Any] = []

    def name(self) -> str:
        return self._name

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return self._allocates

    def register_mem_pool(self, pool: Any) -> None:
        self.pools.append(pool)


@dataclass
class Seen:
    """The arguments of collectives on one rank.

    Attributes:
        groups: Of each collective, what it does and the name of its group.
        outside: Those that touched memory of no pool.
        met: The addresses of tensors that the ranks met in, with the group.
    """

    groups: list[tuple[str, str]] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    met: list[tuple[int, str]] = field(default_factory=list)


@contextmanager
def pools(backend: Backend) -> Iterator[dict[Simulation, Seen]]:
    """Lets simulated accelerators have pools, and groups a backend with an allocator."""
    seen: dict[Simulation, Seen] = {}
    open_pools: dict[Simulation, list[Any]] = {}
    pooled: set[int] = set()
    run, new_block = SimulatedGroup._run, Simulation._new_block

    def noted(group: Any, what: str, work: Any, data: Any, reads: Any, writes: Any) -> Any:
        here = Simulation.here()
        assert here is not None
        one = seen.setdefault(here, Seen())
        one.groups.append((what, group.pg_name))
        if what in ("all_gather", "reduce_scatter"):
            inside = (id(each.untyped_storage()) in pooled for each in tree_leaves((reads, writes)))
            one.outside += [] if all(inside) else [what]
        return run(group, what, work, data, reads, writes)

    def block(simulation: Any, storage: Any, *args: Any) -> Any:
        (pooled.add if open_pools.get(simulation) else pooled.discard)(id(storage))
        return new_block(simulation, storage, *args)

    @contextmanager
    def allocating(simulation: Any, pool: Any) -> Iterator[None]:
        open_pools.setdefault(simulation, []).append(pool)
        yield
        open_pools[simulation].pop()

    def meet(simulation: Any, tensor: torch.Tensor, group: str) -> None:
        seen.setdefault(simulation, Seen()).met.append((tensor.data_ptr(), group))

    with (
        mock.patch.object(SimulatedGroup, "_run", noted),
        mock.patch.object(SimulatedGroup, "_get_backend", lambda *_: backend),
        mock.patch.object(Simulation, "_new_block", block),
        mock.patch.object(Simulation, "new_pool", lambda _, allocator: ("pool", allocator)),
        mock.patch.object(Simulation, "new_symmetric_pool", lambda _: "symmetric"),
        mock.patch.object(Simulation, "allocating_in", allocating),
        mock.patch.object(Simulation, "meet_in_symmetric_memory", meet),
    ):
        yield seen


Choose = Callable[[Any], object]


def by_group(model: Any) -> None:
    for unit in units(model):
        unit.set_allocate_memory_from_process_group_for_comm(True)


def symmetric(model: Any) -> None:
    for unit in units(model):
        unit.set_symm_mem_for_comm()


def apart(model: Any) -> None:
    model.set_separate_reduce_scatter_group()


def train_twins(choose: Choose, size: int = 2, late: bool = False, **options: Any) -> None:
    """Trains a model with a choice beside one without it; their parameters stay equal, in every order."""

    def program(rank: int, device: Simulation) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "copy")) if size == 4 else None
        models = sharded(mesh, **options), sharded(mesh, **options)
        if not late:
            choose(models[0])
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
        for step in range(3):
            if late and step == 1:
                choose(models[0])
            for model, optimizer in zip(models, optimizers):
                one_step(model, optimizer, rank, step, accumulates=step == 2)
        with device.aside():
            for one, other in zip(*(model.parameters() for model in models)):
                assert torch.equal(one.to_local(), other.to_local())

    run_simulated(size, program, records=True, seeds=1)


@pytest.mark.parametrize("choose", [by_group, symmetric, apart])
def test_choices_change_no_numbers(choose):
    with pools(Backend()):
        train_twins(choose, late=False)
        train_twins(choose, late=True)
        train_twins(choose, mp_policy=BF16)
        train_twins(choose, size=4)


def run_steps(choose: Choose, backend: Backend, make: Callable[..., Any] = alone, **options: Any) -> Seen:
    """Trains two steps; returns what the first rank's collectives were given in the second."""
    found: list[Seen] = []

    def program(rank: int, device: Simulation) -> None:
        model = make(**options)
        choose(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        one_step(model, optimizer, rank, 0)
        seen[device].__init__()  # type: ignore[misc]
        one_step(model, optimizer, rank, 1)
        if rank == 0:
            found.append(seen[device])

    with pools(backend) as seen:
        run_simulated(2, program)
    return found[0]


def test_all_that_travels_lies_in_the_groups_memory():
    """Unless the backend has no allocator, or it is ordinary memory again."""
    options: Any
    for options in ({}, {"mp_policy": BF16}):
        backend = Backend()
        seen = run_steps(by_group, backend, **options)
        assert not seen.outside and not seen.met and len(seen.groups) >= 8
        assert backend.pools == 2 * [("pool", backend.mem_allocator)], "one for each rank, whatever the units"
        assert run_steps(lambda model: None, Backend(), **options).outside
    assert len(run_steps(by_group, Backend(allocates=False)).outside) >= 8

    def by_group_and_back(model: Any) -> None:
        by_group(model)
        for unit in units(model):
            unit.set_allocate_memory_from_process_group_for_comm(False)

    assert len(run_steps(by_group_and_back, Backend()).outside) >= 8


def test_units_travel_together_where_they_choose_alike():
    """From the group's memory, and where it reduces; one that chooses otherwise travels alone."""
    seen = run_steps(by_group, Backend(), sharded)
    assert not seen.outside and len(seen.groups) == 3

    def the_last_apart(model: Any) -> None:
        model[3].set_separate_reduce_scatter_group(recurse=False)

    def the_last_by_group(model: Any) -> None:
        model[3].set_allocate_memory_from_process_group_for_comm(True)

    groups = run_steps(the_last_apart, Backend(), sharded).groups
    assert len({group for what, group in groups if what == "reduce_scatter"}) == 2
    assert len(run_steps(the_last_by_group, Backend(), sharded).outside) == 3


def test_ranks_meet_in_symmetric_memory_before_each_collective():
    seen = run_steps(symmetric, Backend())
    gathers = sum(what == "all_gather" for what, _ in seen.groups)
    reductions = sum(what == "reduce_scatter" for what, _ in seen.groups)
    assert reductions == 4 and not seen.outside
    assert len(seen.met) == gathers + 2 * reductions, "what is gathered; what is reduced, and where to"
    assert {group for _, group in seen.met} == {name for _, name in seen.groups}


def test_reductions_in_a_group_of_their_own():
    def groups(choose: Choose, kind: str) -> list[str]:
        return [group for what, group in run_steps(choose, Backend()).groups if what == kind]

    gathering, reducing = ({*groups(apart, kind)} for kind in ("all_gather", "reduce_scatter"))
    assert len(gathering) == len(reducing) == 1 and gathering != reducing

    def back(model: Any) -> None:
        apart(model)
        model.set_separate_reduce_scatter_group(False)

    def only_the_last(model: Any) -> None:
        model[3].set_separate_reduce_scatter_group(recurse=False)
        model.set_separate_reduce_scatter_group(False, recurse=False)  # it owns no parameters

    assert len({group for _, group in run_steps(back, Backend()).groups}) == 1
    of_units = groups(only_the_last, "reduce_scatter")
    assert len(of_units) == 4 and len({*of_units}) == 2 and len({*of_units[1:]}) == 1


def test_choices_that_do_not_go_together():
    def program(rank: int, device: Simulation) -> None:
        for first, second in ((by_group, symmetric), (symmetric, by_group)):
            model = sharded()
            first(model)
            for error in (AssertionError, RuntimeError):
                with pytest.raises(error, match="has no effect on unit '0'|has no effect on the root"):
                    second(model)
            first(model)
        model = sharded()
        model.unshard()
        one_step(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, 0)
        model.set_requires_gradient_sync(False)
        model(torch.ones(2, 16)).sum().backward()
        for choose in (symmetric, by_group):
            with pytest.raises(RuntimeError, match="between steps"):
                choose(model)

    def by_another_backend(rank: int, device: Simulation) -> None:
        model = sharded()
        with pytest.raises(ValueError, match=f"on rank {rank}: symmetric memory.*communicates by mpi on cpu"):
            model[0].set_symm_mem_for_comm()
        one_step(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, 0)

    for backend, refused in (("nccl", program), ("mpi", by_another_backend)):
        with pools(Backend(backend)):
            run_simulated(2, refused)
