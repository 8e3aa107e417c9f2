"""What the simulation sees, in programs of a few lines; known faults are in `test_stream_programs.py`."""

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


@pytest.mark.parametrize("apart", [True, False])
def test_bytes_that_take_turns_need_no_order(apart):
    def program(device):
        values = torch.ones(8, 8)
        side = device.stream("side")
        side.wait_stream(device.compute)
        with side:
            values[:, :4].mul_(2)
        values[:, 4 if apart else 3 :].mul_(3)
        device.compute.wait_stream(side)

    told = " ".join(_run(program).faults)
    assert not told if apart else "aten::mul_ on compute" in told and "aten::mul_ on side" in told


def test_what_the_host_writes_while_a_copy_reads_is_named_and_differs():
    def program(device):
        home, there = device.empty_on_host(4, torch.float32, pin=True), torch.empty(4)
        home.fill_(1)
        there.copy_(home, non_blocking=True)
        home.fill_(2)
        return there

    device = _run(program, records=True)
    assert len(device.faults) == 1 and "aten::fill_ on host" in device.faults[0]
    with pytest.raises(Different):
        replay([device.recording], seeds=8)


def test_operators_that_mix_memory_of_the_host_and_of_the_device():
    def program(device):
        torch.ones(4).add_(device.empty_on_host(4, torch.float32, pin=True))

    assert "mixes memory" in _run(program).faults[0]


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
