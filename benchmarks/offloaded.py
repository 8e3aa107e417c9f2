"""Peaks of a Llama-like model whose activations leave for the host: planned, and on a simulated accelerator.

python -m benchmarks.offloaded --write
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import fsdp_wrap
from benchmarks.llama import Llama, LlamaBlock, WholeLlamaBlock

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "how-to" / "offload.md"
BEGIN, END = "<!-- peaks of offloaded activations -->", "<!-- end -->"
"""Between which the table stands."""

RANKS, BLOCKS, WIDTH, LENGTH, SEQUENCES = 2, 8, 128, 1024, 4
MIN_BYTES = 1 << 20
"""Smaller storages stay."""
PARTS = {"none": 0, "half": BLOCKS // 2, "all": BLOCKS}
"""How many of the first blocks' activations leave; with all of them the root's do."""
MOST_OFF = 0.02
"""How much of what is measured a plan may be off."""


class Norm(nn.Module):
    """Root mean square norm of single operators: torch has one kernel for it on accelerators alone."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * self.weight


def llama(checkpoints: bool) -> Any:
    """Makes the model; ranks that are threads draw from one generator, so nothing is drawn."""
    block = LlamaBlock if checkpoints else WholeLlamaBlock
    model = Llama(BLOCKS, WIDTH, 3 * WIDTH, heads=4, shared=4, vocabulary=256, block=block)
    for module in [*model.modules()]:
        for name, child in module.named_children():
            if isinstance(child, nn.RMSNorm):
                setattr(module, name, Norm())
    for param in model.parameters():
        nn.init.constant_(param, 0.01)
    return model


def setup(leaving: int, checkpoints: bool, device: str) -> tuple[Any, Any, Callable[[], object]]:
    """Shards it by block; `device` is "cpu" where the simulation stands for an accelerator."""
    model = llama(checkpoints)
    for part in (*model.blocks, model):
        fsdp_wrap.fully_shard(part)
    if leaving:
        units = None if leaving == BLOCKS else [f"blocks.{number}" for number in range(leaving)]
        fsdp_wrap.offload_activations(model, units, min_bytes=MIN_BYTES)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)

    def step() -> None:
        model(torch.zeros(SEQUENCES, LENGTH + 1, dtype=torch.long, device=device)).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def simulated(leaving: int, checkpoints: bool) -> int:
    """Returns the most bytes of the second step on a simulated accelerator, of all its streams."""
    from bed.accelerator import Simulation, run_simulated

    peaks: list[int] = []

    def program(rank: int, device: Simulation) -> None:
        _, _, step = setup(leaving, checkpoints, "cpu")
        step()
        device.end_step()
        step()
        peaks.append(device.peak_bytes)

    run_simulated(RANKS, program)
    return max(peaks)


@dataclass(frozen=True)
class Row:
    """Peaks of a step in bytes."""

    part: str
    checkpoints: bool
    planned: int
    measured: int
    on_host: int

    @property
    def off(self) -> float:
        """The relative error of the plan."""
        return self.planned / self.measured - 1

    def __str__(self) -> str:
        """A line of the table."""
        megabytes = (f"{nbytes / 1e6:,.1f}" for nbytes in (self.planned, self.measured))
        checkpoints = "yes" if self.checkpoints else "no"
        cells = (self.part, checkpoints, *megabytes, f"{self.off:+.2%}", f"{self.on_host / 1e6:,.1f}")
        return f"| {' | '.join(cells)} |"


def compare(part: str, checkpoints: bool) -> Row:
    """Plans a step, and takes it on the simulated accelerator."""
    leaving = PARTS[part]
    made = fsdp_wrap.plan(partial(setup, leaving, checkpoints, "cuda"), RANKS, device="cuda")
    return Row(part, checkpoints, made.peak_bytes, simulated(leaving, checkpoints), made.host.peak)


def as_table(rows: Sequence[Row]) -> str:
    """Returns the table of some rows."""
    head = (
        "| activations that leave | checkpoints | planned MB | simulated MB | off | on the host at most, MB |"
    )
    return "\n".join([head, "|---|---|---:|---:|---:|---:|", *map(str, rows)])


def main() -> None:
    """Prints the table, and fails where a plan is off by too much."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write the table into docs/how-to/offload.md")
    options = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests"))
    rows = [compare(part, checkpoints) for checkpoints in (False, True) for part in PARTS]
    print(as_table(rows))
    if options.write:
        before, begin, rest = PAGE.read_text().partition(BEGIN)
        _, end, after = rest.partition(END)
        PAGE.write_text(f"{before}{begin}\n{as_table(rows)}\n{end}{after}")
    raise SystemExit(max(abs(row.off) for row in rows) > MOST_OFF)


if __name__ == "__main__":
    main()
