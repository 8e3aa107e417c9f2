"""Determinism at any number of ranks: the program behind `docs/how-to/reproducible.md`.

Run it by `torchrun --nproc-per-node 2 examples/how_to/reproducible.py`.
"""

import hashlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

dist.init_process_group("gloo")  # "nccl" on GPUs
WORDS = 16


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + F.dropout(self.down(torch.relu(self.up(x))), 0.1)


def make_model(width=16):
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, width), Block(width), Block(width), nn.Linear(width, WORDS))


def shard(model):
    for module in model:
        fully_shard(module)
    return fully_shard(model)


def texts_of(seed):
    return torch.randint(WORDS, (4, 9), generator=torch.Generator().manual_seed(seed))


def loss_of(model, texts):
    return F.cross_entropy(model(texts[:, :-1]).mT, texts[:, 1:])


import fsdp_wrap
from fsdp_wrap import clip_grad_norm_, fully_shard

torch.set_num_threads(1)
model = shard(make_model())
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
work = fsdp_wrap.reproducible(model, micro_batches=8, seed=0)

for step in range(10):
    for index in work.micro_batches(step):  # this rank's, seeded one by one
        texts = texts_of(work.seed_of(step, index))
        loss_of(model, texts).backward()  # not divided by anything
    clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()

digest = hashlib.sha256()
for name, param in model.state_dict().items():
    digest.update(param.full_tensor().numpy().tobytes())
if dist.get_rank() == 0:
    print(digest.hexdigest())  # the same at 1, 2, 4 and 8 ranks

dist.destroy_process_group()
