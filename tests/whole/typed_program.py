"""A user's program with both front-ends, for type checkers: `test_types.py` has it checked, and runs it.

`assert_type` is a type checker's error if the expression has another type.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from typing_extensions import assert_type

import fsdp_wrap
from fsdp_wrap import (
    FSDPModule,
    MixedPrecision,
    MixedPrecisionPolicy,
    ReplicateModule,
    StateDictType,
    checkpoint,
    fully_shard,
    optim,
    replicate,
)
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.sharded_grad_scaler import ShardedGradScaler
from fsdp_wrap.wrap import ModuleWrapPolicy


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.relu(self.inner(x))


class Net(nn.Module):
    def __init__(self, width: int = 8, depth: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        out: torch.Tensor = self.head(x)
        return out


def enter(context: AbstractContextManager[None]) -> None:
    """Enters and leaves a context that yields nothing."""
    with context:
        pass


def train_wrapper(folder: str) -> None:
    """Trains with the wrapper, saves and loads."""
    model = FSDP(
        Net(),
        auto_wrap_policy=ModuleWrapPolicy({Block}),
        mixed_precision=MixedPrecision(reduce_dtype=torch.float32),
        cpu_offload=torch_fsdp.CPUOffload(offload_params=False),
        use_orig_params=True,
    )
    assert_type(model, FSDP)
    assert_type(model.module, nn.Module)
    assert_type(FSDP.fsdp_modules(model), list[FSDP])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = ShardedGradScaler("cpu")
    with model.no_sync():
        model(torch.ones(2, 8)).sum().backward()
    loss = model(torch.ones(2, 8)).mean()
    scaler.scale(loss).backward()
    assert_type(scaler.scale(torch.ones(1)), torch.Tensor)
    assert_type(scaler.scale([torch.ones(1)]), list[torch.Tensor])
    scaler.unscale_(optimizer)
    assert_type(model.clip_grad_norm_(1.0), torch.Tensor)
    assert_type(model.grad_norms(), dict[str, torch.Tensor])
    scaler.step(optimizer)
    scaler.update()
    enter(model.no_sync())
    enter(FSDP.summon_full_params(model))
    enter(FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT))
    with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        state = assert_type(model.state_dict(), dict[str, Any])
        assert not model.load_state_dict(state).missing_keys
        assert_type(FSDP.optim_state_dict(model, optimizer), dict[str, Any])
    for name, tensor in fsdp_wrap.iter_full_params(model):
        assert_type(name, str)
        assert_type(tensor, torch.Tensor)
    checkpoint.save(folder, model, optimizer, step=1)
    assert_type(checkpoint.latest(folder), Path | None)
    assert_type(checkpoint.load(folder, model, optimizer), checkpoint.Loaded)


def train_composable() -> None:
    """Trains with `fully_shard` and `replicate`."""
    model = Net()
    for block in model.blocks:
        assert_type(fully_shard(block, mp_policy=MixedPrecisionPolicy()), FSDPModule)
    assert_type(fully_shard(model), FSDPModule)
    assert isinstance(model, Net) and isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(True)  # of the one class
    assert_type(model.head, nn.Linear)  # of the other one
    assert_type(model.unshard(), fsdp_wrap.UnshardHandle | None)
    assert_type(model.state_dict(), dict[str, Any])
    optimizer = optim.step_in_backward(model, lambda params: torch.optim.SGD(params, lr=0.1))
    assert_type(optimizer, torch.optim.SGD)
    with fsdp_wrap.uneven(model) as context, fsdp_wrap.record_events() as events:
        assert_type(context, fsdp_wrap.Uneven)
        context.backward(model(torch.ones(2, 8)).sum())
    assert_type(events, list[fsdp_wrap.Event])
    enter(fsdp_wrap.find_nonfinite(model))
    assert_type(optim.Muon(fully_shard(Net())), optim.Muon)

    pair = [nn.Linear(4, 4), nn.Linear(4, 4)]
    of_torch = torch_fsdp.MixedPrecisionPolicy()  # as of a program that changes one import
    assert_type(fully_shard(pair, mp_policy=of_torch), list[FSDPModule])
    assert_type(fully_shard([nn.Linear(4, 4), nn.ReLU()]), list[FSDPModule])
    of_host = torch_fsdp.CPUOffloadPolicy()
    assert_type(replicate(Net(), mp_policy=of_torch, offload_policy=of_host), ReplicateModule)
    assert_type(replicate([nn.Linear(4, 4)]), list[ReplicateModule])


def setup() -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    """Returns what a plan needs: the model, the optimizer and one step."""
    model = Net()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def plan_and_measure(folder: str) -> None:
    """Plans a step and records one."""
    planned = fsdp_wrap.plan(setup, ranks=4)
    assert_type(planned, fsdp_wrap.Plan)
    assert_type(planned.peak_bytes, int)
    assert_type(fsdp_wrap.fit(setup, ranks=[2, 4], device_memory="1GB"), fsdp_wrap.Fit)
    dist.init_process_group("gloo")
    model, _, step = setup()
    with fsdp_wrap.timeline(model, f"{folder}/step.json") as recorded:
        step()
    assert_type(recorded, fsdp_wrap.Timeline)
    assert_type(recorded.report(), str)


if __name__ == "__main__":
    plan_and_measure(sys.argv[1])
    train_wrapper(f"{sys.argv[1]}/checkpoints")
    train_composable()
    dist.destroy_process_group()
