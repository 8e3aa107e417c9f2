"""Weights for inference engines: the program behind `docs/weights.md`.

Run it by `torchrun --nproc-per-node 2 examples/how_to/in_depth/weights.py`.
"""

import torch
import torch.distributed as dist
from torch import nn

import fsdp_wrap
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.weights import WeightFolder, apply_changes, stored

dist.init_process_group("gloo")  # "nccl" on GPUs
rank = dist.get_rank()


class Expert(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1 = nn.Linear(8, 8, bias=False)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
            self.add_module(name, nn.Linear(8, 8, bias=False))
        self.experts = nn.ModuleList([Expert(), Expert()])

    def forward(self, x):
        for name in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"):
            x = x + getattr(self, name)(x)
        return sum(expert.w1(x) for expert in self.experts)


torch.manual_seed(0)
module = nn.Sequential(Block(), Block())
theirs = nn.Sequential(Block(), Block()).to(torch.bfloat16)
theirs.load_state_dict(module.state_dict())
model = FSDP(module, use_orig_params=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

source = fsdp_wrap.weight_source(
    model,
    rename=lambda name: f"model.{name}",
    fuse={
        "qkv_proj": ("q_proj", "k_proj", "v_proj"),
        "gate_up_proj": ("gate_proj", "up_proj"),
        "experts.w1": "experts.*.w1",
    },
    dtype=torch.bfloat16,
    budget="1GB",
)
for name, dtype, shape in source.metadata():  # without communication
    ...
for name, tensor in source:  # on every rank, as often as you like
    ...

changes = fsdp_wrap.weight_changes(model, dtype=torch.bfloat16)  # when the receiver has all weights
model(torch.randn(2, 8)).sum().backward()
optimizer.step()  # a step, or several
collected = changes.collect()  # on every rank; the first has them all

apply_changes(theirs.state_dict(), collected)  # of the model that the receiver has

folder = WeightFolder("runs/weights" if rank == 0 else None)
folder.send(fsdp_wrap.weight_source(model, dtype=torch.bfloat16))  # on every rank, and fails on all
folder.send_changes(changes.collect())

folder.close()  # so that readers end
dist.barrier()
if rank == 1:
    for update in stored("runs/weights"):
        update.apply(theirs.state_dict())  # or, if update.whole: for name, tensor in update

dist.destroy_process_group()
