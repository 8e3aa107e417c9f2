"""The flags of the example, checked before any process does work."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lm.data import Corpus, DataError, Share
from lm.model import GPT, GPTConfig


@dataclass(frozen=True)
class Options:
    """What the command line asks for; `parser` describes the fields."""

    layers: int
    width: int
    heads: int
    context: int
    wrap: str
    data: Path | None
    batch: int
    accumulation: int
    optimizer: str
    lr: float
    warmup: int
    steps: int
    seed: int
    eval_every: int
    eval_windows: int
    sample: int
    checkpoint: Path | None
    checkpoint_every: int
    resume: bool
    elastic: bool
    global_batch: int | None
    reproducible: bool
    audit: int | None
    plan: int | None
    timeline: Path | None

    @property
    def model(self) -> GPTConfig:
        return GPTConfig(self.layers, self.width, self.heads, self.context)

    def share(self, rank: int, ranks: int) -> Share:
        """What a rank learns from in each step."""
        return Share(rank, ranks, self.global_batch or self.batch * self.accumulation * ranks, self.batch)

    def identity(self, corpus: Corpus, global_batch: int) -> dict[str, Any]:
        """Whatever decides the course of the training: a run with another identity is another run."""
        names = ("wrap", "optimizer", "lr", "warmup", "seed")
        training = {name: getattr(self, name) for name in names}
        settings = {**asdict(self.model), **training, "global batch": global_batch, "data": corpus.digest}
        return settings | ({"micro-batch": self.batch} if self.reproducible else {})


def parse(arguments: list[str] | None = None) -> tuple[Options, Corpus]:
    """Read the command line and the corpus; whatever does not fit ends the process with a usage error."""
    command = parser()
    options = Options(**vars(command.parse_args(arguments)))
    if options.width % options.heads:
        command.error(f"--heads {options.heads} does not divide --width {options.width}")
    if options.resume and options.checkpoint is None:
        command.error("--resume needs --checkpoint DIR, the folder to resume from")
    if options.elastic and (options.checkpoint is None or options.global_batch is None):
        command.error(
            "--elastic needs --checkpoint DIR and --global-batch N, the same for any number of ranks"
        )
    if options.reproducible and (options.global_batch is None or options.global_batch % options.batch):
        command.error(f"--reproducible needs --global-batch N, a multiple of --batch {options.batch}")
    names = _wrappable(options.model)
    if options.wrap not in names:
        command.error(f"--wrap {options.wrap} is no module class of the model; it has {', '.join(names)}")
    try:
        return options, Corpus.load(options.data, options.context)
    except (DataError, OSError) as error:
        command.error(f"--data: {error}")


def parser() -> argparse.ArgumentParser:
    """The command line, in groups."""
    command = argparse.ArgumentParser(
        description="Train a byte-level GPT with fsdp_wrap, under torchrun or alone as one process.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    _add_model(command.add_argument_group("model"))
    _add_training(command.add_argument_group("training"))
    _add_reports(command.add_argument_group("reports and checkpoints"))
    return command


def _add_model(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--layers", type=_at_least(1), default=4, help="number of blocks")
    group.add_argument("--width", type=_at_least(1), default=128, help="size of the residual stream")
    group.add_argument("--heads", type=_at_least(1), default=4, help="attention heads per block")
    group.add_argument("--context", type=_at_least(1), default=64, help="bytes that the model sees at once")
    group.add_argument("--wrap", default="Block", metavar="CLASS", help="class of the FSDP units")


def _add_training(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--data", type=Path, metavar="DIR", help="text; None is Python's own library")
    group.add_argument("--batch", type=_at_least(1), default=8, help="windows in a rank's forward")
    group.add_argument("--accumulation", type=_at_least(1), default=1, help="forwards in a step")
    group.add_argument(
        "--optimizer", choices=["adamw", "muon"], default="adamw", help="of the matrices in blocks"
    )
    group.add_argument(
        "--global-batch",
        type=_at_least(1),
        metavar="N",
        help="windows in a step over all ranks, in as many forwards as that takes; None is batch x "
        "accumulation x ranks",
    )
    group.add_argument(
        "--reproducible",
        action="store_true",
        help="the same bits at any number of ranks that divides global-batch / batch; prints a hash of them",
    )
    group.add_argument(
        "--audit",
        type=_at_least(1),
        nargs="?",
        const=100,
        metavar="N",
        help="look for silent corruption in one of N steps, and end the run if there is any; 100 if left out",
    )
    group.add_argument("--lr", type=_positive, default=4e-3, help="learning rate after warm-up")
    group.add_argument("--warmup", type=_at_least(1), default=200, help="steps of rising learning rate")
    group.add_argument("--steps", type=_at_least(1), default=1200, help="in all, resumed ones included")
    group.add_argument("--seed", type=_at_least(0), default=0, help="of weights, data order and sampled text")


def _add_reports(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--eval-every", type=_at_least(1), default=300, metavar="N", help="steps apart")
    group.add_argument("--eval-windows", type=_at_least(1), default=512, metavar="N", help="held-out windows")
    group.add_argument(
        "--sample", type=_at_least(0), default=200, metavar="N", help="bytes to sample at the end"
    )
    group.add_argument("--checkpoint", type=Path, metavar="DIR", help="keeps the last two")
    group.add_argument("--checkpoint-every", type=_at_least(1), default=200, metavar="N", help="steps apart")
    group.add_argument("--resume", action="store_true", help="from the latest complete checkpoint")
    group.add_argument(
        "--elastic", action="store_true", help="resume if there is a checkpoint, begin if not; any ranks"
    )
    group.add_argument(
        "--plan",
        type=_at_least(1),
        nargs="?",
        const=0,
        metavar="RANKS",
        help="print what a step of so many ranks will need, and end; torchrun's number if left out",
    )
    group.add_argument(
        "--timeline", type=Path, metavar="DIR", help="record three steps: trace, report, picture"
    )


def _at_least(least: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        number = int(text)
        if number < least:
            raise argparse.ArgumentTypeError(f"must be at least {least}, not {number}")
        return number

    convert.__name__ = "whole number"
    return convert


def _positive(text: str) -> float:
    number = float(text)
    if not (0 < number < math.inf):
        raise argparse.ArgumentTypeError(f"must be positive and finite, not {text}")
    return number


def _wrappable(config: GPTConfig) -> list[str]:
    """Class names inside the model that compute something themselves (a ModuleList does not)."""
    with torch.device("meta"):
        inside = list(GPT(config).modules())[1:]
    classes = {type(module) for module in inside}
    return sorted(cls.__name__ for cls in classes if cls.forward is not nn.Module.forward)
