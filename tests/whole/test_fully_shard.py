"""`fully_shard`: the same numbers as DDP and plain modules, whatever the options."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

from bed import ranks
from composable import assert_same, shard_blocks
from models import Transformer, train


@pytest.mark.parametrize("reshard", [None, True, False])
@ranks(2)
def test_fp32_training_is_bit_equal_to_ddp(rank, world_size, reshard):
    torch.manual_seed(0)
    plain = Transformer()
    model = shard_blocks(copy.deepcopy(plain), reshard_after_forward=reshard)
    ddp = DDP(plain)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1) for m in (ddp, model)]
    assert train(model, optimizers[1], rank, range(4)) == train(ddp, optimizers[0], rank, range(4))
    assert_same(model, plain)


@ranks(1, 3, 4)
def test_float64_training_equals_ddp(rank, world_size):
    torch.manual_seed(0)
    plain = Transformer().double()
    model = shard_blocks(copy.deepcopy(plain))
    ddp = DDP(plain)
    for m in (ddp, model):
        train(m, torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9), rank, range(4))
    assert_same(model, plain, exact=False)
