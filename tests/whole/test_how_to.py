"""The how-to pages: what they show of files is what these hold."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bed.paths import ROOT
from bed.scripts import run

SCRIPT = ROOT / "examples" / "slurm.sh"
PRINT_ARGUMENTS = '#!/bin/bash\nprintf "%s\\n" "${0##*/}" "$@"\n'


def test_the_slurm_script_is_sound_and_on_its_page():
    run("bash", "-n", SCRIPT)
    page = (ROOT / "docs" / "how-to" / "several-hosts.md").read_text("utf-8")
    assert f"```sh\n{SCRIPT.read_text('utf-8').rstrip()}\n```\n" in page


def started(folder: Path, programs: dict[str, str], **settings: str) -> list[str]:
    """What the script starts in a job whose programs are `programs`, as words."""
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    path = os.pathsep.join([str(folder), "/usr/bin", "/bin"])
    job = {"SLURM_JOB_ID": "12345", "SLURM_JOB_NODELIST": "host-[3-4]", "SLURM_JOB_NUM_NODES": "2"}
    done = run("bash", SCRIPT, "train.py", "--lr", "a b", env={"PATH": path, **job, **settings})
    return done.out.splitlines()


@pytest.mark.skipif(Path("/usr/bin/srun").exists(), reason="this host has Slurm")
def test_the_slurm_script_starts_one_torchrun_on_each_host(tmp_path):
    hosts = "#!/bin/bash\nprintf 'host-3\\nhost-4\\n'\n"
    programs = {"srun": PRINT_ARGUMENTS, "torchrun": PRINT_ARGUMENTS, "scontrol": hosts}
    words = started(tmp_path, programs, SLURM_GPUS_ON_NODE="8", SLURM_CPUS_PER_TASK="64")
    assert words[:4] == ["srun", "--kill-on-bad-exit=1", "--cpus-per-task=64", "torchrun"]
    options = dict(zip(words[4:14:2], words[5:14:2]))
    assert options == {
        "--nnodes": "2",
        "--nproc-per-node": "8",
        "--rdzv-id": "12345",
        "--rdzv-backend": "c10d",
        "--rdzv-endpoint": "host-3:22345",
    }
    assert words[14:] == ["train.py", "--lr", "a b"]

    for name in programs:
        (tmp_path / name).unlink()  # without Slurm it starts this host's part
    alone = {"SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "localhost", "RANKS_PER_NODE": "2"}
    words = started(tmp_path, {"torchrun": PRINT_ARGUMENTS}, **alone)
    assert words[0] == "torchrun"
    assert "localhost:22345" in words and words[-3:] == ["train.py", "--lr", "a b"]
