"""Profile a training step: the program behind `docs/how-to/timeline.md`.

Run it by `torchrun --nproc-per-node 2 examples/how_to/timeline.py`.
"""

import time

import torch
import torch.distributed as dist
from torch import nn

import fsdp_wrap
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.wrap import NameWrapPolicy

dist.init_process_group("gloo")  # "nccl" on GPUs
rank = dist.get_rank()


class Block(nn.Module):
    def __init__(self, number, width):
        super().__init__()
        self.number, self.linear = number, nn.Linear(width, width)

    def forward(self, x):
        if rank == 1 and self.number == 2:
            time.sleep(0.05)
        return x + torch.tanh(self.linear(x))


torch.manual_seed(0)
net = nn.ModuleDict({"blocks": nn.Sequential(*(Block(number, 512) for number in range(4)))})
net.forward = lambda x: net["blocks"](x)
batches = torch.randn(8, 16, 512).unbind()

model = FSDP(net, auto_wrap_policy=NameWrapPolicy("Block"))
optimizer = torch.optim.AdamW(model.parameters())


def step(batch):
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


for batch in batches[:3]:
    step(batch)
with fsdp_wrap.timeline(model) as recorded:  # every rank opens and closes it
    for batch in batches[3:]:
        step(batch)
if rank == 0:
    print(recorded.report())
    recorded.save("trace.json")  # for ui.perfetto.dev

report = recorded.report()
assert "Rank 1 holds up the others" in report and "`blocks.2`" in report, report

with fsdp_wrap.timeline(model, "runs/ranks", gather=False):
    step(batches[0])

dist.destroy_process_group()
