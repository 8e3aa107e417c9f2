"""Machines that are measured, alone and by ranks together."""

from __future__ import annotations

import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from bed import ranks
from fsdp_wrap import measure_machine
from fsdp_wrap._comm import make_communicator, ranks_in
from fsdp_wrap.tools import Machine
from fsdp_wrap.tools.machines import measure_link, measured
from models import gather_objects


def test_a_process_alone_measures_what_computes_and_says_what_it_assumes():
    machine = measure_machine("cpu", seconds=0.01)
    assert {"float64", "float32", "bfloat16"} <= set(machine.flops)
    assert 0 < machine.flops["float32"] < 1e14 and 0 < machine.memory_bandwidth < 1e13
    assert machine.bandwidth_within == machine.host_bandwidth == machine.memory_bandwidth / 2
    assert machine.operator_seconds > 0
    assert machine.ranks_per_host == 1 and machine.device_memory > 2**28
    assert "a process alone: links assumed" in machine.source
    assert Machine.from_dict(machine.to_dict()) == machine


def test_figures_are_those_of_the_time_that_things_take(monkeypatch):
    """With a clock by which everything takes 25 ms."""
    monkeypatch.setattr(measured._DeviceTimer, "timed", lambda self, do: 0.025)
    machine = measure_machine("cpu", seconds=0.01)
    width = measured._FIRST_WIDTH
    assert machine.flops["float32"] == pytest.approx(2 * width**3 / 0.025)
    assert machine.memory_bandwidth == pytest.approx(2 * measured._COPIED["cpu"] / 0.025)
    assert machine.operator_seconds == pytest.approx(0.025 / measured._SMALL_OPERATORS)


def test_what_cannot_be_measured_is_refused():
    for device, seconds, message in [
        ("meta", 0.2, "device='meta' computes nothing"),
        ("nonsense", 0.2, "device='nonsense' cannot be measured here"),
        ("cpu", 0, "seconds must be positive"),
    ]:
        with pytest.raises(ValueError, match=message):
            measure_machine(device, seconds=seconds)


@pytest.mark.slow
@ranks(4)
def test_ranks_measure_their_links_together(rank, world_size):
    """On one host, and on two, which are only named so; links between are slow for all that crosses them."""
    machine = measure_machine("cpu", seconds=0.01)
    assert machine.ranks_per_host == 4 and "4 ranks of one host" in machine.source
    assert machine.bandwidth_within == machine.bandwidth_between > 0
    assert 0 < machine.latency_within == machine.latency_between
    told = gather_objects(machine.bandwidth_within)
    assert len({*told}) == 1, "links are of all"
    real = measured.measure_link

    def slow_between(communicator, seconds):
        link = real(communicator, seconds)
        return measured.Link(link.bandwidth / communicator.size**2, link.latency * communicator.size)

    host = f"host{rank // 2}"
    with mock.patch.multiple(measured, host_id=lambda: host, measure_link=slow_between):
        machine = measure_machine("cpu", seconds=0.01)
    assert machine.ranks_per_host == 2 and "2 hosts with 2 ranks each" in machine.source
    assert machine.bandwidth_between != machine.bandwidth_within


@pytest.mark.slow
@ranks(2)
def test_a_link_that_is_slow_is_measured_so(rank, world_size):
    communicator = make_communicator(ranks_in(dist.group.WORLD), torch.device("cpu"))
    real = type(communicator.gather_into([communicator.buffer(8, torch.float32)], lambda: None))
    wait = real.wait

    def slow(self, *arguments, **options):
        time.sleep(0.05)
        return wait(self, *arguments, **options)

    with mock.patch.object(real, "wait", slow):
        held = measure_link(communicator, 0.02)
    assert held.latency > 0.04


class SlowLink:
    """A communicator of two. Gathers take a second by its clock, beside computation or instead of it."""

    device, size = torch.device("cpu"), 2

    def __init__(self, beside: bool) -> None:
        self._beside, self.now = beside, 0.0

    def buffer(self, numel, dtype):
        return mock.Mock(data=torch.empty(numel, dtype=dtype))

    def empty(self, numel, dtype):
        return torch.empty(numel, dtype=dtype)

    def own_part(self, full):
        return full.chunk(2)[0]

    def gather_into(self, fulls, fill):
        fill()
        end = self.now + 1
        if not self._beside:
            self.now = end
        return mock.Mock(wait=lambda: setattr(self, "now", max(self.now, end)))

    def reduce_scatter(self, shards, fulls):
        return self.gather_into(fulls, lambda: None)

    def all_gather_object(self, value):
        return [value, value]

    def multiply(self, *operands, out):
        self.now += 0.25


@pytest.mark.parametrize("beside", [True, False])
def test_computation_beside_a_transfer_is_measured(beside):
    link = SlowLink(beside)
    with (
        mock.patch.object(measured.time, "perf_counter", lambda: link.now),
        mock.patch.object(torch, "mm", link.multiply),
    ):
        assert measure_link(link).overlap == beside  # type: ignore[arg-type]
