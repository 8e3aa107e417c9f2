"""Estimate memory: the program behind `docs/how-to/memory.md`.

Run it by `python examples/how_to/memory.py`: it needs no ranks.
"""

import torch
from torch import nn

import fsdp_wrap


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


def setup(*, batch=8):
    from fsdp_wrap.tools import Recipe, step_of

    with torch.device("meta"):
        model = nn.Sequential(*(Block(64) for _ in range(3)))
    model = Recipe().apply(model, Block)
    optimizer = torch.optim.AdamW(model.parameters())
    return model, optimizer, step_of(model, optimizer, lambda: model(torch.randn(batch, 64)).square().mean())


plan = fsdp_wrap.plan(setup, ranks=64)
print(plan.rest_bytes, plan.peak_bytes, plan.peak_at)
print(plan)  # the page

assert 0 < plan.rest_bytes < plan.peak_bytes
