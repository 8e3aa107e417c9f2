"""Clipping, norms, the scaler and communication hooks under mixed precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from bed import ranks
from fsdp_wrap import CPUOffload, MixedPrecision, ShardingStrategy, comm_hooks
from fsdp_wrap.sharded_grad_scaler import ShardedGradScaler
from models import WRAPPINGS, Transformer, full_grads, loss_of, tokens, twins

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
POLICIES = {
    "bf16": (MixedPrecision(BRAIN), SINGLE),
    "bf16, reduced in fp32": (MixedPrecision(BRAIN, reduce_dtype=SINGLE), SINGLE),
    "bf16 kept": (MixedPrecision(BRAIN, keep_low_precision_grads=True), BRAIN),
    "fp16": (MixedPrecision(HALF), SINGLE),
    "fp16 kept": (MixedPrecision(HALF, keep_low_precision_grads=True), HALF),
    "fp16 reduced in fp32, kept": (MixedPrecision(HALF, SINGLE, keep_low_precision_grads=True), SINGLE),
    "fp16 reduced in bf16, kept": (MixedPrecision(HALF, BRAIN, keep_low_precision_grads=True), BRAIN),
    "fp16 reduced in fp16, kept": (MixedPrecision(HALF, HALF, keep_low_precision_grads=True), HALF),
}
"""By what they do, with the dtype of the norm."""

each_strategy = pytest.mark.parametrize(
    ("strategy", "use_orig_params"), [("FULL_SHARD", False), ("NO_SHARD", True)]
)


def mixed_twins(
    policy: MixedPrecision, use_orig_params: bool, strategy: str = "FULL_SHARD", **options: Any
) -> Any:
    return twins(
        Transformer,
        auto_wrap_policy=WRAPPINGS["block"](),
        mixed_precision=policy,
        use_orig_params=use_orig_params,
        sharding_strategy=ShardingStrategy[strategy],
        **options,
    )


def assert_norms_and_clipping(model: Any, expected: torch.dtype) -> None:
    before = {name: grad.double() for name, grad in full_grads(model).items()}
    for name, norm in model.grad_norms().items():
        assert norm.dtype == SINGLE
        torch.testing.assert_close(norm.double(), before[name].norm(), rtol=1e-6, atol=1e-9)
    exact = torch.cat([grad.flatten() for grad in before.values()]).norm()
    total = model.clip_grad_norm_(0.1)
    assert total.dtype == expected
    torch.testing.assert_close(total.double(), exact, rtol=max(1e-6, torch.finfo(expected).eps), atol=0)
    for name, grad in full_grads(model).items():
        torch.testing.assert_close(grad.double(), before[name] * 0.1 / exact, rtol=0.01, atol=1e-6, msg=name)


@pytest.mark.parametrize("policy", POLICIES)
@each_strategy
@ranks(2)
def test_norms_are_of_the_dtype_in_which_gradients_are_kept(
    rank, world_size, strategy, use_orig_params, policy
):
    """On all ranks, those without a gradient of their own too; what clips is known more precisely."""
    mixed_precision, expected = POLICIES[policy]
    _, model = mixed_twins(mixed_precision, use_orig_params, strategy=strategy)
    with pytest.warns(UserWarning, match="no gradients"):
        assert model.clip_grad_norm_(1.0).dtype == expected
    loss_of(model, tokens(rank, 0)).backward()
    assert_norms_and_clipping(model, expected)


@pytest.mark.parametrize(("use_orig_params", "offload"), [(False, True), (True, False)])
@ranks(2)
def test_the_scaler_keeps_small_gradients_of_fp16(rank, world_size, use_orig_params, offload):
    """Of a loss so small that without it they vanish; the scale is found by backing off."""
    plain, model = mixed_twins(MixedPrecision(HALF), use_orig_params, cpu_offload=CPUOffload(offload))
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


@pytest.mark.parametrize("name", ["default", "fp16_compress_hook", "bf16_compress_hook"])
@each_strategy
@ranks(2)
def test_hooks_get_the_reduce_dtype(rank, world_size, use_orig_params, name, strategy):
    plain, model = mixed_twins(MixedPrecision(BRAIN, reduce_dtype=SINGLE), use_orig_params, strategy)
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
