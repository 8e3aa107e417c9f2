"""torchao's tensor subclasses below `fully_shard`: float8 training, and frozen NF4 weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.tensor import DTensor

from bed import ranks
from bed.references import count_collectives
from fsdp_wrap import fully_shard
from launch import needs

pytestmark = needs("torchao")

WIDTH, BLOCKS = 64, 3


def sharded(model: Any, **options: Any) -> Any:
    for block in model:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def train(
    model: Any, other: Any, rank: int, world_size: int, steps: int, after: Any = None
) -> dict[str, Any]:
    """Trains a sharded model beside a plain one that sees all parts; returns the last step's traffic."""
    optimizers = [
        torch.optim.AdamW([param for param in each.parameters() if param.requires_grad], lr=1e-2)
        for each in (model, other)
    ]
    for step in range(steps):
        batch = torch.randn(world_size, 4, WIDTH, generator=torch.Generator().manual_seed(step))
        wanted = [other(part).square().mean() for part in batch]
        (sum(wanted) / world_size).backward()
        with count_collectives(objects=False) as traffic:
            loss = model(batch[rank]).square().mean()
            loss.backward()
        torch.testing.assert_close(loss, wanted[rank], rtol=1e-5, atol=0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if after is not None:
            after(model)
    return traffic


@pytest.mark.parametrize("precomputed", [False, True])
@ranks(2)
def test_float8_training_gathers_float8(rank, world_size, precomputed):
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.fsdp_utils import (
        WeightWithDynamicFloat8CastTensor,
        precompute_float8_dynamic_scale_for_fsdp,
    )

    torch.manual_seed(0)
    layers = (
        nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)) for _ in range(BLOCKS)
    )
    plain: Any = nn.Sequential(*layers)
    other = convert_to_float8_training(copy.deepcopy(plain), config=Float8LinearConfig(emulate=True))
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    model = sharded(convert_to_float8_training(plain, config=config), shared_memory=False)
    # Scales computed ahead round a few weights otherwise, which shows from the third step on.
    after = precompute_float8_dynamic_scale_for_fsdp if precomputed else None
    counted = train(model, other, rank, world_size, 2 if precomputed else 4, after)
    assert type(model[0][0].weight.to_local()) is WeightWithDynamicFloat8CastTensor
    matrices, biases = 2 * BLOCKS * WIDTH * WIDTH, 2 * BLOCKS * WIDTH * 4
    notes = BLOCKS * 256
    assert 2 * matrices <= counted["all_gather_into_tensor"].bytes <= 2 * (matrices + biases + notes)
    assert 4 * matrices <= counted["reduce_scatter_tensor"].bytes <= 4 * matrices + biases + notes


def adapted() -> Any:
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4, to_nf4

    class Adapted(nn.Module):
        """A frozen NF4 matrix with an adapter that trains."""

        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Parameter(to_nf4(torch.randn(WIDTH, WIDTH), 32, 2), requires_grad=False)
            self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(linear_nf4(x, self.base) + self.up(self.down(x)))

    return nn.Sequential(*(Adapted() for _ in range(BLOCKS)))


@ranks(2)
def test_frozen_nf4_is_gathered_quantised_and_saved(rank, world_size, tmp_path):
    models = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        models.append(adapted())
    plain, model, fresh = models[0], *(sharded(each, shared_memory=False) for each in models[1:])
    kind = type(plain[0].base)
    counted = train(model, plain, rank, world_size, 3)
    entry = model[0].base
    assert isinstance(entry, DTensor) and type(entry.to_local()) is kind
    assert torch.equal(entry.full_tensor().get_original_weight(), plain[0].base.get_original_weight())
    adapters = BLOCKS * 8 * WIDTH * 4
    quantised = BLOCKS * WIDTH * WIDTH // 2  # and a byte for 32 of them, with scales
    assert counted["all_gather_into_tensor"].bytes <= 2 * (1.2 * quantised + adapters + BLOCKS * 256)
    assert counted["reduce_scatter_tensor"].bytes <= adapters + BLOCKS * 256
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path)
    target = fresh.state_dict()
    dcp.load({"model": target}, checkpoint_id=tmp_path)
    fresh.load_state_dict(target)
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(7))
    assert torch.equal(fresh(x), model(x))
