"""Known faults of other runtimes, built into this one: the simulation objects to each, and not without it."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from unittest import mock

import pytest
import torch

from bed.accelerator import run_simulated
from fsdp_wrap._comm import Finished, FromHost, ToHost
from fsdp_wrap._comm.lanes import _EventPending
from fsdp_wrap._params.collectives import NotedReduction, Reduction
from fsdp_wrap._params.handle import HandleState
from fsdp_wrap._runtime.unit import Unit
from stream_programs import PROGRAMS, offloads

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
