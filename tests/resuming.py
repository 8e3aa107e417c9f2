"""Training that is saved and goes on elsewhere: a model for every wrapper, on any number of ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import nets
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.wrap import ModuleWrapPolicy
from models import gather_objects
from nets import WIDTH
from state_nets import adamw

ROWS = 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.rand(1, 2, 3))

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x * self.scale.view(-1))))


class Net(nets.Net):
    """Without scalars, which torch's own wrappers refuse."""

    block = Block


def net() -> nn.Module:
    torch.manual_seed(3)
    return Net().double()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, rank: int, size: int, steps: range) -> None:
    """Trains on this rank's rows of each batch, equally many for 1, 2, 3 and 4 ranks."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        batch = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64)
        optimizer.zero_grad()
        model(batch[rank * ROWS // size : (rank + 1) * ROWS // size]).square().mean().backward()
        optimizer.step()


def trained(steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Returns a plain model that saw whole batches."""
    plain = net()
    optimizer = adamw(plain)
    train(plain, optimizer, 0, 1, range(steps))
    return plain, optimizer


def per_block_of(module: nn.Module, **options: Any) -> FSDP:
    return FSDP(module, auto_wrap_policy=ModuleWrapPolicy({Block}), **options)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def told_alike(error: pytest.ExceptionInfo[Exception]) -> str:
    """Returns the error's text, which must be the same on all ranks."""
    told = gather_objects(str(error.value))
    assert told == told[:1] * len(told)
    return str(told[0])


class Counter:
    """A data position: it is told apart from a value by its methods."""

    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


def other(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)
    return module


@contextmanager
def full_disk() -> Iterator[None]:
    """Lets this process write tensors of checkpoints to a device that has no room."""
    from fsdp_wrap.checkpoint import _storage  # an add-on, without which other tests still run

    begin = _storage._SummedStream.__init__
    with open("/dev/full", "wb", buffering=0) as full:

        def begin_there(stream: Any, raw: Any, *args: Any) -> None:
            begin(stream, full, *args)

        with mock.patch.object(_storage._SummedStream, "__init__", begin_there):
            yield
