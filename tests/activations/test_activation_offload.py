"""Activations in host memory: the same bits in less memory; what travels, when, and what stays."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import fsdp_wrap
from bed import ranks
from bed.accelerator import Simulation, run_simulated
from bed.paths import ROOT
from fronts import each_front, full_state, inner
from stream_programs import WIDTH, Layer, batch, products_beside, wrapped

sys.path.insert(0, str(ROOT))  # benchmarks are not installed

from benchmarks import offloaded

ROWS, BLOCKS = 2048, 8
INPUT, HIDDEN = ROWS * WIDTH * 4, ROWS * 2 * WIDTH * 4
"""Bytes that a layer saves: its input, and what its tanh has computed."""


def deep() -> nn.Sequential:
    """Makes layers that save more than their parameters weigh."""
    return nn.Sequential(*(Layer(number, False) for number in range(BLOCKS)))


def long_batch(rank: int, step: int) -> torch.Tensor:
    return batch(rank, step).repeat(ROWS // 4, 1)


def trained(rank: int, device: Simulation, front: str, offloads: bool) -> tuple[Any, list[int]]:
    """Trains; returns the model, and for each step the peak bytes of the compute stream."""
    model = wrapped(front, module=deep())
    offload = fsdp_wrap.offload_activations(model, min_bytes=1024) if offloads else None
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    peaks = []
    for step in range(2):
        model(long_batch(rank, step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        peaks.append(int(device.end_step()[1]["compute"]))
    # When the last layer begins, what the two before it have saved is still there. The test holds the input.
    assert offload is None or offload.nbytes == 2 * ((BLOCKS - 1) * HIDDEN + (BLOCKS - 2) * INPUT)
    return model, peaks


@each_front
def test_less_memory_and_the_same_bits(front):
    states: dict[bool, list[dict[str, torch.Tensor]]] = {True: [], False: []}
    peaks: dict[bool, int] = {}

    def program(rank: int, device: Simulation, offloads: bool) -> None:
        model, (_, peaks[offloads]) = trained(rank, device, front, offloads)
        with device.aside():
            states[offloads].append({name: value.clone() for name, value in full_state(model).items()})

    for offloads in states:
        run_simulated(2, partial(program, offloads=offloads))
    for one, other in zip(states[True], states[False]):
        assert all(torch.equal(one[name], other[name]) for name in other)
    assert peaks[True] < 0.6 * peaks[False], peaks


def test_copies_run_beside_the_computation():
    devices = run_simulated(2, lambda rank, device: trained(rank, device, "orig", True) and None)
    for queue in ("activations to host", "activations to device"):
        copies = [
            action for action in devices[0].actions if (action.what, action.queue) == ("aten::copy_", queue)
        ]
        assert len(copies) > 2 * BLOCKS and all(products_beside(devices[0].actions, copies)), queue


def test_a_plan_knows_the_peak():
    measured: list[int] = []

    def program(rank: int, device: Simulation) -> None:
        _, (_, peak) = trained(rank, device, "orig", True)
        measured.append(peak)

    def setup() -> tuple[Any, Any, Callable[[], object]]:
        model = wrapped("orig", module=deep(), device_id=0)
        fsdp_wrap.offload_activations(model, min_bytes=1024)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def loss() -> torch.Tensor:
            return model(torch.empty(ROWS, WIDTH, device="cuda")).square().mean()

        return model, optimizer, fsdp_wrap.tools.step_of(model, optimizer, loss)

    run_simulated(2, program)
    planned = fsdp_wrap.plan(setup, ranks=2, device="cuda")
    assert planned.peak_bytes == pytest.approx(max(measured), rel=0.02)
    assert planned.host.pinned >= HIDDEN


class Saving(nn.Module):
    """Saves a tensor of each kind: `first` has 1 kB, `second` as much."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(256))
        self.register_buffer("scale", torch.ones(256))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x * self.weight  # saves the input, which the test holds, and the parameter
        second = (first * self.scale).exp()  # saves the buffer, and what it has computed
        halves = second.sin() + second.view(2, 128).cos().view(-1)  # the same storage
        return halves + second[:8].square().sum()  # and a small part of it


def kinds(rank: int, device: Simulation, held: list[Any], travelled: list[int]) -> None:
    model = wrapped(module=nn.Sequential(Saving(), Saving(), Saving()), kinds={Saving})
    if held:
        inner(model)[0].register_forward_hook(lambda _, args, output: held.append(output))
    offload = fsdp_wrap.offload_activations(model, min_bytes=1)
    model(torch.ones(256)).sum().backward()
    travelled.append(offload.nbytes)
    offload.remove()
    model(torch.ones(256)).sum().backward()
    assert offload.nbytes == travelled[-1]


@pytest.mark.parametrize(("held", "sent"), [([], 3), ([None], 2)], ids=["dropped", "held"])
def test_what_travels(held, sent):
    """Of two units: what `exp` computed, once, and the output of the first unless somebody holds it."""
    travelled: list[int] = []
    run_simulated(2, partial(kinds, held=held, travelled=travelled))
    assert travelled == [sent * 1024] * 2


def edits(rank: int, device: Simulation, late: bool) -> None:
    class Edits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.saved = (x * self.weight).exp()
            sine = self.saved.sin()
            if not late:
                self.saved.add_(1)
            return sine

    model = wrapped(module=nn.Sequential(Edits(), Edits(), Edits(), Edits()), kinds={Edits})
    fsdp_wrap.offload_activations(model, min_bytes=1)
    output = model(torch.ones(16)).sum()
    if late:
        with torch.no_grad():
            inner(model)[0].saved.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.backward()


@pytest.mark.parametrize("late", [False, True], ids=["in the forward", "after it"])
def test_values_that_are_gone_are_not_taken(late):
    run_simulated(2, partial(edits, late=late))


@ranks(1)
def test_without_an_accelerator_it_does_nothing_and_says_so(rank, world_size):
    model = wrapped()
    with pytest.warns(UserWarning, match="does nothing: this model computes in host memory"):
        offload = fsdp_wrap.offload_activations(model)
    model(batch(0, 0)).sum().backward()
    assert offload.nbytes == 0


def refusals(rank: int, device: Simulation) -> None:
    model = wrapped()
    for arguments, words in (
        ({"keep": -1}, "keep=-1 must be a whole number"),
        ({"min_bytes": 0.5}, "min_bytes=0.5 must be a whole number"),
        (
            {"units": ["0", "9"]},
            r"\['9'\] are no units of this FullyShardedDataParallel, which has \['', '0'",
        ),
    ):
        with pytest.raises(ValueError, match=words):
            fsdp_wrap.offload_activations(model, **arguments)
    with pytest.raises(ValueError, match="has no wrapped or sharded module"):
        fsdp_wrap.offload_activations(nn.Linear(2, 2))
    offload = fsdp_wrap.offload_activations(model, ["0"], min_bytes=1)
    with pytest.raises(ValueError, match="the activations of the root unit .* are offloaded already"):
        fsdp_wrap.offload_activations(model)
    model(batch(rank, 0)).sum().backward()
    assert offload.nbytes == 4 * 2 * WIDTH * 4  # what tanh has computed; the test holds the input
    offload.remove()
    fsdp_wrap.offload_activations(model).remove()


def test_wrong_uses_are_refused():
    run_simulated(2, refusals)


@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_plan_knows_the_peak_of_a_llama(checkpoints):
    """Compares the peak of all streams together, by the program that makes the page's table."""
    smaller: Any = {"BLOCKS": 4, "LENGTH": 128, "SEQUENCES": 2, "MIN_BYTES": 1 << 15}
    with mock.patch.multiple(offloaded, **smaller), mock.patch.dict(offloaded.PARTS, half=2, all=4):
        rows = [offloaded.compare(part, checkpoints) for part in offloaded.PARTS]
    assert all(abs(row.off) < offloaded.MOST_OFF for row in rows), rows
    assert rows[0].on_host < rows[1].on_host < rows[2].on_host
    assert checkpoints or rows[0].measured > max(row.measured for row in rows[1:])
