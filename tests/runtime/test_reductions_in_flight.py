"""`set_reduce_scatter_max_input_buffers`: how many units' gradients are on their way at once."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from bed import ranks
from bed.accelerator import Simulation, run_simulated
from beside import assert_close_grads, mean_backward
from fsdp_wrap import CPUOffloadPolicy, fully_shard
from fsdp_wrap._core import UNIT_ATTR
from fsdp_wrap._runtime import Unit
from fsdp_wrap._runtime.batching import BatchedReduction
from stream_programs import batch, net, one_step


def sharded(most: int | None, **options: Any) -> Any:
    model: Any = net()
    for part in (*model, model):
        fully_shard(part, travel_together_bytes=0, **options)
    if most is not None:
        model.set_reduce_scatter_max_input_buffers(most)
    return model


@ranks(2)
def test_as_many_reductions_are_in_flight_as_asked_for(rank, world_size):
    """Beside a model as it is by default, which has the same numbers to the bit."""
    reduce = Unit.reduce
    for most, expected in ((None, [1, 1, 1, 1]), (1, [1, 1, 1, 1]), (2, [1, 2, 2, 2]), (9, [1, 2, 3, 4])):
        models = sharded(most), sharded(None)
        for model in models:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            for step in range(3):
                one_step(model, optimizer, rank, step, accumulates=step == 1)
        handles = [part.__dict__[UNIT_ATTR].handle for part in models[0]]
        found: list[int] = []

        def counted(unit: Unit, phase: Any) -> None:
            reduce(unit, phase)
            if unit.handle in handles:  # noqa: B023
                found.append(sum(each.reduction is not None for each in handles))  # noqa: B023

        with mock.patch.object(Unit, "reduce", counted):
            models[0](batch(rank, 9)).sum().backward()
        assert found == expected, most
        models[1](batch(rank, 9)).sum().backward()
        for one, other in zip(*(model.parameters() for model in models)):
            assert torch.equal(one.to_local(), other.to_local())
            assert torch.equal(one.grad.to_local(), other.grad.to_local())
        assert not any(handle.reduction for handle in handles)


@ranks(2)
def test_so_are_those_of_units_that_travel_together(rank, world_size):
    of_two_units = 2 * 4 * (16 * 16 + 48)  # with what aligns them
    send = BatchedReduction.send
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)))
    for most, expected in ((1, [1, 1, 1]), (2, [1, 2, 2]), (3, [1, 2, 3])):
        plain.zero_grad()
        model: Any = copy.deepcopy(plain)
        for part in (*model, model):
            fully_shard(part, travel_together_bytes=2 * of_two_units)
        model.set_reduce_scatter_max_input_buffers(most)
        sent: list[BatchedReduction] = []

        def counted(joint: BatchedReduction, phase: Any) -> None:
            send(joint, phase)
            sent.append(joint)  # noqa: B023
            in_flight.append(sum(bool(each.taken) for each in sent))  # noqa: B023

        for _ in range(3):
            in_flight: list[int] = []
            model.zero_grad()
            with mock.patch.object(BatchedReduction, "send", counted):
                model(torch.full((2, 16), rank + 1.0)).square().sum().backward()
        assert in_flight == expected
        mean_backward(lambda rank: plain(torch.full((2, 16), rank + 1.0)).square().sum())
        assert_close_grads(model, plain, rtol=1.3e-6, atol=1e-5)


@pytest.mark.parametrize("options", ["nothing", "hybrid", "offload"])
def test_on_an_accelerator_every_order_has_the_same_outcome(options):
    size = 4 if options == "hybrid" else 2

    def program(rank: int, device: Simulation) -> None:
        chosen: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()} if options == "offload" else {}
        if options == "hybrid":
            chosen["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "copy"))
        model = sharded(3, **chosen)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            one_step(model, optimizer, rank, step, accumulates=step == 1)

    run_simulated(size, program, records=True, seeds=1)


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
