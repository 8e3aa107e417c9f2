"""Multi-node training: the program behind `docs/how-to/several-hosts.md`.

Run it by `torchrun --nproc-per-node 2 examples/how_to/several_hosts.py`.
"""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import ShardingStrategy, fully_shard

local_rank = int(os.environ["LOCAL_RANK"])
on_gpu = torch.cuda.is_available()
if on_gpu:
    torch.cuda.set_device(local_rank)
dist.init_process_group("nccl" if on_gpu else "gloo")

os.environ["LOCAL_WORLD_SIZE"] = "1"  # as if each rank had a host of its own: leave it out
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))

ranks_per_host = int(os.environ["LOCAL_WORLD_SIZE"])
hosts = dist.get_world_size() // ranks_per_host
device = "cuda" if torch.cuda.is_available() else "cpu"
mesh = init_device_mesh(device, (hosts, ranks_per_host), mesh_dim_names=("replicate", "shard"))
for layer in model:
    fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)

model(torch.randn(2, 16)).sum().backward()
net = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))

model = FSDP(net, sharding_strategy=ShardingStrategy.HYBRID_SHARD)

model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))

for layer in model:
    fully_shard(layer, mesh=mesh, state_over_replicas=True)
fully_shard(model, mesh=mesh, state_over_replicas=True)

model(torch.randn(2, 16)).sum().backward()

dist.destroy_process_group()
