"""What a sharded checkpoint costs: no bytes that travel besides DCP's metadata, and no memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from bed import ranks
from bed.memory import live_bytes, only_new_objects
from bed.references import count_collectives
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.distributed_state_dict import get_state_dict
from fsdp_wrap.wrap import ModuleWrapPolicy


class Unit(nn.Module):
    """Its odd matrices are cut into several boxes for any number of ranks."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = nn.Linear(301, 299, dtype=dtype)
        self.down = nn.Linear(299, 301, bias=False, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x))


class Looking(DefaultSavePlanner):
    """Notes live bytes whenever the writer asks for the next item: what it has written it may keep."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.items = 0

    def resolve_data(self, write_item: Any) -> Any:
        self.items += 1
        result = super().resolve_data(write_item)
        self.peak = max(self.peak, live_bytes())
        return result


@ranks(3)
def test_saving_takes_no_memory_and_sends_no_tensors(rank, world_size, tmp_path):
    dtype = torch.bfloat16
    with only_new_objects():
        module = nn.Sequential(*(Unit(dtype) for _ in range(4)))
        model = FSDP(module, auto_wrap_policy=ModuleWrapPolicy({Unit}), use_orig_params=True)
        del module
        optimizer = torch.optim.AdamW(model.parameters())
        x = torch.randn(3, 301, dtype=dtype)
        model(x).square().mean().backward()
        optimizer.step()
        rest, look = live_bytes(), Looking()
        with count_collectives(objects=False) as tensors, count_collectives() as all_of_them:
            save(model, optimizer, tmp_path, look)
        assert look.peak - rest < 0.05 * rest
        assert tensors == {} and sum(traffic.bytes for traffic in all_of_them.values()) > 0
    own = sum(param.nbytes for param in model.parameters())
    payload = torch.tensor(3 * own)  # parameters and two averages
    dist.all_reduce(payload)
    written = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert payload - 100 < written < payload + 250_000, "everything is written once"
    assert look.items >= 12 and look.peak > 3 * own  # it did look
    compare(model, optimizer, tmp_path)


def save(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path, planner: DefaultSavePlanner) -> None:
    state, optim_state = get_state_dict(model, optimizer)
    writer = dcp.FileSystemWriter(path, sync_files=False)
    dcp.save({"model": state, "optim": optim_state}, storage_writer=writer, planner=planner)


def compare(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    """What was written is what the model has."""
    expected = {"model": model.state_dict(), "optim": FSDP.optim_state_dict(model, optimizer)}
    zeros = torch.utils._pytree.tree_map_only(torch.Tensor, torch.zeros_like, expected)
    dcp.load(zeros, checkpoint_id=path)
    torch.testing.assert_close(zeros["model"], dict(expected["model"]), rtol=0, atol=0)
    torch.testing.assert_close(zeros["optim"]["state"], expected["optim"]["state"], rtol=0, atol=0)
