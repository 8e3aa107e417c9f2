"""Collectives that do not complete where the host does not wait: who is told, when, and what it costs.

Ranks are threads with simulated accelerators, whose hosts run ahead of the other ranks.
"""

import contextlib
import gc
import json
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch import nn

from bed.accelerator import Simulation, run_simulated
from bed.patience import NEVER, until
from fronts import either_front
from fsdp_wrap._comm.positions.group import GroupPositions, positions_of
from fsdp_wrap._comm.positions.host_log import HostLog, LogEntry
from fsdp_wrap._comm.positions.log_files import LogFiles
from fsdp_wrap._comm.watching import bulletin, monitor, watch
from stream_programs import batch, wrapped

LIMIT = 1.0  # seconds


class Clock:
    """The clock of monitors. It stands until a test lets time pass, so slow machines miss no stage."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(watch, "time_limit", lambda *_: timedelta(seconds=LIMIT))
    for name, value in {"time": made, "_PACE": 0.01, "_REST": 0.02, "_ASK_PACE": 0.02}.items():
        monkeypatch.setattr(monitor, name, value)
    return made


@pytest.fixture
def hosts_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = lambda files, name, rank, ranks: HostLog.unshared(rank, ranks)  # noqa: E731
    monkeypatch.setattr(LogFiles, "open", alone)


def warmed_up(rank: int, device: Simulation, front: str = "orig") -> nn.Module:
    """Returns a model that has trained, and lets the host run ahead from now on."""
    model = wrapped(front)
    for step in range(2):
        model(batch(rank, step)).square().sum().backward()
        model.zero_grad()
    dist.barrier()
    device.runs_ahead = True
    return model


def here() -> GroupPositions:
    assert dist.group.WORLD is not None
    return positions_of(dist.group.WORLD)


def run_two(program: Callable[[int, Simulation, Callable[[], object]], Any]) -> tuple[list[str], list[Any]]:
    """Runs a program on two ranks; returns what was warned of, and what the program returned on each.

    It gets the rank, its accelerator, and what waits for the other rank.
    """
    together, returned = threading.Barrier(2, timeout=NEVER), [None, None]

    def body(rank: int, device: Simulation) -> None:
        returned[rank] = program(rank, device, together.wait)
        together.wait()
        device.runs_ahead = False

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_simulated(2, body)
    return [str(warning.message) for warning in caught if "time limit" in str(warning.message)], returned


def wait_until_late(clock: Clock, device: Simulation) -> None:
    clock.now += 0.5 * LIMIT
    until(lambda: device.monitor._reported)


def has_seen_all(device: Simulation) -> bool:
    """Tells whether the monitor has taken over all work, and found it completed."""
    return not device.monitor._noted and device.monitor._rests


def refused(model: nn.Module, rank: int) -> str:
    until(lambda: here().verdict)
    with pytest.raises(RuntimeError) as failed:
        model(batch(rank, 9))
    return str(failed.value)


@either_front
def test_a_rank_that_does_not_come_is_reported_by_unit(front, caplog, clock):
    """First in a warning, while it may still come; then in the log, and by the next collective's error."""

    def program(rank, device, meet):
        model = warmed_up(rank, device, front)
        if rank == 0:
            model(batch(rank, 2))
            wait_until_late(clock, device)
            assert here().verdict is None
            clock.now += LIMIT
            return refused(model, rank)

    late, (told, _) = run_two(program)
    assert len(late) == 1, late
    for text in (late[0], told, caplog.text):
        assert "has not completed (on the gather lane; number " in text
        assert "gathers unit '0' (forward of iteration 3)" in text or "gathers the root unit" in text
        assert "the group's time limit is 1.0 s\nWhere the ranks stand:" in text
        assert "rank 0 (this one): in or after" in text and "rank 1 (alive): in or after" in text
    first = [line for line in told.splitlines() if line.startswith("  rank 1")]
    assert "(forward of iteration 3)" not in first[0]


def test_a_rank_that_comes_after_all(caplog, clock):
    def program(rank, device, meet):
        model = warmed_up(rank, device)
        if rank == 0:
            model(batch(rank, 2))
            wait_until_late(clock, device)
            clock.now += LIMIT
            until(lambda: here().verdict)
            meet()
        else:
            meet()
            model(batch(rank, 2))
        until(lambda: here().verdict is None)
        meet()

    assert run_two(program)[0] and "time limit" in caplog.text


def test_ranks_that_run_different_units(clock):
    """The second rank raises at once. The first has gone on, and raises as well."""

    def program(rank, device, meet):
        model = warmed_up(rank, device, "composable")
        if rank == 0:
            model[0](batch(rank, 2))
        meet()
        if rank == 0:
            clock.now += 0.1 * LIMIT
            return refused(model[2], rank)
        with pytest.raises(RuntimeError) as failed:
            model[1](batch(rank, 2))
        return str(failed.value)

    for text in run_two(program)[1]:
        assert "rank 0 gathers unit '0'" in text and "rank 1 gathers unit '1'" in text
        assert "must run the same units in the same order" in text


@pytest.mark.usefixtures("hosts_apart")
def test_ranks_of_other_hosts_that_run_different_units(clock):
    """Their gathers differ in size, so neither ends, and each looks for what the other did."""

    def program(rank, device, meet):
        model = warmed_up(rank, device, "composable")
        (model if rank else model[0])(batch(rank, 2))
        meet()
        if rank == 0:
            clock.now += 0.2 * LIMIT
        return refused(model[1], rank)

    did = ["rank 0 gathers unit '0'", "rank 1 gathers the root unit"]
    for rank, text in enumerate(run_two(program)[1]):
        assert "ranks communicate for different units: " in text and "as collective number " in text
        assert text.index(did[rank]) < text.index(did[1 - rank]), text


@pytest.mark.usefixtures("hosts_apart")
def test_a_rank_of_another_host_that_waits_for_nothing_answers(clock):
    def program(rank, device, meet):
        model = warmed_up(rank, device)
        if rank == 0:
            model(batch(rank, 2))
            wait_until_late(clock, device)
            board = bulletin.Bulletin(here())
            until(lambda: "waits for nothing" in board.look([1]))
            clock.now += LIMIT
            return refused(model, rank)

    warned, (told, _) = run_two(program)
    assert warned and "rank 1 (another host): waits for nothing; last collective, number " in told


def test_training_goes_unnoticed(caplog, clock):
    """No warning, no report, no thread that outlives the groups, and no model is kept by one that sleeps."""

    def program(rank, device, meet):
        model = warmed_up(rank, device)
        for step in range(2):
            until(lambda: has_seen_all(device))
            meet()
            if rank == 0:
                clock.now += 10 * LIMIT  # what was not seen to have completed would be late
            meet()
            model(batch(rank, step)).square().sum().backward()
        until(lambda: has_seen_all(device))
        reference = weakref.ref(model)
        meet()
        del model
        gc.collect()
        return reference() is None

    before = {thread.ident for thread in threading.enumerate()}
    assert run_two(program) == ([], [True, True]) and not caplog.text
    gc.collect()
    until(lambda: {thread.ident for thread in threading.enumerate()} <= before)


class Event:
    error: Exception | None = None

    def __init__(self, done: bool = False) -> None:
        self.done, self.asked = done, 0

    def query(self) -> bool:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return self.done


def somewhere() -> Any:
    made = mock.Mock(verdict=None, elsewhere=(), lives=True)
    made.positions = made
    made.latest.return_value = LogEntry(7, 0, b"gathers unit 'a'", 2, 0)
    made.limit.return_value = LIMIT
    made.time_left.side_effect = lambda waited: LIMIT - waited
    made.is_late.return_value = False
    return made


@pytest.fixture
def one() -> Iterator[tuple[monitor.Monitor, Any, Any]]:
    accelerator, group = mock.Mock(monitor=None), somewhere()
    made = monitor.monitor_of(accelerator)
    yield made, group, accelerator
    group.lives = False
    if made._thread is not None:
        made._wakes.put(None)
        until(lambda: made._thread is None)
    assert all(call == mock.call(7) for call in group.require_living.call_args_list)


def test_few_events_are_asked(one):
    made, group, _ = one
    events = [Event(done=number < 700) for number in range(1000)]
    nothing = LogEntry(0, 0, b"", 0, 0)
    lane = monitor.deque(monitor._Issued(event, 0.0, "gather", group, nothing) for event in events)
    monitor._drop_done(lane)
    assert len(lane) == 300 and lane[0].event is events[700]
    assert sum(event.asked for event in events) <= 12
    before = events[700].asked
    monitor._drop_done(lane)
    assert len(lane) == 300 and events[700].asked == before + 1
    assert sum(event.asked for event in events) <= 13


def test_a_thread_that_has_nothing_to_look_after_sleeps(one, monkeypatch):
    made, group, accelerator = one
    monkeypatch.setattr(monitor, "_REST", 60.0)
    assert made._thread is None, "before anything was issued there is none"
    event = Event()
    made.note(event, "gather", group)
    until(lambda: event.asked > 2)
    assert accelerator.prepare_to_ask.call_count == 1
    event.done = True
    until(lambda: made._rests)
    thread, asked = made._thread, event.asked
    time.sleep(0.1)
    assert event.asked == asked and made._thread is thread
    again = Event()
    made.note(again, "reduce", group)
    until(lambda: again.asked > 2)
    assert made._thread is thread and accelerator.prepare_to_ask.call_count == 1
    again.error = RuntimeError("CUDA error: the group was aborted")
    until(lambda: made._rests)
    group.lives = False
    made._wakes.put(None)  # as when the group is collected
    until(lambda: not thread.is_alive())
    assert made._thread is None and not made._watched
    group.lives = True
    last = Event(done=True)
    made.note(last, "gather", group)
    until(lambda: last.asked)


def test_a_forked_process_watches_nothing_of_its_parents(one):
    made, group, _ = one
    event = Event()
    made.note(event, "gather", group)
    until(lambda: event.asked)
    child = os.fork()
    if child == 0:  # only to look, and to end at once
        fresh = made._thread is None and not made._pending and not made._noted and made._rests
        other = Event(done=True)
        made.note(other, "gather", group)
        with contextlib.suppress(TimeoutError):
            until(lambda: other.asked)
        os._exit(0 if fresh and other.asked else 1)
    assert os.waitpid(child, 0)[1] == 0
    asked = event.asked
    until(lambda: event.asked > asked)
    event.done = True


def test_torchs_flight_recorder_is_asked(monkeypatch):
    entry = {
        "profiling_name": "nccl:all_gather",
        "collective_seq_id": 5,
        "process_group": ["0", "default_pg"],
    }
    active = {**entry, "state": "started", "input_sizes": [[3]]}
    done = {**entry, "state": "completed"}

    def told(records: str | bytes) -> str:
        with monkeypatch.context() as patch:
            patch.setattr(watch, "dump_flight_records", lambda *_: records)
            return watch.flight_records()

    for nothing in (json.dumps({"entries": []}), json.dumps({"entries": [done]}), b"not JSON"):
        assert told(nothing) == ""
    lines = told(json.dumps({"entries": [done] + 6 * [active]})).splitlines()
    assert lines[1] == "Torch's flight recorder has not seen complete:" and lines[-1] == "  2 more"
    assert lines[2] == "  nccl:all_gather of [[3]], number 5 of group 0 default_pg: started"
    assert len(lines) == 7
    watch.flight_records()  # torch's own


def test_a_store_that_has_gone_is_not_asked_again():
    store = mock.Mock(spec=["check"])  # it has one connection
    store.check.side_effect = dist.DistNetworkError("connection reset")
    there: Any = mock.Mock(agreement=mock.Mock(store=store))
    board = bulletin.Bulletin(there)
    assert not board.asked and not board.asked
    assert store.check.call_count == 1
