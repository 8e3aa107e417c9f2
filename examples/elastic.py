"""Train through the loss of hosts: each host keeps a copy of its neighbour's shards in memory.

    torchrun --nnodes 1:4 --nproc-per-node 8 --max-restarts 20 \\
        --rdzv-backend c10d --rdzv-endpoint HOST:PORT \\
        examples/elastic.py --memory /dev/shm/run --disk runs/elastic

Each rank's shard is copied in the background into the memory of its own host and of the next one, so often
that the loss of a host costs at most `--lose-at-most` steps. Every `--disk-every` steps it is saved to disk.
When a rank, an agent or a host dies, torchrun's elastic agent restarts the others, and they resume from the
newest complete step. The windows of a step depend on its number and on `--global-batch`, not on the ranks.
Standard output has a line of JSON for each step, with the number of ranks and the time.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lm import launch
from lm.data import Corpus, Share
from lm.launch import World
from lm.model import GPT, Block, GPTConfig

from fsdp_wrap import checkpoint, fully_shard

LEARNING_RATE = 3e-3


@dataclass
class Trainer:
    """A model in training, and the places where it is kept. Each method is called by every rank."""

    options: argparse.Namespace
    world: World
    corpus: Corpus

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        options = self.options
        model = GPT(GPTConfig(options.layers, options.width, heads=2, context=options.context))
        for block in model.modules():
            if isinstance(block, Block):
                fully_shard(block)
        self.model = fully_shard(model.to(self.world.device))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), LEARNING_RATE)
        self.share = Share(self.world.rank, self.world.size, options.global_batch, options.batch)
        self.memory = checkpoint.InMemory(options.memory)
        self.copies = checkpoint.RegularSaves(
            self.memory, self.model, self.optimizer, lose_at_most=options.lose_at_most
        )

    def resume(self) -> dict[str, Any]:
        """Loads the newest step that is whole, in memory or else on disk; tells which and from where."""
        in_memory = self.memory.latest() or 0
        folder = launch.on_first_rank(lambda: self.options.disk and checkpoint.latest(self.options.disk))
        on_disk = int(folder.name.removeprefix("step_")) if folder else 0
        if in_memory == on_disk == 0:
            return {"resumed": 0, "from": "the beginning"}
        place = self.memory if in_memory >= on_disk else self.options.disk
        loaded = checkpoint.load(place, self.model, self.optimizer)
        return {"resumed": loaded.step, "from": "memory" if place is self.memory else "disk"}

    def train_step(self, step: int) -> float:
        """Updates the parameters once; returns the mean loss of all windows of the step."""
        total = torch.zeros((), device=self.world.device)
        windows = self.share.windows(self.corpus, f"step {step}", self.options.context)
        for part, (batch, count) in enumerate(windows, 1):
            self.model.set_requires_gradient_sync(part == self.share.forwards)
            inputs, targets = (tensor.to(self.world.device) for tensor in batch)
            losses = F.cross_entropy(self.model(inputs).transpose(1, 2), targets, reduction="none")
            loss = losses.mean(dim=1)[:count].sum() * self.share.scale
            loss.backward()
            total += loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad()
        dist.all_reduce(total)
        return total.item() / self.world.size

    def keep(self, step: int) -> None:
        """Copies the shards to the neighbours, while training goes on, and to disk, each when it is due."""
        self.copies.after(step)
        if self.options.disk and step % self.options.disk_every == 0:
            checkpoint.save(self.options.disk, self.model, self.optimizer, step=step, keep_last=2)

    def finish(self) -> None:
        """Ends the run: saves it on disk if there is one, and frees the memory of the hosts."""
        self.copies.finish()
        if self.options.disk:
            checkpoint.save(
                self.options.disk, self.model, self.optimizer, step=self.options.steps, keep_last=2
            )
        dist.barrier()
        launch.on_first_of_host(self.memory.clear)


def tell(world: World, **what: Any) -> None:
    """Prints a line of JSON, on the first rank."""
    if world.is_first:
        print(json.dumps({**what, "ranks": world.size, "time": round(time.time(), 3)}), flush=True)


def parse() -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory", type=Path, required=True, help="a folder in the memory of this host")
    parser.add_argument("--lose-at-most", type=int, default=5, help="steps that a lost host may cost")
    parser.add_argument("--disk", type=Path, help="a folder that all hosts share")
    parser.add_argument("--disk-every", type=int, default=100, help="steps between saves on disk")
    parser.add_argument("--steps", type=int, default=500, help="in all")
    parser.add_argument("--step-seconds", type=float, default=0, help="to add to each, as of a larger model")
    parser.add_argument("--global-batch", type=int, default=16, help="windows in a step, over all ranks")
    parser.add_argument("--batch", type=int, default=8, help="most windows in a rank's forward")
    parser.add_argument("--data", type=Path, help="text; Python's own library if left out")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--context", type=int, default=32)
    return parser.parse_args()


def main() -> None:
    options = parse()
    warnings.filterwarnings("ignore", message=".*memory of one host")  # the others may come back
    corpus = Corpus.load(options.data, options.context)
    world = launch.start()
    trainer = Trainer(options, world, corpus)
    origin = trainer.resume()
    tell(world, **origin)
    for step in range(origin["resumed"] + 1, options.steps + 1):
        loss = trainer.train_step(step)
        time.sleep(options.step_seconds)
        tell(world, step=step, loss=loss)
        trainer.keep(step)
    trainer.finish()
    launch.finish()


if __name__ == "__main__":
    main()
