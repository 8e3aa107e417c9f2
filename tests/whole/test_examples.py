"""The examples as a user runs them: under torchrun, to the end, resumed, killed, and with wrong input."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bed import ranks
from bed.paths import ROOT
from bed.patience import NEVER, until
from bed.scripts import Done, on_ranks, python
from fsdp_wrap import FullyShardedDataParallel as FSDP

sys.path.insert(0, str(ROOT))  # benchmarks are not installed

from benchmarks.victims import Host, kill

EXAMPLES = ROOT / "examples"
TINY = "--layers 2 --width 32 --heads 2 --context 16 --batch 2 --warmup 2 --eval-windows 8 --sample 4".split()


def report_of(done: Done) -> dict[str, float]:
    assert done.code == 0, done
    report: dict[str, float] = json.loads(done.out.splitlines()[-1])
    return report


def train(*flags: object, processes: int = 2) -> Done:
    """A tiny run of the language-model example, to its end."""
    return python(*on_ranks(processes, EXAMPLES / "train_lm.py", *TINY, *flags))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of text that is no Python library."""
    folder = tmp_path_factory.mktemp("text")
    words = random.Random(0).choices("the quick brown fox jumps over a lazy dog ".split(), k=4000)
    for index in range(40):
        (folder / f"{index}.txt").write_text(" ".join(words[index * 100 : index * 100 + 100]))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# --- to the end ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_default_corpus_trains_and_reports_one_line_of_json():
    result = train("--steps", 12, "--eval-every", 5, "--lr", "1e-2")
    report = report_of(result)
    assert set(report) == {"step", "val_loss", "tokens_per_s", "peak_memory_bytes"}
    assert report["step"] == 12
    assert 1 < report["val_loss"] < 5.5  # log 256 is 5.545
    assert report["tokens_per_s"] > 0
    assert report["peak_memory_bytes"] > 2**20
    assert len([line for line in result.out.splitlines() if line.strip().startswith(("{", "["))]) == 1
    assert "sampled text" in result.err
    assert "12/12" in result.err


@pytest.mark.slow
def test_muon_learns_more_in_the_same_steps(data):
    flags = ("--data", data, "--steps", 40, "--sample", 0)
    losses = {name: report_of(train(*flags, "--optimizer", name))["val_loss"] for name in ("adamw", "muon")}
    assert 0 < losses["muon"] < losses["adamw"]


@pytest.mark.slow
def test_minimal_example_trains_and_saves(tmp_path):
    result = python(*on_ranks(2, EXAMPLES / "minimal.py"), folder=tmp_path)
    losses = [float(line.rpartition(" ")[2]) for line in result.out.splitlines()]
    assert losses[-1] < losses[0]
    assert (tmp_path / "model.pt").stat().st_size > 0


@pytest.mark.slow
def test_default_run_learns():
    assert report_of(python(*on_ranks(2, EXAMPLES / "train_lm.py")))["val_loss"] < 1.9


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 3])
def test_any_number_of_processes_trains_evaluates_and_samples(data, processes):
    report = report_of(train("--data", data, "--steps", 4, "--accumulation", 2, processes=processes))
    assert 1 < report["val_loss"] < 6


@pytest.mark.slow
@pytest.mark.parametrize("way", ["gloo", "folder"])
def test_a_generating_process_follows_the_trainers(way):
    words = f"--way {way} --steps 4 --every 2".split()
    result = python(*on_ranks(2, EXAMPLES / "weights_to_inference.py", *words))
    lines = [line for line in result.out.splitlines() if line.startswith("version")]
    assert [line.split(":")[0] for line in lines] == ["version 1", "version 2", "version 3"]
    assert ": all; 'def " in lines[0] and " changes (" in lines[2]


# --- before it runs, and while it runs ------------------------------------------------------------------


@pytest.mark.slow
def test_a_plan_is_printed_and_nothing_is_trained(tmp_path):
    planned = python(EXAMPLES / "train_lm.py", *TINY, "--plan", "64", "--checkpoint", tmp_path / "run").out
    assert "rank 0 of 64" in planned and "blocks.1" in planned
    assert "val_loss" not in planned and not (tmp_path / "run").exists()


def test_a_plan_of_a_job_is_printed_by_its_first_rank_alone(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from lm.seeing import print_plan

    def setup(world):
        asked.append(world.size)
        model = FSDP(nn.Linear(3, 2))
        optimizer = torch.optim.SGD(model.parameters())
        return model, optimizer, lambda: model(torch.ones(1, 3)).sum().backward()

    asked: list[int] = []
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        print_plan(0, setup)
    assert asked == [2] and capsys.readouterr().out.count("rank 0 of 2") == 1


@pytest.mark.slow
def test_a_timeline_of_some_steps_is_written_with_report_and_picture(data, tmp_path):
    result = train("--data", data, "--steps", 6, "--timeline", tmp_path / "seen")
    assert report_of(result)["step"] == 6
    assert "wrote trace.json" in result.err
    trace = json.loads((tmp_path / "seen" / "trace.json").read_text())
    assert {event["pid"] for event in trace["traceEvents"] if event.get("ph") == "X"} == {0, 1}
    report = (tmp_path / "seen" / "report.txt").read_text()
    assert "2 ranks on one host, 3 passes" in report and "blocks.1" in report
    assert "<svg" in (tmp_path / "seen" / "step.svg").read_text()


# --- resume -------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_resumed_run_ends_exactly_like_an_uninterrupted_one(data, tmp_path):
    """Over a damaged checkpoint; a run whose steps see other data is refused."""
    flags = ("--data", data, "--steps", 6, "--accumulation", 2, "--checkpoint", tmp_path)
    whole = report_of(train(*flags, "--checkpoint-every", 3))
    assert sorted(path.name for path in tmp_path.glob("step*")) == ["step_00000003", "step_00000006"]
    part = tmp_path / "step_00000006" / "__1_0.distcp"
    part.write_bytes(part.read_bytes()[:1000])
    before = contents(tmp_path)
    alone = python(EXAMPLES / "train_lm.py", *TINY, *flags, "--resume", code=None)
    assert alone.code != 0
    assert "error: " in alone.err and "global batch is 8 in the checkpoint and 4 here" in alone.err
    assert contents(tmp_path) == before

    result = train(*flags, "--checkpoint-every", 1, "--resume")
    assert report_of(result)["step"] == whole["step"] == 6
    assert report_of(result)["val_loss"] == whole["val_loss"]
    assert "step_00000006: __1_0.distcp has 1000 of" in result.err
    assert sorted(path.name for path in tmp_path.glob("step*")) == ["step_00000005", "step_00000006"]


@ranks(2)
def test_folders_refuse_what_is_not_of_this_run(rank, world_size, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from lm.checkpoint import Folder
    from lm.launch import RunError

    model = FSDP(nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    folder = Folder(tmp_path / "run", {"width": 32, "seed": 0})
    with pytest.raises(RunError, match="no complete checkpoint in .*run: there is no such folder"):
        folder.load(5, model, optimizer)
    assert not folder.path.exists()
    dist.barrier()
    folder.prepare()
    with pytest.raises(RunError, match="no complete checkpoint in .*run: it holds no step folder"):
        folder.load(5, model, optimizer)
    folder.save(4, model, optimizer)
    assert folder.load(5, model, optimizer) == 4
    before = contents(tmp_path)
    with pytest.raises(RunError, match="step_00000004 lies beyond the last step asked for, --steps 3"):
        folder.load(3, model, optimizer)
    with pytest.raises(RunError, match="already holds step_00000004: pass --resume"):
        folder.prepare()
    wider = Folder(folder.path, {"width": 64, "seed": 0})
    with pytest.raises(RunError, match="does not fit this run: width is 32 in the checkpoint and 64 here"):
        wider.load(5, model, optimizer)
    dist.barrier()
    if rank == 0:
        part = folder.path / "step_00000004" / "__0_0.distcp"
        data = bytearray(part.read_bytes())
        data[100] ^= 1
        part.write_bytes(data)
        before[str(part)] = bytes(data)
    dist.barrier()
    with pytest.raises(RunError, match="step_00000004 is damaged"):
        folder.load(5, model, optimizer)
    assert rank or contents(tmp_path) == before


# --- wrong flags --------------------------------------------------------------------------------------


WRONG_FLAGS = {
    "--steps -3": "--steps: must be at least 1, not -3",
    "--steps many": "--steps: invalid whole number value: 'many'",
    "--lr nan": "--lr: must be positive and finite",
    "--width 30 --heads 4": "--heads 4 does not divide --width 30",
    "--wrap Blok": "--wrap Blok is no module class of the model; it has Attention, Block",
    "--wrap ModuleList": "--wrap ModuleList is no module class of the model",
    "--resume": "--resume needs --checkpoint DIR",
    "--data {tmp}/absent": "absent does not exist or is not a folder",
    "--data {tmp}/empty": "holds 0 bytes of text to train on and 0 held out",
    "--data {tmp}/small": "each must be more than the context of 64 bytes",
}


def test_wrong_flags_end_in_a_usage_error(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from lm.options import parse

    (tmp_path / "empty").mkdir()
    (tmp_path / "small").mkdir()
    (tmp_path / "small" / "text").write_text("too little to learn from")
    for flags, message in WRONG_FLAGS.items():
        with pytest.raises(SystemExit) as ended:
            parse(flags.format(tmp=tmp_path).split())
        assert ended.value.code == 2
        assert message in capsys.readouterr().err


# --- killed -------------------------------------------------------------------------------------------


LONG = ("--steps", 90, "--checkpoint-every", 3)


@pytest.fixture(scope="module")
def uninterrupted(data: Path) -> float:
    return report_of(train("--data", data, *LONG))["val_loss"]


def wait_for(folder: Path, pattern: str, run: Host) -> None:
    until(lambda: any(folder.glob(pattern)) or run.agent.poll() is not None, pause=0.002)
    assert any(folder.glob(pattern)), run.log.with_suffix(".err").read_text()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the rank processes in /proc")
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("moment", ["in_a_step", "in_a_checkpoint"])
def test_killed_run_resumes_to_the_same_end(data, uninterrupted, tmp_path, moment, rank):
    flags = ["--data", data, *LONG, "--checkpoint", tmp_path / "checkpoints"]
    command = [sys.executable, *map(str, on_ranks(2, EXAMPLES / "train_lm.py", *TINY, *flags))]
    run = Host(command, tmp_path / "memory", tmp_path / "run.log", sorted(os.sched_getaffinity(0)))
    try:
        wait_for(tmp_path / "checkpoints", "step_00000006", run)
        if moment == "in_a_step":
            time.sleep(random.uniform(0, 0.5))
        else:
            wait_for(tmp_path / "checkpoints", ".*.partial", run)
        kill([run.ranks()[rank]])
        assert run.agent.wait(timeout=NEVER) != 0
    finally:
        run.stop()
    assert report_of(train(*flags, "--resume"))["val_loss"] == uninterrupted
