"""Plans: the program behind `docs/planning.md`.

Run it by `python examples/how_to/in_depth/plans.py`: it needs no ranks.
"""

from importlib.util import find_spec

import torch
from torch import nn

import fsdp_wrap
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.wrap import NameWrapPolicy


class Block(nn.Sequential):
    def __init__(self):
        super().__init__(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


class Transformer(nn.Module):
    def __init__(self, length=1024):
        super().__init__()
        self.embedding = nn.Embedding(50257, 64)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(64, 50257)

    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens)))


def setup():
    with torch.device("meta"):
        model = Transformer()
    model = FSDP(model, auto_wrap_policy=NameWrapPolicy("Block"), device_id=0)
    optimizer = torch.optim.AdamW(model.parameters())

    def step():
        optimizer.zero_grad()
        model(torch.randint(50257, (4, 1024), device="cuda")).mean().backward()
        optimizer.step()

    return model, optimizer, step


plan = fsdp_wrap.plan(setup, ranks=64, device="cuda", machine=fsdp_wrap.preset("h100"))
print(plan)  # a page
text = plan.to_json()  # or a file: plan.to_json("plan.json")

if find_spec("matplotlib"):
    plan.plot("out/plan.svg")  # memory by kind through the step (extra `tools`)

assert 0 < plan.rest_bytes < plan.peak_bytes
