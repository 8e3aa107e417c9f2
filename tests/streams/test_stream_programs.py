"""Programs on a simulated accelerator: outcome in other orders, overlap, and known faults of other runtimes.

The faults are built into this package: the simulation objects to each, and not without it.
"""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from unittest import mock

import pytest
import torch

from bed.accelerator import run_simulated
from fronts import FRONTS
from fsdp_wrap import BackwardPrefetch
from fsdp_wrap._comm import Finished, FromHost, ToHost
from fsdp_wrap._comm.lanes import _EventPending
from fsdp_wrap._params.collectives import NotedReduction, Reduction
from fsdp_wrap._params.handle import HandleState
from fsdp_wrap._runtime.unit import Unit
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
    """For each collective of a backward, how many matrix products may run beside it; of units alone."""
    found = []

    def program(rank, device):
        model = wrapped(**options, travel_together_bytes=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            one_step(model, optimizer, rank, step)
        found.append(device)

    run_simulated(2, program)
    actions = found[0].actions
    collectives = [each for each in actions if each.what == kind and each.where.endswith(", backward")]
    return products_beside(actions, collectives[len(collectives) // 2 :])


@pytest.mark.parametrize("front", FRONTS)
def test_gathers_and_reductions_run_beside_products(front):
    """A prefetch that is issued after the kernels of the unit before it would run beside none."""
    *earlier, last = _overlaps("reduce_scatter", front=front)
    assert all(earlier) and last == 0
    gathers = _overlaps("all_gather", front=front)
    assert sum(each > 0 for each in gathers) >= len(gathers) - 2, gathers
    if front != "composable":
        assert not any(_overlaps("all_gather", front=front, backward_prefetch=None))
        assert not all(_overlaps("all_gather", front=front, backward_prefetch=BackwardPrefetch.BACKWARD_POST))


# known faults

_RESHARD, _FINISH, _WRITE = Unit.reshard, Reduction.finish, FromHost.write


def _careless(unit, phase, within=None, keep=()):
    handle = unit.handle
    if handle is None or handle.state is not HandleState.UNSHARDING:
        _RESHARD(unit, phase, within, keep)
        return
    for segment in handle.segments:
        segment.gathered.free()
        segment.free()
    handle._gathering, handle.state = Finished(), HandleState.SHARDED


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
    (_OFFLOADS[0], [mock.patch("fsdp_wrap._runtime.offloading.await_copies", lambda _: None)], "on host"),
]


@pytest.mark.parametrize(("program", "patches", "words"), FAULTS)
def test_a_known_fault_is_objected_to(program, patches, words):
    size, body = program
    run_simulated(size, body)
    with ExitStack() as stack, pytest.raises(AssertionError, match=words):
        for each in patches:
            stack.enter_context(each)
        run_simulated(size, body)


def test_a_sum_is_waited_for_beside_the_count_of_who_took_part():
    """On a stream the count follows it. Elsewhere they are works of their own, and no simulation tells."""
    ranks, pending = mock.Mock(device=torch.device("cpu")), mock.Mock()
    NotedReduction([], [], pending, ranks).wait()
    pending.wait.assert_called_once_with()
