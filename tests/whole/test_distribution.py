"""What a release gives away: complete, checked, and enough to train without the repository."""

import os
import re
import shutil
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

from bed.paths import ROOT
from bed.scripts import here, on_ranks, python, run
from fsdp_wrap._core import __version__

pytestmark = pytest.mark.slow

TOOLS = ("build", "twine", "mypy", "basedpyright")

NOT_COPIED = (".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".coverage*")

WHERE = """
import sys, fsdp_wrap

late = ("fsdp_wrap.tools", "fsdp_wrap.weights", "fsdp_wrap.optim", "torch.distributed.checkpoint")
assert not any(name.startswith(late) for name in sys.modules)
print(fsdp_wrap.__file__, fsdp_wrap.__version__)
"""


IMPORTS = {
    "ours": """
from fsdp_wrap import FSDPModule, FullyShardedDataParallel as FSDP, fully_shard, replicate
from fsdp_wrap.sharded_grad_scaler import ShardedGradScaler
""",
    "torchs": """
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel as FSDP, fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
""",
}
"""Of two programs that differ in nothing else."""
REVEALS = """
import torch
from torch import nn

reveal_type(fully_shard(nn.Linear(2, 2)))
reveal_type(fully_shard([nn.Linear(2, 2)]))
reveal_type(fully_shard(nn.Linear(2, 2)).unshard())
reveal_type(replicate(nn.Linear(2, 2)))
reveal_type(replicate([nn.Linear(2, 2)]))
both = nn.Linear(2, 2)
assert isinstance(both, FSDPModule)
reveal_type(both.weight)
wrapper = FSDP(nn.Linear(2, 2))
optimizer = torch.optim.SGD(wrapper.parameters())
reveal_type(wrapper.module)
reveal_type(wrapper(torch.ones(2)))
reveal_type(wrapper.clip_grad_norm_(1.0))
reveal_type(wrapper.check_is_root())
reveal_type(wrapper.state_dict())
reveal_type(wrapper.state_dict(destination={"name": 1}))
reveal_type(wrapper.named_parameters())
reveal_type(wrapper.apply(print))
reveal_type(FSDP.fsdp_modules(wrapper))
reveal_type(FSDP.optim_state_dict(wrapper, optimizer))
reveal_type(FSDP.optim_state_dict_to_load(wrapper, optimizer, {}))
reveal_type(ShardedGradScaler().scale(torch.ones(2)))
reveal_type(ShardedGradScaler().scale([torch.ones(2)]))
"""
"""What follows the imports."""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source archive, and the wheel that is built from it."""
    for tool in TOOLS:
        pytest.importorskip(tool, reason='needs pip install -e ".[dev]"')
    root = tmp_path_factory.mktemp("release")
    shutil.copytree(ROOT, root / "source", ignore=shutil.ignore_patterns(*NOT_COPIED))
    environment = {**os.environ}  # not what imports the checkout
    python(
        *("-m", "build", "--no-isolation", "--outdir", root / "dist"), folder=root / "source", env=environment
    )
    (archive,) = (root / "dist").glob("*.tar.gz")
    (wheel,) = (root / "dist").glob("*.whl")
    return archive, wheel


def test_archives_hold_what_they_should(built):
    archive, wheel = built
    assert archive.name == f"fsdp_wrap-{__version__}.tar.gz"
    assert wheel.name == f"fsdp_wrap-{__version__}-py3-none-any.whl"
    with tarfile.open(archive) as tar:
        inside = {Path(*Path(name).parts[1:]).as_posix() for name in tar.getnames()}
    for name in (
        *("LICENSE", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md", "pyproject.toml", ".ci/run"),
        *("fsdp_wrap/py.typed", "tests/bed/crew.py", "tests/whole/test_distribution.py"),
        *("docs/architecture.md", "docs/public_api/release.txt"),
        *("examples/lm/model.py", "benchmarks/step.py"),
    ):
        assert name in inside, name
    assert not any(name.endswith(".pyc") for name in inside)
    with zipfile.ZipFile(wheel) as files:
        tops = {name.partition("/")[0] for name in files.namelist()}
        assert tops == {"fsdp_wrap", *(f"fsdp_wrap-{__version__}.{part}" for part in ("data", "dist-info"))}
        there = {path.relative_to(ROOT).as_posix() for path in (ROOT / "fsdp_wrap").rglob("*.py")}
        assert there | {"fsdp_wrap/py.typed"} <= set(files.namelist())
        assert any(name.endswith("LICENSE") for name in files.namelist())
        told = files.read(f"fsdp_wrap-{__version__}.dist-info/METADATA").decode()
        assert "pip install" in told and "](" not in told, "links to files that an index does not have"
    python("-m", "twine", "check", "--strict", *built)


def test_installed_wheel_trains_without_the_repository(built, tmp_path):
    _, wheel = built
    place = tmp_path / "site"
    python(*"-m pip install -q --no-deps --no-index --target".split(), place, wheel)
    shutil.copy(ROOT / "examples" / "minimal.py", tmp_path)
    environment = here(PYTHONPATH=str(place), OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    said = python("-c", WHERE, folder=tmp_path, env=environment).out
    assert said == f"{place / 'fsdp_wrap' / '__init__.py'} {__version__}\n"
    trained = python(*on_ranks(2, "minimal.py"), folder=tmp_path, env=environment).out
    losses = [float(line.rpartition(" ")[2]) for line in trained.splitlines()]
    assert losses[-1] < losses[0] and (tmp_path / "model.pt").exists()


@pytest.fixture(scope="module", params=["editable", "wheel"])
def installed(request: pytest.FixtureRequest, built: tuple[Path, Path]) -> Path:
    """The Python of an environment that has the package, and of this one what the package needs."""
    root = built[1].parents[1] / request.param
    python("-m", "venv", "--without-pip", root)
    place = Path(sysconfig.get_path("purelib", "venv", {"base": str(root)}))
    (place / "beside.pth").write_text(sysconfig.get_path("purelib") + "\n")
    what = ["--editable", root.parent / "source"] if request.param == "editable" else [built[1]]
    options = "-m pip install -q --no-deps --no-index --no-build-isolation --ignore-installed".split()
    interpreter = root / "bin" / "python"
    run(interpreter, *options, *what, folder=root, env=elsewhere())
    file = run(interpreter, "-c", WHERE, folder=root, env=elsewhere()).out.split()[0]
    assert Path(file).is_relative_to(root.parent / "source" if request.param == "editable" else place)
    return interpreter


def elsewhere() -> dict[str, str]:
    """Returns this process's environment without what leads to the checkout."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}


def test_type_checkers_read_what_is_installed(installed, built, tmp_path):
    for name, imports in IMPORTS.items():
        (tmp_path / f"{name}.py").write_text(imports + REVEALS)
    shutil.copy(ROOT / "tests" / "whole" / "typed_program.py", tmp_path)
    cache = built[1].parent / "mypy_cache"  # of torch, for both installs
    (tmp_path / "pyrightconfig.json").write_text('{"typeCheckingMode": "basic"}')
    checkers = {
        "mypy": f"-m mypy --strict --cache-dir {cache} --python-executable {installed} .",
        "pyright": f"-m basedpyright --pythonpath {installed}",
    }
    told = {
        name: python(*words.split(), folder=tmp_path, env=elsewhere()).out for name, words in checkers.items()
    }
    assert "Success: no issues found in 3 source files" in told["mypy"]
    assert "0 errors, 0 warnings" in told["pyright"]
    for output in told.values():
        ours, theirs = (revealed(output, name) for name in IMPORTS)
        assert len(ours) == REVEALS.count("reveal_type(") and ours == theirs


def revealed(output: str, name: str) -> list[str]:
    """Returns the types that a checker reveals in a program, without the modules of their classes."""
    types = re.findall(rf'\b{name}\.py:\d+.*(?:Revealed type is|Type of ".*" is) "(.*)"', output)
    return [re.sub(r"\b(?:\w+\.)+(?=\w)", "", type_) for type_ in types]


def test_the_program_for_type_checkers_runs(tmp_path):
    environment = here(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    python(*on_ranks(2, ROOT / "tests" / "whole" / "typed_program.py", tmp_path), env=environment)
