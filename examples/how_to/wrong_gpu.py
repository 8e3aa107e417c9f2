"""Find a faulty GPU: the program behind `docs/how-to/wrong-gpu.md`.

Run it by `torchrun --nproc-per-node 2 examples/how_to/wrong_gpu.py`.
"""

import os
import socket

import torch
import torch.distributed as dist
from torch import nn

import fsdp_wrap
from fsdp_wrap import fully_shard

dist.init_process_group("gloo")  # "nccl" on GPUs
rank = dist.get_rank()
torch.manual_seed(0)
model = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1), nn.Tanh()) for _ in range(3)))
for block in model:
    fully_shard(block)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters())
batches = torch.randn(4, 5, 8).unbind()
bad_hosts = os.environ.get("BAD_HOSTS", os.devnull)  # a file that the start of the run leaves out


def train(batches):
    for number, batch in enumerate(batches):
        if number == 2 and rank == 1:  # memory that loses a bit
            held = model[1][0].weight.to_local().data.view(torch.int32)
            held[2, 3] ^= 1 << 20
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


try:
    with fsdp_wrap.audit(model, every=1, on_fault="raise"):  # every=100 in a run
        train(batches)
except fsdp_wrap.CorruptionError as error:  # on all ranks, with the same text
    first = error.first
    if rank == 0:
        print(error)
        print(first.rank, first.unit, first.phase, first.index)
    optimizer.zero_grad()
assert (first.rank, first.unit, first.phase, first.index) == (1, "1", "shard", (6, 3))


def leave(corruption):
    if rank in corruption.suspects:
        with open(bad_hosts, "a") as hosts:
            print(socket.gethostname(), corruption.describe(), file=hosts)
    raise SystemExit(f"rank {corruption.rank} is faulty")


try:
    with fsdp_wrap.audit(model, every=1, on_fault=leave):
        train(batches)
except SystemExit as left:  # torchrun then starts all ranks anew, from the last checkpoint
    assert "rank 1 is faulty" in str(left)

optimizer.zero_grad()
dist.destroy_process_group()
