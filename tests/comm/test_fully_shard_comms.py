"""How `fully_shard`'s units communicate, where users have a say in it; what programs read of its modules."""

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.utils._pytree import tree_leaves

from bed import ranks
from bed.accelerator import Simulation, run_simulated
from bed.accelerator.group import SimulatedGroup
from composable import shard_blocks
from fsdp_wrap import FSDPModule, MixedPrecisionPolicy, fully_shard, share_comm_ctx
from models import Transformer, loss_of, tokens
from stream_programs import net, one_step


class Comm:
    def __init__(self) -> None:
        self.calls = 0
        self.groups: set[Any] = set()

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.full(tuple(size), 7, dtype=dtype, device=device)

    def note(self, group: Any) -> None:
        self.calls += 1
        self.groups.add(group)


class Gather(Comm):
    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        self.note(group)
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class Reduce(Comm):
    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        self.note(group)
        dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group)


def chosen(model: nn.Module) -> tuple[Gather, Reduce]:
    gather, reduce = Gather(), Reduce()
    for unit in units(model):
        unit.set_custom_all_gather(gather)
        unit.set_custom_reduce_scatter(reduce)
    return gather, reduce


def sharded(plain: nn.Module, **options: Any) -> Any:
    return shard_blocks(copy.deepcopy(plain), **options)


def units(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def assert_same_steps(one: nn.Module, other: nn.Module, rank: int, **tolerance: Any) -> None:
    for step in range(2):
        for model in (one, other):
            model.zero_grad()
            loss_of(model, tokens(rank, step)).backward()
        for param, expected in zip(one.parameters(), other.parameters()):
            assert (param.grad is None) == (expected.grad is None)
            if param.grad is not None:
                torch.testing.assert_close(param.grad.to_local(), expected.grad.to_local(), **tolerance)


@ranks(2, 4)
def test_collectives_of_the_users(rank, world_size):
    low = torch.bfloat16 if world_size == 4 else None
    torch.manual_seed(0)
    plain = Transformer(2)
    plain.unused = nn.Linear(3, 3)
    shape, names = ((2, 2), ("replicate", "shard")) if world_size == 4 else ((2,), ("shard",))
    options: dict[str, Any] = {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=names)}
    options["mp_policy"] = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
    usual, model = sharded(plain, **options), sharded(plain, **options)
    gather, reduce = chosen(model)
    assert_same_steps(model, usual, rank, rtol=1e-6, atol=1e-7)  # sums in another order
    assert reduce.calls == 2 * 3 and gather.calls >= 2 * 3
    for other in (
        lambda: model.set_allocate_memory_from_process_group_for_comm(True),
        model.set_symm_mem_for_comm,
    ):
        with pytest.raises(AssertionError, match="set_custom_all_gather"):
            other()
    raises(RuntimeError, "for unit 'blocks.0'.* by gloo on cpu", usual.blocks[0].set_symm_mem_for_comm)
    for method, comm in {"set_custom_all_gather": gather, "set_custom_reduce_scatter": reduce}.items():
        for wrong in (None, comm.allocate, Comm()):
            told = rf"^{method}\(\) of the root unit .* takes an object .*allocate"
            with pytest.raises(TypeError, match=told):
                getattr(usual, method)(wrong)
    usual(tokens(rank, 0))


@ranks(4)
def test_all_reduce_hook(rank, world_size):
    """Sharding by hand within pairs, and averaging over them by the hook, is a hybrid mesh."""
    torch.manual_seed(0)
    plain = Transformer(2)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    usual, model = sharded(plain, mesh=mesh), sharded(plain, mesh=mesh["shard"])
    sizes = []

    def average(reduced: torch.Tensor) -> None:
        sizes.append(reduced.numel())
        dist.all_reduce(reduced, group=mesh.get_group("replicate"))
        reduced.div_(2)

    for unit in units(model):
        unit.set_all_reduce_hook(average)
    assert_same_steps(model, usual, rank, rtol=1e-6, atol=1e-7)
    shards = sum(param.to_local().numel() for param in model.parameters())
    assert shards <= sum(sizes) / 2 < 1.1 * shards, "gradients only, and what aligns them"
    stream = torch.Stream("cpu")
    for refuses, hook, options, error, told in (
        (usual, average, {"stream": stream}, ValueError, "replicas"),
        (
            model.blocks[0],
            average,
            {"stream": stream},
            ValueError,
            "'blocks.0' .*on the CPU, .* leave stream out",
        ),
        (model.blocks[0], 3, {}, TypeError, "'blocks.0' .*takes a function of one tensor, not 3"),
    ):
        with pytest.raises(error, match=told):
            refuses.set_all_reduce_hook(hook, **options)
    before = len(sizes)
    loss_of(model, tokens(rank, 0)).backward()
    assert len(sizes) == before + len(units(model)), "what was refused has changed nothing"
    for unit in units(model):
        unit.set_all_reduce_hook(None)
    loss_of(model, tokens(rank, 0)).backward()
    assert len(sizes) == before + len(units(model))


@ranks(2)
def test_a_hook_of_reductions_follows_its_unit(rank, world_size):
    """It follows into the step of a model around the unit, and into deep copies, which may drop it."""
    hooked = []
    inner = fully_shard(nn.Linear(4, 4))
    inner.set_all_reduce_hook(lambda reduced: hooked.append(reduced.numel()))
    model = nn.Sequential(inner, nn.Linear(4, 4))
    inner(torch.ones(2, 4)).sum().backward()
    fully_shard(model)
    model(torch.ones(2, 4)).sum().backward()
    assert len(hooked) == 2
    twin = copy.deepcopy(model)
    twin(torch.ones(2, 4)).sum().backward()
    assert len(hooked) == 3
    twin[0].set_all_reduce_hook(None)
    for trained in (twin, model):
        trained(torch.ones(2, 4)).sum().backward()
    assert len(hooked) == 4


@ranks(2)
def test_hints_change_no_numbers(rank, world_size):
    torch.manual_seed(0)
    plain = Transformer(2)
    usual, model = sharded(plain), sharded(plain)
    share_comm_ctx([model, *model.blocks])
    share_comm_ctx([])
    model.set_reduce_scatter_max_input_buffers(3)
    model.set_separate_reduce_scatter_group()
    model.set_force_sum_reduction_for_comms(True)
    model.set_allocate_memory_from_process_group_for_comm(True)
    raises(RuntimeError, f"on rank {rank}: symmetric memory is NCCL's.*'nccl'", model.set_symm_mem_for_comm)
    with pytest.raises(ValueError, match="no backend but 'NCCL'"):
        model.set_symm_mem_for_comm("NVSHMEM")
    assert_same_steps(model, usual, rank, rtol=0, atol=0)
    with pytest.raises(ValueError, match="this Linear is not sharded yet"):
        share_comm_ctx([model.head])
    for wrong, error in ((0, ValueError), (True, TypeError), ("2", TypeError)):
        with pytest.raises(error, match="max_input_buffers"):
            model.set_reduce_scatter_max_input_buffers(wrong)


@ranks(2)
def test_states_tell_units_apart(rank, world_size):
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(4)))
    fully_shard(model[0]), fully_shard([model[1], model[2]]), fully_shard(model)
    states = [fully_shard.state(module) for module in (model, *model)]
    assert len({*states}) == 4 and states[2] == states[3] and states[4] is None
    assert fully_shard.state(nn.Linear(2, 2)) is None


def raises(error: type[Exception], match: str, call: Any) -> None:
    """Checks that a program which catches torch's type or ours gets it."""
    for kind in (error, ValueError):
        with pytest.raises(kind, match=match):
            call()


@ranks(2)
def test_errors_are_of_torchs_types(rank, world_size):
    model = fully_shard(nn.Linear(3, 4))
    raises(AssertionError, "already wrapped", lambda: fully_shard(model))
    empty = nn.Sequential(model)
    fully_shard(empty)
    raises(AssertionError, "applied to this FSDPSequential", lambda: fully_shard(empty))
    plain = nn.Linear(3, 4)
    for error, match, placement in (
        (AssertionError, "no dimension 2", Shard(2)),
        (NotImplementedError, "multiple of the 2 ranks", Shard(1)),
        (TypeError, "must return a Shard", 3),
    ):
        raises(error, match, lambda placed=placement: fully_shard(plain, shard_placement_fn=lambda _: placed))
    raises(TypeError, "bool, an int or None", lambda: fully_shard(plain, reshard_after_forward="no"))  # type: ignore[call-overload]
    with torch.device("meta"):
        meta = fully_shard(nn.Linear(3, 4))
    raises(RuntimeError, "meta device", lambda: meta(torch.ones(2, 3)))
    with pytest.raises(pickle.PicklingError, match="cannot be pickled"):
        pickle.dumps(model)


BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def simulated(mesh: Any = None, **options: Any) -> Any:
    model = net()
    for part in (*model, model):
        fully_shard(part, mesh=mesh, **options)
    return model


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
            inside = (id(tensor.untyped_storage()) in pooled for tensor in tree_leaves((reads, writes)))
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
        models = simulated(mesh, **options), simulated(mesh, **options)
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
        train_twins(choose, late=True, mp_policy=BF16)
        train_twins(choose, size=4)


def run_steps(choose: Choose, backend: Backend, together: bool = False, **options: Any) -> Seen:
    """Trains two steps; returns what the first rank's collectives were given in the second."""
    all_seen: list[Seen] = []

    def program(rank: int, device: Simulation) -> None:
        model = simulated(travel_together_bytes=None if together else 0, **options)
        choose(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        one_step(model, optimizer, rank, 0)
        seen[device].__init__()  # type: ignore[misc]
        one_step(model, optimizer, rank, 1)
        if rank == 0:
            all_seen.append(seen[device])

    with pools(backend) as seen:
        run_simulated(2, program)
    return all_seen[0]


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
    seen = run_steps(by_group, Backend(), together=True)
    assert not seen.outside and len(seen.groups) == 3

    def the_last_apart(model: Any) -> None:
        model[3].set_separate_reduce_scatter_group(recurse=False)

    def the_last_by_group(model: Any) -> None:
        model[3].set_allocate_memory_from_process_group_for_comm(True)

    groups = run_steps(the_last_apart, Backend(), together=True).groups
    assert len({group for what, group in groups if what == "reduce_scatter"}) == 2
    assert len(run_steps(the_last_by_group, Backend(), together=True).outside) == 3


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
            model = simulated()
            first(model)
            for error in (AssertionError, RuntimeError):
                with pytest.raises(error, match="has no effect on unit '0'|has no effect on the root"):
                    second(model)
            first(model)
        model = simulated()
        model.unshard()
        one_step(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, 0)
        model.set_requires_gradient_sync(False)
        model(torch.ones(2, 16)).sum().backward()
        for choose in (symmetric, by_group):
            with pytest.raises(RuntimeError, match="between steps"):
                choose(model)

    def by_another_backend(rank: int, device: Simulation) -> None:
        model = simulated()
        with pytest.raises(ValueError, match=f"on rank {rank}: symmetric memory.*communicates by mpi on cpu"):
            model[0].set_symm_mem_for_comm()
        one_step(model, torch.optim.SGD(model.parameters(), lr=0.1), rank, 0)

    for backend, refused in (("nccl", program), ("mpi", by_another_backend)):
        with pools(Backend(backend)):
            run_simulated(2, refused)
