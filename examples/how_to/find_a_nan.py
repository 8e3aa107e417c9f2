"""Find where a NaN comes from: the program behind `docs/how-to/find-a-nan.md`.

Run it by `torchrun --nproc-per-node 2 examples/how_to/find_a_nan.py`.
"""

import torch
import torch.distributed as dist
from torch import nn

import fsdp_wrap
from fsdp_wrap import fully_shard

dist.init_process_group("gloo")  # "nccl" on GPUs
rank = dist.get_rank()


class Scale(nn.Module):
    def forward(self, x):
        return x / x.std(dim=-1, keepdim=True)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear, self.scale = nn.Linear(width, width), Scale()

    def forward(self, x):
        return x + self.linear(self.scale(x))


torch.manual_seed(0)
model = nn.Sequential(*(Block(8) for _ in range(3)))
for block in model:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
batches = torch.randn(4, 5, 8).unbind()
if rank == 1:
    batches[2][3] = 1.0  # all features alike: their deviation is zero


def train(batches):
    for batch in batches:
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


try:
    with fsdp_wrap.find_nonfinite(model):
        train(batches)
except fsdp_wrap.NonFiniteError as error:  # on all ranks, with the same text
    first = error.first
    if rank == 0:
        print(error)
        print(first.rank, first.unit, first.module, first.phase, first.index)
    optimizer.zero_grad()
assert (first.rank, first.module, first.phase) == (1, "0.scale", "output")

try:
    with fsdp_wrap.find_nonfinite(model, modules=False):
        train(batches)
except fsdp_wrap.NonFiniteError as error:
    first = error.first
    optimizer.zero_grad()
assert (first.rank, first.unit) == (1, "0")

dist.destroy_process_group()
