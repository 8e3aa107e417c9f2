"""Activity of a GPU by stream, read from a trace of `torch.profiler`.

A trace tells streams by numbers of its own. So before the steps something small is launched on each stream,
within an annotation that names it (`named_streams`). Steps are annotated as well (`STEP`): a launch within
one, by whichever thread, belongs to it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

STEP, STREAM, COMPUTE = "step", "stream of ", "compute"
_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_CALLS = ("cuda_runtime", "cuda_driver")
_WAITS = ("StreamSynchronize", "EventSynchronize", "DeviceSynchronize", "CtxSynchronize")
"""Names of calls that make the host wait; copies that block call the first."""

Span = tuple[float, float]
"""Start and end, microseconds."""


@dataclass(frozen=True)
class Timeline:
    """Launches within the steps.

    Attributes:
        spans: Intervals of work on the GPU by the purpose of a stream: in order, overlaps joined.
        waits: How often the host waited for the GPU in each step.
    """

    spans: Mapping[str, Sequence[Span]]
    waits: Sequence[int]

    def busy(self, purpose: str) -> float:
        """Microseconds of work on a stream."""
        return _length(self.spans.get(purpose, ()))

    def beside(self, purpose: str) -> float:
        """Returns the share of a stream's work during which the GPU computed as well; 0 if there was none."""
        own, compute = self.spans.get(purpose, ()), self.spans.get(COMPUTE, ())
        return _length(_common(own, compute)) / _length(own) if own else 0.0


def record(step: Callable[[], object], steps: int, streams: Mapping[str, Any]) -> Timeline:
    """Profiles some steps, none of which the host waits for at its end.

    Args:
        step: Takes one.
        steps: How many.
        streams: By purpose; none on a CPU, where only calls of the host are seen.
    """
    activities = [ProfilerActivity.CPU]
    device = torch.device("cpu")
    if torch.cuda.is_available():
        activities.append(ProfilerActivity.CUDA)
        device = torch.device("cuda", torch.cuda.current_device())
    with profile(activities=activities) as profiler:
        named_streams(streams, device)
        for _ in range(steps):
            with record_function(STEP):
                step()
        if device.type == "cuda":
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        return read(json.loads(path.read_text())["traceEvents"])


def named_streams(streams: Mapping[str, Any], device: torch.device) -> None:
    """Launches something on each stream within an annotation that tells its purpose."""
    for purpose, stream in streams.items():
        made = torch.ones(256, device=device)
        if device.type == "cuda":
            torch.cuda.synchronize()  # nothing orders the streams here
        with record_function(STREAM + purpose), stream or nullcontext():
            made.add_(1)
        if device.type == "cuda":
            torch.cuda.synchronize()


def read(events: Iterable[Mapping[str, Any]]) -> Timeline:
    """Reads the events of a Chrome trace.

    Raises:
        ValueError: If the GPU worked in a step, and no annotation tells which stream computes.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    calls = [event for event in complete if event.get("cat") in _CALLS]
    launches = {
        event["args"]["correlation"]: event for event in calls if "correlation" in event.get("args", {})
    }
    notes = [event for event in complete if event.get("cat") == "user_annotation"]
    steps = sorted(_span(event) for event in notes if event["name"] == STEP)
    names = [event for event in notes if event["name"].startswith(STREAM)]
    purposes: dict[int, str] = {}
    work: dict[int, list[Span]] = {}
    for event in complete:
        launch = launches.get(event.get("args", {}).get("correlation"))
        if event.get("cat") not in _ON_GPU or launch is None:
            continue
        stream = event["args"]["stream"]
        for name in names:
            if launch.get("tid") == name.get("tid") and _holds(_span(name), launch["ts"]):
                purposes[stream] = name["name"].removeprefix(STREAM)
        if any(_holds(step, launch["ts"]) for step in steps):
            work.setdefault(stream, []).append(_span(event))
    if work and COMPUTE not in purposes.values():
        raise ValueError(f"the trace does not tell which of its streams {sorted(work)} computes")
    spans: dict[str, list[Span]] = {}
    for stream, of_stream in work.items():
        spans.setdefault(purposes.get(stream, f"stream {stream}"), []).extend(of_stream)
    waits = [event["ts"] for event in calls if event["name"].endswith(_WAITS)]
    return Timeline(
        {purpose: _joined(of_purpose) for purpose, of_purpose in spans.items()},
        [sum(_holds(step, wait) for wait in waits) for step in steps],
    )


def _span(event: Mapping[str, Any]) -> Span:
    return float(event["ts"]), float(event["ts"]) + float(event.get("dur", 0))


def _holds(span: Span, moment: float) -> bool:
    return span[0] <= moment <= span[1]


def _joined(spans: Iterable[Span]) -> list[Span]:
    """Sorts intervals, and joins those that overlap."""
    result: list[Span] = []
    for start, stop in sorted(spans):
        if result and start <= result[-1][1]:
            result[-1] = result[-1][0], max(stop, result[-1][1])
        else:
            result.append((start, stop))
    return result


def _common(some: Sequence[Span], others: Sequence[Span]) -> list[Span]:
    """Returns the intersection of two lists of intervals, each in order and without overlaps."""
    result, at = [], 0
    for start, stop in some:
        while at < len(others) and others[at][1] <= start:
            at += 1
        for other in others[at:]:
            if other[0] >= stop:
                break
            result.append((max(start, other[0]), min(stop, other[1])))
    return result


def _length(spans: Iterable[Span]) -> float:
    return sum(stop - start for start, stop in spans)
