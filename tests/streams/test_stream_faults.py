"""Known faults of other runtimes, built into this one: the simulation objects to each, and not without it.

A third, a gradient that is copied to the host before its reduction ends, is in `test_stream_offload.py`.
"""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from bed.accelerator import run_simulated
from fronts import FRONTS
from fsdp_wrap._comm import Finished
from fsdp_wrap._comm.lanes import _EventPending
from fsdp_wrap._params.collectives import NotedReduction
from fsdp_wrap._params.handle import HandleState
from fsdp_wrap._runtime.schedule import Schedule
from fsdp_wrap._runtime.unit import Unit
from stream_programs import PROGRAMS, one_step, products_beside, wrapped

# a buffer that is freed on the stream of the computation while the gather still writes


def _careless(reshard):
    """What frees the buffers of a unit, and never asks whether a gather that nobody waited for is over."""

    def function(unit, phase, within=None, keep=()):
        handle = unit.handle
        if handle is None or handle.state is not HandleState.UNSHARDING:
            reshard(unit, phase, within, keep)
            return
        for segment in handle.segments:
            segment.gathered.free()
            segment.free()
        handle._gathering, handle.state = Finished(), HandleState.SHARDED

    return function


def test_a_gather_whose_buffer_is_freed():
    size, program = PROGRAMS["looks_after_unshard"]
    run_simulated(size, program)
    with (
        mock.patch.object(Unit, "reshard", _careless(Unit.reshard)),
        mock.patch.object(_EventPending, "__del__", lambda pending: None),
        pytest.raises(AssertionError, match="free on compute .* that all_gather on gather .* wrote"),
    ):
        run_simulated(size, program)


def test_a_sum_is_waited_for_beside_the_count_of_who_took_part():
    """On a stream the count follows it. Elsewhere they are works of their own, and no simulation tells."""
    ranks, pending = mock.Mock(device=torch.device("cpu")), mock.Mock()
    NotedReduction([], [], pending, ranks).wait()
    pending.wait.assert_called_once_with()


# a prefetch that is issued after the kernels of the unit that it should run beside


def _issued_late():
    """Puts each prefetch off until the unit before has its gradients, and its kernels are on the stream."""
    prefetch, take, waiting = Schedule._prefetch, Schedule._take_gradients, {}

    def prefetch_later(schedule, unit):
        waiting[schedule] = unit

    def take_first(schedule, unit, phase):
        if schedule in waiting:
            prefetch(schedule, waiting.pop(schedule))
        take(schedule, unit, phase)

    return mock.patch.multiple(Schedule, _prefetch=prefetch_later, _take_gradients=take_first)


def _late_gathers(front):
    """The gathers of a backward that no product may run beside, and how many there are; of units alone."""
    devices = []

    def program(rank, device):
        model = wrapped(front, travel_together_bytes=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            one_step(model, optimizer, rank, step)
            if step == 0:
                device.actions.clear()
        devices.append(device)

    run_simulated(2, program)
    actions = devices[0].actions
    gathers = [each for each in actions if each.what == "all_gather" and each.where.endswith(", backward")]
    return [number for number in products_beside(actions, gathers) if not number], len(gathers)


@pytest.mark.parametrize("front", FRONTS)
def test_a_prefetch_that_is_issued_too_late(front):
    """It is in time for all units but the first of the backward, and the root where it is gathered again."""
    late, number = _late_gathers(front)
    assert number >= 3 and len(late) <= number - 2, late
    with _issued_late():
        late, number = _late_gathers(front)
    assert number >= 3 and len(late) == number, late
