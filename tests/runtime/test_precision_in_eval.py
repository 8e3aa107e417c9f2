"""`FSDP_USE_FULL_PREC_IN_EVAL=1`: in eval mode units compute as a plain model in full precision."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bed import ranks
from fsdp_wrap import CPUOffload, MixedPrecision, ShardingStrategy
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.wrap import ModuleWrapPolicy

LOW = MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16, _module_classes_to_ignore=())
BATCH = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(8, 8), nn.BatchNorm1d(8)
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.norm.running_mean is not None
        self.seen = [x.dtype, self.fc.weight.dtype, self.norm.running_mean.dtype]
        return x + self.norm(self.fc(x))


@contextmanager
def _variable(value: str = "1") -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FSDP_USE_FULL_PREC_IN_EVAL", value)
        yield


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), Block(), Block(), nn.Linear(8, 3))
    for norm in (net[1].norm, net[2].norm):
        norm.running_mean.uniform_(), norm.running_var.uniform_(0.5, 2)
    return net


def _wrapped(net: nn.Module, **options: Any) -> FSDP:
    options = {"mixed_precision": LOW, "auto_wrap_policy": ModuleWrapPolicy({Block}), **options}
    return FSDP(copy.deepcopy(net), **options)


def _plain(model: FSDP) -> nn.Sequential:
    plain = _net()
    plain.load_state_dict({key: value.cpu() for key, value in model.state_dict().items()})
    return plain.eval()


def _seen(model: FSDP) -> list[list[torch.dtype]]:
    return [module.seen for module in model.modules() if isinstance(module, Block)]


def _train(model: FSDP, optimizer: torch.optim.Optimizer) -> None:
    model.train()
    model(BATCH).float().square().mean().backward()
    assert _seen(model) == [[torch.bfloat16] * 3] * 2
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize(
    ("strategy", "offload", "use_orig_params"),
    [
        ("FULL_SHARD", False, False),
        ("FULL_SHARD", True, True),
        ("SHARD_GRAD_OP", False, True),
        ("NO_SHARD", True, False),
    ],
)
@ranks(2)
def test_evaluation_between_steps_equals_a_plain_model(rank, world_size, strategy, offload, use_orig_params):
    options = {
        "sharding_strategy": ShardingStrategy[strategy],
        "cpu_offload": CPUOffload(offload),
        "use_orig_params": use_orig_params,
    }
    with _variable():
        model = _wrapped(_net(), forward_prefetch=True, **options)
    control = _wrapped(_net(), forward_prefetch=True, **options)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, control)]
    for mode in (torch.no_grad, torch.inference_mode, torch.no_grad):
        plain = _plain(model)
        model.eval()
        with mode():
            for _ in range(2):
                assert torch.equal(model(BATCH), plain(BATCH))
                assert _seen(model) == [[torch.float32] * 3] * 2
        for each, optimizer in zip((model, control), optimizers):
            _train(each, optimizer)
    expected = control.state_dict()
    for name, value in model.state_dict().items():
        assert torch.equal(value, expected[name]), name


@ranks(2)
def test_backward_in_eval_is_in_full_precision(rank, world_size):
    with _variable():
        model = _wrapped(_net(), use_orig_params=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _train(model, optimizer)
    plain = _plain(model)
    model.eval()
    for net in (model, plain):
        net(BATCH + rank).square().mean().backward()
    assert _seen(model) == [[torch.float32] * 3] * 2
    with FSDP.summon_full_params(model, with_grads=True):
        for full, param in zip(model.parameters(), plain.parameters()):
            grad = param.grad / world_size
            dist.all_reduce(grad)
            assert torch.equal(full.grad, grad)
    optimizer.zero_grad()
    _train(model, optimizer)


@ranks(2)
def test_the_variable_counts_when_modules_are_wrapped_and_each_unit_follows_its_own_mode(rank, world_size):
    low, full = [torch.bfloat16] * 3, [torch.float32] * 3
    never = _wrapped(_net()).eval()
    with _variable():
        model = _wrapped(_net()[:3], mixed_precision=replace(LOW, cast_forward_inputs=True))
        with torch.no_grad():
            never(BATCH)
        with _variable("0"):
            off = _wrapped(_net()).eval()
    with torch.no_grad():
        off(BATCH)
    assert _seen(never) == _seen(off) == [low, low]
    for training, expected in (((), [full, full]), ((2,), [full, low]), ((1, 2), [low, low])):
        model.eval()
        for index in training:
            model.module[index].train()
        with torch.no_grad():
            model(BATCH)
        assert _seen(model) == expected
    model.train().module[1].eval()
    with pytest.raises(RuntimeError, match="same dtype"):  # as in torch, a unit in eval mode casts no inputs
        model(BATCH)


@ranks(2)
def test_what_waits_for_a_backward_is_not_lost(rank, world_size):
    with _variable():
        model = _wrapped(_net(), use_orig_params=True)
    loss = model(BATCH).sum()
    with torch.no_grad():
        model.eval()(BATCH)
    with pytest.raises(RuntimeError, match=r"on rank . \(or it was evaluated in full precision"):
        loss.backward()
    with model.no_sync():
        model.train()(BATCH).sum().backward()
    with torch.no_grad(), pytest.raises(RuntimeError, match="gradients left by no_sync wait"):
        model.eval()(BATCH)
    model.train()(BATCH).sum().backward()
    assert all(param.grad is not None for param in model.parameters() if param.numel())
