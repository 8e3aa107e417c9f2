"""Draws the picture of docs/timeline.md: two ranks, of which one is slower in one block.

python docs/timeline_picture.py
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from torch import nn

import fsdp_wrap

PICTURE = Path(__file__).parent / "pictures" / "timeline.svg"
RANKS, WIDTH, BLOCKS, ROWS = 2, 512, 4, 256
STYLE = "svg{color:#24292f}@media (prefers-color-scheme:dark){svg{color:#e2e8f0}}"
SLOWER = 0.06  # seconds


class Block(nn.Module):
    """A residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(self.up(x).relu())
        return y


class Model(nn.Module):
    """Blocks, and a head in the root."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(fsdp_wrap.fully_shard(Block()) for _ in range(BLOCKS)))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.head(self.blocks(x))
        return y


def for_any_page(svg: str) -> str:
    """Takes the white background away, and lets what is black or white follow the page, which may be dark."""
    head, opening, rest = svg.partition("<svg ")
    attributes, end, content = rest.partition(">")
    content = content.replace("fill: #ffffff", "fill: none").replace("#ffffff", "currentColor")
    content = content.replace("#000000", "currentColor")
    return f'{head}{opening}fill="currentColor" {attributes}{end}<style>{STYLE}</style>{content}'


def main(rank: int, folder: str) -> None:
    """One rank."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    model = fsdp_wrap.fully_shard(Model(), travel_together_bytes=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        model(torch.randn(ROWS, WIDTH)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(3):
        step()
    if rank == 1:
        model.blocks[2].register_forward_pre_hook(lambda *_: time.sleep(SLOWER))
    with fsdp_wrap.timeline(model) as recorded:
        for _ in range(5):
            step()
    if rank == 0:
        print(recorded.report())
        recorded.plot(PICTURE)
        PICTURE.write_text(for_any_page(PICTURE.read_text("utf-8")), "utf-8")
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(main, args=(folder,), nprocs=RANKS)
