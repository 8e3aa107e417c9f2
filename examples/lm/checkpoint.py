"""Checkpoints as one folder per step, complete or not there at all.

A folder is written under a temporary name and renamed when every rank has finished its part, so a run
killed at any moment leaves the previous checkpoint as it was. Every rank calls the methods of `Folder`, and
every rank sees the same folder.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist
from torch import nn

from lm.launch import RunError, on_first_rank

KEPT = 2
MODEL, DESCRIPTION, PARTIAL = "model.pt", "description.json", ".partial"
STEP_NAME = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Folder:
    """Checkpoints of one run. `identity` holds what a run must share with a checkpoint to continue it."""

    path: Path
    identity: Mapping[str, Any]

    def prepare(self) -> None:
        """Make the folder of a run that starts anew; one that holds checkpoints already is refused."""
        on_first_rank(self._prepare)

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Write the checkpoint of `step`, then drop all but the last few."""
        final = self.path / f"step-{step:06d}"
        partial = final.with_name(final.name + PARTIAL)
        on_first_rank(lambda: _make_empty(partial))
        weights = model.state_dict()
        if dist.get_rank() == 0:
            _write(weights, partial / MODEL)
        _write(optimizer.state_dict(), partial / _optimizer_file(dist.get_rank()))
        dist.barrier()
        on_first_rank(lambda: self._complete(step, partial, final))

    def load(self, last_step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Continue from the latest complete checkpoint, which must not lie beyond `last_step`."""
        step, source = on_first_rank(lambda: self._find(last_step))
        model.load_state_dict(torch.load(source / MODEL, map_location="cpu"))
        optimizer.load_state_dict(torch.load(source / _optimizer_file(dist.get_rank()), map_location="cpu"))
        return step

    def _prepare(self) -> None:
        complete, _ = _survey(self.path)
        if complete:
            raise RunError(
                f"checkpoint folder {self.path} already holds {complete[-1].name}: "
                "pass --resume to continue that run, or name another folder"
            )
        self.path.mkdir(parents=True, exist_ok=True)

    def _complete(self, step: int, partial: Path, final: Path) -> None:
        sizes = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
        description = {"step": step, "identity": dict(self.identity), "files": sizes}
        with open(partial / DESCRIPTION, "w") as file:
            json.dump(description, file, indent=1)
            _flush(file)
        if final.exists():
            # Only a damaged checkpoint is ever written again: resuming skipped it.
            shutil.rmtree(final)
        partial.rename(final)
        _flush_folder(self.path)
        complete, others = _survey(self.path)
        for path in [*complete[:-KEPT], *others]:
            shutil.rmtree(path)

    def _find(self, last_step: int) -> tuple[int, Path]:
        complete, others = _survey(self.path)
        if not complete:
            reason = _why_none(self.path, others)
            raise RunError(f"no complete checkpoint to resume from in {self.path}: {reason}")
        latest = complete[-1]
        for path, lack in others.items():
            print(f"passing over {path}: {lack}", file=sys.stderr)
        description = json.loads((latest / DESCRIPTION).read_text())
        differences = _differences(description["identity"], self.identity)
        if differences:
            raise RunError(f"checkpoint {latest} does not fit this run: {'; '.join(differences)}")
        if description["step"] > last_step:
            raise RunError(f"checkpoint {latest} lies beyond the last step asked for, --steps {last_step}")
        return description["step"], latest


def _survey(folder: Path) -> tuple[list[Path], dict[Path, str]]:
    """The complete checkpoints by step, and the others with what each lacks."""
    complete: list[tuple[int, Path]] = []
    others: dict[Path, str] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        name = STEP_NAME.fullmatch(path.name.removesuffix(PARTIAL))
        if not name or not path.is_dir():
            continue
        lack = "was never completed" if path.name.endswith(PARTIAL) else _lack(path)
        if lack:
            others[path] = lack
        else:
            complete.append((int(name[1]), path))
    return [path for _, path in sorted(complete)], others


def _lack(path: Path) -> str | None:
    """What keeps a checkpoint from being complete."""
    try:
        description = json.loads((path / DESCRIPTION).read_text())
    except OSError:
        return f"{DESCRIPTION} is missing"
    except ValueError:
        return f"{DESCRIPTION} is damaged"
    for name, size in description["files"].items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} of {size} bytes"
    return None


def _why_none(folder: Path, others: Mapping[Path, str]) -> str:
    if others:
        return "; ".join(f"{path.name}: {lack}" for path, lack in others.items())
    return "it holds no step-* folder" if folder.is_dir() else "there is no such folder"


def _differences(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> list[str]:
    names = [*ours, *(name for name in theirs if name not in ours)]
    return [
        f"{name} is {theirs.get(name)} in the checkpoint and {ours.get(name)} here"
        for name in names
        if theirs.get(name) != ours.get(name)
    ]


def _optimizer_file(rank: int) -> str:
    return f"optimizer-{rank}.pt"


def _make_empty(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _write(state: Mapping[str, Any], path: Path) -> None:
    with open(path, "wb") as file:
        torch.save(state, file)
        _flush(file)


def _flush(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
