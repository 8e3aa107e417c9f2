"""Compare two runs: the program behind `docs/how-to/compare-values.md`.

Run it by `torchrun --nproc-per-node 2 examples/how_to/compare_values.py`.
"""

import shutil

import torch
import torch.distributed as dist
from torch import nn

import fsdp_wrap
from fsdp_wrap import fully_shard
from fsdp_wrap.tools.command import main

dist.init_process_group("gloo")  # "nccl" on GPUs
rank, ranks = dist.get_rank(), dist.get_world_size()
if rank == 0:
    shutil.rmtree("runs/values", ignore_errors=True)
dist.barrier()


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)))


def train(model, batches, factor=1.0):
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in batches:
        (model(batch).square().mean() * factor).backward()
        optimizer.step()
        optimizer.zero_grad()


def shard(model):
    for block in model:
        fully_shard(block)
    return fully_shard(model)


batches = torch.randn(3, 8, 16, generator=torch.Generator().manual_seed(1))
own = [batch.chunk(ranks)[rank] for batch in batches]  # each rank has its rows of one batch

model = shard(make_model())
with fsdp_wrap.record_values(model, "runs/values/sharded", every=1):
    train(model, own)

model = shard(make_model())
with fsdp_wrap.record_values(model, "runs/values/wrong", every=1):
    train(model, own, factor=1 / ranks)  # the gradients are averaged already
dist.barrier()
dist.destroy_process_group()

if rank == 0:
    plain = make_model()
    with fsdp_wrap.record_values(plain, "runs/values/plain", every=1, units=["0", "1", "2", "3"]):
        train(plain, batches)

    main(["values", "diff", "runs/values/plain", "runs/values/sharded"])
    main(["values", "diff", "runs/values/plain", "runs/values/wrong"])
