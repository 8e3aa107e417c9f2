"""Clipping, norms, the scaler and communication hooks under mixed precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from bed import ranks
from fronts import each_form
from fsdp_wrap import CPUOffload, MixedPrecision, ShardingStrategy, comm_hooks
from fsdp_wrap.sharded_grad_scaler import ShardedGradScaler
from models import WRAPPINGS, Transformer, full_grads, loss_of, tokens, twins

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
POLICIES = {
    "bf16": MixedPrecision(BRAIN),
    "bf16, reduced in fp32": MixedPrecision(BRAIN, reduce_dtype=SINGLE),
    "bf16 kept": MixedPrecision(BRAIN, keep_low_precision_grads=True),
    "fp16": MixedPrecision(HALF),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@each_form
@ranks(2)
def test_norms_and_clipping(rank, world_size, use_orig_params, strategy, policy):
    _, model = twins(
        Transformer,
        auto_wrap_policy=WRAPPINGS["block"](),
        mixed_precision=POLICIES[policy],
        use_orig_params=use_orig_params,
        sharding_strategy=ShardingStrategy[strategy],
    )
    loss_of(model, tokens(rank, 0)).backward()
    before = {name: grad.double() for name, grad in full_grads(model).items()}
    for name, norm in model.grad_norms().items():
        assert norm.dtype == SINGLE
        torch.testing.assert_close(norm.double(), before[name].norm(), rtol=1e-6, atol=1e-9)
    total = torch.cat([grad.flatten() for grad in before.values()]).norm()
    found = model.clip_grad_norm_(0.1)
    assert found.dtype == (BRAIN if policy == "bf16 kept" else SINGLE)
    torch.testing.assert_close(found.double(), total, rtol=max(1e-6, torch.finfo(found.dtype).eps), atol=0)
    for name, grad in full_grads(model).items():
        torch.testing.assert_close(grad.double(), before[name] * 0.1 / total, rtol=0.01, atol=1e-6, msg=name)


@pytest.mark.parametrize("reduced, expected", [(HALF, HALF), (BRAIN, BRAIN), (SINGLE, SINGLE), (None, HALF)])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@each_form
@ranks(2)
def test_the_norm_is_of_the_dtype_in_which_gradients_are_kept(
    rank, world_size, use_orig_params, strategy, reduced, expected
):
    """On all ranks, those without a gradient of their own too; what clips is known more precisely."""
    _, model = twins(
        Transformer,
        auto_wrap_policy=WRAPPINGS["block"](),
        mixed_precision=MixedPrecision(HALF, reduced, keep_low_precision_grads=True),
        use_orig_params=use_orig_params,
        sharding_strategy=ShardingStrategy[strategy],
    )
    with pytest.warns(UserWarning, match="no gradients"):
        assert model.clip_grad_norm_(1.0).dtype == expected
    loss_of(model, tokens(rank, 0)).backward()
    before = {name: grad.double() for name, grad in full_grads(model).items()}
    exact = torch.cat([grad.flatten() for grad in before.values()]).norm()
    total = model.clip_grad_norm_(0.1)
    assert total.dtype == expected
    torch.testing.assert_close(total.double(), exact, rtol=max(1e-6, torch.finfo(expected).eps), atol=0)
    for name, grad in full_grads(model).items():
        torch.testing.assert_close(grad.double(), before[name] * 0.1 / exact, rtol=0.01, atol=1e-6, msg=name)


@pytest.mark.parametrize("offload", [False, True], ids=["device", "offload"])
@each_form
@ranks(2)
def test_the_scaler_keeps_small_gradients_of_fp16(rank, world_size, use_orig_params, offload):
    """Of a loss so small that without it they vanish; the scale is found by backing off."""
    plain, model = twins(
        Transformer,
        auto_wrap_policy=WRAPPINGS["block"](),
        mixed_precision=MixedPrecision(HALF),
        use_orig_params=use_orig_params,
        cpu_offload=CPUOffload(offload),
    )
    tiny = 2.0**-24
    (sum(loss_of(plain, tokens(r, 0)) for r in range(world_size)) * tiny / world_size).backward()
    expected = torch.cat([param.grad.flatten() for param in plain.parameters()])

    def error() -> float:
        grads = full_grads(model)
        found = torch.cat([grads[name].flatten() for name, _ in plain.named_parameters()])
        return ((found - expected).norm() / expected.norm()).item()

    (loss_of(model, tokens(rank, 0)).float() * tiny).backward()
    assert error() > 0.5
    scaler = ShardedGradScaler("cpu", init_scale=2.0**50)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    skipped = 0
    while True:
        optimizer.zero_grad()
        scaler.scale(loss_of(model, tokens(rank, 0)).float() * tiny).backward()
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() == before:
            break
        skipped += 1
    assert 5 < skipped < 30
    assert error() < 0.02


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@pytest.mark.parametrize("name", ["default", "fp16_compress_hook", "bf16_compress_hook"])
@each_form
@ranks(2)
def test_hooks_get_the_reduce_dtype(rank, world_size, use_orig_params, name, strategy):
    plain, model = twins(
        Transformer,
        auto_wrap_policy=WRAPPINGS["block"](),
        mixed_precision=MixedPrecision(BRAIN, reduce_dtype=SINGLE),
        use_orig_params=use_orig_params,
        sharding_strategy=ShardingStrategy[strategy],
    )
    if name == "default":
        name = "allreduce_hook" if strategy == "NO_SHARD" else "reduce_scatter_hook"
    hook = getattr(comm_hooks, name)
    seen: list[Any] = []

    def spying(state, grad, *output):
        seen.extend(tensor.dtype for tensor in (grad, *output))
        hook(state, grad, *output)

    model.register_comm_hook(comm_hooks.LowPrecisionState(dist.group.WORLD), spying)
    loss_of(model, tokens(rank, 0)).backward()
    assert set(seen) == {SINGLE}
    (sum(loss_of(plain, tokens(r, 0)) for r in range(world_size)) / world_size).backward()
    found = full_grads(model)
    for key, param in plain.named_parameters():
        assert found[key].dtype == SINGLE
        assert (found[key] - param.grad).norm() <= 0.05 * param.grad.norm() + 1e-3, key
