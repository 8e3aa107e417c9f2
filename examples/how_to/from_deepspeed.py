"""From DeepSpeed: the program behind `docs/start/from-deepspeed.md`.

Run it by `torchrun --nproc-per-node 2 examples/how_to/from_deepspeed.py`.
"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import nn

from fsdp_wrap import CPUOffload, MixedPrecision, checkpoint, clip_grad_norm_
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.wrap import NameWrapPolicy

dist.init_process_group("gloo")  # "nccl" on GPUs
rank = dist.get_rank()

layer = nn.TransformerEncoderLayer(d_model=16, nhead=2, dim_feedforward=32, batch_first=True)
module = nn.TransformerEncoder(layer, num_layers=2, enable_nested_tensor=False)
batches = [torch.randn(4, 8, 16) for _ in range(4)]
accumulation = 2

model = FSDP(
    module,
    auto_wrap_policy=NameWrapPolicy("TransformerEncoderLayer"),
    mixed_precision=MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    use_orig_params=True,
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)

for number, batch in enumerate(batches, 1):
    last = number % accumulation == 0
    with nullcontext() if last else model.no_sync():
        loss = model(batch).float().square().mean() / accumulation
        loss.backward()
    if last:
        clip_grad_norm_(model, 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()

checkpoint.save("runs/from_deepspeed", model, optimizer, {"scheduler": scheduler}, step=number)

offloaded = FSDP(
    nn.Linear(16, 16),
    cpu_offload=CPUOffload(offload_optimizer_state=True),
    use_orig_params=True,
)

if dist.get_rank() == 0:
    torch.save(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).state_dict(), "pytorch_model.bin")
dist.barrier()

model.load_state_dict(torch.load("pytorch_model.bin", mmap=True))

dist.destroy_process_group()
