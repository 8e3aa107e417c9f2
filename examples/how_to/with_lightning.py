"""Lightning and Fabric: the program behind `docs/how-to/lightning.md`.

Run it by `torchrun --nproc-per-node 2 examples/how_to/with_lightning.py`.
"""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


data = torch.randn(16, 16)

from fsdp_wrap import compat

compat.install(cpu=True, fully_shard=True)  # cpu=True only on a host without accelerators

import lightning.pytorch as lightning
from lightning.pytorch.strategies import FSDPStrategy


class Module(lightning.LightningModule):
    def configure_model(self):
        torch.manual_seed(0)
        self.model = nn.Sequential(*(Block() for _ in range(3)))

    def training_step(self, batch):
        return self.model(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.trainer.model.parameters(), lr=1e-3)


quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
loader = torch.utils.data.DataLoader(data, batch_size=2)
strategy = FSDPStrategy(auto_wrap_policy={Block}, state_dict_type="full")
trainer = lightning.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_steps=3, **quiet)
trainer.fit(Module(), loader)
trainer.save_checkpoint("full.ckpt")

import fsdp_wrap

assert isinstance(trainer.strategy.model, fsdp_wrap.FullyShardedDataParallel)

from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard


class Sharded(Module):
    def configure_model(self):
        super().configure_model()
        mesh = self.device_mesh["data_parallel"]
        for block in self.model:
            fully_shard(block, mesh=mesh)
        fully_shard(self.model, mesh=mesh)


strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
trainer = lightning.Trainer(
    accelerator="cpu", devices=2, strategy=strategy, max_steps=3, gradient_clip_val=0.5, **quiet
)
module = Sharded()
trainer.fit(module, loader)
assert isinstance(module.model, fsdp_wrap.FSDPModule)
