"""From torch's FSDP2: the program behind `docs/start/from-fsdp2.md`.

Run it by `torchrun --nproc-per-node 2 examples/how_to/from_fsdp2.py`.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import fsdp_wrap
import fsdp_wrap.compat
from fsdp_wrap import MixedPrecisionPolicy, fully_shard

dist.init_process_group("gloo")  # "nccl" on GPUs
rank = dist.get_rank()


def make():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(d_model=16, nhead=2, dim_feedforward=32, batch_first=True)
    return nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)


model = make()
batch = torch.randn(4, 8, 16)

policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for block in model.layers:
    fully_shard(block, mp_policy=policy)
fully_shard(model, mp_policy=policy)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for micro_batch in range(2):
    model.set_requires_gradient_sync(micro_batch == 1)
    model(batch).float().square().mean().backward()
fsdp_wrap.clip_grad_norm_(model, 1.0)
optimizer.step()
optimizer.zero_grad()

mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("replicate", "shard"))
hybrid = make()
for block in hybrid.layers:
    fully_shard(block, mesh=mesh)
fully_shard(hybrid, mesh=mesh)
hybrid(batch).square().mean().backward()

with fsdp_wrap.compat.install(fully_shard=True):
    from torch.distributed.fsdp import fully_shard as torchs

    theirs = torchs(make())
assert isinstance(theirs, fsdp_wrap.FSDPModule)

theirs = torch_fully_shard(make())
dcp.save({"model": theirs.state_dict()}, checkpoint_id="runs/from_fsdp2")

state = {"model": model.state_dict()}
dcp.load(state, checkpoint_id="runs/from_fsdp2")  # writes into the model's own parameters

dist.destroy_process_group()
