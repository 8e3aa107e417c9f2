"""What the simulation objects to, in programs of a few lines; among them the known faults of others."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from bed.accelerator import Different, Simulation, replay, simulations
from bed.paths import ROOT


def _run(program, records=False):
    """Runs a program on one simulated accelerator; returns that."""
    device = Simulation(records)
    with simulations(), device.use():
        kept = program(device)
    del kept  # which is compared in the end
    return device


def _fault(program):
    """What is the matter with a program: one thing, by order and by outcome."""
    device = _run(program, records=True)
    assert len(device.faults) == 1, device.faults
    return device.faults[0]


def _differs(program):
    with pytest.raises(Different):
        replay([_run(program, records=True).recording], seeds=8)


def test_what_no_event_orders_is_named_with_both_sides():
    def program(device):
        values = torch.ones(64)
        side = device.stream("side")
        with side:
            values.mul_(2)
        return values

    fault = _fault(program)
    for told in ("aten::mul_ on side", "aten::ones on compute", "256 bytes", "no event orders them"):
        assert told in fault
    _differs(program)


def test_what_an_event_orders_is_fine():
    def program(device):
        values = torch.ones(64)
        side = device.stream("side")
        side.wait_stream(device.compute)
        with side:
            values.mul_(2)
            done = side.record_event()
        other = torch.ones(64)
        device.compute.wait_event(done)
        values.add_(other)

    device = _run(program, records=True)
    assert not device.faults
    replay([device.recording], seeds=8)


def test_two_that_read_need_no_order():
    def program(device):
        values = torch.ones(64)
        side = device.stream("side")
        side.wait_stream(device.compute)
        with side:
            doubled = values * 2
            tripled = values[:8] * 3
        values.sum()
        side.wait_stream(device.compute)
        device.compute.wait_stream(side)
        del doubled, tripled

    assert not _run(program).faults


@pytest.mark.parametrize("apart", [True, False])
def test_bytes_that_do_not_overlap_need_no_order(apart):
    """Also not if they take turns, as the columns of a matrix do."""

    def program(device):
        values = torch.ones(8, 8)
        side = device.stream("side")
        side.wait_stream(device.compute)
        with side:
            values[:, :4].mul_(2)
        values[:, 4 if apart else 3 :].mul_(3)
        device.compute.wait_stream(side)

    assert bool(_run(program).faults) is not apart


def test_memory_that_is_used_after_it_was_freed():
    def program(device):
        values = torch.ones(64)
        view = values.view(8, 8)
        values.untyped_storage().resize_(0)
        values.untyped_storage().resize_(256)
        del view

    assert not _run(program).faults


def test_a_buffer_freed_on_the_compute_stream_while_the_gather_still_writes():
    """Nobody waits for the gather, and the allocator gives its buffer to the next kernel."""

    def program(device):
        buffer, shard = torch.empty(64), torch.ones(64)
        gather = device.stream("gather")
        gather.wait_stream(device.compute)
        with gather:
            buffer.copy_(shard)
        buffer.untyped_storage().resize_(0)
        device.compute.wait_stream(gather)

    fault = _fault(program)
    assert "free on compute" in fault and "aten::copy_ on gather" in fault


def test_a_gradient_copied_to_the_host_before_its_reduction_ends():
    """Hybrid with offload: the copy waits for the sum within the copy, not for that over the replicas."""

    def program(device):
        gradient, home = torch.ones(64), device.empty_on_host(64, torch.float32, pin=True)
        reduce, replicas = device.stream("reduce"), device.stream("replicas")
        reduce.wait_stream(device.compute)
        with reduce:
            gradient.mul_(2)
            reduced = reduce.record_event()
        replicas.wait_event(reduced)
        with replicas:
            gradient.mul_(2)
        device.compute.wait_event(reduced)
        home.copy_(gradient, non_blocking=True)
        device.compute.wait_stream(replicas)
        return home

    fault = _fault(program)
    assert "aten::copy_ on compute" in fault and "aten::mul_ on replicas" in fault
    _differs(program)


def test_the_host_that_reads_before_a_copy_has_arrived():
    def program(device):
        home = device.empty_on_host(4, torch.float32, pin=True)
        home.copy_(torch.ones(4), non_blocking=True)
        home.tolist()

    fault = _fault(program)
    assert "tolist on host" in fault and "aten::copy_ on compute" in fault


def test_the_host_that_writes_what_a_copy_still_reads():
    def program(device):
        home, there = device.empty_on_host(4, torch.float32, pin=True), torch.empty(4)
        home.fill_(1)
        there.copy_(home, non_blocking=True)
        home.fill_(2)
        return there

    assert "aten::fill_ on host" in _fault(program)
    _differs(program)


@pytest.mark.parametrize("pinned", [True, False])
def test_waits_of_the_host_are_counted(pinned):
    def program(device):
        values = torch.ones(4)
        home = device.empty_on_host(4, torch.float32, pinned)
        home.copy_(values, non_blocking=True)  # waits if the memory is not pinned
        device.compute.record_event().synchronize()
        home.tolist()  # its own memory
        values.sum().item()
        bool(values[0] > 0)
        torch.equal(values, values + 1)

    waits = [each.split(" (")[0] for each in _run(program).host_waits]
    expected = ["Event.synchronize", "aten::_local_scalar_dense", "aten::_local_scalar_dense", "aten::equal"]
    assert waits == ([] if pinned else ["aten::copy_ to the host"]) + expected


def test_operators_that_mix_memory_of_the_host_and_of_the_device():
    def program(device):
        torch.ones(4).add_(device.empty_on_host(4, torch.float32, pin=True))

    assert "mixes memory" in _fault(program)


def test_peaks_by_stream():
    def program(device):
        kept = torch.ones(1024)
        side = device.stream("side")
        with side:
            torch.ones(256)
            torch.ones(256)
        _, peaks = device.end_step()
        assert peaks == {"compute": 4096, "side": 1024}
        torch.ones(64), kept
        assert device.end_step()[1] == {"compute": 4096 + 512, "side": 0}

    _run(program)


_LEFT_AT_EXIT = """
from unittest import mock
import torch
from fsdp_wrap._comm.device import Accelerator
from fsdp_wrap._comm.lanes import StreamLane

torch.accelerator.current_stream = torch.Stream = mock.MagicMock()
torch.kept = StreamLane(Accelerator(torch.device("cuda", 0)), "gather").issue(lambda later: None)
"""


def test_what_is_never_waited_for_is_silent_at_exit():
    found = subprocess.run(
        [sys.executable, "-c", _LEFT_AT_EXIT], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not found.stderr
