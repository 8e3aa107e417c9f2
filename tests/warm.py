"""Programs as torchrun starts them, but in processes that have imported torch already."""

import os
import runpy
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory

from bed import RankFailure, run_isolated
from bed.paths import ROOT
from bed.ports import free_port
from bed.scripts import Done


def warm(processes: int, script: Path | str, *arguments: object, folder: Path = ROOT) -> Done:
    """Runs a script in so many ranks, as `python(*on_ranks(...))` does, seconds sooner."""
    words = [str(script), *map(str, arguments)]
    with TemporaryDirectory() as told:
        rest = (words, str(folder), free_port(), told)
        outcomes = run_isolated(_run, *rest, world_size=processes, timeout=900, backend=None)
        if any(outcome.kind != "passed" for outcome in outcomes):
            raise RankFailure(outcomes)
        return Done(0, *(Path(told, name).read_text() for name in ("out", "err")))


def _run(rank: int, world_size: int, words: list[str], folder: str, port: int, told: str) -> None:
    for prefix in ("", "LOCAL_"):
        os.environ |= {f"{prefix}RANK": str(rank), f"{prefix}WORLD_SIZE": str(world_size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.chdir(folder)
    sys.argv = words
    sys.path.insert(0, str(Path(words[0]).parent))
    with open(f"{told}/out", "a", buffering=1) as out, open(f"{told}/err", "a", buffering=1) as err:
        with redirect_stdout(out), redirect_stderr(err):
            runpy.run_path(words[0], run_name="__main__")
