"""A step before it runs, and while it runs: `--plan`, `--timeline` and `--audit`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import fsdp_wrap
from lm.data import Batch
from lm.launch import World

UNRECORDED, RECORDED = 2, 3
"""Steps: the first ones allocate and make optimizer state, so those after them are recorded."""


class Unread:
    """Stands for a corpus where no values matter."""

    def batch(self, key: str, size: int, context: int, taken: slice = slice(None)) -> Batch:
        tokens = torch.zeros(len(range(size)[taken]), context, dtype=torch.long)
        return tokens, tokens


def auditing(model: torch.nn.Module, every: int | None) -> AbstractContextManager[Any]:
    """Ends the run if hardware computes wrong; an elastic agent then begins anew from the last checkpoint."""
    return nullcontext() if every is None else fsdp_wrap.audit(model, every, on_fault="raise")


def print_plan(ranks: int, setup: Callable[[World], tuple[Any, Any, Any]]) -> None:
    """Print what a rank of so many will hold and send; 0 stands for as many as torchrun has started."""
    if int(os.environ.get("RANK", 0)):
        return  # one page is enough
    ranks = ranks or int(os.environ.get("WORLD_SIZE", 1))
    world = World(0, ranks, torch.device("cpu"))
    print(fsdp_wrap.plan(lambda: setup(world), ranks, machine=fsdp_wrap.measure_machine("cpu")))


@dataclass
class Recording:
    """Records some steps of a run into a folder: a trace, a report and a picture. Every rank has one.

    Without a folder it records nothing.
    """

    folder: Path | None
    world: World
    _open: ExitStack = field(default_factory=ExitStack)
    _timeline: Any = None
    _steps: int = 0

    @contextmanager
    def step(self, model: torch.nn.Module, is_last: bool) -> Iterator[None]:
        """Count a step, and record it where it is one of those to be recorded."""
        if self.folder is not None and self._steps == UNRECORDED:
            self._timeline = self._open.enter_context(fsdp_wrap.timeline(model, self.folder))
        yield
        self._steps += 1
        if self._timeline is not None and (is_last or self._steps == UNRECORDED + RECORDED):
            self._open.close()
            self._write()
            self._timeline = None

    def _write(self) -> None:
        if not self.world.is_first or self.folder is None:
            return
        self._timeline.save(self.folder / "trace.json")
        (self.folder / "report.txt").write_text(self._timeline.report() + "\n")
        written = "trace.json (for https://ui.perfetto.dev), report.txt"
        try:
            self._timeline.plot(self.folder / "step.svg")
            written += " and step.svg"
        except ImportError as error:  # matplotlib is not needed to train
            print(f"no picture: {error}", file=sys.stderr)
        print(f"wrote {written} to {self.folder}", file=sys.stderr)
