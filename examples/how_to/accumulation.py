"""Gradient accumulation and clipping: the program behind `docs/how-to/accumulation.md`.

Run it by `torchrun --nproc-per-node 2 examples/how_to/accumulation.py`.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn

from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import clip_grad_norm_, fully_shard
from fsdp_wrap.wrap import NameWrapPolicy

dist.init_process_group("gloo")  # "nccl" on GPUs
rank = dist.get_rank()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def make_model(width=16, blocks=2):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(blocks)))


def loss_of(model, part):
    return model(part).square().mean()


def by_hand():
    plain = make_model()
    every = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(every, parts)
    sum(loss_of(plain, part) for of_rank in every for part in of_rank).div(len(parts) * len(every)).backward()
    return [param.grad for param in plain.parameters()]


parts = torch.randn(4, 4, 16, generator=torch.Generator().manual_seed(torch.distributed.get_rank())).unbind()

model = FSDP(make_model(), auto_wrap_policy=NameWrapPolicy("Block"), use_orig_params=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for number, part in enumerate(parts, 1):  # the parts of a batch
    with nullcontext() if number == len(parts) else model.no_sync():
        (loss_of(model, part) / len(parts)).backward()
model.clip_grad_norm_(1.0)
optimizer.step()
optimizer.zero_grad()

sharded = make_model()
for block in sharded:
    fully_shard(block)
fully_shard(sharded)
optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-3)

for number, part in enumerate(parts, 1):
    sharded.set_requires_gradient_sync(number == len(parts))
    (loss_of(sharded, part) / len(parts)).backward()
clip_grad_norm_(sharded, 1.0)

expected = by_hand()
for param, grad in zip(sharded.parameters(), expected):
    norm = torch.nn.utils.get_total_norm(expected)
    torch.testing.assert_close(param.grad.full_tensor(), grad * min(1, 1 / norm), rtol=1e-4, atol=1e-6)

for part in parts:
    (loss_of(model, part) / len(parts)).backward()

with FSDP.summon_full_params(model, with_grads=True):
    grads = [param.grad.clone() for param in model.parameters()]

dist.destroy_process_group()
