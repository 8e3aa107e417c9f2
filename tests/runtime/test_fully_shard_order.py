"""`fully_shard`: how often it communicates, in which order, and what prefetch lists and hands change."""

import copy
import itertools
import math
import warnings
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed._composable import checkpoint as composable_checkpoint
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel as DDP

from bed import ranks
from bed.accelerator import Simulation, run_simulated
from bed.threads import threads_as_ranks
from beside import mean_backward
from composable import assert_same, shard_blocks, trace
from fsdp_wrap import FSDPModule, GradientReductionHandle, MixedPrecisionPolicy, fully_shard, record_events
from fsdp_wrap._core import UNIT_ATTR
from fsdp_wrap._runtime import Unit
from models import Transformer, loss_of, tokens
from nets import Around
from stream_programs import batch, net, one_step

N = 3


def counts(run: Callable[[], Any]) -> tuple[int, ...]:
    with CommDebugMode() as mode:
        run()
    counted = Counter({str(op).rpartition(".")[2]: number for op, number in mode.get_comm_counts().items()})
    kinds = ("_allgather_base_", "_reduce_scatter_base_", "allreduce_")
    assert not set(counted) - set(kinds), counted
    return tuple(counted[kind] for kind in kinds)


def units_of(model: nn.Module) -> list[FSDPModule]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


@ranks(4)
def test_counts_of_collectives(rank, world_size):
    """A number keeps parameters among so many ranks; 1 means False, with a warning, and all mean True."""
    torch.manual_seed(0)
    plain = Transformer(N).double()
    ddp = DDP(copy.deepcopy(plain))
    for step in range(2):
        loss_of(ddp, tokens(rank, step)).backward()
    for reshard, by_hand, gathers_in_backward in [
        (None, False, N),
        (True, False, N + 1),
        (2, False, N + 1),
        (world_size, False, N + 1),
        (1, False, 0),
        (False, False, 0),
        (False, True, N + 1),
    ]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            model = shard_blocks(copy.deepcopy(plain), reshard_after_forward=reshard, travel_together_bytes=0)
        told = [
            str(warning.message) for warning in caught if "reshard_after_forward=1" in str(warning.message)
        ]
        assert len(told) == (N + 1 if reshard is not True and reshard == 1 else 0)
        for step in range(2):
            losses: list[torch.Tensor] = []
            forward = partial(loss_of, model, tokens(rank, step))
            assert counts(lambda: losses.append(forward())) == (N + 1, 0, 0)  # noqa: B023
            for unit in units_of(model) if by_hand else ():
                unit.reshard()
            assert counts(losses[0].backward) == (gathers_in_backward, N + 1, 0)
        assert_same(model, ddp.module, exact=False)
    step_of = torch.optim.AdamW(model.parameters(), fused=True).step

    def backward() -> None:
        loss_of(model, tokens(rank, 0)).backward()

    with torch.no_grad():
        assert counts(lambda: loss_of(model, tokens(rank, 0))) == (N + 1, 0, 0)
    model.set_reshard_after_backward(False)
    assert counts(backward) == (N + 1, N + 1, 0)
    assert counts(backward) == (0, N + 1, 0)
    step_of()
    assert counts(backward) == (N + 1, N + 1, 0), "parameters from before the step"
    model.set_reshard_after_backward(True)
    model.set_requires_gradient_sync(False)
    assert counts(backward)[1] == 0
    model.unshard()
    assert counts(backward)[0] == N, "the root was there already"


@pytest.mark.parametrize("shape", [(6,), (2, 4)])
def test_any_divisor_of_the_ranks_may_keep_parameters(shape):
    """The ranks are threads. Each keeps its part of the full parameters from forward to backward."""
    size, sharding = math.prod(shape), shape[-1]
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(7, 7) for _ in range(N))).double()
    batches = torch.randn(size, 5, 7, dtype=torch.float64)
    (torch.stack([plain(batch).square().sum() for batch in batches]).sum() / size).backward()

    def train(rank: int, mesh: DeviceMesh, number: int) -> None:
        model = copy.deepcopy(plain)
        model.zero_grad()
        for module in (*model, model):
            fully_shard(module, mesh=mesh, reshard_after_forward=number, travel_together_bytes=0)
        for _ in range(2):
            model.zero_grad()
            loss = model(batches[rank]).square().sum()
            buffers = model[1].__dict__[UNIT_ATTR].buffers
            if number in (1, sharding):
                assert buffers.post_forward_shards is None
            else:
                kept = sum(part.numel() for part in buffers.post_forward_shards._parts)
                assert kept == -(-buffers.segments[0].layout.full_numel // number)
            loss.backward()
        for param, expected in zip(model.parameters(), plain.parameters()):
            torch.testing.assert_close(param.grad.full_tensor(), expected.grad, rtol=0, atol=1e-12)

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", shape)
        for number in range(-1, size + 2):
            if number > 0 and sharding % number == 0:
                train(rank, mesh, number)
                continue
            model = nn.Linear(7, 7)
            with pytest.raises(ValueError, match=rf"{number} must divide the number of ranks.*, {sharding}:"):
                fully_shard(model, mesh=mesh, reshard_after_forward=number)
            assert type(model) is nn.Linear and type(model.weight) is nn.Parameter

    with warnings.catch_warnings(), threads_as_ranks(size) as run:
        warnings.filterwarnings("ignore", "reshard_after_forward=1 lets")
        run(body)


def transformer(checkpointing: str, reshard: bool | None) -> FSDPModule:
    model = Transformer(N)
    for index, block in enumerate(model.blocks):
        if checkpointing == "wrapper":
            model.blocks[index] = checkpoint_wrapper(block)
        elif checkpointing == "composable":
            composable_checkpoint(block)
    return shard_blocks(model, reshard_after_forward=reshard, travel_together_bytes=0)


@ranks(2)
def test_order_of_events(rank, world_size):
    once = {
        True: ["u root", "u 0", "r 0", "u 1", "r 1", "u 2", "r 2", "r root"],
        None: ["u root", "u 0", "r 0", "u 1", "r 1", "u 2", "r 2"],
        False: ["u root", "u 0", "u 1", "u 2"],
    }
    again = {  # what waits for the first backward goes when the next forward comes to it
        True: once[True],
        None: ["r root", *once[None]],
        False: [f"{what} {unit}" for what in "ru" for unit in ("root", 0, 1, 2)],
    }
    backward = {
        True: ["u root", "u 2", "u 1", "p 2", "r 2", "u 0", "p 1", "r 1", "p 0", "r 0", "p root", "r root"],
        None: ["u 2", "u 1", "p 2", "r 2", "u 0", "p 1", "r 1", "p 0", "r 0", "p root", "r root"],
        False: ["p 2", "r 2", "p 1", "r 1", "p 0", "r 0", "p root", "r root"],
    }
    for reshard, checkpointing in itertools.product(once, ("none", "wrapper", "composable")):
        model = transformer(checkpointing, reshard)
        with record_events() as events:
            loss = loss_of(model, tokens(rank, 0))
        assert trace(events) == once[reshard]
        with record_events() as events:
            loss.backward()
        assert trace(events) == backward[reshard]
        with record_events() as events:
            losses = [loss_of(model, tokens(rank, step)) for step in range(2)]
        assert trace(events) == once[reshard] + again[reshard]
        with record_events() as events:
            torch.stack(losses).sum().backward()
        assert [event for event in trace(events) if event[0] == "p"][-1] == "p root"
        assert Counter(trace(events))["r root"] == 1


@ranks(2)
def test_prefetch_lists_are_obeyed_and_wrong_guesses_kept(rank, world_size):
    model = shard_blocks(Transformer(4))
    blocks = list(model.blocks)
    blocks[0].set_modules_to_forward_prefetch([blocks[1], blocks[3]])
    blocks[3].set_modules_to_backward_prefetch([blocks[1], blocks[0]])
    with record_events() as events:
        loss = loss_of(model, tokens(rank, 0))
    assert trace(events)[:5] == ["u root", "u 0", "u 1", "u 3", "r 0"]
    assert Counter(trace(events))["u 3"] == 1, "a prefetched unit waits for its forward"
    with record_events() as events:
        loss.backward()
    # The next one, 2, was not prefetched; those that were too early are kept.
    assert [event for event in trace(events) if event[0] == "u"] == ["u 3", "u 1", "u 0", "u 2"]
    with pytest.raises(ValueError, match="this Linear is not sharded yet"):
        model.set_modules_to_forward_prefetch([model.head])


@ranks(2)
def test_unsharding_by_hand(rank, world_size):
    torch.manual_seed(0)
    plain = Transformer(2)
    model = copy.deepcopy(plain)
    fully_shard(model.embed), fully_shard(model.blocks[0])
    model.blocks[1].unused = nn.Identity()
    assert fully_shard(model.blocks[1].unused).unshard() is None, "no parameters to manage"
    fully_shard(model)
    model.blocks[0].unshard()
    for (name, param), expected in zip(model.blocks[0].named_parameters(), plain.blocks[0].parameters()):
        assert type(param) is nn.Parameter and torch.equal(param, expected), name
    handle = model.unshard(async_op=True)
    pending = model.embed.unshard(async_op=True)
    pending.wait(), pending.wait()
    assert torch.equal(model.embed.weight, plain.embed.weight)
    loss = loss_of(model, tokens(rank, 0))
    assert torch.equal(loss, loss_of(plain, tokens(rank, 0)))
    handle.wait()
    model.reshard(), model.reshard()
    loss.backward()
    model.unshard()
    torch.optim.SGD(list(model.blocks[0].parameters()), lr=1.0).step()
    assert set(model.state_dict()) == set(plain.state_dict())
    assert all(type(value).__name__ == "DTensor" for value in model.state_dict().values())
    ddp = DDP(plain)
    loss_of(ddp, tokens(rank, 0)).backward()
    torch.optim.SGD(plain.blocks[0].parameters(), lr=1.0).step()
    assert_same(model, plain)


class Unseen(torch.optim.SGD):
    """Writes past version counters, as kernels of some packages do."""

    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                param.data.add_(param.grad, alpha=-group["lr"])


@ranks(2)
def test_a_step_or_a_write_outdates_what_was_unsharded_before_it(rank, world_size):
    for writes in (False, True):
        torch.manual_seed(0)
        plain = Transformer(1)
        model, ddp = shard_blocks(copy.deepcopy(plain)), DDP(plain)
        params = [*model.parameters(), *plain.parameters()]
        optimizer = Unseen(params, lr=0.5)
        for number in range(2):
            for trained in (model, ddp):
                loss_of(trained, tokens(rank, number)).backward()
            model.blocks[0].unshard()
            with torch.no_grad():
                for param in params if writes else ():
                    param.mul_(0.5)
            if not writes:
                optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(loss_of(model, tokens(rank, 2)), loss_of(plain, tokens(rank, 2)))


@ranks(2)
def test_expert_setters(rank, world_size):
    torch.manual_seed(0)
    plain = Transformer(1)
    model = copy.deepcopy(plain)
    fully_shard(model.embed), fully_shard(model)
    model.embed.set_unshard_in_backward(False)
    waited = []

    class Event:
        def wait(self) -> None:
            waited.append(model)

    model.set_post_optim_event(Event())
    forward = ["u root", "u embed", "r embed"]
    for expected in (forward, ["r root", *forward]):
        with record_events() as events:
            loss = loss_of(model, tokens(rank, 0))
        assert trace(events) == expected and len(waited) == 1, "an event counts once"
    with record_events() as events:
        loss.backward()
    assert not [event for event in trace(events) if event[0] == "u"]
    ddp = DDP(plain)
    loss_of(ddp, tokens(rank, 0)).backward()
    assert_same(model, plain)
    model.set_requires_gradient_sync(False)
    loss_of(model, tokens(rank, 1)).backward()
    model.reset_iter_state()
    model.set_requires_gradient_sync(True)
    for one in (ddp, model):
        one.zero_grad()
        loss_of(one, tokens(rank, 2)).backward()
    assert_same(model, plain)
    hook = model.norm.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss_of(model, tokens(rank, 0))
    hook.remove()
    model.reset_iter_state()
    torch.testing.assert_close(loss_of(model, tokens(rank, 3)), loss_of(plain, tokens(rank, 3)))


# how many units' gradients are on their way at once


def sharded(most: int | None, **options: Any) -> Any:
    model: Any = net()
    for part in (*model, model):
        fully_shard(part, travel_together_bytes=0, **options)
    if most is not None:
        model.set_reduce_scatter_max_input_buffers(most)
    return model


@ranks(2)
def test_as_many_reductions_are_in_flight_as_asked_for(rank, world_size):
    reduce = Unit.reduce
    for most, expected in ((None, [1, 1, 1, 1]), (1, [1, 1, 1, 1]), (2, [1, 2, 2, 2]), (9, [1, 2, 3, 4])):
        model = sharded(most)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            one_step(model, optimizer, rank, step, accumulates=step == 1)
        all_buffers = [part.__dict__[UNIT_ATTR].buffers for part in model]
        in_flight: list[int] = []

        def counted(unit: Unit, phase: Any) -> None:
            reduce(unit, phase)
            if unit.buffers in all_buffers:  # noqa: B023
                in_flight.append(sum(buffers.gradients.reduction is not None for buffers in all_buffers))  # noqa: B023

        with mock.patch.object(Unit, "reduce", counted):
            model(batch(rank, 9)).sum().backward()
        assert in_flight == expected, most
        assert not any(buffers.gradients.reduction for buffers in all_buffers)


def test_more_in_flight_take_more_memory_and_all_of_it_comes_back():
    peaks = {}

    def program(rank: int, device: Simulation, most: int) -> None:
        model = sharded(most)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            one_step(model, optimizer, rank, step)
            _, peak = device.end_step()
        peaks[most] = peak["compute"]

    for most in (1, 3):
        run_simulated(2, partial(program, most=most))
    assert peaks[3] > peaks[1]


# backwards that the user ends

HAS_TORCHS = hasattr(torch_fsdp, "GradientReductionHandle")


def make_net() -> Around:
    """Two units in a root, one parameter of which is never used."""
    torch.manual_seed(0)
    net = Around()
    net.spare = nn.Parameter(torch.ones(3))
    return net.double()


def inputs(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + rank), dtype=torch.float64)


def shard(model: Around, shard: Any = fully_shard, **options: Any) -> Any:
    for unit in (model.first, model.middle):
        shard(unit, **options)
    return shard(model, **options)


def ended_by_hand(**options: Any) -> Any:
    model = shard(make_net(), **options)
    model.set_manual_backward_finalization(True)
    return model


def loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).pow(2).mean()


def assert_grads(model: nn.Module, *steps: int) -> None:
    """They are a plain model's, averaged over ranks and added over steps; None where that has none."""
    plain = make_net()
    for step in steps:
        mean_backward(lambda rank: loss(plain, inputs(rank, step)))  # noqa: B023
    wanted = dict(plain.named_parameters())
    for name, param in model.named_parameters():
        assert (param.grad is None) == (wanted[name].grad is None), name
        if param.grad is not None:
            grad = param.grad.full_tensor()
            torch.testing.assert_close(grad, wanted[name].grad, rtol=0, atol=1e-12, msg=name)


def train(model: Any, rank: int, way: str, asynchronous: bool) -> None:
    """Trains two batches; ends each backward, or both at last: of two graphs, or without reductions."""

    def end() -> None:
        ended = model.finalize_backward(async_op=asynchronous)
        assert (ended is None) is not asynchronous
        for _ in range(2 * asynchronous):
            ended.wait()

    model.set_requires_gradient_sync(way != "accumulated")
    graphs = [loss(model, inputs(rank, step)) for step in range(2 * (way == "together"))]
    for step in (0, 1):
        (graphs[step] if graphs else loss(model, inputs(rank, step))).backward()
        if way == "again" and step == 0:
            end()
    model.set_requires_gradient_sync(True)
    end()


@pytest.mark.parametrize("keep", [None, "forward", "backward"])
@ranks(3)
def test_gradients_of_backwards_ended_by_hand(rank, world_size, keep):
    model = ended_by_hand(reshard_after_forward=keep != "forward")
    model.set_reshard_after_backward(keep != "backward")
    model.set_is_last_backward(False)  # without effect
    for way, asynchronous in itertools.product(("again", "accumulated", "together"), (False, True)):
        train(model, rank, way, asynchronous)
        assert_grads(model, 0, 1)
        model.zero_grad()
        if HAS_TORCHS:
            theirs = shard(make_net(), torch_fsdp.fully_shard)
            theirs.set_manual_backward_finalization(True)
            train(theirs, rank, way, asynchronous)
            assert_grads(theirs, 0, 1)


@ranks(4)
def test_replicas_are_summed_completely_or_refused(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = ended_by_hand(mesh=mesh)
    model.set_requires_all_reduce(False)
    loss(model, inputs(rank, 0)).backward()
    with pytest.raises(RuntimeError, match=r"set_requires_all_reduce\(True\)"):
        model.finalize_backward()
    model.set_requires_all_reduce(True)
    loss(model, inputs(rank, 1)).backward()
    model.finalize_backward()
    assert_grads(model, 0, 1)


@ranks(2)
def test_what_is_to_be_waited_for(rank, world_size):
    model = shard(make_net())
    assert model.finalize_backward() is None  # before the first forward
    model.finalize_backward(async_op=True).wait()
    model.set_manual_backward_finalization(True)
    output = loss(model, inputs(rank, 0))
    errors = []

    def end_inside(grad: torch.Tensor) -> None:
        for act in (model.finalize_backward, lambda: model.set_manual_backward_finalization(False)):
            with pytest.raises(RuntimeError) as error:
                act()
            errors.append(str(error.value))

    output.register_hook(end_inside)
    output.backward()
    assert "inside a backward" in errors[0] and "had begun" in errors[1]
    with pytest.raises(RuntimeError, match="had begun"):
        model.set_manual_backward_finalization(False)
    handle = model.finalize_backward(async_op=True)
    assert isinstance(handle, GradientReductionHandle)
    for too_early in (lambda: model(inputs(rank, 1)), model.finalize_backward):
        with pytest.raises(RuntimeError, match=r"before wait\(\)"):
            too_early()
    handle.wait()
    assert_grads(model, 0)
    model.set_manual_backward_finalization(False)
    loss(model, inputs(rank, 1)).backward()
    assert_grads(model, 0, 1)
    with pytest.raises(RuntimeError, match="end by themselves"):
        model.finalize_backward()


@ranks(2)
def test_only_the_root_ends_backwards_and_reset_drops_what_they_left(rank, world_size):
    model = shard(make_net())
    for act in (model.first.finalize_backward, lambda: model.first.set_manual_backward_finalization(True)):
        with pytest.raises(RuntimeError, match="must be called on the root, and this is unit 'first'"):
            act()
    inner = make_net()
    fully_shard(inner.first).set_manual_backward_finalization(True)
    fully_shard(inner)
    with pytest.raises(RuntimeError, match="unit 'first', which another unit encloses"):
        inner(inputs(rank, 0))
    model.set_manual_backward_finalization(True)
    loss(model, inputs(rank, 0)).backward()
    handle = model.finalize_backward(async_op=True)
    model.reset_iter_state()
    with pytest.raises(RuntimeError, match="has dropped"):
        handle.wait()
    model.zero_grad()
    loss(model, inputs(rank, 1)).backward()
    model.finalize_backward()
    assert_grads(model, 1)


# unsharded memory that stays where it is


@ranks(1, 4)
def test_unsharded_memory_stays_where_it_is(rank, world_size):
    for precision, reshard in ((None, True), (torch.float32, 2 if world_size == 4 else True)):
        model = shard(make_net(), mp_policy=MixedPrecisionPolicy(precision), reshard_after_forward=reshard)
        model.set_keep_unsharded_storage(True)
        plain = copy.deepcopy(model)
        plain.set_keep_unsharded_storage(False)
        both = [(net, torch.optim.SGD(net.parameters(), lr=0.1)) for net in (model, plain)]
        seen: list[list[int]] = []
        for layer in (model.first, model.middle.linear, model.last):
            layer.register_forward_pre_hook(lambda layer, args: seen[-1].append(layer.weight.data_ptr()))  # noqa: B023
        blockers = []
        dtype = torch.float64
        for step in range(6):
            if step == 4:  # into memory of another dtype, which stays as well
                dtype = torch.float32
                for net, _ in both:
                    net.to(dtype)
            seen.append([])
            for net, optimizer in both:
                optimizer.zero_grad()
                loss(net, inputs(rank, step).to(dtype)).backward()
                optimizer.step()
            blockers += [torch.empty(48, dtype=dtype) for _ in range(50)]  # takes what is freed
            assert all(isinstance(param, DTensor) for param in model.parameters())
        assert seen[0] == seen[1] == seen[2] == seen[3] and seen[4] == seen[5], precision
        for one, two in zip(model.parameters(), plain.parameters()):
            assert torch.equal(one.full_tensor(), two.full_tensor())
