"""What the simulation objects to, in programs of a few lines; among them the known faults of others."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from bed.accelerator import Different, Simulation, replay, simulations
from bed.paths import ROOT


def _run(program, records=False):
    device = Simulation(records)
    with simulations(), device.use():
        kept = program(device)
    del kept  # which is compared in the end
    return device


def _writes_beside(device):
    values = torch.ones(64)
    with device.stream("side"):
        values.mul_(2)
    return values


def _writes_in_order(device):
    values = torch.ones(64)
    side = device.stream("side")
    side.wait_stream(device.compute)
    with side:
        values.mul_(2)
        done = side.record_event()
    other = torch.ones(64)
    device.compute.wait_event(done)
    values.add_(other)


def _reads_twice(device):
    values = torch.ones(64)
    side = device.stream("side")
    side.wait_stream(device.compute)
    with side:
        doubled, tripled = values * 2, values[:8] * 3
    values.sum()
    side.wait_stream(device.compute)
    device.compute.wait_stream(side)
    del doubled, tripled


def _writes_columns(device, first=3):
    values = torch.ones(8, 8)
    side = device.stream("side")
    side.wait_stream(device.compute)
    with side:
        values[:, :4].mul_(2)
    values[:, first:].mul_(3)
    device.compute.wait_stream(side)


def _frees_and_takes_memory(device):
    values = torch.ones(64)
    values.untyped_storage().resize_(0)
    values.untyped_storage().resize_(256)


def _frees_what_a_gather_writes(device):
    """Nobody waits for the gather, and the allocator gives its buffer to the next kernel."""
    buffer, shard = torch.empty(64), torch.ones(64)
    gather = device.stream("gather")
    gather.wait_stream(device.compute)
    with gather:
        buffer.copy_(shard)
    buffer.untyped_storage().resize_(0)
    device.compute.wait_stream(gather)


def _copies_what_is_being_reduced(device):
    """Hybrid with offload: the copy waits for the sum within the copy, not for that over the replicas."""
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


def _reads_what_has_not_arrived(device):
    home = device.empty_on_host(4, torch.float32, pin=True)
    home.copy_(torch.ones(4), non_blocking=True)
    home.tolist()


def _writes_what_a_copy_reads(device):
    home, there = device.empty_on_host(4, torch.float32, pin=True), torch.empty(4)
    home.fill_(1)
    there.copy_(home, non_blocking=True)
    home.fill_(2)
    return there


def _mixes_memory(device):
    torch.ones(4).add_(device.empty_on_host(4, torch.float32, pin=True))


@pytest.mark.parametrize(
    ("program", "words", "differs"),
    [
        (_writes_beside, ("aten::mul_ on side", "aten::ones on compute", "256 bytes", "no event"), True),
        (_writes_columns, ("aten::mul_ on compute", "aten::mul_ on side"), False),
        (_frees_what_a_gather_writes, ("free on compute", "aten::copy_ on gather"), False),
        (_copies_what_is_being_reduced, ("aten::copy_ on compute", "aten::mul_ on replicas"), True),
        (_reads_what_has_not_arrived, ("tolist on host", "aten::copy_ on compute"), False),
        (_writes_what_a_copy_reads, ("aten::fill_ on host",), True),
        (_mixes_memory, ("mixes memory",), False),
    ],
)
def test_a_fault_is_named_with_both_sides_and_differs_in_another_order(program, words, differs):
    device = _run(program, records=True)
    (fault,) = device.faults
    assert all(each in fault for each in words), fault
    if differs:
        with pytest.raises(Different):
            replay([device.recording], seeds=8)


@pytest.mark.parametrize(
    "program",
    [
        *(_writes_in_order, _reads_twice, _frees_and_takes_memory),
        lambda device: _writes_columns(device, first=4),  # bytes that take turns
    ],
)
def test_what_needs_no_order_or_has_it_is_fine(program):
    device = _run(program, records=True)
    assert not device.faults
    replay([device.recording], seeds=8)


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


def test_peaks_by_stream():
    def program(device):
        kept = torch.ones(1024)
        with device.stream("side"):
            torch.ones(256)
            torch.ones(256)
        assert device.end_step()[1] == {"compute": 4096, "side": 1024}
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
