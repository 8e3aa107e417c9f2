"""The Python and the commands of README and of every page of the site, run as a reader would.

README, the front page and *First run* are programs: their Python blocks are pasted into one file, and that
runs in two ranks. Most other pages show parts of a program in `examples/how_to`, which is one of their
commands; `test_site.py` compares the parts. On the rest, Python blocks run one after the other in one
namespace, in two ranks with a process group, and with a temporary folder as the working folder. No page has
code that readers do not see. What cannot run here is skipped, with a reason:
`<!--- skip: next "needs a GPU" -->`.

Commands in `bash` blocks run one after the other under `bash -euo pipefail` in a folder that holds a copy of
the examples. Three are not taken as they stand. `pip` installs nothing: `test_site.py` compares what it
would install with the extras that there are. `pytest` runs nothing: it would run these tests. The language
model of `examples/train_lm.py` is small and trains for a few steps. Blocks of other languages are output,
files, or commands for a cluster.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
from pathlib import Path
from unittest import SkipTest

import pytest

from bed import run_isolated
from bed.paths import ROOT
from bed.report import RankFailure
from bed.scripts import Done, here, run
from site_pages import blocks, name_of, pages, program_of

pytestmark = pytest.mark.slow
sybil = pytest.importorskip("sybil")

LIMIT = 150.0
ELSEWHERE = {"docs/examples.md", *(name_of(page) for page in (ROOT / "docs" / "reference").glob("*.md"))}
"""`test_gallery.py` runs the commands of the examples, and `test_reference.py` what the reference shows."""
SHORT = (
    "--layers 2 --width 32 --heads 2 --context 16 --batch 2 --warmup 2 --eval-windows 8 --sample 4 --steps 12"
)
PROLOGUE = f"""
set -euo pipefail
pip() {{ :; }}
pytest() {{ :; }}
short() {{ if [[ "$*" == *examples/train_lm.py* ]]; then echo {SHORT}; fi; }}
torchrun() {{ command python -m torch.distributed.run --standalone "$@" $(short "$@"); }}
python() {{ command python "$@" $(short "$@"); }}
fsdp-wrap() {{ command python -m fsdp_wrap "$@"; }}
"""


def pages_with(language: str) -> list[str]:
    """The pages that have blocks of a language."""
    searched = [page for page in pages() if name_of(page) not in ELSEWHERE]
    return [name_of(page) for page in searched if any(block.language == language for block in blocks(page))]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a page's blocks run: it has the examples, and what the blocks write."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples", ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def run_python(rank: int, world_size: int, page: str, folder: str, port: int) -> list[str]:
    """Runs a page's Python in this rank; returns why some was skipped."""
    from sybil import Sybil
    from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser

    os.chdir(folder)
    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in launched.items()})
    os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "HF_HUB_OFFLINE": "1"})
    document = Sybil([PythonCodeBlockParser(), SkipParser()]).parse(ROOT / page)
    document.namespace.update(__name__="__main__", rank=rank, world_size=world_size)
    reasons = []
    for example in document:
        try:
            example.evaluate()
        except SkipTest as skipped:
            reasons.append(f"{page}:{example.line}: {skipped}")
    return reasons


PROGRAMS = ["README.md", "docs/index.md", "docs/start/first-run.md"]


@pytest.mark.parametrize("page", PROGRAMS)
def test_a_page_that_is_a_program_runs(page, folder):
    copied = [block.source for block in blocks(ROOT / page) if block.language == "python"]
    (folder / "pasted.py").write_text("\n".join(copied))
    run_commands("torchrun --nproc-per-node 2 pasted.py", folder)


@pytest.mark.parametrize(
    "page", [page for page in pages_with("python") if page not in PROGRAMS and program_of(page) is None]
)
def test_python_of_a_page_runs(page, folder):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    outcomes = run_isolated(run_python, page, str(folder), port, world_size=2, timeout=LIMIT)
    if {outcome.kind for outcome in outcomes} != {"passed"}:
        pytest.fail(str(RankFailure(outcomes)), pytrace=False)
    for reason in outcomes[0].value:
        print("skipped", reason)


def commands_of(page: str) -> str:
    """The commands of a page in their order, without the skipped."""
    from sybil import Example, Sybil
    from sybil.parsers.markdown import CodeBlockParser, SkipParser

    commands: list[str] = []

    def collect(example: Example) -> None:
        commands.append(str(example.parsed))

    for example in Sybil([CodeBlockParser("bash", collect), SkipParser()]).parse(ROOT / page):
        with contextlib.suppress(SkipTest):
            example.evaluate()
    return "\n".join(commands)


def run_commands(script: str, folder: Path, code: int | None = 0) -> Done:
    """Runs a script; nothing of it is left running."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    quiet = here(PATH=path, HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")
    return run("bash", "-c", PROLOGUE + script, code=code, folder=folder, env=quiet)


@pytest.mark.left_over(4)
@pytest.mark.parametrize("page", pages_with("bash"))
def test_commands_of_a_page_run(page, folder):
    run_commands(commands_of(page), folder)


def test_what_fails_is_seen(folder):
    for script in ("false | true\n:", "python -c 'raise SystemExit(3)'\n:", "torchrun absent.py\n:"):
        assert run_commands(script, folder, code=None).code != 0
    broken = folder / "broken.md"
    broken.write_text("# Page\n\n```python\nvalue = 1\n```\n\n```python\nassert value == 2\n```\n")
    outcomes = run_isolated(run_python, str(broken), str(folder), 0, world_size=2, timeout=LIMIT)
    assert {outcome.kind for outcome in outcomes} == {"failed"}
    assert 'broken.md", line 8' in outcomes[0].text
