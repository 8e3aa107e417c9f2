"""What `fully_shard` made, through streams, checkpoints and safetensors, to the wrapper and back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bed import ranks
from bed.references import count_collectives
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import checkpoint, fully_shard, iter_full_optim_state, iter_full_params
from state_nets import assert_equal


def layers(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(7, 5), nn.Linear(5, 4), nn.Linear(4, 3)).double()


def sharded(seed: int) -> nn.Module:
    model = layers(seed)
    fully_shard(model[0])
    return fully_shard(model)


@ranks(3)
def test_what_is_saved_goes_to_the_wrapper_and_back(rank, world_size, tmp_path):
    model = sharded(0)
    full = {name: param.detach() for name, param in layers(0).named_parameters()}
    assert_equal({name: value.clone() for name, value in iter_full_params(model, budget=1)}, full)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.full((2, 7), 1.0 + rank, dtype=torch.float64)).square().sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match=r"'0\.weight' was sharded by fully_shard"):
        iter_full_optim_state(model, optimizer)
    checkpoint.save(tmp_path / "run", model, optimizer)
    wrapped = FSDP(layers(1), use_orig_params=True)
    of_wrapped = torch.optim.AdamW(wrapped.parameters())
    checkpoint.load(tmp_path / "run", wrapped, of_wrapped)
    assert_equal(dict(iter_full_params(wrapped)), dict(iter_full_params(model)))
    checkpoint.save(tmp_path / "run", wrapped, of_wrapped)
    again = sharded(2)
    of_again = torch.optim.AdamW(again.parameters())
    checkpoint.load(tmp_path / "run", again, of_again)
    for param, other in zip(model.parameters(), again.parameters()):
        assert torch.equal(param.to_local(), other.to_local())
        for kind in ("step", "exp_avg", "exp_avg_sq"):
            one, two = optimizer.state[param][kind], of_again.state[other][kind]
            assert torch.equal(getattr(one, "_local_tensor", one), getattr(two, "_local_tensor", two)), kind

    checkpoint.export_safetensors(model, tmp_path / "files")
    imported = sharded(3)
    with count_collectives() as counts:
        checkpoint.import_safetensors(imported, tmp_path / "files")
    assert not counts
    assert_equal(dict(iter_full_params(imported)), dict(iter_full_params(model)))
