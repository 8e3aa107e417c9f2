"""What `python -m benchmarks.gpu` does without a GPU: its measures at tiny sizes, its sizes, its verdicts."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
from torch import nn

from bed.paths import ROOT
from bed.scripts import python

sys.path.insert(0, str(ROOT))  # benchmarks are not installed

from benchmarks import gpu
from benchmarks.goals import GOALS, Goal, verdicts
from benchmarks.harness import Settings, run_fake, run_group
from benchmarks.models import TINY, Block

OF_GPU = [goal for goal in GOALS if goal.place[0] == "gpu"]


@pytest.mark.slow
def test_every_way_through_it_is_taken_on_a_cpu():
    figures = gpu.ask_dry(Settings(rounds=1))
    assert set(figures) == {
        *(f"memory, fake group of {ranks}" for ranks in gpu.FAKE_RANKS),
        *("48 small units", "width 4096 in bf16", "offload", "overlap", "overlap, offload"),
    }
    assert all(
        math.isfinite(value) for table in figures.values() for row in table.values() for value in row.values()
    )
    for goal in OF_GPU:  # what is judged has its row; columns that only a GPU fills aside
        _, title, column = goal.place
        assert set(goal.rows) <= set(figures[title]), title
        on_gpu = ("reserved in vain", "gather exposed", "reduce exposed")
        assert column in on_gpu or all(column in figures[title][row] for row in goal.rows)


def test_measures_run_on_a_cpu():
    memory = run_fake(_memory, 2)
    assert memory["peak MB"] > 0 and memory["blocks"] == pytest.approx(memory["peak MB"] * 1e6 / _block())
    found = run_group(_alone, 1, "gloo", 1, ())
    assert set(found["speed"]) == {"plain", "fsdp2", "fsdp_wrap"}
    for name, each in found["offload"].items():
        assert len(each["s"]) == 1 and each["s"][0] > each["least"] > 0, name
    assert set(found["overlap"]) == {"waits of the host"}


def _block():
    block = next(module for module in TINY.model().modules() if isinstance(module, Block))
    return sum(param.nbytes for param in block.parameters())


def _memory():
    return gpu.measure_memory(TINY, "fsdp_wrap", "cpu")


def _alone():
    return {
        "speed": gpu.measure_speed(TINY, ["fsdp2", "fsdp_wrap"], "cpu", "bfloat16", 1),
        "offload": {name: gpu.measure_offload(name, TINY, "cpu", 1, 256) for name in gpu.OFFLOADED},
        "overlap": gpu.measure_overlap("fully_shard", TINY, "cpu", offload=False),
    }


def test_sizes_fit_what_is_free():
    for device, host, wide, huge in ((139, 110, 4, 16), (24, 64, 1, 10), (8, 4, 1, 1), (40, 500, 2, 16)):
        found = gpu.scale_for(device * gpu.GB, host * gpu.GB)
        assert found.wide[0] == wide and found.huge[0] == huge
        least = 1  # block, also where it may not fit
        assert 5 * 1.6 * 0.2 * found.wide[0] * 4 < device or wide == least
        assert 16e-9 * gpu.parameters(found.at("huge")) < host or huge == least
    large = gpu.scale_for(139 * gpu.GB, 110 * gpu.GB).at("huge")
    assert 3.0e9 < gpu.parameters(large) < 7e9, "the size that the goal names"


def test_models_are_filled_with_values():
    model = gpu.filled(TINY)
    assert all(param.isfinite().all() and param.std() > 0.001 for param in model.parameters())
    assert isinstance(model, nn.Module) and gpu.parameters(TINY) == sum(p.numel() for p in model.parameters())


def test_visits_are_merged():
    def visit(least, *times):
        return {"s": list(times), "least": least, "tokens": 10}

    visits = [
        ("a", visit(1.0, 2.0, 4.0)),
        ("b", visit(3.0, 6.0)),
        ("b", visit(2.0, 8.0)),
        ("a", visit(2.0, 5.0)),
    ]
    table = gpu.in_turn(visits, params=3_000_000_000)
    assert table["a"] == {"s": 4.0, "tokens/s": 2.5, "/ roofline": 2.0, "parameters, 1e9": 3.0}
    assert table["b"]["s"] == 7.0 and table["b"]["/ roofline"] == 3.5


def _figures(factor):
    """Figures that meet each goal of a GPU by a factor."""
    figures: dict[str, Any] = {}
    for goal in OF_GPU:
        _, title, column = goal.place
        for base in goal.over:
            figures.setdefault(title, {}).setdefault(base, {})[column] = 100.0
        for row in goal.rows:
            value = goal.limit * factor * (100.0 if goal.over else 1.0)
            figures.setdefault(title, {}).setdefault(row, {}).setdefault(column, value)
    return {"gpu": figures}


def test_verdicts():
    assert all(verdict.met for verdict in verdicts(_figures(0.99), OF_GPU))
    missed = [verdict for verdict in verdicts(_figures(1.01), OF_GPU) if not verdict.met]
    assert {verdict.goal.name for verdict in missed} >= {"G1", "G2", "G3", "order"}
    assert not any(verdict.met for verdict in verdicts({}, OF_GPU))
    goal = Goal("G", "share", 0.5, ("gpu", "t", "c"), rows=("one", "other"))
    tables = [{"one": {"c": 0.25}, "other": {"c": 0.5}}, {"one": {"c": 0.25}}, {"one": {"c": 0.75}}, {}]
    told = [str(*verdicts({"gpu": {"t": table}}, [goal])) for table in tables]
    assert told == [
        "met    G: share: at most 0.500, one 0.250, other 0.500",
        "open   G: share: at most 0.500, one 0.250 (without other)",
        "missed G: share: at most 0.500, one 0.750 (without other)",
        "open   G: share: at most 0.500, not measured",
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_it_says_what_it_needs():
    found = python("-m", "benchmarks.gpu", code=2)
    assert not found.out
    assert found.err.strip().splitlines()[-1].startswith("benchmarks.gpu needs a CUDA device")
