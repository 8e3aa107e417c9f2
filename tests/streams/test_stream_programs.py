"""Programs on a simulated accelerator: outcome in other orders, overlap, and known faults of other runtimes.

The faults are built into this package: the simulation objects to each, and not without it.
"""

import random
import subprocess
import sys
from contextlib import ExitStack
from functools import partial
from unittest import mock

import pytest
import torch

from bed.accelerator import Different, Simulation, replay, run_simulated, simulation, simulations
from bed.paths import ROOT
from fronts import FRONTS, each_front
from fsdp_wrap import BackwardPrefetch
from fsdp_wrap._comm import Finished, FromHost, ToHost
from fsdp_wrap._comm.lanes import _EventPending
from fsdp_wrap._params.buffers import Where
from fsdp_wrap._params.collectives import NotedReduction, Reduction
from fsdp_wrap._runtime.unit import Unit
from scenario import (
    COMPOSABLE_SPACE,
    HYBRID_COMPOSABLE_SPACE,
    HYBRID_SPACE,
    SPACE,
    STEPS,
    check,
    draw,
    name_of,
    pairwise,
    reference,
)
from stream_programs import PROGRAMS, offloads, one_step, products_beside, wrapped

_BY_FRONT = [name.removesuffix("-flat") for name in PROGRAMS if name.endswith("-flat")]


def _marks(name):
    """Slow for all but one front-end, which takes turns; not for what only trains."""
    kind, _, front = name.rpartition("-")
    turn = _BY_FRONT.index(kind) if kind in _BY_FRONT and front in FRONTS else 0
    return pytest.mark.slow if turn and front != FRONTS[turn % len(FRONTS)] else ()


@pytest.mark.parametrize("name", [pytest.param(name, marks=_marks(name)) for name in PROGRAMS])
def test_every_order_has_the_same_outcome(name):
    size, program = PROGRAMS[name]
    run_simulated(size, program, records=True, seeds=1)


def _overlaps(kind, **options):
    """For each collective of a backward, how many products may run beside it; units travel alone."""
    devices = []

    def program(rank, device):
        model = wrapped(**options, travel_together_bytes=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            one_step(model, optimizer, rank, step)
        devices.append(device)

    run_simulated(2, program)
    actions = devices[0].actions
    collectives = [
        action for action in actions if action.what == kind and action.where.endswith(", backward")
    ]
    return products_beside(actions, collectives[len(collectives) // 2 :])


@each_front
def test_gathers_and_reductions_run_beside_products(front):
    """A prefetch that is issued after the kernels of the unit before it would run beside none."""
    *earlier, last = _overlaps("reduce_scatter", front=front)
    assert all(earlier) and last == 0
    gathers = _overlaps("all_gather", front=front)
    assert sum(products > 0 for products in gathers) >= len(gathers) - 2, gathers
    if front != "composable":
        assert not any(_overlaps("all_gather", front=front, backward_prefetch=None))
        assert not all(_overlaps("all_gather", front=front, backward_prefetch=BackwardPrefetch.BACKWARD_POST))


# known faults

_RESHARD, _FINISH, _WRITE = Unit.reshard, Reduction.finish, FromHost.write


def _careless(unit, phase, within=None):
    buffers = unit.buffers
    if buffers.where is not Where.GATHERING:
        _RESHARD(unit, phase, within)
        return
    for segment in buffers.segments:
        segment.gathered.free()
        segment.free()
    buffers._gathering, buffers.where = Finished(), Where.SHARDED


def _too_early(reduction):
    if reduction._in_copy:
        reduction._pending.wait()
        reduction._leave_copy()
    reduction._kept, reduction._over_replicas = reduction._over_replicas, None  # it goes on unwaited for
    _FINISH(reduction)


def _forgetful(from_host, out):
    _WRITE(from_host, out)
    from_host.settle()


def _forget(to_host):
    to_host._copying._start = None


_UNSHARDS, _HYBRID = (PROGRAMS[name] for name in ("looks_after_unshard", "hybrid-offload-orig"))
_OFFLOADS = [(2, partial(offloads, front=front)) for front in ("orig", "composable")]
FAULTS = [
    (
        _UNSHARDS,
        [
            mock.patch.object(Unit, "reshard", _careless),
            mock.patch.object(_EventPending, "__del__", lambda pending: None),
        ],
        "free on compute .* that all_gather on gather .* wrote",
    ),
    (_HYBRID, [mock.patch.object(Reduction, "finish", _too_early)], "all_reduce on reduce"),
    (_OFFLOADS[0], [mock.patch.object(ToHost, "release", _forget)], "free on compute"),
    (_OFFLOADS[1], [mock.patch.object(FromHost, "write", _forgetful)], "free on compute"),
    (_OFFLOADS[0], [mock.patch("fsdp_wrap._offloading.await_copies", lambda _: None)], "on host"),
]


@pytest.mark.parametrize(("program", "patches", "words"), FAULTS)
def test_a_known_fault_is_objected_to(program, patches, words):
    size, body = program
    run_simulated(size, body)
    with ExitStack() as stack, pytest.raises(AssertionError, match=words):
        for patch in patches:
            stack.enter_context(patch)
        run_simulated(size, body)


def test_a_sum_is_waited_for_beside_the_count_of_who_took_part():
    """On a stream the count follows it. Elsewhere they are works of their own, and no simulation tells."""
    ranks, pending = mock.Mock(device=torch.device("cpu")), mock.Mock()
    NotedReduction([], [], pending, ranks).wait()
    pending.wait.assert_called_once_with()


# what the simulation sees, in programs of a few lines


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


_LEFT_AT_EXIT = """
from unittest import mock
import torch
from fsdp_wrap._comm.device import Accelerator
from fsdp_wrap._comm.lanes import StreamLane

torch.accelerator.current_stream = torch.Stream = mock.MagicMock()
torch.kept = StreamLane(Accelerator(torch.device("cuda", 0)), "gather").issue(lambda later: None)
"""


def test_what_is_never_waited_for_is_silent_at_exit():
    process = subprocess.run(
        [sys.executable, "-c", _LEFT_AT_EXIT], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not process.stderr


# options crossed, as `test_options.py` crosses them on the CPU


def _draws(space, number, seed, **fixed):
    generator = random.Random(seed)
    return [draw(space, generator, fixed) for _ in range(number)]


def _check(scenario, size, steps=STEPS):
    """Trains with nothing but the training on the device, and compares with a plain model elsewhere."""
    expected = reference(scenario, size, steps=steps)

    def program(rank, device):
        return check(scenario, rank, size, expected, device.aside)

    run_simulated(size, program, records=True, seeds=1)


FAST = [*_draws(SPACE, 3, 0), *_draws(COMPOSABLE_SPACE, 3, 1)]


@pytest.mark.parametrize("scenario", FAST, ids=name_of)
def test_options_drawn(scenario):
    _check(scenario, 2)


_SMALL = {"wrapping": "block", "accumulation": "F", "forwards": 1, "checkpointing": "none", "fault": None}
_SHARDED = [
    *_draws(SPACE, 1, 3, strategy="FULL_SHARD", evaluates=False, **_SMALL),
    *_draws(COMPOSABLE_SPACE, 1, 3, evaluates=False, **_SMALL),
]


@pytest.mark.parametrize("scenario", _SHARDED, ids=name_of)
def test_what_is_drawn_misses_a_wait(scenario):
    """By the order, and by the outcome where nobody looks at the order."""
    with mock.patch.object(_EventPending, "wait", lambda self: None):
        with pytest.raises(AssertionError, match="no event orders them"):
            _check(scenario, 2, steps=2)
        with mock.patch.object(simulation, "conflicts", lambda action: []), pytest.raises(Different):
            _check(scenario, 2, steps=2)


_PARTS = [
    *((space, 2, part, 4) for space in (SPACE, COMPOSABLE_SPACE) for part in range(4)),
    *((space, 4, part, 16) for space in (HYBRID_SPACE, HYBRID_COMPOSABLE_SPACE) for part in range(4)),
]


@pytest.mark.left_over(4)
@pytest.mark.parametrize("number", range(len(_PARTS)))
def test_every_two_options_meet(number):
    """At two ranks all do; of copies that are sharded a quarter of the scenarios is trained."""
    space, size, part, parts = _PARTS[number]
    for scenario in pairwise(space, seed=31)[part::parts]:
        _check(scenario, size, steps=2)
