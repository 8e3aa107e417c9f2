"""Save and resume a checkpoint: the program behind `docs/how-to/checkpoints.md`.

Run it by `torchrun --nproc-per-node 2 examples/how_to/checkpoints.py`.
"""

import torch
import torch.distributed as dist
from torch import nn

from fsdp_wrap import FullStateDictConfig, StateDictType, checkpoint, fully_shard
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.wrap import NameWrapPolicy

dist.init_process_group("gloo")  # "nccl" on GPUs
rank = dist.get_rank()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, width=32, blocks=3):
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


torch.manual_seed(0)

model = FSDP(Model(), auto_wrap_policy=NameWrapPolicy("Block"))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=10)

first, extra = 1, {"scheduler": scheduler}
if checkpoint.latest("runs/resumed"):
    first = checkpoint.load("runs/resumed", model, optimizer, extra).step + 1
for step in range(first, 21):
    model(torch.randn(4, 32)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    if step % 10 == 0:
        checkpoint.save("runs/resumed", model, optimizer, extra, step=step, keep_last=3)

pending = checkpoint.async_save("runs/resumed", model, optimizer, extra, step=30)
# Training goes on here: everything has been copied.
pending.result()  # before destroy_process_group(); raises if saving failed

sharded = Model()
for block in sharded.blocks:
    fully_shard(block)
fully_shard(sharded)
moments = torch.optim.AdamW(sharded.parameters(), lr=1e-3)
loaded = checkpoint.load("runs/resumed", sharded, moments, {"scheduler": scheduler}, step=20)

assert loaded.step == 20 and first in (1, 31) and pending.done()
with FSDP.summon_full_params(model):
    for name, param in sharded.named_parameters():
        assert torch.equal(param.full_tensor(), model.get_parameter(name)), name

full = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, full):
    state = model.state_dict()  # every rank calls it; rank 0 gets the tensors
if torch.distributed.get_rank() == 0:
    torch.save(state, "model.pt")

dist.destroy_process_group()
