"""What tests of weights that are sent have in common: a small model, its units, and a step of training."""

from __future__ import annotations

import torch
from torch import nn

from fsdp_wrap.wrap import ModuleWrapPolicy

POLICY = ModuleWrapPolicy({nn.Linear})


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 7), nn.Tanh(), nn.Linear(7, 3))


def step(model: nn.Module) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model(torch.randn(4, 10)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
