"""`fully_shard`: the same numbers as DDP and plain modules, whatever the options."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from bed import ranks
from fsdp_wrap import fully_shard
from models import Transformer, train


def shard_blocks(model: nn.Module, **kwargs):
    for block in model.blocks:
        fully_shard(block, **kwargs)
    return fully_shard(model, **kwargs)


def assert_same(model: nn.Module, reference: nn.Module, exact: bool = True) -> None:
    """Parameters and gradients, gathered by DTensor, equal those of a plain model."""
    wanted_of = dict(reference.named_parameters())
    for name, param in model.named_parameters():
        expected = wanted_of.pop(name.replace("_checkpoint_wrapped_module.", ""))
        pairs = [(param.detach().full_tensor(), expected.detach())]
        assert (param.grad is None) == (expected.grad is None), name
        if param.grad is not None:
            pairs.append((param.grad.full_tensor(), expected.grad))
        for found, wanted in pairs:
            if exact:
                assert torch.equal(found, wanted), name
            else:
                torch.testing.assert_close(found, wanted, rtol=0, atol=1e-10, msg=name)
    assert not wanted_of


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
