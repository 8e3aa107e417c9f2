"""Timelines: what a trace holds, beside events counted apart; who is named as late; clocks; pictures."""

from __future__ import annotations

import gzip
import json
import os
import sys
import threading
import time
from collections import Counter
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from time import perf_counter_ns
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import stream_programs as programs
from bed import ranks
from bed.accelerator import run_simulated
from bed.patience import until
from fronts import either_front, shard
from fsdp_wrap import CPUOffload, EventKind, record_events, timeline, uneven
from fsdp_wrap._comm import messages
from fsdp_wrap._core import Computing, Phase, everywhere
from fsdp_wrap.optim import step_in_backward
from fsdp_wrap.tools.timeline import Timeline, load, merge
from fsdp_wrap.tools.timeline import recorder as recorder_module
from fsdp_wrap.tools.timeline import recording as recording_module
from fsdp_wrap.tools.timeline.assemble import Assembler
from fsdp_wrap.tools.timeline.clocks import align
from fsdp_wrap.tools.timeline.recorder import TimelineRecorder
from fsdp_wrap.tools.timeline.records import Level, RankRecord, Slice, Transfer, TransferWait
from fsdp_wrap.wrap import ModuleWrapPolicy
from nets import WIDTH, Block, Net

STEPS = 2
CATEGORIES = ("gather", "reduce", "forward", "backward", "optimizer")


def _trained(front, **options):
    torch.manual_seed(0)
    model = shard(front, Net(), ModuleWrapPolicy({Block}), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step():
        model(torch.ones(2, WIDTH)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, step


def _checked(events):
    """Checks what a viewer of traces relies on; returns the slices by process.

    Slices of a track nest, arrows begin and end on slices, numbers are finite, tracks have names.
    """
    named = {(event["pid"], event["tid"]) for event in events if event["name"] == "thread_name"}
    slices = [event for event in events if event["ph"] == "X"]
    for track in {(event["pid"], event["tid"]) for event in slices}:
        assert track in named
        own = [event for event in slices if (event["pid"], event["tid"]) == track]
        ends: list[float] = []
        for event in sorted(own, key=lambda event: (event["ts"], -event["dur"])):
            end = event["ts"] + event["dur"]
            while ends and ends[-1] <= event["ts"] + 1e-4:  # a tenth of a nanosecond: how floats are printed
                ends.pop()
            assert not ends or end <= ends[-1] + 1e-3, f"{event} overlaps what it lies in"
            ends.append(end)
    flows: dict[Any, Any] = {}
    for event in events:
        assert event["ph"] in "MXCstf" and event.get("ts", 0) >= 0
        if event["ph"] in "stf":
            flows.setdefault(event["id"], []).append(event)
            beside = [one for one in slices if (one["pid"], one["tid"]) == (event["pid"], event["tid"])]
            under = (one["ts"] <= event["ts"] + 1e-3 <= one["ts"] + one["dur"] + 2e-3 for one in beside)
            assert any(under), f"{event} points at no slice"
    for flow in flows.values():
        assert [event["ph"] for event in flow] == ["s", "t", "f"]
        assert [event["ts"] for event in flow] == sorted(event["ts"] for event in flow)
    return {pid: [event for event in slices if event["pid"] == pid] for pid, _ in named}, flows


def _events_in(path):
    data = path.read_bytes()
    return json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["traceEvents"]


@pytest.mark.parametrize(("front", "memory"), [("orig", "0"), ("composable", "1")])
@ranks(2)
def test_a_trace_holds_what_events_tell(rank, world_size, tmp_path, front, memory):
    with mock.patch.dict(os.environ, FSDP_WRAP_SHARED_MEMORY=memory):
        model, step = _trained(front)
        step()
        with timeline(model) as recorded, record_events() as events:
            for _ in range(STEPS):
                step()
        assert not everywhere.see_spans
        recorded.save(tmp_path / f"{rank}.json.gz")
        processes, flows = _checked(_events_in(tmp_path / f"{rank}.json.gz"))
    assert [*processes] == [0, 1]
    way = "shared memory" if memory == "1" else "process group"
    for slices in processes.values():
        of = {what: [event["args"] for event in slices if event["cat"] == what] for what in CATEGORIES}
        for kind, what in ((EventKind.UNSHARD, "gather"), (EventKind.REDUCE, "reduce")):
            alike = [event for event in events if event.kind is kind]
            firsts = [span for span in alike if span.unit in span.together[:1] or not span.together]
            told = Counter(", ".join(event.together) or event.unit for event in firsts)
            assert told == Counter(event["units"] for event in of[what]) and sum(told.values()) > 1
            assert {(event["dtype"], event["way"]) for event in of[what]} == {("float32", way)}
        nbytes = sum(event.nbytes for event in events if event.kind is EventKind.UNSHARD)
        assert sum(event["bytes"] for event in of["gather"]) == nbytes
        units = Counter(event["unit"] for event in of["forward"])
        assert units == {"": STEPS, "blocks.0": STEPS, "blocks.1": STEPS}
        assert {event["unit"] for event in of["backward"]} >= {"blocks.0", "blocks.1"}
        assert len(of["optimizer"]) == STEPS
    transfers = len(of["gather"]) + len(of["reduce"])
    assert len(flows) == 2 * transfers, "each transfer was issued and used"
    for record in recorded.ranks:
        last = record.levels[-1]
        assert (last.unsharded, last.units, last.gradients) == (0, 0, 0)
        for most in ("unsharded", "gradients"):
            assert max(getattr(level, most) for level in record.levels) > 0
        assert len(record.passes) == STEPS and record.clock_error == record.offset == 0


class _Clock:
    """A rank's clock, on which only what a test says takes time.

    If it `meets`, it goes on to that of the last rank where its rank has waited.
    """

    def __init__(self, path, rank, world_size, meets):
        shared = torch.from_file(str(path), shared=True, size=2 * world_size, dtype=torch.int64)
        self._times, self._waits = shared.view(2, -1)
        self._rank, self._thread, self._meets = rank, threading.get_ident(), meets

    def __call__(self):
        if threading.get_ident() != self._thread:  # a work is completed
            self._meet()
        return self.sleep(1e-6)

    def sleep(self, seconds):
        self._times[self._rank] += round(seconds * 1e9)
        return int(self._times[self._rank])

    def sleep_when_awaited(self, seconds):
        """Sleeps once another rank waits for the next collective of this one."""
        until(lambda: bool(self._waits.max() > self._waits[self._rank]))
        self.sleep(seconds)

    def _meet(self):
        if self._meets:
            self._times[self._rank] = self._times.max()

    def patched(self):
        """Lets timelines go by this clock."""
        begin, end, patches = TimelineRecorder.span_begins, TimelineRecorder.span_ends, ExitStack()

        def begun(recorder, span):
            begin(recorder, span)
            self._waits[self._rank] += span.kind.name.startswith("AWAIT")

        def ended(recorder, span):
            if span.kind.name.startswith("AWAIT"):
                self._meet()
            end(recorder, span)

        patches.enter_context(mock.patch.multiple(TimelineRecorder, span_begins=begun, span_ends=ended))
        for module in (recorder_module, recording_module):
            patches.enter_context(mock.patch.object(module, "perf_counter_ns", self))
        return patches


@pytest.mark.parametrize("memory", ["0", "1"])
@ranks(2)
def test_a_slow_rank_is_named(rank, world_size, tmp_path, memory):
    clock = _Clock(tmp_path / "clocks", rank, world_size, meets=True)
    with mock.patch.dict(os.environ, FSDP_WRAP_SHARED_MEMORY=memory):
        model, step = _trained("composable", travel_together_bytes=0)
        step()
        if rank == 1:
            model.blocks[1].register_forward_pre_hook(lambda *_: clock.sleep_when_awaited(0.06))
        with clock.patched(), timeline(model) as recorded:
            for _ in range(STEPS):
                step()
    report = recorded.report()
    named = next(line for line in report.splitlines() if line.startswith("Rank "))
    assert named.startswith("Rank 1 holds up the others, each by 60.") and "in `blocks.1`" in named
    longest = next(line for line in report.splitlines() if line.startswith(("`", "The root")))
    assert "for rank 1, which comes last" in longest


class _SlowMessages:
    """Works that take 30 ms longer on all ranks, as over a slow link."""

    def __init__(self, work, clock):
        self._work, self._clock, self._notes = work, clock, []

    def wait(self, *limit):
        self._work.wait(*limit)
        self._clock.sleep(0.03)

    def is_completed(self):
        return self._work.is_completed()


@ranks(2)
def test_a_slow_link_is_no_slow_rank(rank, world_size, tmp_path):
    clock = _Clock(tmp_path / "clocks", rank, world_size, meets=False)

    def gather(*of_tensor):
        return _SlowMessages(gather_at_once(*of_tensor), clock)

    gather_at_once = messages.gather_at_once

    with mock.patch.dict(os.environ, FSDP_WRAP_SHARED_MEMORY="0"):
        model, step = _trained("composable", travel_together_bytes=0)
        step()
        slow = mock.patch.object(messages, "gather_at_once", gather)
        with slow, clock.patched(), timeline(model) as recorded:
            for _ in range(STEPS):
                dist.barrier()
                step()
    report = recorded.report()
    gathers = [line for line in report.splitlines() if "for its gather" in line]
    assert gathers and not any("comes last" in line for line in gathers)
    assert any("`blocks.0` waits 30.0 ms" in line and "prefetch it" in line for line in gathers)
    assert "(100%): 0.00 ms for late ranks, 150.0 ms" in report.splitlines()[1]


@ranks(2)
def test_files_of_ranks_are_merged(rank, world_size, tmp_path):
    model, step = _trained("orig")
    with timeline(model, tmp_path, gather=False) as recorded:
        step()
    assert [record.rank for record in recorded.ranks] == [rank]
    assert load(tmp_path / f"rank-{rank:05d}.json").ranks == recorded.ranks
    with timeline(model, tmp_path) as recorded:
        step()
    dist.barrier()
    if rank == 0:
        whole = merge([tmp_path], tmp_path / "all.json")
        assert whole.ranks == recorded.ranks == load(tmp_path / "all.json").ranks
        assert whole.report() == recorded.report()
        with pytest.raises(ValueError, match="two records of rank 0"):
            merge([tmp_path, tmp_path / "rank-00000.json"], tmp_path / "twice.json")
        alone = load(tmp_path / "rank-00001.json").report()
        assert "records are missing" in alone and "records are missing" not in whole.report()


@either_front
@ranks(1)
def test_recomputed_and_nested_units(rank, world_size, front, tmp_path):
    class Inner(Block):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    class Outer(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.inner = nn.Linear(WIDTH, WIDTH), Inner()

        def forward(self, x):
            return checkpoint(self.inner, self.stem(x), use_reentrant=False)

    torch.manual_seed(0)
    model = shard(front, Outer(), ModuleWrapPolicy({Inner}))
    with timeline(model) as recorded:
        model(torch.ones(2, WIDTH, requires_grad=True)).sum().backward()
    (record,) = recorded.ranks
    what = [(span.what, span.unit) for span in record.compute]
    assert what.count(("forward", "inner")) == 1 and what.count(("recompute", "inner")) == 1
    assert ("backward", "inner") in what and ("backward", "") in what
    recorded.save(tmp_path / "trace.json")
    _checked(_events_in(tmp_path / "trace.json"))


@ranks(1)
def test_models_by_name(rank, world_size):
    first, step_first = _trained("composable")
    second, step_second = _trained("orig")
    other, step_other = _trained("flat")
    with timeline({"actor": first, "critic": second}) as recorded:
        step_first()
        step_other()  # of which nothing is recorded
        step_second()
    (record,) = recorded.ranks
    units = {unit for transfer in record.transfers for unit in transfer.units}
    parts = ("", ".blocks.0", ".blocks.1")
    assert units == {f"{model}{rest}" for model in ("actor", "critic") for rest in parts}
    assert sum(span.what == "optimizer" for span in record.compute) == 2
    with timeline(nn.ModuleList([first, second])) as recorded:  # around roots
        step_second()
    forwards = {span.unit for span in recorded.ranks[0].compute if span.what == "forward"}
    assert forwards == {f"1{rest}" for rest in parts}


@ranks(1)
def test_wrong_uses(rank, world_size):
    with pytest.raises(ValueError, match=r"nothing in Net is wrapped.*pass timeline\(\)"), timeline(Net()):
        pass
    with pytest.raises(ValueError, match="nothing in no model"), timeline([]):
        pass
    model, step = _trained("orig")
    with timeline(model) as recorded:
        for ask in (recorded.report, lambda: recorded.save("nowhere"), lambda: recorded.plot("nowhere")):
            with pytest.raises(RuntimeError, match="nothing is recorded yet"):
                ask()
    assert "0.00 ms" in recorded.report()  # of a recording without a step
    with pytest.raises(ZeroDivisionError), timeline(model) as recorded:
        step()
        raise ZeroDivisionError
    assert not everywhere.see_spans and len(recorded.ranks) == 1 and recorded.ranks[0].transfers


def test_files_that_are_no_timelines(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no trace of a rank"):
        merge([tmp_path], tmp_path / "all.json")
    for number, text in enumerate(("", "[]", "{}", '{"traceEvents": []}', '{"fsdp_wrap": {"format": 1}}')):
        path = tmp_path / f"{number}.json"
        path.write_text(text)
        with pytest.raises(ValueError, match=r"is not a trace that fsdp_wrap.timeline\(\) has written"):
            load(path)
    path.write_text('{"fsdp_wrap": {"format": 99, "ranks": []}}')
    with pytest.raises(ValueError, match="format 99"):
        load(path)
    path.write_text('{"fsdp_wrap": {"format": 2, "ranks": [{"rank": 0}]}}')
    with pytest.raises(ValueError, match="is damaged.*host"):
        load(path)


@either_front
def test_on_an_accelerator(front, tmp_path):
    kept = {}

    def body(rank, device):
        model = programs.wrapped(front, cpu_offload=CPUOffload(offload_params=True))
        programs.train(model, rank, device, steps=1)
        with timeline(model) as recorded:
            programs.train(model, rank, device, steps=2)
        if rank == 0:
            kept["timeline"] = recorded

    run_simulated(2, body)
    recorded = kept["timeline"]
    recorded.save(tmp_path / "trace.json")
    processes, _ = _checked(_events_in(tmp_path / "trace.json"))
    assert [*processes] == [0, 1]
    for record in recorded.ranks:
        assert {sent.known for sent in record.transfers} == {"told"}
        assert {copy.what for copy in record.copies} == {"to device", "to host"}
        assert {span.what for span in record.host_side} == {"issue gather", "issue reduce", "wait for copies"}
        assert {span.what for span in record.compute} >= {"forward", "backward", "wait for gather"}
        for transfer in record.transfers:  # begins after the computation asked, and ends before its use
            assert transfer.waits and transfer.begin <= transfer.end <= transfer.waits[0].end
    assert "2 ranks on one host" in recorded.report()


def _meet(meeting, *_):
    if meeting:
        meeting.wait()


class _Sleeping(torch.optim.SGD):
    """Its updates take a while. The first of each three, of the last block, meets a backward, if any."""

    def __init__(self, meeting, params):
        super().__init__(params, lr=0.1)
        self._meeting, self._updates = meeting, 0

    def step(self, closure=None):
        self._updates += 1
        if self._updates % 3 == 1:
            _meet(self._meeting)
        time.sleep(0.03)
        super().step(closure)


@either_front
@ranks(1)
def test_updates_in_the_backward(rank, world_size, front, tmp_path):
    """In a thread they are a track of their own, beside the backward of other units; else part of it."""
    for in_thread in (True, False):
        net, meeting = Net(), threading.Barrier(2) if in_thread else None
        for block in net.blocks:
            block.up.register_full_backward_hook(lambda *_: time.sleep(0.03))
        net.blocks[0].up.register_full_backward_hook(partial(_meet, meeting))
        model = shard(front, net, ModuleWrapPolicy({Block}))
        step_in_backward(model, partial(_Sleeping, meeting), in_thread=in_thread)
        with timeline(model) as recorded:
            for _ in range(STEPS):
                model(torch.ones(2, WIDTH)).sum().backward()
        recorded.save(tmp_path / "trace.json")
        _checked(_events_in(tmp_path / "trace.json"))
        assert load(tmp_path / "trace.json").ranks == recorded.ranks
        (record,) = recorded.ranks
        within = [span for span in record.compute if span.what == "update"]
        updates = [*record.updates] if in_thread else within
        assert (not within) if in_thread else (not record.updates)
        assert sorted(update.unit for update in updates) == sorted(["", "blocks.0", "blocks.1"] * STEPS)
        assert all(update.end - update.begin >= 25_000_000 for update in updates)
        assert not any(span.what == "optimizer" for span in record.compute)
        told = [line for line in recorded.report().splitlines() if line.startswith("The host updates units")]
        assert len(told) == in_thread
        if in_thread:
            slow = [span for span in record.compute if (span.what, span.unit) == ("backward", "blocks.0")]
            beside = [update for update in updates if update.unit == "blocks.1"]
            for one, other in zip(beside, slow, strict=True):
                assert one.begin < other.end and other.begin < one.end
            assert int(told[0].split("%")[0].split()[-1]) >= 10


@either_front
@ranks(2)
def test_a_rank_without_a_batch_helps(rank, world_size, front, tmp_path):
    """Rank 1 has one batch of two, then none; its gathers and reductions lie in slices of its help."""
    model, step = _trained(front)
    step()
    with timeline(model) as recorded:
        for own in ((2, 1)[rank], (2, 0)[rank]):
            with uneven(model) as work:
                for _ in range(own):
                    model(torch.ones(2, WIDTH)).sum().backward()
                    time.sleep(0.02)
    assert work.passes_helped == (0, 2)[rank]
    trace, picture = tmp_path / f"{rank}.json", tmp_path / f"{rank}.svg"  # of each rank: all have the same
    recorded.save(trace)
    processes, _ = _checked(_events_in(trace))
    helping = [
        [event for event in processes[other] if event["name"] == "help other ranks"] for other in (0, 1)
    ]
    assert [len(events) for events in helping] == [0, 3]
    first, second = recorded.ranks
    assert len(first.passes) == len(second.passes) == 4
    sent = [
        Counter((transfer.kind, transfer.units, transfer.nbytes) for transfer in one.transfers)
        for one in recorded.ranks
    ]
    assert sent[0] == sent[1]
    assert Counter(span.unit for span in second.compute if span.what == "forward")["blocks.0"] == 1
    helped = [span for span in second.compute if span.what == "help other ranks"]
    within = [wait for transfer in second.transfers for wait in transfer.waits]
    assert sum(any(a.begin <= wait.begin < a.end for a in helped) for wait in within) > len(within) / 2
    report = recorded.report().splitlines()
    total = sum(span.end - span.begin for span in helped) / 1e6
    assert total > 0
    told = f"takes {total:.1f} ms in all: {total:.1f} ms on rank 1."
    assert f"Helping other ranks, without a batch, {told}" in report
    recorded.plot(picture)
    assert ">help other ranks<" in picture.read_text()


@ranks(1)
def test_units_are_ranges_of_the_profiler(rank, world_size):
    model, step = _trained("composable", travel_together_bytes=0)
    step()
    with torch.profiler.profile() as profiler:
        step()
    names = Counter(event.name for event in profiler.events() if event.name.startswith("fsdp_wrap: "))
    for unit in ("blocks.0", "blocks.1", "(root)"):
        assert names[f"fsdp_wrap: forward {unit}"] == 1
        assert names[f"fsdp_wrap: reduce {unit}"] == 1
    assert names["fsdp_wrap: backward blocks.0"] == names["fsdp_wrap: await gather blocks.0"] - 1 == 1
    step()
    assert not everywhere.see_spans  # as before: at no cost


def test_backwards_that_are_told_late_to_be_over():
    """A unit's backward ends where that of the next one begins, though it is told to be over only then."""
    root, first, second = object(), object(), object()
    recorder = TimelineRecorder({root: "", first: "0", second: "1"}, [], None)
    for unit in (root, second, first):
        recorder.computes(unit, Computing.BACKWARD)
    for unit in (second, first, root):
        recorder.backward_over(unit, Phase.BACKWARD)
    outer, before, after = Assembler(recorder, perf_counter_ns()).track.closed(perf_counter_ns())
    assert [outer.unit, before.unit, after.unit] == ["", "1", "0"]
    assert outer.begin <= before.begin < before.end <= after.begin < after.end <= outer.end


# clocks


def test_clocks_of_hosts_are_compared():
    store, size = dist.HashStore(), 5
    hosts, shifts = ["a", "a", "b", "b", "c"], [0, 0, 7 * 10**15, 7 * 10**15, -3 * 10**15]
    clocks: list[Any] = [None] * size

    def run(rank):
        clocks[rank] = align(store, rank, size, hosts[rank], lambda: perf_counter_ns() + shifts[rank])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert clocks[0][1:] == clocks[1][1:] == (0, 0)
    assert clocks[2] == clocks[3]
    for clock, shift in zip(clocks, shifts):
        assert abs(clock.offset + shift) <= clock.error < 10**15

    with pytest.raises(RuntimeError, match=r"only 1 of 2 ranks have opened fsdp_wrap.timeline\(\)"):
        align(dist.HashStore(), 0, 2, "host", patience=timedelta(seconds=0.01))


# reports, from records made by hand


def _record(rank, begin, waits, *, offset=0, kind=("gather", "forward"), way="", known="told"):
    """A record of one transfer of `blocks.0` and one step; times in milliseconds of rank 0."""

    def at(milliseconds):
        return round(milliseconds * 1e6) - offset

    waited = tuple(TransferWait("blocks.0", at(start), at(stop)) for start, stop in waits)
    done = waits[-1][1]
    transfer = Transfer(
        *(kind[0], ("blocks.0",), 0, kind[1], 2_000_000, ("float32",), way, (0, 1)),
        *(at(begin), at(begin), at(done), known, waited),
    )
    compute = (Slice("forward", "", at(0), at(60)), Slice("forward", "blocks.0", at(done), at(60)))
    levels = (Level(at(begin), 2_000_000, 1, 0), Level(at(60), 0, 0, 0))
    times = (at(0), at(100), (at(0),))
    peaks = {"blocks.0": 2_000_000}
    return RankRecord(rank, "h", "cpu", offset, 0, *times, compute, (), (), (transfer,), levels, peaks)


def test_waits_are_split_and_bytes_counted():
    """Rank 1 asks 10 ms after rank 0, whose clock is ahead by an hour; it has come 2 ms later."""
    whole = Timeline([_record(1, 12, [(12, 14)], offset=3600 * 10**9), _record(0, 2, [(2, 14)])])
    head, waits, named, *_ = whole.report().splitlines()
    assert head == "2 ranks on one host, 1 pass of 100.0 ms"
    split = "(7%): 5.0 ms for late ranks, 2.0 ms for transfers."
    assert waits == f"The computation waits 7.0 ms of a pass {split}"
    assert named == "Rank 1 holds up the others, each by 10.0 ms of a pass."
    row = " ".join(_row(whole))
    assert row == "blocks.0 2.0 0.00 0.00 7.0 5.0 2.0 0.5 2.00 1 (1 of 1, 10.0 ms)"
    assert "`blocks.0` waits 7.0 ms for its gather, 71% of it for rank 1, which comes last" in whole.report()


def _row(whole):
    return next(line.split() for line in whole.report().splitlines() if line.startswith("blocks.0"))


def test_advice_fits_the_cause():
    late = "`blocks.0` waits 12.0 ms for its gather, which is issued only when it is needed: prefetch it"
    shared = "which it copies from shared memory at 83.33 MB/s: send fewer bytes"
    how: Any
    for begin, advised, how in (
        (2, late, {}),
        (2, "prefetch it (backward_prefetch, or", {"kind": ("gather", "backward")}),
        (-20, "though that was prefetched: at 29.41 MB/s it takes longer", {}),
        (2, shared, {"way": "shared memory"}),
        (2, "send fewer bytes (a reduce dtype of 16 bits, no_sync)", {"kind": ("reduce", "backward")}),
    ):
        records = [_record(rank, begin, [(2, 14)], **how) for rank in range(2)]
        assert advised in Timeline(records).report()
        short = [_record(rank, begin, [(2, 2.04)], **how) for rank in range(2)]
        assert "`" not in Timeline(short).report()  # nothing is due
    bounds = [_record(rank, 2, [(12, 12.01)], known="at most") for rank in range(2)]
    assert _row(Timeline(bounds))[7].startswith(">=")


# pictures


def test_a_picture_of_a_pass(tmp_path):
    whole = Timeline([_record(1, 12, [(12, 14)]), _record(0, 2, [(2, 14)])])
    whole.plot(tmp_path / "step.svg")
    text = (tmp_path / "step.svg").read_text()
    labels = ("rank 0", "rank 1", "forward", "wait for a late rank", "gather")
    assert all(f">{label}<" in text for label in labels)
    assert ">backward<" not in text
    whole.plot(tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == text  # to be kept under version control

    with mock.patch.dict(sys.modules, {"matplotlib": None}), pytest.raises(ImportError) as caught:
        whole.plot(tmp_path / "step.svg")
    assert str(caught.value) == "a picture needs matplotlib: pip install matplotlib"
