"""Timelines of steps: the program behind `docs/timeline.md`.

Run it by `torchrun --nproc-per-node 2 examples/how_to/in_depth/timelines.py`.
"""

from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch import nn

import fsdp_wrap
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.tools.timeline import load, merge
from fsdp_wrap.wrap import ModuleWrapPolicy

dist.init_process_group("gloo")  # "nccl" on GPUs
rank = dist.get_rank()
torch.manual_seed(0)
model = FSDP(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
optimizer = torch.optim.AdamW(model.parameters())
batches = torch.randn(3, 2, 8).unbind()


def step(batch):
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


step(batches[0])

with fsdp_wrap.timeline(model) as recorded:
    for batch in batches:  # a few steps, after the first
        step(batch)

if rank == 0:
    print(recorded.report())  # a table by unit, and advice
    recorded.save("trace.json")  # open it at ui.perfetto.dev, or chrome://tracing

if rank == 0 and find_spec("matplotlib"):
    recorded.plot("step.svg")

with fsdp_wrap.timeline(model, "runs/timeline", gather=False):  # runs/timeline/rank-00000.json, ...
    step(batches[0])

dist.barrier()  # each rank has written its file

whole = merge(
    ["runs/timeline"], "trace.json"
)  # Or the files, one by one. `load(path)` reads what was written.
print(whole.report())

dist.barrier()
assert load("trace.json").report() == whole.report()

with fsdp_wrap.explain_memory_errors(model):
    model(batches[0]).square().mean().backward()
    optimizer.step()

dist.destroy_process_group()
