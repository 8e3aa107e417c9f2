"""What a release gives away: complete, checked, and enough to train without the repository."""

import os
import shutil
import tarfile
import zipfile
from pathlib import Path

import pytest

from bed.paths import ROOT
from bed.scripts import here, on_ranks, python
from fsdp_wrap._core import __version__

pytestmark = pytest.mark.slow

TOOLS = ("build", "twine")

NOT_COPIED = (".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".*_cache", ".coverage*")

WHERE = """
import sys, fsdp_wrap

late = ("fsdp_wrap.tools", "fsdp_wrap.weights", "fsdp_wrap.optim", "torch.distributed.checkpoint")
assert not any(name.startswith(late) for name in sys.modules)
print(fsdp_wrap.__file__, fsdp_wrap.__version__)
"""


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
