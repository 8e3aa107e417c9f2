"""Run me: torchrun --nproc-per-node 2 examples/minimal.py"""

import torch
import torch.distributed as dist
from torch import nn

from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.wrap import NameWrapPolicy

dist.init_process_group("gloo")
rank = dist.get_rank()

torch.manual_seed(0)  # the same weights on every rank
layer = nn.TransformerEncoderLayer(d_model=32, nhead=4, dim_feedforward=64, batch_first=True)
encoder = nn.TransformerEncoder(layer, num_layers=4)
model = FSDP(encoder, auto_wrap_policy=NameWrapPolicy("TransformerEncoderLayer"))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

torch.manual_seed(rank)  # other data on each
for step in range(20):
    x = torch.randn(8, 16, 32)
    loss = (model(x) + x).pow(2).mean()  # learn to negate
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0:
        print(f"step {step}: loss {loss.item():.4f}")

state = model.state_dict()  # full tensors; every rank takes part
if rank == 0:
    torch.save(state, "model.pt")
dist.destroy_process_group()
