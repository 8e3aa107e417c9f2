"""`verify` tells the mistakes of training programs, and finds nothing in right ones."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import fsdp_wrap
from bed import ranks, run_isolated, run_ranks
from bed.patience import NEVER
from bed.scripts import python
from fronts import each_front
from fsdp_wrap._values.verifying.launch import launch
from fsdp_wrap._values.verifying.observe import Errand, Observed, observe, places_of, seed_as_of
from fsdp_wrap._values.verifying.pair import Pair
from fsdp_wrap._values.verifying.report import Verification, verification_of
from fsdp_wrap.optim import Muon
from trainings import setup


def observed(rank: int, world_size: int, sharded: bool, options: dict[str, Any], **given: Any) -> Observed:
    seed_as_of(rank)
    steps = 1 if options.get("mistake") == "clip" else 3  # the second step of that one raises an error
    return observe(Errand(partial(setup, **options), sharded, steps, **given))


def _plain(rank: int, world_size: int, options: dict[str, Any], given: dict[str, Any]) -> Observed:
    return observed(rank, world_size, False, options, **given)


def verified(count: int = 2, **options: Any) -> Verification:
    """Verifies a program of `trainings` in the ranks of the pool."""
    sharded = run_ranks(count, observed, True, options)
    units = sharded[0].units
    plain = run_ranks(1, _plain, options, {"units": units, "asked": places_of(sharded)})
    rounded = run_ranks(
        1, _plain, options, {"units": units, "rounding": 4e-3 if options.get("bf16") else 1e-6}
    )
    return verification_of(Pair(plain, sharded, rounded), "plain")


WRONG: dict[str, tuple[dict[str, Any], str, str]] = {
    "another seed on each rank": (
        {"mistake": "seed"},
        "weights not synchronised",
        "rank 0 holds the values of the plain model, and rank 1 other ones, of 'blocks.0.down.bias'",
    ),
    "means over the rank's tokens": (
        {"mistake": "padding", "front": "orig"},
        "mean of means",
        "those of rank 0 1.4 times, those of rank 1 0.778 times as much",
    ),
    "no sampler": ({"mistake": "same batch"}, "the same batch on all ranks", "the same inputs, bit for bit"),
    "loss / world_size": (
        {"mistake": "divide"},
        "divided by the ranks twice",
        "0.5 times those of the plain",
    ),
    "a sum over rows": ({"mistake": "sum", "front": "flat"}, "divided by the ranks twice", "one of 2 ranks"),
    "loss * world_size": ({"mistake": "multiply"}, "not divided by the ranks", "2 times those of the plain"),
    "torch's clip_grad_norm_": (
        {"mistake": "clip", "clip": 0.5, "front": "orig"},
        "clipping by local norms",
        "its own shards to a norm of 0.5: rank 0 by 1, rank 1 by 0.696",
    ),
    "no_sync in the last micro-batch": (
        {"mistake": "no_sync", "micro": 2, "front": "flat"},
        "gradients not reduced before the step",
        "gradients of 2 forwards",
    ),
    "the optimizer before sharding": (
        {"mistake": "optimizer", "front": "flat"},
        "optimizer of other parameters",
        "(AdamW) holds no parameter of the sharded model",
    ),
    "no zero_grad": ({"mistake": "never zero"}, "zero_grad missing", "of step 0 are still there in step 1"),
    "zero_grad before the step": (
        {"mistake": "zero before step"},
        "step without gradients",
        "trains nothing",
    ),
    "the step before the backward": ({"mistake": "early step"}, "step before the backward", "in the first"),
    "batch norm": ({"mistake": "batch norm"}, "statistics of the rank's batch", "'blocks.0.norm' normalises"),
    "functional dropout": ({"mistake": "noise"}, "random numbers", "the output of unit 'blocks.0' in step 0"),
    "frozen in a flat parameter": (
        {"mistake": "freeze", "front": "flat"},
        "other parameters are trained",
        "The sharded run trains embedding.weight, and the plain one does not",
    ),
    "a penalty on pieces": (
        {"mistake": "penalty", "front": "orig"},
        "parameter used outside of its unit",
        "First at the gradient of unit 'blocks.1' in step 0",
    ),
    "decay by p.ndim": (
        {"mistake": "decay", "front": "orig"},
        "other options of the optimizer",
        "has weight_decay=0.0 in the sharded run, and weight_decay=0.1 in the plain one",
    ),
}
RIGHT: dict[str, dict[str, Any]] = {
    "flat": {"front": "flat"},
    "original parameters": {"front": "orig", "clip": 0.5},
    "fully_shard": {"clip": 0.5},
    "accumulation": {"micro": 2, "front": "orig"},
    "bf16": {"bf16": True, "front": "flat", "optim": torch.optim.SGD},
    "accumulation by fully_shard": {"micro": 2},
    "no no_sync": {"micro": 2, "mistake": "no no_sync"},
    "frozen parameters": {"mistake": "freeze"},
    "kept parameters": {"mistake": "optimizer", "front": "orig"},
    "decay by p.ndim of DTensors": {"mistake": "decay"},
    "Muon of flat parameters": {"front": "flat", "optim": Muon},
}
FIRST = 5
slow = pytest.mark.slow


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WRONG)
def test_mistakes_are_told(name):
    options, kind, told = WRONG[name]
    report = verified(**options)
    assert (report.verdict, report.ok, len(report.causes)) == (kind, False, 1), str(report)
    assert told in report.causes[0].told, report.causes[0].told


@pytest.mark.parametrize(
    "name", [program if n < FIRST else pytest.param(program, marks=slow) for n, program in enumerate(RIGHT)]
)
def test_nothing_is_told_of_right_programs(name):
    report = verified(**RIGHT[name])
    assert report.ok and report.verdict == "rounding", str(report)
    assert len(report.steps) == 3 and report.steps[0].departures.keys() >= {
        "inputs",
        "at the step",
        "updates",
    }
    assert 0 < report.steps[2].largest < (0.1 if RIGHT[name].get("bf16") else 1e-3)
    if name == "no no_sync":
        assert "Gradients are reduced after each of 2 forwards" in report.notes[-1]


ALL_FRONTS = [
    "seed",
    "padding",
    "same batch",
    "divide",
    "no_sync",
    "never zero",
    "zero before step",
    "batch norm",
    "noise",
]


@slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@each_front
def test_each_front_end_and_precision_is_told_the_same(front, bf16):
    if front == "composable" and bf16:
        pytest.skip("the front's options have no precision in common")
    kinds = {options["mistake"]: kind for options, kind, _ in WRONG.values()}
    for mistake in ALL_FRONTS:
        report = verified(front=front, mistake=mistake, bf16=bf16, micro=2 if mistake == "no_sync" else 1)
        assert report.verdict == kinds[mistake], (mistake, str(report))


@slow
def test_other_numbers_of_ranks_are_verified():
    assert verified(4, front="orig").verdict == "rounding"
    uneven = verified(3, front="flat")  # 3, 3 and 2 rows
    assert uneven.verdict == "mean of means" and "those of rank 2 1.33 times" in uneven.causes[0].told


def without_threads(body: Any) -> Any:
    """Calls a body in a process that may be forked: no backward has run in a thread there."""
    (outcome,) = run_isolated(body, backend=None, timeout=NEVER)
    assert outcome.kind == "passed", outcome
    return outcome.value


def closures(rank: int, world_size: int) -> str:
    report = fsdp_wrap.verify(lambda sharded: setup(sharded, optim=torch.optim.SGD), steps=2)
    assert report.ok and len(report.steps) == 2, str(report)
    return str(report)


def test_closures_are_verified_in_processes_of_their_own():
    """Those are forks; each sees the numbers of its rank."""
    told = without_threads(closures)
    assert (
        "Sharded over 2 ranks, compared with the plain model: rounding" in told and "Nothing is wrong" in told
    )
    assert "Dropout was off: blocks.0.drop, blocks.1.drop" in told and "get the same masks" in told


def test_forks_that_cannot_run_a_backward_are_refused(monkeypatch):
    """As after backwards that have run in threads."""
    monkeypatch.setattr(torch.autograd, "backward", Mock(side_effect=RuntimeError("no threads in a fork")))
    with pytest.raises(ValueError, match="forks of this one cannot run it: define it by `def`"):
        alone(lambda sharded: setup(sharded))


def against_one_rank(rank: int, world_size: int) -> None:
    report = fsdp_wrap.verify(lambda sharded: setup(sharded, mistake="divide"), steps=1, against="one rank")
    assert report.verdict == "divided by the ranks twice", str(report)
    assert "sharded program" in report.notes[0], str(report)
    assert str(report).startswith("Sharded over 2 ranks, compared with one rank: ")


def test_one_rank_is_what_a_large_model_is_compared_with():
    without_threads(against_one_rank)


@slow
@pytest.mark.parametrize(("mistake", "verdict"), [("", "rounding"), ("multiply", "not divided by the ranks")])
def test_a_compiled_model_is_verified(mistake, verdict):
    """In processes of their own: where nothing is sharded, dynamo would trace what watches a plain model."""
    report = fsdp_wrap.verify(partial(setup, mistake=mistake, compiled=True), steps=2)
    assert report.verdict == verdict, str(report)


def alone(setup: Any, sharded: bool = True, count: int = 1, timeout: float = 60.0) -> None:
    """Runs what is no program, or one that fails."""
    launch(Errand(setup, sharded, 1), count, timeout)


def failing(sharded: bool, on: int) -> Any:
    if torch.distributed.get_rank() == on:
        raise ZeroDivisionError("a mistake of mine")
    return setup(sharded)


def failures(rank: int, world_size: int) -> None:
    with pytest.raises(RuntimeError, match=r"(?s)rank 1 has failed in the sharded run:.*a mistake of mine"):
        alone(lambda sharded: failing(sharded, 1), count=2)
    with pytest.raises(RuntimeError, match=r"(?s)rank 0 has failed in the plain run:.*in failing"):
        alone(lambda sharded: failing(sharded, 0), sharded=False)
    with pytest.raises(RuntimeError, match=r"rank 0 has not ended the sharded run in 0.5 s, or was killed"):
        alone(lambda sharded: time.sleep(60), timeout=0.5)


def test_a_failure_is_told_with_rank_and_traceback():
    without_threads(failures)


def wrong_programs(rank: int, world_size: int) -> None:
    programs: list[tuple[Any, str]] = [
        (None, r"setup\(sharded=True\) must return \(model, optimizer, step\), and returned NoneType"),
        ((1, 2, 3), "the model that .* must be an nn.Module, not int"),
        ((torch.nn.Linear(1, 1), 2, 3), "the optimizer that .* must be a torch.optim.Optimizer, not int"),
    ]
    for made, told in programs:
        with pytest.raises(TypeError, match=told):
            alone(lambda sharded, made=made: made)
    with pytest.raises(ValueError, match="returned a model that is not sharded: wrap it"):
        alone(lambda sharded: setup(False))


def test_wrong_uses_of_verify_are_refused():
    wrong: Any = "setup"
    with pytest.raises(TypeError, match="setup must be a function of `sharded`"):
        fsdp_wrap.verify(wrong)
    options: dict[str, Any]
    for options, told in (
        ({"ranks": 1}, "ranks=1 must be a number from 2"),
        ({"steps": 0}, "steps=0 must be a number from 1"),
        ({"against": "ddp"}, "against='ddp' must be one of"),
        ({"timeout": 0}, "timeout=0 must be a positive number"),
    ):
        with pytest.raises(ValueError, match=told):
            fsdp_wrap.verify(setup, **options)
    without_threads(wrong_programs)


@slow
@ranks(2)
def test_a_process_group_that_is_there_verifies(rank, world_size):
    with pytest.raises(ValueError, match="ranks=3, and the process group has 2"):
        fsdp_wrap.verify(setup, ranks=3)
    report = fsdp_wrap.verify(setup, steps=2)
    assert report.ok and report.ranks == 2 and report.steps[1].plain_loss is not None, str(report)


@slow
def test_the_command_verifies_a_file(tmp_path):
    example = Path("examples/how_to/verify.py")
    words = ("-m", "fsdp_wrap", "verify", "--steps", 1)
    wrong = tmp_path / "wrong.py"
    wrong.write_text(f"import sys\nsys.path.insert(0, {str(example.parent.resolve())!r})\n" + _WRONG_SETUP)
    told = python(*words, f"{wrong}:setup", "--ranks", 2, "--against", "plain", code=1)
    assert "mean of means:" in told.out


_WRONG_SETUP = """
import functools
import importlib

setup = functools.partial(importlib.import_module("verify").setup, wrong=True)
"""
