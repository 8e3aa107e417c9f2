"""The benchmarks run, at sizes that measure nothing, and their meters and judgements are right."""

from __future__ import annotations

import importlib.util
import json
import math
import mmap
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from bed.paths import ROOT

sys.path.insert(0, str(ROOT))  # benchmarks are not installed

from benchmarks import accumulation, counts, harness
from benchmarks.__main__ import questions, run
from benchmarks.goals import GOALS, Goal, judged
from benchmarks.harness import Question, Settings, as_markdown, compare, run_ranks
from benchmarks.implementations import SHARED
from benchmarks.meters import received, resident, resident_on_host, tensors
from benchmarks.models import lora

ON_MESHES = ("tiny with tensor parallelism", "tiny accumulated over replicas")
STEPS = ("tiny", "tiny on 4 ranks", *ON_MESHES, "4 blocks")
HOST = ("barrier", "4 parameters", "12 parameters", "by cause")
CASES = (*STEPS, "experts", *HOST, "gloo", "fake group", accumulation.CASE)
FAKE = ("fake group of 2", "fake group of 8")
IMPL = ("ddp", "fsdp1", "fsdp2", "fsdp_wrap", *SHARED.values())
MB = 1 << 20


def _of_ways(question, table):
    """Whether a table tells of something else than implementations."""
    others: tuple[str, ...] = ("accumulation", "collectives", "counts", "latency", "compression", "travel")
    others += ("in_backward", "host_step", "recording")
    return question in others or "hooks" in table


@pytest.mark.slow
def test_ways_to_accumulate():
    rows = accumulation.ask(Settings())[accumulation.CASE]
    each, within, without = (rows[way] for way in accumulation.WAYS)
    assert (each["all-reduces"], within["all-reduces"], without["all-reduces"]) == (32, 8, 8)
    assert each["reduce-scatters"] == within["reduce-scatters"] == 4 * without["reduce-scatters"]
    assert within["waits, of all gradients"] == pytest.approx(0.5, abs=0.02)
    assert without["waits, of all gradients"] == pytest.approx(1.5, abs=0.02)


@pytest.mark.slow
def test_no_more_collectives_than_torchs():
    tables = counts.ask(Settings())
    assert set(tables) >= {"tensor parallelism", "experts", "pipeline"}
    for case, table in tables.items():
        each = 2 if case == "float8" else 1  # what subclasses gather travels apart from all else
        ours = [name for name in table if name in counts.THEIRS]
        assert len(table) == 2 * len(ours) > 0
        for name in ours:
            theirs = table[counts.THEIRS[name]]
            assert theirs["gathers"] and theirs["reduce-scatters"]
            for column, found in table[name].items():
                most = 1.01 * theirs[column] if column.endswith("KB") else each * theirs[column]
                assert found <= most, (case, name, column)


@pytest.mark.slow
def test_every_question_is_answered_and_shown(tmp_path):
    asked = questions()
    run(asked, tmp_path, Settings(IMPL, (*CASES, *FAKE), rounds=1))
    answers = json.loads((tmp_path / "performance" / "figures.json").read_text())
    page = (tmp_path / "performance.md").read_text()
    for question in asked:
        figures = answers[question.name]["figures"]
        assert f"## {question.title}\n" in page
        assert question.name in ("gpu", "small_states") or any(  # which need what is not everywhere
            question.chart in row for t in figures.values() for row in t.values()
        )
        for table in figures.values():
            assert as_markdown(table) in page
            assert set(table) <= set(IMPL) or _of_ways(question.name, table)
            assert all(math.isfinite(value) for row in table.values() for value in row.values())
        drawn = (tmp_path / "performance" / f"{question.name}.svg").exists()
        assert drawn == (importlib.util.find_spec("matplotlib") is not None and bool(figures))
    assert set(answers["step"]["figures"]["tiny"]) == set(IMPL)
    assert set(answers["step"]["figures"]["tiny on 4 ranks"]) == set(IMPL)
    for title in ON_MESHES:
        assert set(answers["step"]["figures"][title]) == set(IMPL) - {"ddp"}
    took = {name: {"s": answer["seconds"]} for name, answer in answers.items()}
    assert as_markdown({**took, "all": {"s": sum(row["s"] for row in took.values())}}) in page
    wire = answers["wire"]["figures"]["tiny"]["fsdp_wrap"]
    assert 1 <= wire["/ needed"] < 2
    assert wire["forward MB"] < wire["backward MB"] < wire["step MB"] * 1.01


def test_answers_given_before_stay_on_the_page_and_tables_measured_anew_beside_them(tmp_path, monkeypatch):
    there = dict.fromkeys(("torch", "python", "cores", "processor", "load"), 1)
    before = {
        "date": "then",
        "seconds": 1,
        "machine": there,
        "figures": {"gpt": {"fsdp_wrap": {"/ ddp": 7.25}}},
    }
    (tmp_path / "performance").mkdir()
    (tmp_path / "performance" / "figures.json").write_text(json.dumps({"step": before}))
    run([], tmp_path, Settings())
    page = (tmp_path / "performance.md").read_text()
    assert "## Time of a step" in page and "## Host time" not in page
    assert "| P1 | step of gpt, to DDP | 1 | **7.25** |  |  | no |" in page

    monkeypatch.setattr(harness, "machine", lambda: there)
    figures: Iterator[Any] = iter([{"a": {"x": {"c": 1}}, "b": {"x": {"c": 2}}}, {"b": {"x": {"c": 3}}}])
    question = Question("q", "Title", "About.", lambda settings: next(figures), "c", cases=("a", "b"))
    run([question], tmp_path, Settings())
    run([question], tmp_path, Settings(cases=("b",)))
    found = json.loads((tmp_path / "performance" / "figures.json").read_text())["q"]
    assert found["figures"] == {"a": {"x": {"c": 1}}, "b": {"x": {"c": 3}}}
    assert list(found["later"]) == ["b"] and found["later"]["b"]["date"].endswith("UTC")


def test_ratios_and_goals_are_judged_by_all_that_they_name():
    """Ratios are paired by round, and to the fastest form."""
    times = {"base": [1.0, 2.0, 4.0], "slow base": [9.0, 9.0, 9.0], "mine": [2.0, 4.0, 2.0]}
    table = compare(times, {"both": ("slow base", "base"), "absent": ("nobody",)}, ("s", 1.0))
    assert table["mine"] == {"s": 2.0, "min": 2.0, "max": 4.0, "/ both": 2.0, "medians / both": 1.0}
    row, other = GOALS[0].rows[:2]
    results = {"q": {"t": {row: {"c": 2.0}, other: {"c": 3.0}, "a": {"c": 4.0}, "b": {"c": 8.0}}}}
    goal = Goal("G", "", 0.6, ("q", "t", "c"), ("a", "b"), (row, other))
    assert goal.figure(results, row) == 0.5 and goal.figure(results, other) == 0.75
    assert goal.figure({}, row) is None
    assert judged({}).count("not measured") == len(GOALS)


def test_meters_of_memory():
    kept = []

    def act():
        torch.ones(8 * MB // 4)
        kept.append(torch.ones(4 * MB // 4))

    exact = tensors(act)
    assert (exact.peak, exact.kept) == (8 * MB, 4 * MB)

    def in_a_thread():
        thread = threading.Thread(target=act)
        thread.start()
        thread.join()

    resident(in_a_thread)  # the first thread's stack stays
    seen = [resident(in_a_thread) for _ in range(3)]  # other threads of the process may free memory meanwhile
    assert abs(statistics.median(lap.peak for lap in seen) - 8 * MB) < MB
    assert abs(statistics.median(lap.kept for lap in seen) - 4 * MB) < MB


def test_meter_of_the_host_counts_shared_pages_once():
    own, shared = run_ranks(_take_own_and_shared, 2)
    assert abs(own[0] - 2 * 24 * MB) < 2 * MB and abs(own[1] - 2 * 16 * MB) < 2 * MB
    assert abs(shared[0] - 24 * MB) < 2 * MB and abs(shared[1] - 24 * MB) < 2 * MB


def _take_own_and_shared():
    """What each rank takes, part of it for a while, and what both do."""
    kept: list[Any] = []

    def of_one_rank():
        kept.append(bytearray(b"1") * (16 * MB))
        for_a_while = bytearray(b"1") * (8 * MB)
        dist.barrier()  # both have it at once
        time.sleep(0.5)
        dist.barrier()
        del for_a_while

    def of_both():
        path: list[Any] = [None]
        if dist.get_rank() == 0:
            path[0] = f"/proc/{os.getpid()}/fd/{os.memfd_create('shared')}"
        dist.broadcast_object_list(path)
        with open(path[0], "r+b") as file:
            file.truncate(24 * MB)
            kept.append(mmap.mmap(file.fileno(), 24 * MB))
        kept[-1].write(b"1" * (24 * MB))
        dist.barrier()

    return [(lap.peak, lap.kept) for lap in map(resident_on_host, (of_one_rank, of_both))]


def test_meter_of_the_wire():
    with socket.create_server(("127.0.0.1", 0)) as server:
        with socket.create_connection(server.getsockname()) as sender, server.accept()[0] as receiver:
            before = received()
            sender.sendall(bytes(100_000))
            receiver.recv(100_000, socket.MSG_WAITALL)
            assert received() - before == 100_000


def test_one_percent_of_the_adapted_model_trains():
    params = list(lora(16, 1).model().parameters())
    share = sum(p.numel() for p in params if p.requires_grad) / sum(p.numel() for p in params)
    assert 0.008 < share < 0.012
