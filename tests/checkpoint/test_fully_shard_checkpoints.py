"""What `fully_shard` made, through streams, checkpoints and safetensors, to the wrapper and back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bed import ranks
from bed.references import count_collectives
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import checkpoint, fully_shard, iter_full_optim_state, iter_full_params


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 4), nn.Linear(4, 3)).double()


def sharded() -> nn.Module:
    model = layers()
    fully_shard(model[0])
    fully_shard(model)
    return model


def stepped(model: nn.Module, rank: int) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.full((2, 7), 1.0 + rank, dtype=torch.float64)).square().sum().backward()
    optimizer.step()
    return optimizer


def assert_same(one: nn.Module, other: nn.Module) -> None:
    expected = dict(iter_full_params(other))
    found = dict(iter_full_params(one))
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


@ranks(1, 3)
def test_full_parameters_stream(rank, world_size):
    torch.manual_seed(0)
    model = layers()
    expected = {name: param.detach().clone() for name, param in model.named_parameters()}
    fully_shard(model[0])
    fully_shard(model)
    for name, value in iter_full_params(model, budget=1):
        assert torch.equal(value, expected.pop(name)), name
    assert not expected
    with pytest.raises(ValueError, match=r"'0\.weight' was sharded by fully_shard"):
        iter_full_optim_state(model, stepped(model, rank))


@ranks(3)
def test_checkpoints_go_to_the_wrapper_and_back(rank, world_size, tmp_path):
    torch.manual_seed(0)
    model = sharded()
    optimizer = stepped(model, rank)
    checkpoint.save(tmp_path, model, optimizer)
    torch.manual_seed(1)
    wrapped = FSDP(layers(), use_orig_params=True)
    of_wrapped = torch.optim.AdamW(wrapped.parameters())
    checkpoint.load(tmp_path, wrapped, of_wrapped)
    assert_same(wrapped, model)
    checkpoint.save(tmp_path, wrapped, of_wrapped)
    again = sharded()
    of_again = torch.optim.AdamW(again.parameters())
    checkpoint.load(tmp_path, again, of_again)
    for param, other in zip(model.parameters(), again.parameters()):
        assert torch.equal(param.to_local(), other.to_local())
        for kind in ("step", "exp_avg", "exp_avg_sq"):
            one, two = optimizer.state[param][kind], of_again.state[other][kind]
            assert torch.equal(getattr(one, "_local_tensor", one), getattr(two, "_local_tensor", two)), kind


@ranks(2)
def test_safetensors_are_read_without_communication(rank, world_size, tmp_path):
    torch.manual_seed(0)
    model = sharded()
    checkpoint.export_safetensors(model, tmp_path)
    torch.manual_seed(1)
    again = sharded()
    with count_collectives() as counts:
        checkpoint.import_safetensors(again, tmp_path)
    assert not counts
    assert_same(again, model)
