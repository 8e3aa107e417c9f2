"""Mixed precision: what is computed, gathered and reduced in which dtype, and what stays in full precision.

The reference computes with a plain copy of the master weights in the param dtype, averages its gradients over
the ranks in the reduce dtype with a plain all-reduce, and updates the master weights: bit-equal at 2 ranks.
"""

import copy
import itertools
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

from bed import ranks
from bed.references import count_collectives
from fronts import assert_tensors
from fsdp_wrap import CPUOffload, MixedPrecision, ShardingStrategy, StateDictType
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.wrap import CustomPolicy, ModuleWrapPolicy
from models import full_grads
from scenario import pairwise

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


class Block(nn.Module):
    def __init__(self, checkpointing: bool = False) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 12), nn.Linear(12, 8)
        self.checkpointing = checkpointing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointing:
            return x + checkpoint(self._compute, x, use_reentrant=False)
        return x + self._compute(x)

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


def _net(checkpointing: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), Block(checkpointing), Block(checkpointing), nn.Linear(8, 3))


def _batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))


class Reference:
    def __init__(self, net: nn.Module, policy: MixedPrecision) -> None:
        self.master = copy.deepcopy(net)
        self.param = policy.param_dtype or FP32
        self.reduce = policy.reduce_dtype or self.param
        self.keeps = policy.keep_low_precision_grads
        self.grads = [torch.zeros_like(p, dtype=self.reduce) for p in self.master.parameters()]

    def backward(self, x: torch.Tensor) -> torch.Tensor:
        low = copy.deepcopy(self.master).to(self.param)
        loss = low(x.to(self.param)).float().square().mean()
        loss.backward()
        for total, param in zip(self.grads, low.parameters()):
            assert param.grad is not None
            wide = torch.promote_types(torch.promote_types(total.dtype, param.grad.dtype), FP32)
            total.copy_(total.to(wide) + param.grad.to(wide) / dist.get_world_size())  # rounded once
        return loss.detach()

    def reduce_grads(self) -> None:
        """Sums over the ranks and hands the result to the master weights."""
        for total, param in zip(self.grads, self.master.parameters()):
            dist.all_reduce(total)
            param.grad_dtype = self.reduce if self.keeps else param.dtype
            param.grad = total.to(param.grad_dtype, copy=True)
            total.zero_()


SPACE: dict[str, list[Any]] = {
    "param": [BF16, FP16, FP32, FP64, None],
    "reduce": [BF16, FP16, FP32, FP64, None],
    "strategy": ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"],
    "use_orig_params": [False, True],
    "per_block": [False, True],
    "accumulation": ["F", "TF", "TTF"],
    "offload": [False, True],
    "keep": [False, True],
    "checkpointing": [False, True],
}


@pytest.mark.parametrize("scenario", pairwise(SPACE, seed=4), ids=lambda s: "-".join(map(str, s.values())))
@ranks(2)
def test_training_equals_training_by_hand(rank, world_size, scenario):
    policy = MixedPrecision(
        param_dtype=scenario["param"],
        reduce_dtype=scenario["reduce"],
        keep_low_precision_grads=scenario["keep"],
    )
    net = _net(scenario["checkpointing"])
    reference = Reference(net, policy)
    model = FSDP(
        net,
        auto_wrap_policy=ModuleWrapPolicy({Block}) if scenario["per_block"] else None,
        sharding_strategy=ShardingStrategy[scenario["strategy"]],
        use_orig_params=scenario["use_orig_params"],
        cpu_offload=CPUOffload(scenario["offload"]),
        mixed_precision=policy,
    )
    sgd: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "foreach": False}
    ours = torch.optim.SGD(model.parameters(), **sgd)
    theirs = torch.optim.SGD(reference.master.parameters(), **sgd)
    for step in range(3):
        for part, unsynced in enumerate(scenario["accumulation"]):
            x = _batch(rank, 10 * step + part)
            with model.no_sync() if unsynced == "T" else nullcontext():
                loss = model(x).float().square().mean()
                loss.backward()
            assert torch.equal(loss.detach(), reference.backward(x))
        reference.reduce_grads()
        kept = {param.grad.dtype for param in model.parameters() if param.grad is not None}
        assert kept == {reference.reduce if scenario["keep"] else FP32}
        grads = full_grads(model)
        for name, param in reference.master.named_parameters():
            assert torch.equal(grads[name], param.grad.to(FP32)), (step, name)
        ours.step()
        theirs.step()
        ours.zero_grad()
    for name, value in model.state_dict().items():
        assert value.dtype == FP32
        assert torch.equal(value, reference.master.state_dict()[name]), name


class Spy(nn.Module):
    """Notes the dtypes that its forward sees; passes `x` through a linear."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("scale", torch.full((4,), 1.0 + 2**-20))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        tensors = [x, *args, *kwargs.values()]
        self.seen.append([value.dtype if isinstance(value, torch.Tensor) else value for value in tensors])
        self.seen.append([self.linear.weight.dtype, self.scale.dtype, self.count.dtype])
        return self.linear(x.to(self.linear.weight.dtype)) * self.scale.to(self.linear.weight.dtype)


@pytest.mark.parametrize("dtype", [BF16, FP64])
@ranks(2)
def test_users_see_and_load_full_precision(rank, world_size, dtype):
    spy = Spy()
    original = copy.deepcopy(spy.state_dict())
    model = FSDP(spy, mixed_precision=MixedPrecision(BF16, BF16, buffer_dtype=dtype), use_orig_params=True)
    assert model.module.scale.dtype == FP32
    for kind in StateDictType:
        out = model(torch.ones(2, 4))
        assert out.dtype == BF16
        assert spy.seen[-1] == [BF16, dtype, torch.long]
        out.sum().backward()
        for param in model.parameters():
            assert param.dtype == FP32
            assert param.grad is None or param.grad.dtype == FP32
        with FSDP.state_dict_type(model, kind):
            state = {name: value.clone() for name, value in model.state_dict().items()}
            assert {value.dtype for value in state.values()} == {FP32, torch.long}, kind
            assert torch.equal(state["scale"], original["scale"]), kind
            assert model.module.scale.dtype == dtype
            with FSDP.summon_full_params(model), torch.no_grad():
                assert {param.dtype for param in model.parameters()} == {FP32}
                assert torch.equal(model.module.scale, original["scale"].to(dtype)), "as torch shows it"
                model(torch.ones(2, 4))
                assert spy.seen[-1] == [FP32, FP32, torch.long], "all originals"
                for tensor in (*model.parameters(), model.module.scale):
                    tensor.data.zero_()
            assert model.module.scale.dtype == dtype
            model(torch.ones(2, 4))
            model.load_state_dict(state)
        loaded = model.state_dict()
        assert all(torch.equal(loaded[name], value) for name, value in original.items()), kind
    model.load_state_dict({**model.state_dict(), "scale": original["scale"] + 2**-10})
    assert torch.equal(model.state_dict()["scale"], original["scale"] + 2**-10)
    model(torch.ones(2, 4))
    assert torch.equal(model.module.scale, (original["scale"] + 2**-10).to(dtype))


@ranks(2)
def test_which_inputs_are_cast(rank, world_size):
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Spy()
            self.own = nn.Parameter(torch.ones(4))
            self.seen: list[Any] = []

        def forward(self, x: torch.Tensor, extra: dict[str, Any]) -> torch.Tensor:
            self.seen.append(extra)
            values = [x, extra["pair"][0], extra["pair"][1], extra["count"]]
            self.seen.append([value.dtype for value in values])
            return self.inner(x.float(), torch.ones(1, dtype=FP64), 3, mask=torch.ones(4, dtype=torch.bool))

    for cast_root, cast_nested in itertools.product([False, True], repeat=2):
        policy = MixedPrecision(BF16, cast_forward_inputs=cast_nested, cast_root_forward_inputs=cast_root)
        outer = Outer()
        inner = outer.inner
        model = FSDP(outer, auto_wrap_policy=ModuleWrapPolicy({Spy}), mixed_precision=policy)
        x, count = torch.ones(2, 4, requires_grad=True), torch.ones(1, dtype=torch.int32)
        extra = {"pair": (torch.ones(2), torch.ones(2, dtype=FP64)), "count": count}
        model(x, extra=extra).sum().backward()
        low, wide = (BF16, BF16) if cast_root or cast_nested else (FP32, FP64)
        assert outer.seen[1] == [low, low, wide, torch.int32], (cast_root, cast_nested)
        cast = [BF16, BF16, 3, torch.bool] if cast_nested else [FP32, FP64, 3, torch.bool]
        assert inner.seen[0] == cast, (cast_root, cast_nested)
        assert x.grad is not None and x.grad.dtype == FP32 and x.grad.any()
        extra = {"pair": (torch.ones(2, dtype=BF16),) * 2, "count": count}
        model(torch.ones(2, 4, dtype=BF16), extra=extra)
        assert outer.seen[2] is extra, "what needs no cast stays the same"


def _with_norms() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)), nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8))
    )


def _low(net: nn.Module, dtype: torch.dtype, full: tuple[type[nn.Module], ...]) -> nn.Module:
    """Casts all but instances of `full`, which take and return `dtype`."""
    low = copy.deepcopy(net).to(dtype)
    for original, module in zip(net.modules(), low.modules()):
        if isinstance(module, full):
            module.to(FP32).load_state_dict(original.state_dict())
            module.register_forward_pre_hook(lambda _, args: tuple(arg.float() for arg in args))
            module.register_forward_hook(lambda _, args, out: out.to(dtype))
    return low


STYLES: dict[str, Any] = {
    "module_wrap": ModuleWrapPolicy({nn.Sequential}),
    "function": lambda module, recurse, **_: recurse or isinstance(module, nn.Sequential),
    "custom": CustomPolicy(lambda module: isinstance(module, nn.Sequential)),
}


@pytest.mark.parametrize(
    ("style", "classes"),
    [("module_wrap", None), ("function", (nn.LayerNorm,)), ("custom", (nn.LayerNorm, nn.BatchNorm1d))],
)
@ranks(2)
def test_classes_that_stay_in_full_precision(rank, world_size, style, classes):
    net = _with_norms()
    kwargs = {} if classes is None else {"_module_classes_to_ignore": classes}
    policy = MixedPrecision(BF16, buffer_dtype=BF16, **kwargs)
    full = (nn.BatchNorm1d,) if classes is None else classes
    low = _low(net, BF16, full)
    model = FSDP(net, auto_wrap_policy=STYLES[style], mixed_precision=policy, use_orig_params=True)
    wrapped = [m.module for m in FSDP.fsdp_modules(model)]
    assert {type(m) for m in wrapped} == {nn.Sequential, *full}
    for unit in FSDP.fsdp_modules(model):
        assert unit.mixed_precision == (MixedPrecision() if isinstance(unit.module, full) else policy)
    x = _batch(rank, 0)
    out, expected = model(x), low(x.to(BF16))
    assert out.dtype == BF16
    assert torch.equal(out, expected)
    out.float().square().mean().backward()
    expected.float().square().mean().backward()
    grads = full_grads(model)
    for name, param in low.named_parameters():
        mean = param.grad / world_size
        dist.all_reduce(mean)
        assert torch.equal(grads[name], mean.float()), name
    with FSDP.summon_full_params(model):
        for norm in (m for m in model.modules() if isinstance(m, nn.BatchNorm1d)):
            assert torch.equal(norm.running_mean, low[0][1].running_mean.float())  # type: ignore[arg-type]


@ranks(1)
def test_what_stays_in_full_precision_is_told(rank, world_size):
    policy = MixedPrecision(BF16)
    with pytest.warns(UserWarning, match=r"separate FSDP units.*: '0\.1' \(BatchNorm1d\)$") as caught:
        model = FSDP(_with_norms(), mixed_precision=policy, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    assert [warning.filename for warning in caught] == [__file__]
    assert [type(m.module) for m in FSDP.fsdp_modules(model)].count(nn.BatchNorm1d) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for precision in (None, MixedPrecision(BF16, _module_classes_to_ignore=())):
            wrapping = ModuleWrapPolicy({nn.Linear})
            plain = FSDP(_with_norms(), mixed_precision=precision, auto_wrap_policy=wrapping)
            assert plain.mixed_precision == (precision or MixedPrecision()) == plain[0][0].mixed_precision
        FSDP(_with_norms(), mixed_precision=policy)  # a unit that is wrapped whole is as its policy says


@ranks(2)
def test_half_the_bytes_on_the_wire(rank, world_size):
    def traffic(policy: MixedPrecision | None) -> dict[str, int]:
        net = nn.Sequential(*[nn.Linear(16, 16, bias=False) for _ in range(3)])
        model = FSDP(net, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), mixed_precision=policy)
        with count_collectives() as counts:
            model(torch.ones(2, 16)).sum().backward()
        return {name: count.bytes for name, count in counts.items()}

    full, low = traffic(None), traffic(MixedPrecision(BF16, BF16))
    mixed = traffic(MixedPrecision(BF16, FP32))
    gathers, reductions = full
    assert set(full) == set(low) == {gathers, reductions}
    assert "gather" in gathers and "reduce" in reductions
    assert {name: 2 * size for name, size in low.items()} == full
    sum_as_they_travel = os.environ.get("FSDP_WRAP_SHARED_MEMORY") == "0"  # as gloo's own collectives do
    summed = full if sum_as_they_travel else low
    assert mixed == {gathers: low[gathers], reductions: summed[reductions]}


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@ranks(2)
def test_autocast_equals_ddp(rank, world_size, strategy):
    options: dict[str, Any] = {"auto_wrap_policy": ModuleWrapPolicy({Block}), "use_orig_params": True}
    ddp, model = DDP(_net()), FSDP(_net(), sharding_strategy=ShardingStrategy[strategy], **options)
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=False) for net in (ddp, model)]
    for step in range(3):
        x = _batch(rank, step)
        with torch.autocast("cpu", dtype=BF16):
            outs = [ddp(x), model(x)]
        assert outs[1].dtype == BF16
        assert torch.equal(*outs)
        for out, optimizer in zip(outs, optimizers):
            out.float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert_tensors(ddp.module.state_dict(), model.state_dict())

    low = FSDP(_net(), mixed_precision=MixedPrecision(BF16, FP32))
    with torch.autocast("cpu", dtype=BF16):
        out = low(_batch(rank, 0))
    assert out.dtype == BF16
    out.float().sum().backward()
    assert all(value.isfinite().all() for value in full_grads(low).values())


@ranks(2)
def test_dtypes_that_cannot_be_computed_in_are_refused(rank, world_size):
    for dtype in (torch.int8, torch.float8_e4m3fn, "bfloat16"):
        for field in ("param_dtype", "reduce_dtype", "buffer_dtype"):
            given: dict[str, Any] = {field: dtype}
            net = nn.Linear(2, 2)
            with pytest.raises(ValueError, match=field):
                FSDP(net, mixed_precision=MixedPrecision(**given))
            FSDP(net)


class Quantised(nn.Module):
    """A frozen linear of few bits per weight, dequantised in the forward, with trainable adapters."""

    def __init__(self, width: int, dtype: torch.dtype) -> None:
        super().__init__()
        weight = torch.randn(width, width)
        self.scale = nn.Parameter(weight.abs().amax(1, keepdim=True) / 7, requires_grad=False)
        levels = (weight / self.scale).round() + 8 * (dtype == torch.uint8)
        self.levels = nn.Parameter(levels.to(dtype), requires_grad=False)
        self.down, self.up = nn.Linear(width, 2, bias=False), nn.Linear(2, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        levels = self.levels.to(self.scale.dtype) - 8 * (self.levels.dtype == torch.uint8)
        return F.linear(x, levels * self.scale) + self.up(self.down(x))


@pytest.mark.parametrize(
    ("dtype", "use_orig_params", "strategy", "policy"),
    [
        (torch.uint8, True, "FULL_SHARD", MixedPrecision(BF16, FP32)),
        (torch.int8, False, "SHARD_GRAD_OP", MixedPrecision()),
        (torch.float8_e4m3fn, True, "NO_SHARD", MixedPrecision(BF16, FP32)),
        (torch.float8_e5m2, False, "FULL_SHARD", MixedPrecision(BF16, FP32)),
    ],
    ids=["uint8", "int8-flat", "float8-no_shard", "float8-flat"],
)
@ranks(2)
def test_adapters_over_quantised_weights(rank, world_size, dtype, use_orig_params, strategy, policy):
    net = nn.Sequential(*[Quantised(6, dtype) for _ in range(3)])
    before = {name: value.clone() for name, value in net.state_dict().items()}
    low = copy.deepcopy(net)
    for param in low.parameters():
        if param.dtype == FP32:
            param.data = param.data.to(policy.param_dtype or FP32)
    model = FSDP(
        net,
        auto_wrap_policy=ModuleWrapPolicy({Quantised}),
        use_orig_params=use_orig_params,
        sharding_strategy=ShardingStrategy[strategy],
        mixed_precision=policy,
    )
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank))
    loss, expected = (output.float().square().mean() for output in (model(x), low(x.to(low[0].scale.dtype))))
    assert torch.equal(loss, expected)
    loss.backward()
    expected.backward()
    optimizer.step()
    trained = {name: value.clone() for name, value in before.items()}
    for name, param in low.named_parameters():
        if param.requires_grad:
            grad = param.grad.to(FP32) / world_size
            dist.all_reduce(grad)
            trained[name].add_(grad, alpha=-0.1)
    for wanted in (trained, before):
        for name, value in model.state_dict().items():
            assert value.dtype == wanted[name].dtype
            assert torch.equal(
                *(tensor.contiguous().view(torch.uint8) for tensor in (value, wanted[name]))
            ), name
        model.load_state_dict(before)


@ranks(1, 3)
def test_evaluation_and_half_precision_range(rank, world_size):
    """In fp16, gradients are divided before they are summed and narrowed, so large ones do not overflow."""
    net = nn.Linear(4, 1, bias=False)
    model = FSDP(net, mixed_precision=MixedPrecision(FP32, FP16))
    model(torch.full((1, 4), 50_000.0)).sum().backward()
    torch.testing.assert_close(full_grads(model)["weight"], torch.full((1, 4), 5e4), rtol=1e-3, atol=0)
    model.eval()
    with torch.no_grad():
        assert model(torch.ones(1, 4)).dtype == FP32


# `FSDP_USE_FULL_PREC_IN_EVAL=1`: in eval mode units compute as a plain model in full precision

LOW = MixedPrecision(torch.bfloat16, torch.bfloat16, torch.bfloat16, _module_classes_to_ignore=())
BATCH = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))


class Normed(nn.Module):
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


def _normed_net() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), Normed(), Normed(), nn.Linear(8, 3))
    for norm in (net[1].norm, net[2].norm):
        norm.running_mean.uniform_(), norm.running_var.uniform_(0.5, 2)
    return net


def _wrapped(net: nn.Module, **options: Any) -> FSDP:
    options = {"mixed_precision": LOW, "auto_wrap_policy": ModuleWrapPolicy({Normed}), **options}
    return FSDP(copy.deepcopy(net), **options)


def _plain(model: FSDP) -> nn.Sequential:
    plain = _normed_net()
    plain.load_state_dict({key: value.cpu() for key, value in model.state_dict().items()})
    return plain.eval()


def _seen(model: FSDP) -> list[list[torch.dtype]]:
    return [module.seen for module in model.modules() if isinstance(module, Normed)]


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
        model = _wrapped(_normed_net(), forward_prefetch=True, **options)
    control = _wrapped(_normed_net(), forward_prefetch=True, **options)
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in (model, control)]
    for mode in (torch.no_grad, torch.inference_mode, torch.no_grad):
        plain = _plain(model)
        model.eval()
        with mode():
            for _ in range(2):
                assert torch.equal(model(BATCH), plain(BATCH))
                assert _seen(model) == [[torch.float32] * 3] * 2
        for net, optimizer in zip((model, control), optimizers):
            _train(net, optimizer)
    assert_tensors(control.state_dict(), model.state_dict())


@ranks(2)
def test_backward_in_eval_is_in_full_precision(rank, world_size):
    with _variable():
        model = _wrapped(_normed_net(), use_orig_params=True)
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
    never = _wrapped(_normed_net()).eval()
    with _variable():
        model = _wrapped(_normed_net()[:3], mixed_precision=replace(LOW, cast_forward_inputs=True))
        with torch.no_grad():
            never(BATCH)
        with _variable("0"):
            off = _wrapped(_normed_net()).eval()
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
        model = _wrapped(_normed_net(), use_orig_params=True)
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
