"""The example that is read in one sitting: it computes what the package does, and is as short as it says."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from bed import ranks
from bed.paths import ROOT
from bed.scripts import script
from fsdp_wrap import FullyShardedDataParallel, MixedPrecision
from fsdp_wrap.wrap import ModuleWrapPolicy
from models import Block, Transformer, loss_of, tokens, train

SOURCE = ROOT / "examples" / "fsdp_in_250_lines.py"
example = script("fsdp_in_250_lines", "examples")


def _twins(**dtypes: torch.dtype) -> tuple[nn.Module, FullyShardedDataParallel]:
    """The same transformer sharded by the example and by the package, a unit for each block."""
    torch.manual_seed(0)
    model = Transformer()
    model.register_buffer("seen", torch.tensor(3))
    precision = MixedPrecision(**dtypes) if dtypes else None  # type: ignore[arg-type]  # known to be dtypes
    package = FullyShardedDataParallel(
        copy.deepcopy(model), auto_wrap_policy=ModuleWrapPolicy({Block}), mixed_precision=precision
    )
    names = {"param_dtype": "compute_dtype"}
    return example.FSDP(model, (Block,), **{names.get(name, name): dtypes[name] for name in dtypes}), package


@pytest.mark.parametrize("dtypes", [{}, {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}])
@ranks(2)
def test_the_example_trains_as_the_package_does_bit_for_bit(rank, world_size, dtypes):
    ours, package = _twins(**dtypes)
    losses = []
    for model in (ours, package):
        losses.append(train(model, torch.optim.AdamW(model.parameters(), lr=1e-2), rank, range(5)))
    assert losses[0] == losses[1]
    state, expected = ours.full_state_dict(), package.state_dict()
    assert state.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(state[name], value), name


@ranks(2)
def test_parameters_without_gradients_evaluation_and_two_backwards(rank, world_size):
    ours, package = _twins()
    for model in (ours, package):
        with torch.no_grad():
            model(tokens(rank, 7))
        for step in range(2):
            loss_of(model, tokens(rank, step)).backward()
        model(tokens(rank, 5)).sum().backward()
    grads = torch.cat([param.grad for param in ours.parameters()])
    expected = torch.cat([param.grad for param in package.parameters()])
    assert torch.equal(grads, expected)


@ranks(2)
def test_units_that_share_a_parameter_are_refused(rank, world_size):
    model = Transformer()
    model.blocks[1].norm1.weight = model.blocks[0].norm1.weight
    with pytest.raises(ValueError, match=r"'blocks\.0' and 'blocks\.1' share weight"):
        example.FSDP(model, (Block,))


def test_it_is_short_and_needs_torch_alone():
    lines = SOURCE.read_text("utf-8").splitlines()
    assert len(lines) <= 250
    imported = {line.split()[1].split(".")[0] for line in lines if line.startswith(("import ", "from "))}
    assert imported <= {"__future__", "collections", "copy", "itertools", "torch"}
    told = [line.split()[2] for line in lines if line.strip().startswith("# Step ")]
    assert sorted(told, key=lambda number: int(number[:-1])) == [f"{number}," for number in range(1, 11)]
