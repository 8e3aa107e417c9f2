"""Checkpoints: the program behind `docs/checkpoints.md`.

Run it by `torchrun --nproc-per-node 2 examples/how_to/in_depth/checkpoints.py`.
"""

from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch import nn

from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import checkpoint

dist.init_process_group("gloo")  # "nccl" on GPUs


class Loader:
    """A data loader that can go on where it was."""

    position = 0

    def state_dict(self):
        return {"position": self.position}

    def load_state_dict(self, state):
        self.position = state["position"]


class Settings:
    """A class of your own in a checkpoint."""


torch.manual_seed(0)
model = FSDP(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 4)), use_orig_params=True)
optimizer = torch.optim.AdamW(model.parameters())
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
loader, epoch, done, steps = Loader(), 0, 0, 200

extra = {"scheduler": scheduler, "loader": loader, "epoch": epoch}
if checkpoint.latest("runs/net"):
    loaded = checkpoint.load("runs/net", model, optimizer, extra)
    epoch, done = loaded["epoch"], loaded.step
for step in range(done + 1, steps + 1):
    model(torch.randn(2, 8)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 100 == 0:
        checkpoint.save("runs/net", model, optimizer, extra, step=step, keep_last=3)

assert checkpoint.latest("runs/net").name == "step_00000200"

state = {"model": model.state_dict()}
torch.distributed.checkpoint.load(state, checkpoint_id="runs/net/step_00000200")

torch.serialization.add_safe_globals([Settings])  # admits a class
checkpoint.load("runs/net", model, trusted=True)  # admits all: for folders that you trust

if find_spec("safetensors"):
    checkpoint.export_safetensors(model, "out/net", max_shard_size="5GB", dtype=torch.bfloat16)
    checkpoint.import_safetensors(model, "out/net")

dist.destroy_process_group()
