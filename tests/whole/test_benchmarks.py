"""The benchmarks run, at sizes that measure nothing, and their meters and judgements are right."""

import importlib.util
import json
import math
import re
import statistics
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from bed.paths import ROOT
from bed.scripts import python

sys.path.insert(0, str(ROOT))  # benchmarks are not installed

from benchmarks import accumulation, counts, uneven
from benchmarks.__main__ import questions, run
from benchmarks.goals import GOALS, Goal, judged
from benchmarks.harness import Settings, as_markdown, compare
from benchmarks.implementations import SHARED
from benchmarks.meters import resident, tensors

ON_MESHES = ("tiny with tensor parallelism", "tiny accumulated over replicas")
CASES = (
    *("tiny", *ON_MESHES, "4 blocks", "barrier", "2 ranks", "4 parameters", "12 parameters", "gloo"),
    *("fake group", "fake group of 2", "fake group of 8", accumulation.CASE, *counts.CASES),
    *(uneven.AGREEMENT, "8 ranks: rows"),
)
IMPL = ("ddp", "fsdp_wrap", SHARED["fsdp_wrap"])
MB = 1 << 20


OF_WAYS = {"accumulation", "collectives", "counts", "latency", "compression", "travel"}
OF_WAYS |= {"in_backward", "host_step", "recording", "uneven", "floor"}
"""Questions whose tables tell of something else than implementations."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    run(questions(), folder, Settings(IMPL, CASES, rounds=1))
    return folder


@pytest.fixture
def answers(folder: Path) -> Any:
    return json.loads((folder / "performance" / "figures.json").read_text())


@pytest.mark.slow
def test_ways_to_accumulate(answers):
    rows = answers["accumulation"]["figures"][accumulation.CASE]
    every_time, within, without = (rows[way] for way in accumulation.WAYS)
    assert (every_time["all-reduces"], within["all-reduces"], without["all-reduces"]) == (32, 8, 8)
    assert every_time["reduce-scatters"] == within["reduce-scatters"] == 4 * without["reduce-scatters"]
    assert within["waits, of all gradients"] == pytest.approx(0.5, abs=0.02)
    assert without["waits, of all gradients"] == pytest.approx(1.5, abs=0.02)


@pytest.mark.slow
def test_no_more_collectives_than_torchs(answers):
    tables = answers["counts"]["figures"]
    assert set(tables) >= {"tensor parallelism", "experts", "pipeline"}
    for case, table in tables.items():
        factor = 2 if case == "float8" else 1  # what subclasses gather travels apart from all else
        ours = [name for name in table if name in counts.THEIRS]
        assert len(table) == 2 * len(ours) > 0
        for name in ours:
            theirs = table[counts.THEIRS[name]]
            assert theirs["gathers"] and theirs["reduce-scatters"]
            for column, value in table[name].items():
                most = 1.01 * theirs[column] if column.endswith("KB") else factor * theirs[column]
                assert value <= most, (case, name, column)


@pytest.mark.slow
def test_every_question_is_answered_and_shown(folder, answers):
    page = (folder / "performance.md").read_text()
    for question in questions():
        figures = answers[question.name]["figures"]
        assert (f"## {question.title}\n" in page) == bool(figures), "what cannot be answered here is left out"
        assert question.name in ("gpu", "small_states") or any(  # which need what is not everywhere
            question.chart in row for t in figures.values() for row in t.values()
        )
        for table in figures.values():
            assert as_markdown(table) in page
            assert set(table) <= set(IMPL) or question.name in OF_WAYS or "hooks" in table
            assert all(math.isfinite(value) for row in table.values() for value in row.values())
        drawn = (folder / "performance" / f"{question.name}.svg").exists()
        assert drawn == (importlib.util.find_spec("matplotlib") is not None and bool(figures))
    steps = answers["step"]["figures"]
    assert set(steps["tiny"]) == set(IMPL)
    assert all(set(steps[title]) == set(IMPL) - {"ddp"} for title in ON_MESHES)
    took = {name: {"s": answer["seconds"]} for name, answer in answers.items() if answer["figures"]}
    assert as_markdown({**took, "all": {"s": sum(row["s"] for row in took.values())}}) in page
    wire = answers["wire"]["figures"]["tiny"]["fsdp_wrap"]
    assert 1 <= wire["/ needed"] < 2
    assert wire["forward MB"] < wire["backward MB"] < wire["step MB"] * 1.01
    floor = answers["floor"]["figures"]["tiny"]
    parts = [floor[part]["ms"] for part in ("computing", "AdamW", "bytes")]
    assert floor["floor"]["ms"] == pytest.approx(sum(parts)) and min(parts) > 0  # of one round


@pytest.mark.slow
def test_names_that_are_none_are_refused():
    outcome = python("-m", *"benchmarks.step --impl ddp,fdsp".split(), code=2)
    assert "--impl: 'fdsp' unknown; there are ddp, " in outcome.err and not outcome.out


def test_questions_know_their_names():
    for question in questions():
        question.check(Settings(impl=tuple(question.implementations), cases=tuple(question.cases)))
        assert question.cases or question.implementations
        with pytest.raises(ValueError, match="--cases: 'none' unknown"):
            question.check(Settings(cases=(*question.cases, "none")))


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


def test_goals_are_printed_by_a_command_and_stand_on_no_page():
    lines = python("-m", "benchmarks.goals", folder=ROOT).out.splitlines()
    assert lines[0].startswith("| goal |") and len(lines) == len(GOALS) + 4
    told = re.fullmatch(r"(\d+) of (\d+) goals are met, (\d+) were not measured", lines[-1])
    assert told and int(told[2]) + int(told[3]) == len(GOALS)
    assert int(told[1]) == sum(line.endswith("| yes |") for line in lines)
    for page in ("README.md", "docs/index.md", "docs/performance.md"):
        assert not re.search(r"\bgoals?\b", (ROOT / page).read_text("utf-8")), page


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
