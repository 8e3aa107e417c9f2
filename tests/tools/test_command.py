"""The command line: what each command prints, and one line and an exit status for what is wrong."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
import threading
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from bed.paths import PACKAGE, ROOT
from bed.patience import NEVER
from bed.scripts import called
from fsdp_wrap._core import NEWEST_TORCH, OLDEST_TORCH
from fsdp_wrap.tools import plan, progress
from fsdp_wrap.tools.command import doctor, main
from fsdp_wrap.tools.command.meeting import Meeting, meet

SETUP = """
import torch
from torch import nn

import fsdp_wrap


def setup(*, batch=4, wide=False):
    model = fsdp_wrap.fully_shard(nn.Linear(64, 256 if wide else 64))
    optimizer = torch.optim.SGD(model.parameters())

    def step():
        model(torch.ones(batch, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def reads(*, batch=4):
    model, optimizer, step = setup(batch=batch)
    return model, optimizer, lambda: model(torch.ones(batch, 64)).sum().item()


def fails():
    raise KeyError("depth")


def returns_one():
    return nn.Linear(2, 2)


def needs(depth):
    return setup()
"""


run = partial(called, main)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(SETUP)
    return path


@pytest.fixture(autouse=True)
def as_before():
    """Removes the traces of a loaded file from this process, and shows no progress in the meantime."""
    paths = [*sys.path]
    with mock.patch.object(progress, "_PATIENCE", NEVER):  # how long a command takes changes nothing
        yield
    sys.path[:] = paths
    sys.modules.pop("mine", None)


# plan


def test_a_plan_is_printed_with_whether_it_fits(file, capsys):
    code, out, err = run(capsys, "plan", f"{file}:setup", "--ranks", "2,4", "--device-memory", "1GB")
    assert code == 0 and "error" not in err
    assert "2 ranks: fits, " in out and "4 ranks: fits, " in out and " of 1.00 GB" in out
    code, out, _ = run(capsys, "plan", f"{file}:setup", "--ranks", 2, "--device-memory", "10KB")
    assert code == 1 and "2 ranks: does not fit, " in out
    more = ["--json", "--machine", "h100", "--device", "cpu"]
    code, out, _ = run(capsys, "plan", f"{file}:setup", "--ranks", "2,4", *more)
    two, four = json.loads(out)
    assert code == 0 and (two["ranks"], four["ranks"]) == (2, 4)
    assert two["parameters"] == 64 * 65 and two["machine"]["name"] == "H100 SXM"
    assert two["predicted_seconds"] > 0


def test_fit_varies_what_the_setup_takes(file, capsys):
    arguments = ["fit", f"{file}:setup", "--ranks", 2, "--vary", "wide=False,True"]
    code, out, _ = run(capsys, *arguments, "--device-memory", "300KB", "--json")
    told = json.loads(out)
    assert code == 0 and told["device_memory"] == 300_000
    wide, narrow = sorted(told["choices"], key=lambda choice: choice["batch"])
    assert (wide["values"], narrow["values"]) == ({"wide": True}, {"wide": False})
    assert 0 < wide["batch"] < narrow["batch"]
    code, out, _ = run(capsys, *arguments, "--device-memory", "1KB")
    assert code == 1 and "0 of 2 fit" in out


def test_wrong_input_is_told_in_one_line(file, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("text")
    (tmp_path / "broken.py").write_text("\n1 / 0")
    for arguments, told in [
        ("plan {file}", "names no function: write FILE.py:name"),
        ("plan {file}:", "names no function"),
        ("plan {tmp}/none.py:setup", "there is no file"),
        ("plan {tmp}/text.txt:setup", "is no Python file: its name must end in .py"),
        ("plan {file}:other", "has no function 'other'; it has setup, reads, fails, returns_one, needs"),
        ("plan {file}:fails", "failed in line 26: KeyError: 'depth'"),
        ("plan {file}:needs", "mine.py:needs: missing a required argument: 'depth': give it a default"),
        ("plan {file}:returns_one", "setup"),
        ("plan {file}:reads", "failed in line 22: PlanningError: "),
        ("plan {tmp}/broken.py:setup", "failed in line 2: ZeroDivisionError: division by zero"),
        ("plan {file}:setup --machine h1000", "there is no machine 'h1000'; there are v100"),
        ("plan {file}:setup --machine {tmp}/none.json", "No such file"),
        ("plan {file}:setup --machine {tmp}/text.txt", "does not describe a machine"),
        ("plan {file}:setup --attained 7 --machine h100", "attained must be above 0 and at most 1"),
        ("plan {file}:setup --attained 0.5", "--attained is a part of a preset's peak"),
        ("plan {file}:setup --attained 0.5 --machine measure", "--attained is a part of a preset's peak"),
        ("fit {file}:setup --attained 0.5 --machine it.json", "--attained is a part of a preset's peak"),
        ("plan {file}:setup --device-memory lots", "--device-memory must look like '80GB'"),
        ("fit {file}:setup --machine h100 --device-memory 80", "write the unit, as in '80GB' or '80GiB'"),
        ("plan {file}:setup --ranks-per-host 4", "--ranks-per-host is for predictions of time"),
        (
            "plan {file}:setup --vary batch=1",
            "--fit is a command of its own now, which takes --vary: fsdp-wrap fit",
        ),
        ("plan {file}:setup --fit --device-memory 1GB", "--fit is a command of its own now"),
        ("plan {file}:setup --device-memory 80", "80 bytes, less than any device has: write the unit"),
        ("fit {file}:setup", "fit needs --device-memory"),
        ("fit {file}:setup --device-memory 1GB --vary depth=1", "takes no argument 'depth'"),
        ("fit {file}:setup --device-memory 1GB --vary batch", "names no values: write NAME=A,B"),
        ("fit {file}:setup --device-memory 1MB --out {tmp}/it.json", "--out writes a recipe, and "),
        ("plan {file}:setup --ranks 2,x", "is not a list of ranks"),
        ("plan {file}:setup --ranks 0", "is not a list of ranks"),
        ("timeline report {tmp}/none", "no file or folder of a timeline is at"),
        ("timeline merge {tmp}", "no rank has written a trace"),
        ("timeline merge {tmp} --out {tmp}/trace.txt", "a trace must end in .json or .json.gz"),
        ("timeline plot {file}", "is not a trace that fsdp_wrap.timeline() has written"),
        ("checkpoint inspect {tmp}/none", "there is no folder"),
        ("checkpoint export {file}", "is no file that torch.load"),
        ("checkpoint", "the following arguments are required"),
        ("cure", "invalid choice: 'cure'"),
        ("", "the following arguments are required: plan|fit|timeline|values|verify|checkpoint|doctor"),
    ]:
        code, out, err = run(capsys, *arguments.format(file=file, tmp=tmp_path).split())
        assert code == 2 and not out, arguments
        line = err.strip().splitlines()[-1]
        assert told in line and "error: " in line, err
        assert "Traceback" not in err and (err.startswith("usage: ") or err.count("\n") == 1), err
    code, _, err = run(capsys, "--traceback", "plan", f"{file}:fails")
    assert code == 2 and "Traceback" in err and 'raise KeyError("depth")' in err
    with mock.patch("fsdp_wrap.tools.command.plans._plan", side_effect=KeyboardInterrupt):
        assert run(capsys, "plan", f"{file}:setup") == (130, "", "interrupted\n")


def test_what_does_not_fit_proposes_what_does(file, capsys):
    """Smaller batches where the setup takes one, else more ranks."""
    file.write_text(SETUP.replace("batch=4, wide", "batch=512, wide"))
    code, out, _ = run(capsys, "plan", f"{file}:setup", "--ranks", 2, "--device-memory", "150KB")
    assert code == 1 and "2 ranks: does not fit, " in out
    batch = int(re.search(r"but 2 ranks, batch=(\d+): fits, ", out)[1])
    setup = runpy.run_path(str(file))["setup"]
    needed = [plan(partial(setup, batch=size), 2).needed_bytes for size in (batch, batch + 1)]
    assert needed[0] <= 150_000 < needed[1]
    file.write_text(SETUP.replace("setup(*, batch=4", "setup(*, rows=4").replace("batch, 64", "rows, 64"))
    needed = [plan(runpy.run_path(str(file))["setup"], ranks).needed_bytes for ranks in (4, 8)]
    limit = sum(needed) // 2
    code, out, _ = run(capsys, "plan", f"{file}:setup", "--ranks", 2, "--device-memory", f"{limit}B")
    assert code == 1 and "but 8 ranks: fits, " in out
    code, out, _ = run(capsys, "plan", f"{file}:setup", "--ranks", 2, "--device-memory", "1KB")
    assert code == 1 and "nor does it on 64 ranks: let setup() take batch or recipe" in out
    code, out, _ = run(capsys, "plan", f"{file}:setup", "--ranks", 16384, "--device-memory", "1KB")
    assert code == 1 and "nor does it on 16384 ranks" in out, "more cannot be planned"


SEARCHES = (
    "searching {} configurations for what fits into 300.0 kB; Ctrl-C ends the search, "
    "and keeps what was found"
)


def test_an_interrupted_fit_reports_and_keeps_what_it_has(file, capsys):
    planned, after = import_module("fsdp_wrap.tools.fitting.fit").plan, 4

    def plan(*args, **kwargs):
        nonlocal after
        after -= 1
        if after < 0:
            raise KeyboardInterrupt
        return planned(*args, **kwargs)

    command = "fit", f"{file}:setup", "--ranks", 2, "--vary", "wide=False,True", "--device-memory"
    with mock.patch("fsdp_wrap.tools.fitting.fit.plan", plan):
        code, out, err = run(capsys, *command, "300KB")
        assert code == 130 and "1 of 1 fit into 300.0 kB" in out and "interrupted before the rest" in out
        begin, first, *_ = err.splitlines()
        assert begin == SEARCHES.format(2) and first.startswith("2 ranks, wide=False, batch=")
        assert err.endswith("\ninterrupted\n")
        code, out, err = run(capsys, *command, "300KB")
        assert (code, out) == (130, ""), "there was nothing to keep"
        assert err.splitlines() == [SEARCHES.format(2), "interrupted"]
        after = 2  # the plan, and one of the search for what fits
        code, out, err = run(capsys, "plan", f"{file}:setup", "--device-memory", "1KB")
        assert code == 130 and "does not fit" in out and err.endswith("interrupted\n")


def test_an_interrupt_of_the_imports_ends_in_one_line(tmp_path):
    (tmp_path / "torch.py").write_text("raise KeyboardInterrupt")
    program = PACKAGE / "tools" / "command" / "fsdp-wrap"
    settings = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}
    done = subprocess.run([sys.executable, program, "doctor"], env=settings, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "interrupted\n")


# timeline, checkpoint


def test_commands_of_checkpoints_are_those_of_the_folder(tmp_path, capsys):
    pytest.importorskip("fsdp_wrap.checkpoint")
    torch.save({"w": torch.ones(2, 3)}, tmp_path / "m.pt")
    code, out, _ = run(capsys, "checkpoint", "inspect", tmp_path / "m.pt")
    assert code == 0 and "w  float32 [2, 3]  24 B" in out
    code, out, _ = run(capsys, "checkpoint", "export", tmp_path / "m.pt", tmp_path / "out")
    assert code == 0 and (tmp_path / "out" / "model.safetensors").exists()
    with mock.patch.object(import_module("fsdp_wrap.tools.command.main"), "find_spec", lambda name: None):
        code, _, err = run(capsys, "checkpoint", "inspect", "x")
    assert code == 2 and "invalid choice: 'checkpoint'" in err


# doctor


def findings(capsys: Any, *arguments: str) -> tuple[int, dict[str, dict[str, Any]]]:
    code, out, _ = run(capsys, "doctor", "--json", *arguments)
    return code, {finding["name"]: finding for finding in json.loads(out)}


def test_the_doctor_tells_what_is_there(capsys):
    code, by_name = findings(capsys, "--alone")
    assert code == 0 and not any(finding["fatal"] for finding in by_name.values())
    assert by_name["torch"]["told"].startswith(f"{torch.__version__}; supported are {OLDEST_TORCH} to")
    assert "gloo" in by_name["backends"]["told"]
    assert "meeting" not in by_name
    code, out, _ = run(capsys, "doctor", "--alone")
    assert code == 0 and out.splitlines()[0] == "versions" and "\npackages\n" in out


def test_the_doctor_judges_versions_and_limits(capsys):
    for version, fatal, advice in [
        ("2.10.1", True, "install torch 2.11 or newer"),
        (f"{OLDEST_TORCH}.0+cu130", False, ""),
        (f"{NEWEST_TORCH}.1", False, ""),
        ("2.99.0", False, "newer than all versions that were tested"),
    ]:
        with mock.patch.object(torch, "__version__", version):
            code, by_name = findings(capsys, "--alone")
        assert code == int(fatal) and by_name["torch"]["fatal"] == fatal
        assert advice in by_name["torch"]["advice"] and bool(advice) == bool(by_name["torch"]["advice"])
    with mock.patch.object(doctor.resource, "getrlimit", lambda which: (256, 4096)):
        _, by_name = findings(capsys, "--alone")
        _, out, _ = run(capsys, "doctor", "--alone")
    assert by_name["descriptors"]["told"] == "256 at most (may be raised to 4,096)"
    assert (
        "ulimit -n" in by_name["descriptors"]["advice"] and "ulimit -v" in by_name["address space"]["advice"]
    )
    assert "! descriptors" in out and "could be better" in out


def test_what_two_ranks_found_is_told(capsys):
    slow = Meeting(way="", warnings=["cannot share memory (no futex)"], latency=1e-4, bandwidth=2e9)
    with mock.patch.object(doctor, "meet", lambda: slow):
        code, by_name = findings(capsys)
    assert (
        code == 0
        and by_name["communicate by"]["told"] == "gloo's own collectives: 2.00 GB/s, 100 us at least"
    )
    assert by_name["communicate by"]["advice"] == "cannot share memory (no futex)"
    assert "was not noticed" in by_name["watch"]["told"] and by_name["watch"]["advice"]
    with mock.patch.object(doctor, "meet", lambda: Meeting(error="no route")):
        code, by_name = findings(capsys)
    assert code == 1 and by_name["meeting"]["told"] == "no route"
    assert "GLOO_SOCKET_IFNAME" in by_name["meeting"]["advice"]


@pytest.mark.slow
def test_two_ranks_meet_and_communicate_or_say_why_not(monkeypatch):
    monkeypatch.setenv("FSDP_WRAP_SHARED_MEMORY", "0")
    met = meet()
    assert not met.error and met.watched
    assert "shared memory" not in met.way
    assert met.bandwidth > 1e7 and 0 < met.latency < 1
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothing0")
    assert "nothing0" in meet().error


# bars, and the program


def test_where_there_is_no_terminal_an_hour_of_progress_is_a_few_lines(capsys):
    """By a fake clock; the search ends after an hour of it."""
    now = 0.0

    class Over(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            nonlocal now
            now += timeout or 0.0
            return now > 3600

    clock = SimpleNamespace(monotonic=lambda: now)
    with mock.patch.multiple(progress, _PATIENCE=2.0, time=clock):
        bar = progress.ProgressBar(None)
        bar.describe("planned 7 recipes")
        bar.run(Over())
    lines = capsys.readouterr().err.splitlines()
    assert 5 <= len(lines) <= 20 and len({*lines}) == len(lines)
    assert re.fullmatch(r"planned 7 recipes \[\d+ s\]", lines[0])


def test_a_bar_appears_after_two_seconds_and_goes(capsys):
    for terminal in (True, False):
        with (
            mock.patch.object(sys.stderr, "isatty", lambda terminal=terminal: terminal),
            mock.patch.multiple(progress, _PATIENCE=0.0, _PACE=0.01),
            progress.progress_bar(3) as bar,
        ):
            bar.describe("planning 8 ranks")
            bar.advance()
            told = ""
            while "planning 8 ranks: 1 of 3" not in told:  # a thread writes it
                told += capsys.readouterr().err
        told += capsys.readouterr().err
        assert ("\r" in told) is terminal and ("\n" in told) is not terminal, repr(told)
    with progress.progress_bar(3) as bar:
        bar.describe("something quick")
    assert capsys.readouterr().err == ""
    assert not [thread for thread in threading.enumerate() if thread.name == "fsdp_wrap.progress"]


@pytest.mark.slow
def test_the_program_ends_with_its_status_and_minds_a_closed_pipe(file):
    command = [sys.executable, "-m", "fsdp_wrap"]
    settings = {**os.environ, "PYTHONPATH": str(ROOT)}
    wrong = subprocess.run([*command, "plan", "x.py:f"], env=settings, capture_output=True, text=True)
    assert (wrong.returncode, wrong.stderr) == (2, "error: there is no file x.py\n")
    shown = subprocess.Popen(
        [*command, "doctor", "--alone"], env=settings, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    shown.stdout.close()
    assert shown.wait(NEVER) == 0 and b"Traceback" not in shown.stderr.read()
    shown.stderr.close()
