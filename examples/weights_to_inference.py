r"""Two ranks train a byte-level GPT; a third process generates text with their weights.

    torchrun --nproc-per-node 2 examples/weights_to_inference.py
    torchrun --nproc-per-node 2 examples/weights_to_inference.py --way gloo

Rank 0 starts the generating process, sends it all weights in bf16 once, and then only the elements
that changed. The generator verifies by checksums that it has the trainers' weights, and prints a completion
of a prompt:

    version 1: all; 'def U\x0b...'
    version 4: 126472 changes (93% of the elements); 'def ne on t t on on t on t t t on t on t t t'
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lm.data import Corpus
from lm.model import GPT, GPTConfig
from lm.weight_channel import Message, Pair, PeerLost, WeightSender, received

from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import weight_changes, weight_source
from fsdp_wrap.weights import Update, WeightFolder, stored
from fsdp_wrap.wrap import NameWrapPolicy

CONFIG = GPTConfig(layers=2, width=64, heads=4, context=64)
DTYPE = torch.bfloat16


def options() -> argparse.Namespace:
    command = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    command.add_argument("--way", choices=["folder", "gloo"], default="folder")
    command.add_argument("--where", help="folder, or host:port; made up if not given")
    command.add_argument("--steps", type=int, default=200, help="of training")
    command.add_argument("--every", type=int, default=50, help="steps between two updates")
    command.add_argument("--generate", action="store_true", help="be the generating process")
    return command.parse_args()


def made_up(way: str) -> str:
    if way == "gloo":
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            return f"localhost:{probe.getsockname()[1]}"
    return tempfile.mkdtemp()


def sender(way: str, where: str | None) -> WeightSender | WeightFolder:
    """Runs the trainers' side; the first rank alone says where."""
    if way == "folder":
        return WeightFolder(where)
    return WeightSender(None if where is None else Pair(where, receives=False))


def updates(way: str, where: str) -> Iterator[Update] | Iterator[Message]:
    """Runs the receiver's side."""
    return stored(where) if way == "folder" else received(Pair(where, receives=True))


def train(way: str, where: str, steps: int, every: int) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = FSDP(GPT(CONFIG), auto_wrap_policy=NameWrapPolicy("Block"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    corpus = Corpus.load(None, CONFIG.context)
    generator = None
    if dist.get_rank() == 0:
        command = [sys.executable, __file__, "--generate", "--way", way, "--where", where]
        generator = subprocess.Popen(command)
    engine = sender(way, where if generator is not None else None)
    try:
        engine.send(weight_source(model, dtype=DTYPE))
    except PeerLost as error:
        print(f"training goes on alone: {error}", file=sys.stderr)
    changes = weight_changes(model, DTYPE)
    for step in range(1, steps + 1):
        inputs, targets = corpus.batch(f"step {step} rank {dist.get_rank()}", 8, CONFIG.context)
        F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % every == 0:
            collected = changes.collect()
            try:
                engine.send_changes(collected)
            except PeerLost as error:
                print(f"training goes on alone: {error}", file=sys.stderr)
    engine.close()
    if generator is not None:
        generator.wait()
    dist.destroy_process_group()


@torch.no_grad()
def generate(way: str, where: str) -> None:
    model = GPT(CONFIG).to(DTYPE)
    total = sum(param.numel() for param in model.parameters())
    for update in updates(way, where):
        kind = "all"
        if not update.whole:
            count = sum(meta.shape[0] for meta in update.metadata)
            kind = f"{count} changes ({count / total:.0%} of the elements)"
        update.apply(model.state_dict())
        text = list(b"def ")
        for _ in range(40):
            text.append(int(model(torch.tensor([text[-CONFIG.context :]]))[0, -1].argmax()))
        print(f"version {update.version}: {kind}; {bytes(text).decode(errors='replace')!r}", flush=True)


if __name__ == "__main__":
    given = options()
    place = given.where or made_up(given.way)
    if given.generate:
        generate(given.way, place)
    else:
        train(given.way, place, given.steps, given.every)
