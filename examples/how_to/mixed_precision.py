"""Mixed precision: the program behind `docs/how-to/mixed-precision.md`.

Run it by `torchrun --nproc-per-node 2 examples/how_to/mixed_precision.py`.
"""

import torch
import torch.distributed as dist
from torch import nn

from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import MixedPrecision, MixedPrecisionPolicy, fully_shard
from fsdp_wrap.sharded_grad_scaler import ShardedGradScaler
from fsdp_wrap.wrap import NameWrapPolicy

dist.init_process_group("gloo")  # "nccl" on GPUs
rank = dist.get_rank()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 2 * width),
            nn.Linear(2 * width, width),
        )

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, width=32, blocks=2):
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.head = nn.ModuleList(Block(width) for _ in range(blocks)), nn.Linear(width, 8)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


batch = torch.randn(4, 32)

precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
model = FSDP(Model(), auto_wrap_policy=NameWrapPolicy("Block"), mixed_precision=precision)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # on float32 shards

out = model(batch)  # inputs are cast by the root
out.float().square().mean().backward()
optimizer.step()

policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
sharded = Model()
for block in sharded.blocks:
    fully_shard(block, mp_policy=policy)
fully_shard(sharded, mp_policy=policy)

assert out.dtype == torch.bfloat16 and sharded(batch).dtype == torch.bfloat16
for wrapped in (model, sharded):
    assert all(param.dtype == torch.float32 for param in wrapped.parameters())

kept = MixedPrecision(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32, _module_classes_to_ignore=(nn.LayerNorm,)
)
model = FSDP(Model(), auto_wrap_policy=NameWrapPolicy("Block"), mixed_precision=kept)

assert all(isinstance(block.norm, FSDP) for block in model.blocks)
model(batch).sum().backward()

half = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16)
model = FSDP(Model(), auto_wrap_policy=NameWrapPolicy("Block"), mixed_precision=half)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scaler = ShardedGradScaler(device="cpu")  # leave it out on CUDA

loss = model(batch).float().square().mean()
scaler.scale(loss).backward()
scaler.unscale_(optimizer)  # only to clip
model.clip_grad_norm_(1.0)
scaler.step(optimizer)  # leaves the step out if something overflowed
scaler.update()

assert scaler.get_scale() > 0

dist.destroy_process_group()
