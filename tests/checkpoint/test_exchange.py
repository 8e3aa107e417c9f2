"""Model and optimizer to and from plain modules and torch's own: through checkpoints and full state dicts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_functions
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as TorchFSDP
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchModuleWrapPolicy

from bed import ranks
from fronts import each_form
from fsdp_wrap import distributed_state_dict as our_functions
from resuming import Block, Net, net, per_block_of, train, trained
from state_nets import adamw


def plain() -> nn.Module:
    return net()


def fsdp1(use_orig_params: bool) -> nn.Module:
    policy = TorchModuleWrapPolicy({Block})
    device = torch.device("cpu")
    return TorchFSDP(net(), auto_wrap_policy=policy, device_id=device, use_orig_params=use_orig_params)


def fsdp2() -> nn.Module:
    model: Any = net()
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=init_device_mesh("cpu", (2,)))
    return model


PEERS: dict[str, Callable[[], nn.Module]] = {
    "plain": plain,
    "fsdp2": fsdp2,
    "fsdp1": lambda: fsdp1(True),
    "fsdp1_flat": lambda: fsdp1(False),
}


class Side:
    """A model and its optimizer, with the functions that save and load them."""

    def __init__(self, functions: Any, model: nn.Module) -> None:
        self._functions, self.model, self.optimizer = functions, model, adamw(model)

    def train(self, rank: int, steps: range) -> None:
        alone = type(self.model) is Net  # a plain model sees all batches
        train(self.model, self.optimizer, 0 if alone else rank, 1 if alone else 2, steps)

    def state(self, full: bool = False) -> dict[str, Any]:
        options = torch_functions.StateDictOptions(full_state_dict=full)
        model, optim = self._functions.get_state_dict(self.model, self.optimizer, options=options)
        return {"model": model, "optim": optim}

    def take(self, state: dict[str, Any], full: bool = False) -> None:
        options = torch_functions.StateDictOptions(full_state_dict=full)
        self._functions.set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
            options=options,
        )


def hand_over(source: Side, target: Side, way: str, path: Path) -> None:
    if way == "full":
        target.take(source.state(full=True), full=True)
        return
    dcp.save(source.state(), checkpoint_id=path)
    state = target.state()
    # DCP takes a `ShardedTensor` of which a rank has nothing (torch's wrapper makes such) for a sign that the
    # checkpoint is of a former version, unless it leaves them alone.
    dcp.load(state, checkpoint_id=path, planner=DefaultLoadPlanner(flatten_sharded_tensors=False))
    target.take(state)


@each_form
@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("way", ["checkpoint", "full"])
@pytest.mark.parametrize("giver", ["ours", "theirs"])
@ranks(2)
def test_training_goes_on_elsewhere(rank, world_size, giver, way, peer, use_orig_params, tmp_path):
    sides = {
        "ours": Side(our_functions, per_block_of(net(), use_orig_params=use_orig_params)),
        "theirs": Side(torch_functions, PEERS[peer]()),
    }
    source = sides.pop(giver)
    (target,) = sides.values()
    source.train(rank, range(3))
    hand_over(source, target, way, tmp_path)
    target.train(rank, range(3, 5))
    found, expected = target.state(full=True)["model"], trained(5)[0].state_dict()
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10)
