"""What `python -m benchmarks.gpu` does without a GPU: its measures at tiny sizes, its sizes, its verdicts.

Also that it reads traces rightly: by traces made here as the profiler writes them.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections import defaultdict
from typing import Any

import pytest
import torch

from bed.paths import ROOT
from bed.scripts import python

sys.path.insert(0, str(ROOT))  # benchmarks are not installed

from benchmarks import gpu
from benchmarks.goals import GOALS, Goal, verdicts
from benchmarks.harness import Settings
from benchmarks.models import TINY
from benchmarks.timeline import COMPUTE, STEP, STREAM, read

OF_GPU = [goal for goal in GOALS if goal.place[0] == "gpu"]


@pytest.mark.slow
def test_every_way_through_it_is_taken_on_a_cpu():
    figures = gpu.ask_dry(Settings(rounds=1))
    assert set(figures) == {
        *(f"memory, fake group of {ranks}" for ranks in gpu.FAKE_RANKS),
        *("48 small units", "width 4096 in bf16", "offload", "overlap", "overlap, offload"),
    }
    rows = [row for table in figures.values() for row in table.values()]
    assert all(math.isfinite(value) for row in rows for value in row.values())
    for goal in OF_GPU:  # what is judged has its row; columns that only a GPU fills aside
        _, title, column = goal.place
        assert set(goal.rows) <= set(figures[title]), title
        on_gpu = ("reserved in vain", "gather exposed", "reduce exposed")
        assert column in on_gpu or all(column in figures[title][row] for row in goal.rows)


def test_sizes_fit_what_is_free():
    for device, host, wide, huge in ((139, 110, 4, 16), (24, 64, 1, 10), (8, 4, 1, 1), (40, 500, 2, 16)):
        sizes = gpu.scale_for(device * gpu.GB, host * gpu.GB)
        assert sizes.wide[0] == wide and sizes.huge[0] == huge
        least = 1  # block, also where it may not fit
        assert 5 * 1.6 * 0.2 * sizes.wide[0] * 4 < device or wide == least
        assert 16e-9 * gpu.parameters(sizes.at("huge")) < host or huge == least
    large = gpu.scale_for(139 * gpu.GB, 110 * gpu.GB).at("huge")
    assert 3.0e9 < gpu.parameters(large) < 7e9, "the size that the goal names"
    model = gpu.filled(TINY)
    assert all(param.isfinite().all() and param.std() > 0.001 for param in model.parameters())
    assert gpu.parameters(TINY) == sum(p.numel() for p in model.parameters())


def _figures(factor):
    """Figures that meet each goal of a GPU by a factor."""
    figures: dict[str, Any] = defaultdict(lambda: defaultdict(dict))
    for goal in OF_GPU:
        _, title, column = goal.place
        for base in goal.over:
            figures[title][base][column] = 100.0
        for row in goal.rows:
            figures[title][row].setdefault(column, goal.limit * factor * (100.0 if goal.over else 1.0))
    return {"gpu": figures}


def test_verdicts():
    assert all(verdict.met for verdict in verdicts(_figures(0.99), OF_GPU))
    missed = [verdict for verdict in verdicts(_figures(1.01), OF_GPU) if not verdict.met]
    assert {verdict.goal.name for verdict in missed} >= {"G1", "G2", "G3", "order"}
    assert not any(verdict.met for verdict in verdicts({}, OF_GPU))
    goal = Goal("G", "share", 0.5, ("gpu", "t", "c"), rows=("one", "other"))
    for figures, told in (
        ({"one": 0.25, "other": 0.5}, "met    G: share: at most 0.500, one 0.250, other 0.500"),
        ({"one": 0.25}, "open   G: share: at most 0.500, one 0.250 (without other)"),
        ({"one": 0.75}, "missed G: share: at most 0.500, one 0.750 (without other)"),
        ({}, "open   G: share: at most 0.500, not measured"),
    ):
        table = {row: {"c": value} for row, value in figures.items()}
        assert str(*verdicts({"gpu": {"t": table}}, [goal])) == told


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_says_what_it_needs():
    outcome = python("-m", "benchmarks.gpu", code=2)
    assert not outcome.out
    assert outcome.err.strip().splitlines()[-1].startswith("benchmarks.gpu needs a CUDA device")


HOST, BACKWARD = 100, 101  # threads


class _Trace:
    """Writes events as the profiler does: an annotation, what it calls, and what the GPU does later."""

    def __init__(self):
        self.events = [{"ph": "M", "name": "process_name", "pid": 0, "args": {"name": "python"}}]
        self._numbers = itertools.count(1)

    def note(self, name, start, stop):
        self._add("user_annotation", name, start, stop, tid=HOST)

    def call(self, name, at, **args):
        self._add("cuda_runtime", name, at, at + 1, tid=args.pop("tid", HOST), args=args)

    def work(self, stream, start, stop, launched, kind="kernel", tid=HOST):
        number = next(self._numbers)
        self.call("cudaLaunchKernel", launched, correlation=number, tid=tid)
        args = {"device": 0, "stream": stream, "correlation": number}
        self._add(kind, "some_kernel", start, stop, tid=stream, args=args)

    def _add(self, kind, name, start, stop, tid, args=None):
        event = {"ph": "X", "cat": kind, "name": name, "pid": 1, "tid": tid, "ts": start, "dur": stop - start}
        self.events.append({**event, "args": args or {}})


def _trace():
    trace = _Trace()
    for at, (purpose, stream) in enumerate({COMPUTE: 7, "gather": 20, "reduce": 24}.items()):
        trace.note(STREAM + purpose, 10 * at, 10 * at + 5)
        trace.work(stream, 10 * at + 6, 10 * at + 8, launched=10 * at + 2)
    return trace


def test_shares_beside_computation():
    trace = _trace()
    trace.note(STEP, 100, 200)
    trace.work(7, 300, 340, launched=110)
    trace.work(7, 335, 350, launched=111, tid=BACKWARD)  # joined with the one before
    trace.work(7, 400, 410, launched=112)
    trace.work(20, 290, 310, launched=120, kind="gpu_memcpy")  # half of it beside
    trace.work(20, 345, 405, launched=121, kind="gpu_memcpy")  # 5 and 5 of 60
    trace.work(24, 500, 520, launched=122)  # alone
    trace.work(20, 300, 399, launched=230)  # in no step
    times = read(trace.events)
    assert times.busy(COMPUTE) == 60 and times.busy("gather") == 80 and times.busy("reduce") == 20
    assert times.beside("gather") == pytest.approx(20 / 80)
    assert times.beside("reduce") == 0 == times.beside("nothing of the kind")


def test_waits_by_step_and_streams_without_a_name():
    trace = _trace()
    for start in (100, 200, 300):
        trace.note(STEP, start, start + 50)
    for at in (110, 310, 320):
        trace.call("cudaStreamSynchronize", at, tid=BACKWARD if at == 310 else HOST)
    trace.call("cudaDeviceSynchronize", 170)  # between steps
    trace.call("cudaStreamWaitEvent", 115)  # which the host does not wait for
    trace.work(31, 400, 440, launched=112)
    times = read(trace.events)
    assert times.waits == [1, 0, 2] and times.busy("stream 31") == 40
    nameless = [event for event in trace.events if not event["name"].startswith(STREAM)]
    with pytest.raises(ValueError, match=r"which of its streams \[31\] computes"):
        read(nameless)
