"""A small model, its units and a step of training, for tests that send weights."""

import torch
from torch import nn

from fsdp_wrap.wrap import ModuleWrapPolicy

WIDTH = 10
POLICY = ModuleWrapPolicy({nn.Linear})


def net(hidden: int = 7) -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, hidden), nn.Tanh(), nn.Linear(hidden, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3)]
    return nn.Sequential(*layers)


def step(model: nn.Module, lr: float = 1e-2) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    model(torch.randn(4, WIDTH)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
