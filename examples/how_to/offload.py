"""CPU offload: the program behind `docs/how-to/offload.md`.

Run it by `torchrun --nproc-per-node 2 examples/how_to/offload.py`.
"""

import torch
import torch.distributed as dist
from torch import nn

from fsdp_wrap import CPUOffload, CPUOffloadPolicy, fully_shard
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.optim import HostAdamW, step_in_backward
from fsdp_wrap.wrap import NameWrapPolicy

dist.init_process_group("gloo")  # "nccl" on GPUs
rank = dist.get_rank()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def make_model(width=16, blocks=3):
    torch.manual_seed(0)
    return nn.Sequential(*(Block(width) for _ in range(blocks)))


batches = torch.randn(3, 4, 16).unbind()

device_id = torch.cuda.current_device() if torch.cuda.is_available() else None
model = FSDP(
    make_model(),
    auto_wrap_policy=NameWrapPolicy("Block"),
    cpu_offload=CPUOffload(offload_params=True),
    device_id=device_id,
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)  # steps on the host

sharded = make_model()
for block in sharded:
    fully_shard(block, offload_policy=CPUOffloadPolicy())
fully_shard(sharded, offload_policy=CPUOffloadPolicy())

optimizer = step_in_backward(model, lambda params: HostAdamW(params, lr=3e-4, moments=torch.bfloat16))
for batch in batches:
    model(batch).square().mean().backward()  # and no optimizer.step()

plain = make_model()
with FSDP.summon_full_params(model):
    assert not any(torch.equal(*pair) for pair in zip(model.parameters(), plain.parameters()))

model = FSDP(
    make_model(),
    auto_wrap_policy=NameWrapPolicy("Block"),
    cpu_offload=CPUOffload(offload_optimizer_state=True),
    device_id=device_id,
)
optimizer = step_in_backward(model, lambda params: torch.optim.AdamW(params, lr=3e-4))

for batch in batches:
    model(batch).square().mean().backward()
assert all(state["exp_avg"].device.type == "cpu" for state in optimizer.state.values())

import fsdp_wrap

offload = fsdp_wrap.offload_activations(model)
for batch in batches:
    model(batch).square().mean().backward()
print(offload.nbytes, "bytes have gone to host memory")
offload.remove()

dist.destroy_process_group()
