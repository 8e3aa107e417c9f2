"""Checkpoints of one run, by `fsdp_wrap.checkpoint`: what this adds is that a run continues only its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fsdp_wrap import checkpoint
from lm.launch import RunError, on_first_rank

KEPT = 2
RUN = "run.json"


@dataclass(frozen=True)
class Folder:
    """Checkpoints of one run. `identity` holds what a run must share with a checkpoint to continue it."""

    path: Path
    identity: Mapping[str, Any]

    def prepare(self) -> None:
        """Make the folder of a run that starts anew; one that holds checkpoints already is refused."""
        on_first_rank(self._prepare)

    def is_begun(self) -> bool:
        """Whether there is a checkpoint to continue from."""
        return on_first_rank(lambda: checkpoint.latest(self.path) is not None)

    def save(self, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Write the checkpoint of `step`, then drop all but the last few."""
        checkpoint.save(self.path, model, optimizer, step=step, keep_last=KEPT)

    def load(self, last_step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
        """Continue from the latest complete checkpoint, which must not lie beyond `last_step`."""
        on_first_rank(self._check)
        try:
            loaded = checkpoint.load(self.path, model, optimizer)
        except (ValueError, checkpoint.DamagedCheckpoint) as error:
            raise RunError(str(error)) from None
        if loaded.step > last_step:
            raise RunError(f"{loaded.folder} lies beyond the last step asked for, --steps {last_step}")
        return loaded.step

    def _prepare(self) -> None:
        held = sorted(path.name for path in self.path.glob("step_*"))
        if held:
            raise RunError(
                f"checkpoint folder {self.path} already holds {held[-1]}: "
                "pass --resume to continue that run, or name another folder"
            )
        self.path.mkdir(parents=True, exist_ok=True)
        (self.path / RUN).write_text(json.dumps(dict(self.identity), indent=1))

    def _check(self) -> None:
        if not (self.path / RUN).is_file():
            return  # nor is there a checkpoint, which will be told
        theirs = json.loads((self.path / RUN).read_text())
        differences = [
            f"{name} is {theirs.get(name)} in the checkpoint and {self.identity.get(name)} here"
            for name in dict.fromkeys([*self.identity, *theirs])
            if theirs.get(name) != self.identity.get(name)
        ]
        if differences:
            raise RunError(f"{self.path} does not fit this run: {'; '.join(differences)}")
