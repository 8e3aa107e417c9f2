"""Norms of gradients that lie on several meshes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial

import fsdp_wrap
import tp_nets
from bed import ranks
from fronts import full
from fsdp_wrap import fully_shard
from fsdp_wrap.clip_grad import clip_grad_norm_


def with_gradients(mesh_name: str, plan: str) -> tuple[nn.Module, nn.Module]:
    """A sharded model and a plain one, with the same gradients."""
    _, data, tensor = tp_nets.mesh_of(mesh_name)
    plain, model = tp_nets.net(), tp_nets.parallelize(tp_nets.net(), tensor, plan)
    tp_nets.shard_blocks(model, fully_shard, mesh=data)
    tokens = tp_nets.batches(1, 0)[0]
    for each, how in ((plain, "columns"), (model, plan)):
        tp_nets.loss_of(each, tokens, how)
    return model, plain


def clip(function: Any, model: nn.Module, bound: float, p: float) -> torch.Tensor:
    return full(function(model.parameters(), bound, p))


@ranks(4)
@pytest.mark.each_value
@pytest.mark.parametrize("mesh", ["flat", "replicas", "shards"])
@pytest.mark.parametrize("plan", tp_nets.PLANS)
def test_clipping_equals_that_of_a_plain_model(rank, world_size, mesh, plan):
    several = plan == "columns"  # where torch's own function refuses the meshes
    for p in (1.0, 2.0, 3.5, math.inf):
        for function in (clip_grad_norm_,) if several else (clip_grad_norm_, nn.utils.clip_grad_norm_):
            model, plain = with_gradients(mesh, plan)
            expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.01, p)
            found = clip(function, model, 0.01, p)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=0)
            for (name, param), other in zip(model.named_parameters(), plain.named_parameters()):
                torch.testing.assert_close(full(param.grad), other[1].grad, rtol=0, atol=1e-13, msg=name)
    if several:
        with pytest.raises(RuntimeError):
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)


@ranks(4)
def test_what_is_not_finite_is_so_on_all_ranks(rank, world_size):
    model, _ = with_gradients("flat", "columns")
    held = model.blocks[0].up.weight.grad.to_local()
    for value in (math.nan, math.inf):
        if rank == 2:
            held.view(-1)[0] = value
        for p in (2.0, math.inf):
            with pytest.raises(RuntimeError, match="total norm of order"):
                clip_grad_norm_(model.parameters(), 1.0, p, error_if_nonfinite=True)
            with pytest.raises(RuntimeError, match="total norm of order"):
                fsdp_wrap.clip_grad_norm_(model, 1.0, p, error_if_nonfinite=True)
    found = clip_grad_norm_(model.parameters(), 1.0)
    assert not torch.isfinite(found)


@ranks(4)
def test_what_cannot_be_clipped_is_refused(rank, world_size):
    mesh, _, _ = tp_nets.mesh_of("flat")
    param = nn.Parameter(DTensor.from_local(torch.ones(2), mesh, [Partial(), Partial()]))
    param.grad = DTensor.from_local(torch.ones(2), mesh, [Partial(), Partial()])
    with pytest.raises(ValueError, match="redistribute it first"):
        clip_grad_norm_([param], 1.0)
    with pytest.raises(ValueError, match="norm_type must be positive"):
        clip_grad_norm_([param], 1.0, 0)
    with pytest.raises(ValueError, match="max_norm must not be negative"):
        clip_grad_norm_([param], -1.0)
    assert clip_grad_norm_([], 1.0) == 0
