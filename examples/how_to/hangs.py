"""Debug a hang: the program behind `docs/how-to/hangs.md`.

Run it by `torchrun --nproc-per-node 2 examples/how_to/hangs.py`.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import nn

import fsdp_wrap
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.wrap import NameWrapPolicy

torch.distributed.init_process_group(timeout=timedelta(minutes=2))
rank = dist.get_rank()


class Block(nn.Module):
    def __init__(self, number):
        super().__init__()
        self.number, self.linear = number, nn.Linear(32, 32)

    def forward(self, x):
        return self.linear(x)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.left_out = nn.ModuleList(Block(number) for number in range(3)), None

    def forward(self, x):
        for block in self.blocks:
            if block.number != self.left_out:
                x = block(x)
        return x


net, batch = Model(), torch.randn(4, 32)
model = FSDP(
    net,
    torch.distributed.new_group(timeout=timedelta(seconds=20)),
    auto_wrap_policy=NameWrapPolicy("Block"),
    travel_together_bytes=0,
)
model(batch).sum().backward()

with fsdp_wrap.record_events() as events:
    model(batch).sum().backward()
order = [(event.kind.value, event.unit, event.phase.value) for event in events]
print(order)

with open(f"rank{rank}.log", "w") as log:
    with fsdp_wrap.observe_events(lambda event: print(event, file=log, flush=True)):
        model(batch).sum().backward()

every = [None, None]
torch.distributed.all_gather_object(every, order)
assert every[0] == every[1] and ("unshard", "blocks.0", "forward") in order, order
if rank == 1:  # so the ranks run different units, which all of them report
    net.left_out = 1
try:
    model(batch).sum().backward()
except RuntimeError as error:
    assert "ranks communicate for different units" in str(error) or "has ended" in str(error), error
    print(error)
else:
    raise AssertionError("nobody noticed")
