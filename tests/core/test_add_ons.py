"""Each add-on can be deleted, with its files and their tests, and the rest works as before."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from bed.paths import ROOT
from bed.scripts import python

pytestmark = pytest.mark.slow


class AddOn(NamedTuple):
    """An add-on to delete, and the name by which users see that it is gone.

    Attributes:
        files: In the package; folders end with a slash.
        tests: In the folder of tests, as patterns.
        missed: What raises an error that names the add-on; nothing where nobody would notice.
        error: Its type and a part of its text.
    """

    files: list[str]
    tests: list[str]
    missed: str = ""
    error: str = ""


ADD_ONS = {
    "shared memory": AddOn(["_comm/shared_memory/"], ["comm/shared_memory/", "comm/test_lost_ranks.py"]),
    "compression": AddOn(
        ["_compression/"],
        ["compression/"],
        "fsdp_wrap.comm_hooks.compress(torch.nn.Linear(1, 1), gathers='int8')",
        "MissingAddOn: compress() needs the add-on for compression",
    ),
    "optimizers": AddOn(
        ["optim/"],
        [
            *("optim/", "seams/", "clients/test_low_bit_optimizers.py", "tools/test_timelines.py"),
            *("whole/test_benchmarks.py", "whole/test_examples.py"),
        ],
        "import fsdp_wrap.optim",
        "ModuleNotFoundError: No module named 'fsdp_wrap.optim'",
    ),
    "checkpoint folders": AddOn(
        ["checkpoint/"],
        [
            *("checkpoint/", "seams/", "comm/test_lost_ranks.py", "tools/test_command.py"),
            *("whole/test_examples.py", "gpu/test_cuda_checkpoint.py"),
            *(f"clients/test_{name}.py" for name in ("exports", "low_bit_optimizers", "torchao")),
            *("optim/test_muon.py", "optim/test_step_in_backward.py", "weights/test_weight_transfer.py"),
            *("parallel/test_checkpoints_across_meshes.py", "parallel/test_distributed_parameters.py"),
            *("parallel/test_mesh_per_parameter.py", "parallel/test_replicate.py"),
        ],
        "import fsdp_wrap.checkpoint",
        "ModuleNotFoundError: No module named 'fsdp_wrap.checkpoint'",
    ),
    "compat": AddOn(
        ["compat/"],
        [
            *("compat/", "clients/", "params/test_attributes.py", "parallel/test_pipelines.py"),
            "whole/test_benchmarks.py",
        ],
        "import fsdp_wrap.compat",
        "ModuleNotFoundError: No module named 'fsdp_wrap.compat'",
    ),
}
"""The one list of what belongs to which add-on."""

CHOSEN = {
    "test_parity": "by_hand",
    "test_fully_shard_comms": "collectives_of_the_users",
    "test_comm_hooks": "differ_and_dtypes",
    "test_distributed_state_dict": "several_optimizers",
}
"""The other tests that run, by file; all of them are imported."""

OF_THE_WHOLE = [
    *(f"core/test_{name}.py" for name in ("add_ons", "architecture", "torch_private", "api_table")),
    "core/test_message_page.py",
    "whole/test_distribution.py",
    "whole/test_gallery.py",
    "site/",
]
"""Tests that look at all files and names of the package, those of add-ons too."""


ALONE = """
import sys

sys.meta_path[:] = [each for each in sys.meta_path if "__editable__" not in getattr(each, "__module__", "")]
"""
"""Without it an installation of the repository would give back what was deleted from the copy."""


def without(add_on: AddOn, root: Path) -> None:
    """Copies package and tests into a folder, and deletes an add-on."""
    for name in ("fsdp_wrap", "tests", "benchmarks", "examples"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    (root / "sitecustomize.py").write_text(ALONE)
    for folder, patterns in (("fsdp_wrap", add_on.files), ("tests", [*add_on.tests, *OF_THE_WHOLE])):
        for pattern in patterns:
            found = [*(root / folder).glob(pattern.rstrip("/"))]
            assert found, f"{pattern} is not in {folder}"
            for path in found:
                shutil.rmtree(path) if path.is_dir() else path.unlink()


@pytest.mark.parametrize("name", ADD_ONS)
def test_each_can_be_deleted(name, tmp_path):
    add_on = ADD_ONS[name]
    without(add_on, tmp_path)
    chosen = " or ".join(f"({file} and {name})" for file, name in CHOSEN.items())
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    python(*("-m", "pytest", "-q", "-x", "-k", chosen, "tests"), folder=tmp_path, env=environment)
    if add_on.missed:
        asks = f"import fsdp_wrap, fsdp_wrap.comm_hooks, torch; {add_on.missed}"
        told = python("-c", asks, code=None, folder=tmp_path, env=environment)
        assert add_on.error in told.err, told
