"""The how-to pages: what they show of files is what these hold."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from bed.paths import ROOT

SCRIPT = ROOT / "examples" / "slurm.sh"
PRINT_ARGUMENTS = '#!/bin/bash\nprintf "%s\\n" "${0##*/}" "$@"\n'


def test_the_slurm_script_is_on_its_page():
    page = (ROOT / "docs" / "how-to" / "several-hosts.md").read_text("utf-8")
    assert f"```sh\n{SCRIPT.read_text('utf-8').rstrip()}\n```\n" in page


def started(folder: Path, programs: dict[str, str], **settings: str) -> list[str]:
    """What the script starts in a job whose programs are `programs`, as words."""
    for name, text in programs.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    path = os.pathsep.join([str(folder), "/usr/bin", "/bin"])
    job = {"SLURM_JOB_ID": "12345", "SLURM_JOB_NODELIST": "host-[3-4]", "SLURM_JOB_NUM_NODES": "2"}
    return subprocess.run(
        ["bash", str(SCRIPT), "train.py", "--lr", "a b"],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": path, **job, **settings},
    ).stdout.splitlines()


def test_the_slurm_script_is_sound():
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)


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


@pytest.mark.skipif(Path("/usr/bin/srun").exists(), reason="this host has Slurm")
def test_the_slurm_script_starts_this_hosts_part_without_slurm(tmp_path):
    alone = {"SLURM_JOB_NUM_NODES": "1", "SLURM_JOB_NODELIST": "localhost", "RANKS_PER_NODE": "2"}
    words = started(tmp_path, {"torchrun": PRINT_ARGUMENTS}, **alone)
    assert words[0] == "torchrun"
    assert "localhost:22345" in words and words[-3:] == ["train.py", "--lr", "a b"]
