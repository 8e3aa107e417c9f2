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
    """What to delete in the package and in the tests; what is missed then, and the error that names it."""

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
    "state over replicas": AddOn(
        ["_state_over_replicas/"],
        ["state_over_replicas/", "params/test_phased_gathers.py"],
        "torch.distributed.init_process_group('fake', rank=0, world_size=4); mesh = "
        "torch.distributed.init_device_mesh('cpu', (2, 2)); "
        "fsdp_wrap.fully_shard(torch.nn.Linear(4, 4), mesh=mesh, state_over_replicas=True)",
        "MissingAddOn: state_over_replicas=True needs the add-on for state over replicas",
    ),
    "activations": AddOn(
        ["_activations/"],
        ["activations/", "streams/"],
        "fsdp_wrap.offload_activations",
        "AttributeError: module 'fsdp_wrap' has no attribute 'offload_activations'",
    ),
    "uneven ranks": AddOn(
        ["_uneven/"],
        [
            *(
                "uneven/",
                "runtime/test_backward_ends.py",
                "params/test_phased_gathers.py",
                "tools/test_plan.py",
                "tools/test_timelines.py",
            ),
            "whole/test_benchmarks.py",
        ],
        "fsdp_wrap.uneven",
        "AttributeError: module 'fsdp_wrap' has no attribute 'uneven'",
    ),
    "the same bits": AddOn(
        ["_reproducible/"],
        ["reproducible/", "streams/", "whole/test_examples.py"],
        "fsdp_wrap.reproducible",
        "AttributeError: module 'fsdp_wrap' has no attribute 'reproducible'",
    ),
    "transforms": AddOn(
        ["_transforms.py"],
        ["runtime/test_second_order.py", "generated/"],
        "torch.distributed.init_process_group('fake', rank=0, world_size=2); "
        "model = fsdp_wrap.fully_shard(torch.nn.Linear(4, 4)); torch.func.vmap(model)(torch.ones(2, 4))",
        "MissingAddOn: torch.func needs the add-on for transforms of torch.func",
    ),
    "recorded values": AddOn(
        ["_values/"],
        ["values/"],
        "fsdp_wrap.find_nonfinite",
        "AttributeError: module 'fsdp_wrap' has no attribute 'find_nonfinite'",
    ),
    "optimizers": AddOn(
        ["optim/"],
        [
            *("optim/", "seams/", "clients/test_low_bit_optimizers.py", "tools/test_timelines.py"),
            *("state/test_step_mistakes.py", "state/test_optim_input.py", "whole/test_benchmarks.py"),
            "whole/test_examples.py",
        ],
        "import fsdp_wrap.optim",
        "ModuleNotFoundError: No module named 'fsdp_wrap.optim'",
    ),
    "writer process": AddOn(["_writer_process/"], ["checkpoint/test_writer_process.py"]),
    "checkpoint folders": AddOn(
        ["checkpoint/", "_writer_process/"],
        [
            *("checkpoint/", "seams/", "comm/test_lost_ranks.py", "tools/test_command.py"),
            *("whole/test_examples.py", "whole/test_mistakes.py", "gpu/test_cuda_checkpoint.py"),
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
            *("state/test_optim_input.py", "state/test_optim_state_dict.py", "whole/test_benchmarks.py"),
            *("params/test_phased_bytes.py", "params/test_phased_gathers.py"),
        ],
        "import fsdp_wrap.compat",
        "ModuleNotFoundError: No module named 'fsdp_wrap.compat'",
    ),
}
"""The one list of what belongs to which add-on."""

CHOSEN = (
    "test_parity and by_hand or test_fully_shard_comms and collectives_of_the_users "
    "or test_comm_hooks and differ_dtypes or test_distributed_state_dict and several_optimizers"
)
"""The other tests that run where all add-ons are gone; all of them are imported."""

OF_THE_WHOLE = [
    *(
        f"core/test_{name}.py"
        for name in ("add_ons", "architecture", "torch_private", "api_table", "own_files")
    ),
    *("generated/", "whole/test_distribution.py", "whole/test_gallery.py", "site/"),
]
"""Tests that look at all files and names of the package, those of add-ons too."""

ALONE = """
import sys

sys.meta_path[:] = [hook for hook in sys.meta_path if "__editable__" not in getattr(hook, "__module__", "")]
"""
"""Without it an installation of the repository would give back what was deleted from the copy."""


def without(add_ons: list[AddOn], root: Path) -> dict[str, str]:
    """Copies package and tests into a folder, and deletes add-ons; returns an environment that uses it."""
    for name in ("fsdp_wrap", "tests", "benchmarks", "examples"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", root)
    (root / "sitecustomize.py").write_text(ALONE)
    files = {pattern for add_on in add_ons for pattern in add_on.files}
    tests = {pattern for add_on in add_ons for pattern in add_on.tests}
    for folder, patterns in (("fsdp_wrap", files), ("tests", {*tests, *OF_THE_WHOLE})):
        for pattern in patterns:
            assert (ROOT / folder / pattern).exists(), f"{pattern} is not in {folder}"
            path = root / folder / pattern
            shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    return {**os.environ, "PYTHONPATH": str(root)}


IMPORTS = """
import pkgutil
from importlib import import_module

import fsdp_wrap

for info in pkgutil.walk_packages(fsdp_wrap.__path__, "fsdp_wrap."):
    if not info.name.endswith("__main__"):
        import_module(info.name)
"""


@pytest.mark.parametrize("name", ADD_ONS)
def test_each_can_be_deleted(name, tmp_path):
    add_on = ADD_ONS[name]
    environment = without([add_on], tmp_path)
    asks = f"import fsdp_wrap.comm_hooks, torch; {add_on.missed}"
    code = 1 if add_on.missed else 0
    told = python("-c", IMPORTS + asks, code=code, folder=tmp_path, env=environment)
    assert add_on.error in told.err, told


def test_all_can_be_deleted_at_once(tmp_path):
    environment = without(list(ADD_ONS.values()), tmp_path)
    python(*("-m", "pytest", "-q", "-x", "-k", CHOSEN, "tests"), folder=tmp_path, env=environment)
