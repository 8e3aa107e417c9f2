"""`MixedPrecisionPolicy` of `fully_shard`: dtypes per parameter, and what a missing reduce dtype stands for.

The latter changed in torch 2.15, and here it is what it is in the torch that is installed. The reference
computes with a plain copy of the master weights in the dtypes wanted, and averages its gradients by a plain
all-reduce: bit-equal at 2 ranks. Torch's own `fully_shard` is compared where it has all this.
"""

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

from bed import ranks
from fsdp_wrap import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

FOLLOWS_GRAD_DTYPE = hasattr(torch_fsdp, "GradientReductionHandle")
"""Whether this is torch 2.15 or later."""


class Scaled(nn.Module):
    """A layer whose scale is meant to stay in full precision, and is of odd size."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(8, 8), nn.Parameter(torch.linspace(0.5, 1.5, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        return x + F.gelu(y.to(self.scale.dtype) * self.scale).to(x.dtype)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Scaled() for _ in range(2))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def net(dtype: torch.dtype) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def keeps_scales(param: nn.Parameter) -> torch.dtype | None:
    return param.dtype if param.shape == (8,) and bool((param[0] == 0.5).item()) else None


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + rank))


def shard(model: Net, shard: Any = fully_shard, **options: Any) -> Net:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers:
        shard(layer, mesh=mesh, **options)
    shard(model, mesh=mesh, **options)
    return model


def torch_twin(model: Net, policy: MixedPrecisionPolicy) -> Net:
    fields = {field.name: getattr(policy, field.name) for field in dataclasses.fields(policy)}
    return shard(model, torch_fsdp.fully_shard, mp_policy=torch_fsdp.MixedPrecisionPolicy(**fields))


class ByHand:
    """Trains master weights; each is computed with, and its gradient reduced, in given dtypes."""

    def __init__(self, model: Net, computed: dict[str, torch.dtype], reduced: dict[str, torch.dtype]) -> None:
        self.model, self.computed, self.reduced = model, computed, reduced

    def backward(self, rank: int, steps: range, dtype: torch.dtype) -> None:
        """Leaves in `.grad` the averages, over the ranks, of the sums of some backwards."""
        sums: dict[str, torch.Tensor] = {}
        for step in steps:
            twin = copy.deepcopy(self.model)
            for name, param in twin.named_parameters():
                param.data = param.data.to(self.computed[name])
            twin(batch(rank, step).to(dtype)).float().pow(2).mean().backward()
            for name, param in twin.named_parameters():
                if name in sums:
                    sums[name].add_(param.grad)  # rounded once
                else:
                    sums[name] = param.grad.to(self.reduced[name])
        for name, param in self.model.named_parameters():
            dist.all_reduce(sums[name])
            param.grad = sums[name].to(param.dtype) / dist.get_world_size()


def backward(model: Net, rank: int, steps: range) -> None:
    for step in steps:
        last = step == steps[-1]
        model.set_requires_gradient_sync(last)
        model(batch(rank, step)).float().pow(2).mean().backward()


def assert_same_grads(
    model: nn.Module, wanted: nn.Module, dtypes: dict[str, torch.dtype] | None = None
) -> None:
    for (name, param), other in zip(model.named_parameters(), wanted.parameters()):
        expected = other.grad.full_tensor() if hasattr(other.grad, "full_tensor") else other.grad
        assert param.grad.dtype == (dtypes or {}).get(name, expected.dtype), name
        assert torch.equal(param.grad.full_tensor(), expected.to(param.grad.dtype)), name


@pytest.mark.parametrize(
    ("master", "low", "offload", "reduce", "backwards"),
    [
        (FP32, BF16, False, None, 2),
        (FP32, BF16, True, "wide", 2),
        (FP32, BF16, False, "narrow", 1),
        (FP64, FP32, True, None, 1),
        (FP64, FP32, False, "wide", 1),
        (FP64, FP32, True, "narrow", 2),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
@ranks(2)
def test_parameters_kept_in_their_own_dtype(rank, world_size, master, low, offload, reduce, backwards):
    plain = net(master)
    policy = MixedPrecisionPolicy(
        low, {None: None, "wide": master, "narrow": low}[reduce], param_dtype_override_fn=keeps_scales
    )
    offload_policy = CPUOffloadPolicy() if offload else OffloadPolicy()
    model = shard(copy.deepcopy(plain), mp_policy=policy, offload_policy=offload_policy)
    computed = {name: master if "scale" in name else low for name, _ in plain.named_parameters()}
    without = master if FOLLOWS_GRAD_DTYPE else None
    reduced = {name: policy.reduce_dtype or without or computed[name] for name in computed}
    reference = ByHand(plain, computed, reduced)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (plain, model)]
    for step in range(0, 2 * backwards, backwards):
        steps = range(step, step + backwards)
        backward(model, rank, steps)
        reference.backward(rank, steps, low)
        assert_same_grads(model, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@ranks(2)
def test_what_an_override_and_inputs_and_outputs_may_be(rank, world_size):
    asked: list[int] = []

    def override(param: nn.Parameter) -> torch.dtype:
        asked.append(param.numel())
        return param.dtype

    model, seen = net(FP32), []
    shapes = [param.shape for param in model.parameters()]
    shard(model, mp_policy=MixedPrecisionPolicy(BF16, param_dtype_override_fn=override))
    assert sorted(asked) == sorted(shape.numel() for shape in shapes)
    linear = model.layers[0].linear
    linear.register_forward_pre_hook(lambda module, args: seen.append((args[0].dtype, module.weight.dtype)))
    with pytest.raises(RuntimeError, match="dtype"):  # inputs are cast to param_dtype all the same
        model(batch(rank, 0))
    assert seen == [(BF16, FP32)]
    for answer in (FP16, "float32"):
        layer = nn.Linear(4, 4)
        chosen: Any = dict.fromkeys(layer.parameters(), answer)
        policy = MixedPrecisionPolicy(BF16, param_dtype_override_fn=chosen.get)
        before = dict(layer.named_parameters())
        wanted = r"param_dtype_override_fn returned .* for parameter 'weight'; .*bfloat16.*float32"
        with pytest.raises(ValueError, match=wanted):
            fully_shard(layer, mp_policy=policy, mesh=init_device_mesh("cpu", (world_size,)))
        assert dict(layer.named_parameters()).items() == before.items()
    with pytest.raises(TypeError, match="param_dtype_override_fn"):
        MixedPrecisionPolicy(BF16, param_dtype_override_fn=BF16)  # type: ignore[arg-type]
    linear = nn.Linear(8, 3)
    linear.register_forward_pre_hook(lambda module, args: seen.append((args[0].dtype, module.weight.dtype)))
    fully_shard(linear, mp_policy=MixedPrecisionPolicy(BF16, FP32, output_dtype=FP64))
    for wrong in (0, 0.0, float("nan"), float("inf"), -float("inf")):
        with pytest.raises(ValueError, match="the divisor of gradients must be finite and not 0, but is"):
            linear.set_gradient_divide_factor(wrong)
    averaged = []
    for factor in (None, 1.0):
        if factor is not None:
            linear.set_gradient_divide_factor(factor)
        linear.zero_grad()
        out = linear(batch(rank, 0))
        assert out.dtype == FP64 and seen[-1] == (BF16, BF16)
        out.sum().backward()
        assert linear.weight.grad.dtype == FP32
        averaged.append(linear.weight.grad.full_tensor())
    assert torch.equal(averaged[1], averaged[0] * world_size)


def with_grad_dtypes(model: Net, dtypes: Mapping[str, torch.dtype | None]) -> Net:
    for name, param in model.named_parameters():
        if name in dtypes:
            param.grad_dtype = dtypes[name]
    return model


EVERY = [name for name, _ in Net().named_parameters()]

GRAD_DTYPES: dict[str, Mapping[str, torch.dtype | None]] = {
    "all narrow": dict.fromkeys(EVERY, BF16),
    "some narrow": {name: BF16 for name in EVERY if "weight" in name},
    "any": dict.fromkeys(EVERY, None),
    "wide": dict.fromkeys(EVERY, FP64),
}


@pytest.mark.parametrize(
    ("kind", "reduce", "backwards"),
    [
        ("all narrow", None, 2),
        ("some narrow", None, 1),
        ("some narrow", FP32, 2),
        ("any", None, 2),
        ("any", FP32, 1),
        ("wide", None, 1),
    ],
    ids=lambda value: str(value).removeprefix("torch."),
)
@ranks(2)
def test_grad_dtype(rank, world_size, kind, reduce, backwards):
    """From torch 2.15 on it is that of the sharded gradients, and decides in what they are reduced."""
    policy = MixedPrecisionPolicy(BF16, reduce)
    plain = net(FP32)
    asked = GRAD_DTYPES[kind] if FOLLOWS_GRAD_DTYPE else {}
    model = shard(with_grad_dtypes(net(FP32), asked), mp_policy=policy)
    computed = dict.fromkeys(EVERY, BF16)
    alone = {name: asked.get(name, FP32 if FOLLOWS_GRAD_DTYPE else BF16) or BF16 for name in EVERY}
    units = {name: ".".join(name.split(".")[:2]) if name.startswith("layers") else "" for name in EVERY}
    widest: dict[str, torch.dtype] = {}
    for name, unit in units.items():
        widest[unit] = torch.promote_types(widest.get(unit, alone[name]), alone[name])
    reduced = {name: reduce or widest[units[name]] for name in EVERY}
    got = {name: (asked[name] or reduced[name]) if name in asked else FP32 for name in EVERY}
    reference = ByHand(plain, computed, reduced)
    steps = range(backwards)
    backward(model, rank, steps)
    reference.backward(rank, steps, BF16)
    assert_same_grads(model, plain, got)
    if FOLLOWS_GRAD_DTYPE and not (backwards == 2 and kind == "some narrow"):  # there torch rounds each sum
        theirs = torch_twin(with_grad_dtypes(net(FP32), asked), policy)
        backward(theirs, rank, steps)
        assert_same_grads(model, theirs)
    backward(model, rank, steps)  # added to what is there
    assert {name: param.grad.dtype for name, param in model.named_parameters()} == got


class WideGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.float()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad  # of float32, for a weight in bfloat16


class Wide(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x.float(), WideGradient.apply(self.weight), None)


@ranks(2)
def test_gradients_of_any_dtype_are_not_narrowed_silently(rank, world_size):
    model = Wide(4, 4, bias=False)
    model.weight.grad_dtype = None
    mesh = init_device_mesh("cpu", (world_size,))
    fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(BF16))
    loss = model(torch.ones(2, 4)).sum()
    if not FOLLOWS_GRAD_DTYPE:
        loss.backward()
        return
    with pytest.raises(RuntimeError, match=f"'weight'.*grad_dtype is None.*rank {rank}.*reduce_dtype"):
        loss.backward()
