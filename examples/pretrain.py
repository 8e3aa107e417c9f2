"""Pre-train a language model with `fully_shard`, on the source code of Python's own library.

    torchrun --nproc-per-node 2 examples/pretrain.py

Each block of the model is a unit: its parameters are gathered before it runs, and freed afterwards. A step
accumulates two batches: gradients are reduced over the ranks only after the second one.

Prints:

    0.9 million parameters, of which this rank keeps 0.4
    step 10: loss 3.2
    step 20: loss 2.4
    step 30: loss 2.5
    step 40: loss 2.6
    held-out loss 2.7
"""

import sysconfig
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import fsdp_wrap
from fsdp_wrap import fully_shard

WIDTH, LAYERS, HEADS, CONTEXT, BATCH, STEPS, PARTS = 128, 4, 4, 64, 8, 40, 2


class GPT(nn.Module):
    """Bytes in, logits of the next byte out."""

    def __init__(self) -> None:
        super().__init__()
        self.byte, self.position = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, 0.0, batch_first=True, norm_first=True)
            for _ in range(LAYERS)
        )
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.byte(tokens) + self.position(torch.arange(tokens.shape[1]))
        later = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=x.dtype)
        for block in self.blocks:
            x = block(x, src_mask=later, is_causal=True)
        return self.head(self.norm(x))


def read_text() -> tuple[torch.Tensor, torch.Tensor]:
    """Reads bytes to learn from, and the last twentieth of them for evaluation."""
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("[a-z]*.py"))
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    return text[: -len(text) // 20], text[-len(text) // 20 :]


def loss_on(model: nn.Module, text: torch.Tensor) -> torch.Tensor:
    """Returns the loss on windows that torch's random numbers choose."""
    starts = torch.randint(len(text) - CONTEXT, (BATCH, 1))
    windows = text[starts + torch.arange(CONTEXT + 1)].long()
    return F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)  # the same weights on every rank
    model = GPT()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if rank == 0:
        whole, kept = (
            sum(map(torch.Tensor.numel, tensors)) / 1e6
            for tensors in (model.parameters(), (param.to_local() for param in model.parameters()))
        )
        print(f"{whole:.1f} million parameters, of which this rank keeps {kept:.1f}", flush=True)

    train, held_out = read_text()
    torch.manual_seed(1 + rank)  # other windows on each
    for step in range(1, STEPS + 1):
        for part in range(PARTS):
            model.set_requires_gradient_sync(part == PARTS - 1)
            loss = loss_on(model, train) / PARTS
            loss.backward()
        fsdp_wrap.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 10 == 0:
            print(f"step {step}: loss {PARTS * loss.item():.1f}", flush=True)

    with torch.no_grad():
        losses = torch.stack([loss_on(model, held_out) for _ in range(8)])
    dist.all_reduce(mean := losses.mean() / dist.get_world_size())
    if rank == 0:
        print(f"held-out loss {mean.item():.1f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
