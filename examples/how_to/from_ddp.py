"""From DDP: the program behind `docs/start/from-ddp.md`.

Run it by `torchrun --nproc-per-node 2 examples/how_to/from_ddp.py`.
"""

import torch
import torch.distributed as dist
from torch import nn

from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import clip_grad_norm_, fully_shard, replicate
from fsdp_wrap.wrap import NameWrapPolicy

dist.init_process_group("gloo")  # "nccl" on GPUs
rank = dist.get_rank()

layer = nn.TransformerEncoderLayer(d_model=16, nhead=2, dim_feedforward=32, batch_first=True)
module = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
batch = torch.randn(4, 8, 16)

model = FSDP(
    module,
    auto_wrap_policy=NameWrapPolicy("TransformerEncoderLayer"),
    sync_module_states=True,
    use_orig_params=True,
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

with model.no_sync():  # accumulates, and communicates nothing
    model(batch).square().mean().backward()
model(batch).square().mean().backward()
model.clip_grad_norm_(1.0)
optimizer.step()
optimizer.zero_grad()

module = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)

matrices = [param for param in module.parameters() if param.ndim >= 2]
others = [param for param in module.parameters() if param.ndim < 2]
model = FSDP(module, auto_wrap_policy=NameWrapPolicy("TransformerEncoderLayer"), use_orig_params=True)
optimizer = torch.optim.AdamW([{"params": matrices}, {"params": others, "weight_decay": 0.0}], lr=1e-3)

torch.manual_seed(0)
module = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)

for block in module.layers:
    fully_shard(block)
fully_shard(module)
optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)

module.set_requires_gradient_sync(False)  # as no_sync()
module(batch).square().mean().backward()
module.set_requires_gradient_sync(True)
module(batch).square().mean().backward()
clip_grad_norm_(module, 1.0)
optimizer.step()
optimizer.zero_grad()

torch.manual_seed(0)
module = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)

for block in module.layers:
    replicate(block)
replicate(module)
module(batch).square().mean().backward()

dist.destroy_process_group()
