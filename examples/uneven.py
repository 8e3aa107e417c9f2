"""Train on documents of very different lengths: ranks have different numbers of batches, sometimes none.

    torchrun --nproc-per-node 2 examples/uneven.py

The documents are classes and functions of Python's own library, of one to a hundred lines. In each step
a rank gets two, and trains on those with a docstring. Inside `uneven` a rank with no batch left helps the
others: it sends its shards and contributes zeros. Afterwards gradients are means over the bytes of all ranks.
In the evaluation the numbers of batches differ too. A pass is a forward of at least one rank.

Prints:

    step 20: loss 3.36
    step 40: loss 2.75
    step 60: loss 2.71
    held-out loss 2.54
    rank 0: no batch in 12 % of steps, helps in 28 % of passes
    rank 1: no batch in 18 % of steps, helps in 25 % of passes
"""

import random
import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

import fsdp_wrap

WIDTH, LAYERS, HEADS, CONTEXT, ROWS = 128, 2, 4, 64, 16
STEPS, HELD_OUT, LONGEST, PAD = 60, 60, 4000, -100  # PAD is a target that does not count


class GPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self) -> None:
        super().__init__()
        self.byte, self.position = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, LAYERS, enable_nested_tensor=False)
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.byte(tokens) + self.position(torch.arange(tokens.shape[1]))
        later = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        return self.head(self.blocks(x, later, is_causal=True))


def read_documents() -> list[str]:
    """Reads what stands apart in the sources, in a random order that is the same on every rank."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*.py"))
    documents = [part.strip() for file in files for part in file.read_text("utf-8").split("\n\n\n")]
    return random.Random(0).sample(documents, len(documents))


def batches_of(documents: list[str]) -> list[torch.Tensor]:
    """Packs the documents that have a docstring into batches of at most ROWS pieces; there may be none."""
    kept = [torch.tensor([*text.encode()][:LONGEST]) for text in documents if '"""' in text]
    pieces = [piece for text in kept for piece in text.split(CONTEXT + 1) if len(piece) > 1]
    return [pad_sequence(pieces[n : n + ROWS], True, PAD) for n in range(0, len(pieces), ROWS)]


def loss_on(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the mean loss on a batch, and the number of bytes that it is the mean of."""
    targets = batch[:, 1:]
    return F.cross_entropy(model(batch[:, :-1].clamp(0)).mT, targets), (targets != PAD).sum()


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)  # the same weights on every rank
    model = GPT()
    for block in model.blocks.layers:
        fsdp_wrap.fully_shard(block)
    fsdp_wrap.fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    documents = read_documents()
    sums, own, helped, idle = torch.zeros(2), 0, 0, 0
    for step in range(1, STEPS + 1):
        batches = batches_of(documents[2 * (ranks * step + rank) :][:2])
        with fsdp_wrap.uneven(model) as work:
            for batch in batches:
                loss, count = loss_on(model, batch)
                work.backward(loss, weight=count)
                sums += torch.stack([loss.detach() * count, count])
        own, helped, idle = own + len(batches), helped + work.passes_helped, idle + (not batches)
        if batches or work.passes_helped:  # else no rank has a batch, and none has gradients
            fsdp_wrap.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        if step % 20 == 0:
            dist.all_reduce(sums)
            if rank == 0:
                print(f"step {step}: loss {sums[0] / sums[1]:.2f}", flush=True)
            sums.zero_()

    held_out = batches_of(documents[-HELD_OUT:][rank::ranks])
    with fsdp_wrap.uneven(model) as work, torch.no_grad():
        for batch in held_out:
            loss, count = loss_on(model, batch)
            sums += torch.stack([loss * count, count])
    dist.all_reduce(sums)
    own, helped = own + len(held_out), helped + work.passes_helped
    shares = torch.zeros(ranks, 2)
    shares[rank] = torch.tensor([100 * idle / STEPS, 100 * helped / (own + helped)])
    dist.all_reduce(shares)
    if rank == 0:
        print(f"held-out loss {sums[0] / sums[1]:.2f}")
        for number, (none, others) in enumerate(shares):
            print(f"rank {number}: no batch in {none:.0f} % of steps, helps in {others:.0f} % of passes")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
