"""What the tests on a GPU share. They are skipped where there is none; one rank per GPU."""

from __future__ import annotations

import pytest
import torch

from models import loss_of, tokens

needs_cuda = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
SIZES = [1] + ([2] if torch.cuda.device_count() > 1 else [])


def device_of(rank: int) -> torch.device:
    """Makes a rank's GPU the current one."""
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def train(model, optimizer, rank, device, steps):
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, tokens(rank, step).to(device)).backward()
        optimizer.step()
