"""Traces of a GPU are read rightly: by traces made here as the profiler writes them."""

from __future__ import annotations

import itertools
import sys

import pytest
import torch

from bed.paths import ROOT

sys.path.insert(0, str(ROOT))  # benchmarks are not installed

from benchmarks.timeline import COMPUTE, STEP, STREAM, read, record

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
    found = read(trace.events)
    assert found.busy(COMPUTE) == 60 and found.busy("gather") == 80 and found.busy("reduce") == 20
    assert found.beside("gather") == pytest.approx(20 / 80)
    assert found.beside("reduce") == 0 == found.beside("nothing of the kind")


def test_waits_by_step():
    trace = _trace()
    for start in (100, 200, 300):
        trace.note(STEP, start, start + 50)
    for at in (110, 310, 320):
        trace.call("cudaStreamSynchronize", at, tid=BACKWARD if at == 310 else HOST)
    trace.call("cudaDeviceSynchronize", 170)  # between steps
    trace.call("cudaStreamWaitEvent", 115)  # which the host does not wait for
    assert read(trace.events).waits == [1, 0, 2]


def test_streams_without_a_name_are_told_by_number():
    trace = _trace()
    trace.note(STEP, 100, 200)
    trace.work(31, 300, 340, launched=110)
    assert read(trace.events).busy("stream 31") == 40
    nameless = [event for event in trace.events if not event["name"].startswith(STREAM)]
    with pytest.raises(ValueError, match=r"which of its streams \[31\] computes"):
        read(nameless)


def test_a_real_trace_without_a_gpu():
    value = torch.rand(8)
    found = record(lambda: value.add_(1), 3, {COMPUTE: None})
    assert len(found.waits) == 3 and (torch.cuda.is_available() or (not found.spans and not any(found.waits)))
