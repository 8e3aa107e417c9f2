"""The examples as a user runs them: under torchrun, to the end, resumed, killed, and with wrong input."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "examples"
TINY = "--layers 2 --width 32 --heads 2 --context 16 --batch 2 --warmup 2 --eval-windows 8 --sample 4".split()
LIMIT = 120.0


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def report(self) -> dict[str, float]:
        assert self.code == 0, self.err
        return json.loads(self.out.splitlines()[-1])


class Torchrun:
    """A running `torchrun`; its rank processes end with it, whatever happens in between."""

    def __init__(self, script: str, *flags: str, processes: int = 2, cwd: Path = ROOT) -> None:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        self._process = subprocess.Popen(
            [sys.executable, *launcher, str(EXAMPLES / script), *flags],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=cwd,
            env={**os.environ, "PYTHONPATH": path},
        )

    def __enter__(self) -> Torchrun:
        return self

    def __exit__(self, *error: object) -> None:
        ranks = self.ranks()
        if self._process.poll() is None:
            self._process.terminate()  # torchrun passes it on
            try:
                self._process.communicate(timeout=20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                for pid in ranks.values():
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)

    def result(self, limit: float = LIMIT) -> Result:
        out, err = self._process.communicate(timeout=limit)
        return Result(self._process.returncode, out, err)

    def is_running(self) -> bool:
        return self._process.poll() is None

    def ranks(self) -> dict[int, int]:
        """The process id of each rank that is running now."""
        found = {}
        for stat in Path("/proc").glob("[0-9]*/stat"):
            try:
                parent = int(stat.read_text().rpartition(")")[2].split()[1])
                environment = (stat.parent / "environ").read_bytes() if parent == self._process.pid else b""
            except OSError:  # ended meanwhile
                continue
            for entry in environment.split(b"\0"):
                if entry.startswith(b"RANK="):
                    found[int(entry[5:])] = int(stat.parent.name)
        return found


def train(*flags: object, processes: int = 2) -> Result:
    """A tiny run of the language-model example, to its end."""
    with Torchrun("train_lm.py", *TINY, *map(str, flags), processes=processes) as run:
        return run.result()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of text that is no Python library."""
    folder = tmp_path_factory.mktemp("text")
    words = random.Random(0).choices("the quick brown fox jumps over a lazy dog ".split(), k=4000)
    for index in range(40):
        (folder / f"{index}.txt").write_text(" ".join(words[index * 100 : index * 100 + 100]))
    return folder


@pytest.fixture(scope="module")
def three_steps(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint folder of a run of three steps, for tests to copy."""
    folder = tmp_path_factory.mktemp("run") / "checkpoints"
    assert train("--data", data, "--steps", 3, "--checkpoint", folder, "--accumulation", 2).code == 0
    return folder


@pytest.fixture
def checkpoints(three_steps: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(three_steps, tmp_path / "checkpoints"))


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


# --- to the end ---------------------------------------------------------------------------------------


def test_default_corpus_trains_and_reports_one_line_of_json():
    result = train("--steps", 12, "--eval-every", 5, "--lr", "1e-2")
    report = result.report
    assert set(report) == {"step", "val_loss", "tokens_per_s", "peak_memory_bytes"}
    assert report["step"] == 12
    assert 1 < report["val_loss"] < 5.5  # log 256 is 5.545
    assert report["tokens_per_s"] > 0
    assert report["peak_memory_bytes"] > 2**20
    assert len([line for line in result.out.splitlines() if line.strip().startswith(("{", "["))]) == 1
    assert "sampled text" in result.err
    assert "12/12" in result.err


def test_minimal_example_trains_and_saves(tmp_path):
    with Torchrun("minimal.py", cwd=tmp_path) as run:
        result = run.result()
    assert result.code == 0, result.err
    losses = [float(line.rpartition(" ")[2]) for line in result.out.splitlines()]
    assert losses[-1] < losses[0]
    assert (tmp_path / "model.pt").stat().st_size > 0


# --- resume -------------------------------------------------------------------------------------------


def test_resumed_run_ends_exactly_like_an_uninterrupted_one(data, checkpoints):
    flags = ("--data", data, "--steps", 6, "--accumulation", 2)
    whole = train(*flags).report
    resumed = train(*flags, "--checkpoint", checkpoints, "--checkpoint-every", 1, "--resume").report
    assert resumed["step"] == whole["step"] == 6
    assert resumed["val_loss"] == whole["val_loss"]
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-000005", "step-000006"]


def test_resume_passes_over_a_half_written_checkpoint(data, checkpoints):
    shutil.copytree(checkpoints / "step-000003", checkpoints / "step-000004")
    (checkpoints / "step-000004" / "optimizer-1.pt").unlink()
    flags = ("--data", data, "--steps", 3, "--accumulation", 2, "--checkpoint", checkpoints)
    result = train(*flags, "--resume")
    assert result.report["step"] == 3
    assert "step-000004: optimizer-1.pt is missing" in result.err


@pytest.mark.parametrize("state", ["absent", "empty", "half_written"])
def test_resume_without_a_complete_checkpoint_names_what_is_missing(data, checkpoints, tmp_path, state):
    folder = checkpoints if state == "half_written" else tmp_path / "none"
    if state == "empty":
        folder.mkdir()
    if state == "half_written":
        model = folder / "step-000003" / "model.pt"
        model.write_bytes(model.read_bytes()[:1000])
        (folder / "step-000006.partial").mkdir()
    before = contents(tmp_path)
    result = train("--data", data, "--steps", 6, "--accumulation", 2, "--checkpoint", folder, "--resume")
    missing = {
        "absent": ["there is no such folder"],
        "empty": ["it holds no step-* folder"],
        "half_written": ["step-000003: model.pt has 1000 of", "step-000006.partial: was never completed"],
    }
    assert result.code != 0
    for text in [str(folder), *missing[state]]:
        assert text in result.err
    assert contents(tmp_path) == before
    assert folder.exists() == (state != "absent")


@pytest.mark.parametrize(
    ("flags", "processes", "message"),
    [
        (["--accumulation", "2"], 1, "world size is 2 in the checkpoint and 1 here"),
        (["--accumulation", "2", "--width", "64"], 2, "width is 32 in the checkpoint and 64 here"),
    ],
    ids=["world_size", "model"],
)
def test_checkpoint_of_another_run_is_refused_by_both_values(data, checkpoints, flags, processes, message):
    before = contents(checkpoints)
    result = train(
        "--data", data, "--steps", 6, "--checkpoint", checkpoints, "--resume", *flags, processes=processes
    )
    assert result.code != 0
    assert message in result.err
    assert contents(checkpoints) == before


def test_new_run_does_not_overwrite_the_checkpoints_of_another(data, checkpoints):
    before = contents(checkpoints)
    result = train("--data", data, "--steps", 1, "--checkpoint", checkpoints)
    assert result.code != 0
    assert "already holds step-000003" in result.err
    assert contents(checkpoints) == before


# --- wrong flags --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--steps -3", "--steps: must be at least 1, not -3"),
        ("--steps many", "--steps: invalid whole number value: 'many'"),
        ("--lr nan", "--lr: must be positive and finite"),
        ("--width 30 --heads 4", "--heads 4 does not divide --width 30"),
        ("--wrap Blok", "--wrap Blok is no module class of the model; it has Attention, Block"),
        ("--wrap ModuleList", "--wrap ModuleList is no module class of the model"),
        ("--resume", "--resume needs --checkpoint DIR"),
        ("--data {tmp}/absent", "absent does not exist or is not a folder"),
        ("--data {tmp}", "holds 0 bytes of text to train on and 0 held out"),
        ("--data {tmp}/small", "each must be more than the context of 64 bytes"),
    ],
)
def test_wrong_flags_end_in_a_usage_error(flags, message, tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    from lm.options import parse

    if "small" in flags:
        (tmp_path / "small").mkdir()
        (tmp_path / "small" / "text").write_text("too little to learn from")
    with pytest.raises(SystemExit) as ended:
        parse(flags.format(tmp=tmp_path).split())
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


# --- killed -------------------------------------------------------------------------------------------


LONG = ("--steps", 90, "--checkpoint-every", 3)


@pytest.fixture(scope="module")
def uninterrupted(data: Path) -> float:
    return train("--data", data, *LONG).report["val_loss"]


def wait_for(folder: Path, pattern: str, run: Torchrun) -> None:
    until = time.monotonic() + LIMIT
    while not any(folder.glob(pattern)):
        assert run.is_running(), run.result().err
        assert time.monotonic() < until, f"no {pattern} in {folder}"
        time.sleep(0.002)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds the rank processes in /proc")
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("moment", ["in_a_step", "in_a_checkpoint"])
def test_killed_run_resumes_to_the_same_end(data, uninterrupted, tmp_path, moment, rank):
    flags = ["--data", data, *LONG, "--checkpoint", tmp_path / "checkpoints"]
    with Torchrun("train_lm.py", *TINY, *map(str, flags)) as run:
        wait_for(tmp_path / "checkpoints", "step-000006", run)
        if moment == "in_a_step":
            time.sleep(random.uniform(0, 0.5))
        else:
            wait_for(tmp_path / "checkpoints", "*.partial", run)
        os.kill(run.ranks()[rank], signal.SIGKILL)
        assert run.result().code != 0
    assert train(*flags, "--resume").report["val_loss"] == uninterrupted


@pytest.mark.slow
def test_default_run_learns():
    with Torchrun("train_lm.py") as run:
        assert run.result(limit=600).report["val_loss"] < 1.9


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 3, 4])
def test_any_number_of_processes_trains_evaluates_and_samples(data, processes):
    report = train("--data", data, "--steps", 4, "--accumulation", 2, processes=processes).report
    assert 1 < report["val_loss"] < 6
