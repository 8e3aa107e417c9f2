"""Planned against measured: what `plan` says of a step, and what ranks over gloo hold and receive in one.

python -m benchmarks.planned --ranks 2,4 --cases gpt,small,mlp,lora --write
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

import fsdp_wrap
from benchmarks.harness import preload, run_ranks
from benchmarks.implementations import over
from benchmarks.meters import Travelling, tensors
from benchmarks.models import CASES, Block, Case
from fsdp_wrap._comm.process_group import Works

MOST_OFF = 0.02
"""How much of what is measured a plan may be off."""

FIGURES = Path(__file__).parents[1] / "docs" / "performance" / "planned.json"
PAGE = Path(__file__).parents[1] / "docs" / "planning.md"
BEGIN, END = "<!-- planned against measured -->", "<!-- end -->"
"""Between which the table stands."""


class CheckpointedInside(Block):
    """A block that keeps its input alone from forward to backward."""

    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


class CheckpointedAround(nn.Module):
    """The same around a block that is a unit."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.block, x, use_reentrant=False)


def replace_blocks(module: nn.Module, make: Callable[[Any], nn.Module]) -> None:
    """Puts what is made of each block in its place."""
    for name, child in module.named_children():
        if isinstance(child, Block):
            setattr(module, name, make(child))
        else:
            replace_blocks(child, make)


@dataclass(frozen=True)
class Way:
    """A way to shard and train a model.

    Attributes:
        front: "original" or "flat" for the wrapper's forms, "fully_shard".
        inside: Whether blocks checkpoint their activations inside of units.
        around: Whether they do around units.
        in_place: Whether gradients take the place of parameters.
        mixed: Whether to compute in bfloat16.
        offload: Whether to offload to the host.
    """

    front: str
    inside: bool = False
    around: bool = False
    in_place: bool = False
    mixed: bool = False
    offload: bool = False

    def shard(self, model: nn.Module) -> nn.Module:
        """Makes units of a model's blocks and of itself."""
        if self.inside:
            replace_blocks(model, CheckpointedInside)
        model = self._units(model) if self.front == "fully_shard" else self._wrapped(model)
        if self.in_place:
            fsdp_wrap.set_gradients_in_place(model)
        return model

    def _units(self, model: nn.Module) -> nn.Module:
        mixed = fsdp_wrap.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        options: dict[str, Any] = {"mp_policy": mixed} if self.mixed else {}
        if self.offload:
            options["offload_policy"] = fsdp_wrap.CPUOffloadPolicy()
        shard: Callable[[nn.Module], Any] = partial(fsdp_wrap.fully_shard, **options)
        for block in [module for module in model.modules() if _is_outer(module, model)]:
            shard(block)
        if self.around:
            replace_blocks(model, CheckpointedAround)
        shard(model)
        return model

    def _wrapped(self, model: nn.Module) -> nn.Module:
        mixed = fsdp_wrap.MixedPrecision(torch.bfloat16, torch.float32)
        wrap = partial(
            fsdp_wrap.FullyShardedDataParallel,
            use_orig_params=self.front == "original",
            mixed_precision=mixed if self.mixed else None,
            cpu_offload=fsdp_wrap.CPUOffload(True) if self.offload else None,
        )
        make: Callable[[nn.Module], nn.Module] = wrap
        if self.around:
            make = lambda block: CheckpointedAround(wrap(block))  # noqa: E731
        replace_blocks(model, make)
        return wrap(model)


def _is_outer(module: nn.Module, model: nn.Module) -> bool:
    inner = {part.block for part in model.modules() if isinstance(part, CheckpointedInside)}
    return isinstance(module, Block) and module not in inner


WAYS = {
    "original": Way("original"),
    "flat": Way("flat"),
    "fully_shard": Way("fully_shard"),
    "original, in place": Way("original", in_place=True),
    "fully_shard, in place": Way("fully_shard", in_place=True),
    "original, bf16": Way("original", mixed=True),
    "fully_shard, bf16": Way("fully_shard", mixed=True),
    "original, offload": Way("original", offload=True),
    "fully_shard, offload": Way("fully_shard", offload=True),
    "original, checkpoint inside": Way("original", inside=True),
    "fully_shard, checkpoint inside": Way("fully_shard", inside=True),
    "flat, checkpoint around": Way("flat", around=True),
    "fully_shard, checkpoint around": Way("fully_shard", around=True),
}
MODELS = ("gpt", "small", "mlp", "lora")


def setup(case: Case, way: Way) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], object]]:
    """Makes a model, its optimizer and a step, for the plan and for the run."""
    torch.manual_seed(0)
    model = over(False, way.shard, case.model())
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad])

    def step() -> None:
        optimizer.zero_grad()
        model(case.batch()).backward()
        optimizer.step()

    return model, optimizer, step


def measure(case: str, ways: list[str]) -> dict[str, dict[str, int]]:
    """Returns bytes at rest, at the peak, and received in a step, of each way; called on every rank."""
    return {way: measure_one(case, way) for way in ways}


@contextmanager
def letting_go() -> Iterator[None]:
    """Lets gloo's threads let go of what has travelled before we do: the meter sees this thread alone."""
    wait = Works.wait

    def wait_longer(self: Works, *pause: float) -> None:
        wait(self, *pause)
        time.sleep(0.003)

    with patch.object(Works, "wait", wait_longer):
        yield


def measure_one(case: str, way: str) -> dict[str, int]:
    """Returns the same of one way; called on every rank."""
    held: list[Any] = []

    def build() -> None:
        held.append(setup(CASES[case], WAYS[way]))
        for _ in range(2):
            held[0][2]()
        gc.collect()

    with letting_go():
        rest = tensors(build).kept
        peak = rest + tensors(held[0][2]).peak
    with Travelling() as travelling:
        held[0][2]()
    dist.barrier()
    return {"rest": rest, "peak": peak, "received": received(travelling, dist.get_world_size())}


def received(travelling: Travelling, ranks: int) -> int:
    """Returns the bytes that a rank has received, of those that were counted."""
    nbytes = travelling.nbytes
    rings = nbytes["gathers"] + nbytes["reduce-scatters"] + 2 * nbytes["all-reduces"]
    return rings * (ranks - 1) // ranks + nbytes["messages"] // 2  # of which half is sent


def compare(case: str, ways: list[str], ranks: int) -> dict[str, dict[str, int]]:
    """Plans and measures some ways; returns both by way."""
    measured = run_ranks(measure, ranks, case, ways)
    rows = {}
    for way in ways:
        plan = fsdp_wrap.plan(partial(setup, CASES[case], WAYS[way]), ranks)
        planned = {
            "planned rest": plan.rest_bytes,
            "planned peak": plan.peak_bytes,
            "planned received": sum(plan.wire_bytes.values()),
        }
        rows[f"{case}, {way}, {ranks} ranks"] = {**measured[way], **planned}
    return rows


def off(row: dict[str, int], what: str) -> float:
    """Returns the relative error of a plan."""
    return row[f"planned {what}"] / row[what] - 1


def as_table(rows: dict[str, dict[str, int]]) -> str:
    """Returns a table with planned and measured figures side by side."""
    lines = ["| model, way, ranks | rest MB | off | peak MB | off | received MB | off |"]
    lines.append("|---|---:|---:|---:|---:|---:|---:|")
    for name, row in rows.items():
        cells = (f"{row[what] / 1e6:,.2f} | {off(row, what):+.2%}" for what in ("rest", "peak", "received"))
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def written_page(rows: dict[str, dict[str, int]]) -> str:
    """Returns the page with the table of these rows."""
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    return f"{before}{begin}\n{as_table(rows)}\n{end}{after}"


def write(rows: dict[str, dict[str, int]]) -> None:
    """Keeps rows beside those of earlier runs, and writes the table of all into the page."""
    known = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    names = [f"{case}, {way}, {ranks} ranks" for ranks in (2, 4) for case in MODELS for way in WAYS]
    rows = {name: {**known, **rows}[name] for name in names if name in {*known, *rows}}
    FIGURES.write_text(json.dumps(rows, indent=1) + "\n")
    PAGE.write_text(written_page(rows))


def judge(rows: dict[str, dict[str, int]]) -> tuple[float, list[str]]:
    """Tells how far plans are off in memory at most, and where received bytes are not exact."""
    worst = max(abs(off(row, what)) for row in rows.values() for what in ("rest", "peak"))
    return worst, [name for name, row in rows.items() if row["received"] != row["planned received"]]


def main() -> None:
    """Prints the table, and fails where a plan is off by too much."""
    parser = argparse.ArgumentParser(description=__doc__)
    split: Callable[[str], list[str]] = lambda text: text.split(";")  # noqa: E731
    parser.add_argument("--cases", type=lambda text: text.split(","), default=[*MODELS])
    parser.add_argument("--ways", type=split, default=[*WAYS], metavar="A;B")
    parser.add_argument("--ranks", type=lambda text: [*map(int, text.split(","))], default=[2, 4])
    parser.add_argument("--write", action="store_true", help="keep the figures and write docs/planning.md")
    options = parser.parse_args()
    preload()
    rows: dict[str, dict[str, int]] = {}
    for ranks in options.ranks:
        for case in options.cases:
            rows |= compare(case, options.ways, ranks)
    print(as_table(rows))
    if options.write:
        write(rows)
    worst, wrong = judge(rows)
    print(f"\nat most {worst:.2%} off in memory; received bytes are wrong in: {', '.join(wrong) or 'none'}")
    raise SystemExit(worst > MOST_OFF or bool(wrong))


if __name__ == "__main__":
    main()
