"""Train with Muon: the program behind `docs/how-to/muon.md`.

Run it by `torchrun --nproc-per-node 2 examples/how_to/muon.py`.
"""

import torch
import torch.distributed as dist
from torch import nn

from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import checkpoint
from fsdp_wrap.optim import Muon, split
from fsdp_wrap.wrap import NameWrapPolicy

dist.init_process_group("gloo")  # "nccl" on GPUs
rank = dist.get_rank()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv, self.out, self.norm = (
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
            nn.LayerNorm(width),
        )

    def forward(self, x):
        query, key, value = self.qkv(self.norm(x)).chunk(3, -1)
        return x + self.out(torch.softmax(query @ key.transpose(1, 2), -1) @ value)


class Model(nn.Module):
    def __init__(self, width=32, blocks=2):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(64, width), nn.Linear(width, 64)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(model):
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


tokens = torch.randint(64, (4, 8))
steps = 3

model = FSDP(Model(), auto_wrap_policy=NameWrapPolicy("Block"))  # or fully_shard
optimizer = Muon(
    model,
    lr=2e-3,
    adjust_lr_fn="match_rms_adamw",  # so that one learning rate fits the matrices and all else
    select=lambda name, shape: name.startswith("blocks.") and len(shape) == 2,
    other=lambda params: torch.optim.AdamW(params, lr=2e-3, betas=(0.9, 0.95)),
)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)

for step in range(steps):
    loss_of(model).backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()

optimizer = Muon(
    model,
    lr=2e-3,
    select=["*.qkv.weight", "*.out.weight"],
    other={
        "*norm*": lambda params: torch.optim.AdamW(params, lr=2e-3, weight_decay=0.0),
        "*": lambda params: torch.optim.AdamW(params, lr=2e-3),
    },
)

optimizer = Muon(
    model, lr=2e-3, select=["*.qkv.weight", "*.out.weight"], view={"*.qkv.weight": split([32, 32, 32])}
)

loss_of(model).backward()
optimizer.step()

checkpoint.save("runs/muon", model, optimizer, step=step)
checkpoint.load("runs/muon", model, optimizer)

dist.destroy_process_group()
