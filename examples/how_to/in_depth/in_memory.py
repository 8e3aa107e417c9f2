"""Elastic training and fault tolerance: the program behind `docs/elastic.md`.

Run it by `torchrun --nproc-per-node 2 examples/how_to/in_depth/in_memory.py`.
"""

import torch
import torch.distributed as dist
from torch import nn

from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import checkpoint

dist.init_process_group("gloo")  # "nccl" on GPUs
torch.manual_seed(0)
model = FSDP(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), use_orig_params=True)
optimizer = torch.optim.AdamW(model.parameters())
done, steps = 0, 10

if checkpoint.latest("runs/elastic"):
    done = checkpoint.load("runs/elastic", model, optimizer).step

memory = checkpoint.InMemory("/dev/shm/elastic")
copies = checkpoint.RegularSaves(memory, model, optimizer, lose_at_most=5)
if memory.latest() is not None:
    done = checkpoint.load(memory, model, optimizer).step
for step in range(done + 1, steps + 1):
    model(torch.randn(2, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    copies.after(step)
copies.finish()

assert memory.latest() is not None
dist.barrier()
if dist.get_rank() == 0:
    memory.clear()
dist.destroy_process_group()
