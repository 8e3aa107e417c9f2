"""How `fully_shard`'s units communicate, where users have a say in it; what programs read of its modules."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard

import tp_nets
from bed import ranks
from bed.threads import threads_as_ranks
from fsdp_wrap import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    share_comm_ctx,
)
from models import Transformer, loss_of, tokens


class Comm:
    """A collective of the user's, with torch's interface."""

    def __init__(self) -> None:
        self.calls = 0
        self.groups: set[Any] = set()

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.full(tuple(size), 7, dtype=dtype, device=device)


class Gather(Comm):
    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> Any:
        self.calls += 1
        self.groups.add(group)
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class Reduce(Comm):
    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        self.calls += 1
        self.groups.add(group)
        dist.reduce_scatter_tensor(output_tensor, input_tensor, op=op, group=group)


def sharded(plain: nn.Module, **options: Any) -> Any:
    model = copy.deepcopy(plain)
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def units(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def assert_same_steps(one: nn.Module, other: nn.Module, rank: int, **tolerance: Any) -> None:
    for step in range(2):
        for model in (one, other):
            model.zero_grad()
            loss_of(model, tokens(rank, step)).backward()
        for found, expected in zip(one.parameters(), other.parameters()):
            assert (found.grad is None) == (expected.grad is None)
            if found.grad is not None:
                torch.testing.assert_close(found.grad.to_local(), expected.grad.to_local(), **tolerance)


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
    gather, reduce = Gather(), Reduce()
    for unit in units(model):
        unit.set_custom_all_gather(gather)
        unit.set_custom_reduce_scatter(reduce)
    assert_same_steps(model, usual, rank, rtol=1e-6, atol=1e-7)  # sums in another order
    assert reduce.calls == 2 * 3 and gather.calls >= 2 * 3
    with pytest.raises(AssertionError, match="set_custom_all_gather"):
        model.set_allocate_memory_from_process_group_for_comm(True)
    with pytest.raises(AssertionError, match="set_custom_all_gather"):
        model.set_symm_mem_for_comm()
    raises(RuntimeError, "for unit 'blocks.0'.* by gloo on cpu", usual.blocks[0].set_symm_mem_for_comm)
    comms = {"set_custom_all_gather": gather, "set_custom_reduce_scatter": reduce}
    for method, comm in comms.items():
        for wrong in (None, comm.allocate, Comm()):
            with pytest.raises(
                TypeError, match=rf"^{method}\(\) of the root unit .* takes an object .*allocate"
            ):
                getattr(usual, method)(wrong)
    usual(tokens(rank, 0))


@ranks(1)
def test_collectives_of_the_users_on_one_rank(rank, world_size):
    """Nothing is sent. What excludes each other does so here as well."""
    model = fully_shard(nn.Linear(4, 4))
    model.set_allocate_memory_from_process_group_for_comm(True)
    gather, reduce = Gather(), Reduce()
    model.set_custom_all_gather(gather)
    model.set_custom_reduce_scatter(reduce)
    with pytest.raises(AssertionError, match="set_custom_all_gather"):
        model.set_allocate_memory_from_process_group_for_comm(True)
    model(torch.ones(2, 4)).sum().backward()
    assert gather.calls == reduce.calls == 0 and model.bias.grad.full_tensor().eq(2).all()


@ranks(4)
def test_collectives_of_the_users_beside_tensor_parallelism(rank, world_size):
    """They get the group over which is sharded, not one of ranks that share a layer."""
    _, data, tensor = tp_nets.mesh_of("flat")
    usual, model = (
        tp_nets.shard_blocks(tp_nets.parallelize(tp_nets.net(), tensor, "sequence"), fully_shard, mesh=data)
        for _ in range(2)
    )
    gather, reduce = Gather(), Reduce()
    for unit in units(model):
        unit.set_custom_all_gather(gather)
        unit.set_custom_reduce_scatter(reduce)
    for each in (usual, model):
        tp_nets.loss_of(each, tp_nets.batches(1, 0)[0])
    assert gather.calls and reduce.calls and gather.groups == reduce.groups == {data.get_group()}
    for found, expected in zip(model.parameters(), usual.parameters()):
        torch.testing.assert_close(found.grad.to_local(), expected.grad.to_local())


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
    with pytest.raises(ValueError, match="replicas"):
        usual.set_all_reduce_hook(average, stream=torch.Stream("cpu"))
    with pytest.raises(ValueError, match="'blocks.0' .*computes on the CPU, .* leave stream out"):
        model.blocks[0].set_all_reduce_hook(lambda reduced: None, stream=torch.Stream("cpu"))
    with pytest.raises(TypeError, match="'blocks.0' .*takes a function of one tensor, not 3"):
        model.blocks[0].set_all_reduce_hook(3)
    before = len(sizes)
    loss_of(model, tokens(rank, 0)).backward()
    assert len(sizes) == before + len(units(model)), "what was refused has changed nothing"
    for unit in units(model):
        unit.set_all_reduce_hook(None)
    loss_of(model, tokens(rank, 0)).backward()
    assert len(sizes) == before + len(units(model))


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
    for each in (error, ValueError):
        with pytest.raises(each, match=match):
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
    raises(TypeError, "bool, an int or None", lambda: fully_shard(plain, reshard_after_forward="no"))  # type: ignore[arg-type]
    with torch.device("meta"):
        meta = fully_shard(nn.Linear(3, 4))
    raises(RuntimeError, "meta device", lambda: meta(torch.ones(2, 3)))
    with pytest.raises(pickle.PicklingError, match="cannot be pickled"):
        pickle.dumps(model)


def test_ranks_that_are_threads():
    """Units of several threads are not taken for those of one rank, nor mixed up by the order of threads."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    batches = torch.randn(4, 8, 4)
    for batch in batches:
        (plain(batch).sum() / 4).backward()

    def body(rank: int) -> None:
        models = [copy.deepcopy(plain) for _ in range(2)]
        for model in models:
            model.zero_grad()
            for module in (*model, model):
                fully_shard(module, mesh=init_device_mesh("cpu", (4,)))
            for scale in (0.5, 0.5):  # two iterations
                (scale * model(batches[rank]).sum()).backward()
            for found, expected in zip(model.parameters(), plain.parameters()):
                torch.testing.assert_close(found.grad.full_tensor(), expected.grad)

    with threads_as_ranks(4) as run:
        run(body)
