"""`fit`: the largest batch and the fastest recipe that fit, found from a few plans, in the order of speed."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any
from unittest import mock

import pytest

from fsdp_wrap._core import nbytes_of
from fsdp_wrap.tools.fitting.fit import Fit, fit
from fsdp_wrap.tools.machines.presets import PRESETS, preset
from fsdp_wrap.tools.planning import Machine, Plan
from tools.made_plans import made_plan

fitting = import_module("fsdp_wrap.tools.fitting.fit")

GB = 10**9
MACHINE = Machine(
    name="one", flops={"float32": 1e12}, memory_bandwidth=1e11, bandwidth_within=1e10, bandwidth_between=1e9
)


def planned(places: Mapping[str, float], seconds: float | None = None, first: float = 0) -> Plan:
    """A plan that holds so many bytes at some places."""
    return made_plan([(name, "forward", nbytes) for name, nbytes in places.items()], seconds, first)


class Plans:
    """Stands for `plan`: the values that a setup got become a plan; counts how many."""

    def __init__(self, model: Callable[..., Plan]) -> None:
        self._model = model
        self.asked: list[dict[str, Any]] = []

    def __call__(self, setup: Any, ranks: int, **_: Any) -> Plan:
        self.asked.append({"ranks": ranks, **setup.keywords})
        return self._model(ranks=ranks, **setup.keywords)


def fitted(model: Callable[..., Plan], setup: Any, *arguments: Any, **options: Any) -> tuple[Fit, Plans]:
    plans = Plans(model)
    with mock.patch.object(fitting, "plan", plans):
        return fit(setup, *arguments, **options), plans


def takes_batch(*, batch=1): ...


def takes_all(*, batch=1, length=1, offload="none", accumulation=1): ...


def largest(model: Callable[..., Plan], limit: int, **values: Any) -> int:
    """Returns the largest batch that fits, by trying all."""
    batch = 0
    while model(batch=batch + 1, **values).needed_bytes <= limit:
        batch += 1
    return batch


def corner(*, batch, ranks=8, **_):
    """The peak lies elsewhere for large batches than for small ones."""
    places = {"start": 3 * GB + 1000 * batch, "middle": 10**9 + 7_000_001 * batch, "end": 5_000_000 * batch}
    return planned(places, seconds=0.1 + 0.01 * batch, first=10**8)


def test_the_largest_batch_is_found_where_the_peak_moves(tmp_path):
    report, plans = fitted(corner, takes_batch, device_memory="8GB", machine=MACHINE)
    (choice,) = report.choices
    assert choice.batch == largest(corner, 8 * GB) == 999
    assert choice.fits and report.best is choice
    assert choice.peak_bytes == corner(batch=999).peak_bytes
    assert report.plans == len(plans.asked) == 3, "two batches, and the answer"
    assert choice.samples_per_second == pytest.approx(999 * 8 / (0.1 + 9.99))
    told = json.loads(report.to_json(tmp_path / "fit.json"))
    assert told == json.loads((tmp_path / "fit.json").read_text())
    assert told["device_memory"] == 8 * GB and told["machine"]["name"] == "one"
    assert told["choices"][0]["batch"] == 999 and "plan" not in told["choices"][0]


def test_memory_that_is_not_affine_takes_more_plans_and_no_wrong_answer():
    def bent(*, batch, ranks=8):
        padded = -(-batch // 64) * 64  # kernels that work in tiles
        return planned({"start": 10**8 + 10_000_000 * padded, "b": 9_000_000 * batch + 77 * batch**2})

    for limit in (2 * GB, 5 * GB, 20 * GB):
        report, plans = fitted(bent, takes_batch, device_memory=limit)
        choice = report.choices[0]
        assert choice.fits and choice.peak_bytes <= limit
        assert bent(batch=choice.batch).needed_bytes == choice.peak_bytes
        assert largest(bent, limit) - 64 < choice.batch, "a tile less at most"
        assert len(plans.asked) <= 8

    def flatter(*, batch, ranks=8):
        return planned({"a": 10**8 * min(batch, 8) + 10**7 * max(batch - 8, 0)})

    report, plans = fitted(flatter, takes_batch, device_memory=2 * GB)
    assert report.choices[0].batch == largest(flatter, 2 * GB) == 128, "and not a guess that was too high"
    assert len(plans.asked) <= 8


def test_what_does_not_fit_at_all_says_so():
    for memory in ("3GB", "2.9GB"):
        report, _ = fitted(corner, takes_batch, device_memory=memory)
        (choice,) = report.choices
        assert not choice.fits and choice.batch == 1 and report.best is None
        assert choice.peak_bytes > nbytes_of(memory, "it")
        page = str(report)
        assert "0 of 1 fit" in page and "too much (8 ranks, batch=1), at its tightest in forward of " in page
    for text, nbytes in (("80GB", 80 * GB), ("1.5 GiB", 3 << 29), ("512", 512), (7, 7)):
        assert nbytes_of(text, "it") == nbytes


def test_batches_that_are_named_are_answered_one_by_one():
    report, plans = fitted(corner, takes_batch, device_memory=8 * GB, vary={"batch": [16, 256, 1024, 4096]})
    answers = {choice.batch: choice.fits for choice in report.choices}
    assert answers == {16: True, 256: True, 1024: False, 4096: False}
    assert report.best is not None and report.best.batch == 256 and len(plans.asked) == 4


def attention(*, batch, length, ranks=8, offload="none", accumulation=1):
    """Affine in the batch, quadratic in the length."""
    state = GB if offload == "none" else 0
    scores = batch * (1000 * length + 3 * length**2)
    seconds = accumulation * (scores / 1e10 + (0.5 if offload == "all" else 0.1))
    return planned({"a": state + scores, "b": GB + 50 * length, "c": 2000 * length * batch}, seconds)


def test_the_answer_of_every_length_is_right_after_three_plans():
    lengths = [128, 256, 512, 1024, 2048, 4096, 8192]
    asked: Any = {"device_memory": 3 * GB, "vary": {"length": lengths}, "machine": MACHINE}
    report, plans = fitted(attention, takes_all, **asked)
    expected = {length: largest(attention, 3 * GB, length=length) for length in lengths}
    assert {choice.values["length"]: choice.batch for choice in report.choices} == expected
    assert len(plans.asked) == 3 * len(lengths)


def test_the_fastest_comes_first_and_slower_ones_after_it():
    report, _ = fitted(
        attention,
        takes_all,
        ranks=[8, 64],
        device_memory=16 * GB,
        vary={"offload": ["none", "all"], "accumulation": [1, 4], "length": [1024]},
        machine=MACHINE,
    )
    assert len(report.choices) == 8
    speeds = [choice.samples_per_second for choice in report.choices]
    assert speeds == sorted(speeds, reverse=True)  # type: ignore[type-var]
    assert report.best.ranks == 64 and report.best.values["offload"] == "none"
    by_key = {(choice.ranks, *choice.values.values()): choice for choice in report.choices}
    one, four = by_key[8, "none", 1, 1024], by_key[8, "none", 4, 1024]
    assert one.batch == four.batch and one.samples_per_second == pytest.approx(four.samples_per_second)
    lines = str(report).splitlines()
    assert lines[0] == f"8 of 8 fit into 16.00 GB ({report.plans} plans)"
    assert lines[3].split() == "ranks offload accumulation length batch peak fits step samples/s".split()

    untimed, _ = fitted(  # without a machine the largest batch comes first
        lambda **values: planned({"a": attention(**values).peak_bytes}),
        takes_all,
        device_memory=16 * GB,
        vary={"length": [512], "offload": ["none", "all"]},
    )
    assert [choice.values["offload"] for choice in untimed.choices] == ["all", "none"]
    assert "samples/s" not in str(untimed) and "ms" not in str(untimed)


def test_what_cannot_be_is_told_beside_what_can():
    def picky(*, batch, ranks=8, offload):
        if offload == "all":
            raise ValueError("offload='all' needs pinned memory\nmore lines")
        return corner(batch=batch)

    def setup(*, batch=1, offload="none"): ...

    report, _ = fitted(picky, setup, device_memory=8 * GB, vary={"offload": ["all", "none"]})
    assert [choice.refused for choice in report.choices] == ["", "offload='all' needs pinned memory"]
    assert "refused: 8 ranks, offload=all: offload='all' needs pinned memory" in str(report)
    with pytest.raises(ValueError, match="no configuration can be planned: offload='all' needs") as raised:
        fitted(picky, setup, device_memory=8 * GB, vary={"offload": ["all"]})
    assert "pinned" in str(raised.value.__cause__)


def test_a_setup_without_batch_is_answered_by_yes_or_no():
    def setup(*, offload="none"): ...

    def model(*, ranks, offload):
        return planned({"a": (9 if offload == "none" else 5) * GB})

    report, plans = fitted(model, setup, device_memory=8 * GB, vary={"offload": ["none", "all"]})
    answers = [(choice.values["offload"], choice.fits) for choice in report.choices]
    assert answers == [("all", True), ("none", False)]
    assert len(plans.asked) == 2 and [line.split()[4] for line in str(report).splitlines()[3:5]] == [
        "yes",
        "no",
    ]


def test_wrong_arguments_are_refused_before_anything_is_planned():
    plans = Plans(corner)
    for memory, vary, error, message in [
        (None, {}, ValueError, "needs device_memory"),
        ("much", {}, ValueError, "device_memory must look like '80GB' or '24GiB', not 'much'"),
        (0, {}, ValueError, "must be positive"),
        (True, {}, TypeError, "must be an int or a str"),
        (80, {}, ValueError, r"device_memory is 80 bytes.*write the unit, as in '80GB'"),
        (GB, {"depth": [1]}, TypeError, "setup.. takes no argument 'depth'"),
        (GB, {"batch": "8"}, TypeError, "must be a sequence of values"),
        (GB, {"batch": []}, TypeError, "must be a sequence of values"),
        (GB, {"batch": [0, 1]}, ValueError, "whole numbers from 1 on"),
    ]:
        with mock.patch.object(fitting, "plan", plans), pytest.raises(error, match=message):
            fit(takes_batch, device_memory=memory, vary=vary)  # type: ignore[arg-type]
    assert not plans.asked
    with pytest.raises(ValueError, match="need the same memory: let setup.. use its batch"):
        fitted(lambda **_: planned({"a": GB}), takes_batch, device_memory=8 * GB)


def test_presets_are_machines_with_sources():
    assert {"a100-40gb", "a100-80gb", "h100", "h100-pcie", "h200", "b200", "mi300x"} <= set(PRESETS)
    for machine in PRESETS.values():
        assert "data sheet" in machine.source or "Technical Brief" in machine.source
        assert machine.device_memory >= 32 * GB and machine.bandwidth_within > machine.bandwidth_between
        assert Machine.from_dict(machine.to_dict()) == machine
    assert PRESETS["h100"].flops["bfloat16"] == 989e12
    half = preset("H100", attained=0.5)
    assert half.flops["bfloat16"] == 989e12 / 2 and half.bandwidth_within == PRESETS["h100"].bandwidth_within
    with pytest.raises(ValueError, match="there is no machine 'h1000'; there are v100, a100"):
        preset("h1000")
    with pytest.raises(ValueError, match="attained must be above 0"):
        preset("h100", attained=60)
