"""Clipping and norms by name, of wrappers and of any model, against `torch.nn.utils` on a plain one."""

import copy
import itertools
import math
import warnings
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

import fronts
import fsdp_wrap
from bed import ranks
from bed.references import count_collectives
from beside import large_batch_backward
from fronts import assert_tensors, each_form, each_front, full_grads, shard
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import MixedPrecision, ShardingStrategy, fully_shard, replicate
from fsdp_wrap.wrap import ModuleWrapPolicy
from models import WRAPPINGS, Transformer, gather_objects, loss_of, tokens, transformer_twins, twins
from state_nets import Casting

NORMS = (1.0, 2.0, math.inf)
HALF, BRAIN, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64


def backward(model: nn.Module, rank: int) -> None:
    loss_of(model, tokens(rank, 0)).backward()


def expected_norms(plain: nn.Module, p: float) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    grads = {name: param.grad for name, param in plain.named_parameters() if param.grad is not None}
    norms = {
        name: torch.linalg.vector_norm(grad, p) if grad.numel() else grad.new_zeros(())
        for name, grad in grads.items()
    }
    return norms, torch.linalg.vector_norm(torch.stack([*norms.values()]), p)


def assert_norms_and_clipping(
    model: FSDP,
    plain: nn.Module,
    norm_type: Any,
    all_reduces: int,
    ignored: Mapping[str, nn.Parameter] | None = None,
) -> None:
    """Norms, the total and clipped gradients are a plain model's, and travel in so many all-reduces."""
    by_name, _ = expected_norms(plain, float(norm_type))
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 1e-3, norm_type)
    calls = []
    with count_collectives() as traffic:
        norms = model.grad_norms(norm_type)
    calls.append({name: count for name, (count, _) in traffic.items()})
    with count_collectives() as traffic:
        total = model.clip_grad_norm_(1e-3, norm_type)
    calls.append({name: count for name, (count, _) in traffic.items()})
    assert calls == [{"all_reduce": all_reduces} if all_reduces else {}] * 2
    assert list(norms) == list(by_name)
    torch.testing.assert_close(norms, by_name, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(total, expected, rtol=1e-10, atol=1e-12)
    assert len(set(gather_objects(total.item()))) == 1
    assert_grads_equal(model, plain, ignored)


def assert_grads_equal(
    model: nn.Module, plain: nn.Module, ignored: Mapping[str, nn.Parameter] | None = None
) -> None:
    grads = full_grads(model) | {name: param.grad for name, param in (ignored or {}).items()}
    for name, param in plain.named_parameters():
        torch.testing.assert_close(grads[name], param.grad, rtol=1e-9, atol=1e-13, msg=name)


def values(norms: Mapping[str, torch.Tensor]) -> dict[str, float]:
    return {name: norm.item() for name, norm in norms.items()}


def groups_of_four(rank: int) -> dict[str, dist.ProcessGroup]:
    """The rank's groups: pairs of neighbours, and the pairs that cross them."""
    made = {pair: dist.new_group(list(pair)) for pair in ((0, 1), (2, 3), (0, 2), (1, 3))}
    near, across = (rank // 2 * 2, rank // 2 * 2 + 1), (rank % 2, rank % 2 + 2)
    return {"world": dist.group.WORLD, "near": made[near], "across": made[across]}


TREES = {
    # For the root and three blocks a strategy and its groups; then the all-reduces needed.
    "all in world": (["F world", "H near across", "N world", "F world"], 1),
    "hybrid and replicated": (["H near across", "N world", "H near across", "N world"], 1),
    "hybrid above sharded": (["H near across", "F world", "H across near", "N world"], 1),
    "replicated root": (["N world", "H near across", "F world", "N world"], 1),
    "crossing": (["H near across", "H across near", "H near across", "N world"], 2),
    "all replicated": (["N world"] * 4, 0),
}


def wrap_as(module: Transformer, tree: list[str], groups: dict[str, dist.ProcessGroup], form: bool) -> FSDP:
    def wrap(child: nn.Module, how: str, **kwargs) -> FSDP:
        letter, *names = how.split()
        chosen = {"F": "FULL_SHARD", "H": "HYBRID_SHARD", "N": "NO_SHARD"}[letter]
        group = groups[names[0]] if len(names) == 1 else tuple(groups[name] for name in names)
        strategy = ShardingStrategy[chosen]
        return FSDP(child, group, strategy, use_orig_params=form, **kwargs)  # type: ignore[arg-type]

    for number, how in enumerate(tree[1:]):
        module.blocks[number] = wrap(module.blocks[number], how)
    return wrap(module, tree[0], ignored_modules=[module.norm])


@pytest.mark.parametrize(
    ("tree", "use_orig_params"), [(tree, bool(number % 2)) for number, tree in enumerate(TREES)]
)
@ranks(4)
def test_each_element_counts_once_in_every_tree(rank, world_size, use_orig_params, tree):
    torch.manual_seed(0)
    plain = Transformer().double()
    raw = copy.deepcopy(plain)
    strategies, collectives = TREES[tree]
    model = wrap_as(raw, strategies, groups_of_four(rank), use_orig_params)
    backward(model, rank)
    large_batch_backward(plain, [0])
    for param in raw.norm.parameters():  # no unit reduces them
        dist.all_reduce(param.grad)
        param.grad /= world_size
    ignored = {f"norm.{name}": param for name, param in raw.norm.named_parameters()}
    for norm_type in NORMS:
        assert_norms_and_clipping(model, plain, norm_type, collectives, ignored)


@ranks(2)
def test_tied_parameters_count_once_by_their_first_name(rank, world_size):
    plain, _ = twins(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), DOUBLE)
    plain[1].weight = plain[0].weight
    by_policy = FSDP(copy.deepcopy(plain), use_orig_params=True)
    by_hand, apart = copy.deepcopy(plain), copy.deepcopy(plain)
    for number in (1, 0):  # the second layer owns the weight
        by_hand[number] = FSDP(by_hand[number], use_orig_params=True)
    x = torch.ones(2, 4).double()
    plain(x).square().sum().backward()
    norms = {name: param.grad.norm().item() for name, param in plain.named_parameters()}
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    for model in (by_policy, FSDP(by_hand, use_orig_params=True)):
        model(x).square().sum().backward()
        own = model.grad_norms()
        assert list(own) == list(norms)
        assert values(own) == pytest.approx(norms)
        torch.testing.assert_close(model.clip_grad_norm_(1.0), expected)
    lender, borrower = (FSDP(layer, use_orig_params=True) for layer in apart)  # two roots
    borrower(lender(x)).square().sum().backward()
    lent = {"weight": norms["0.weight"], "bias": norms["0.bias"]}
    assert values(lender.grad_norms()) == pytest.approx(lent)
    assert values(borrower.grad_norms()) == pytest.approx({"bias": norms["1.bias"]})
    assert borrower.clip_grad_norm_(1.0).item() == pytest.approx(norms["1.bias"])


def assert_norms_and_clipping_in(model: FSDP, widest: torch.dtype, near: Any = None) -> None:
    """The norm is of the widest dtype in which gradients are kept; each is scaled more precisely."""
    before = {name: grad.double() for name, grad in full_grads(model).items()}
    for norm_type in NORMS:
        for name, norm in model.grad_norms(norm_type).items():
            expected = torch.linalg.vector_norm(before[name], norm_type)
            assert norm.dtype == SINGLE or (norm.dtype == widest == DOUBLE)
            torch.testing.assert_close(norm.double(), expected, rtol=1e-6, atol=0)
    exact = torch.cat([grad.flatten() for grad in before.values()]).norm()
    total = model.clip_grad_norm_(0.1)
    assert total.dtype == widest
    torch.testing.assert_close(total.double(), exact, rtol=max(1e-6, torch.finfo(widest).eps), atol=0)
    for name, grad in full_grads(model).items():
        expected = (before[name] * (0.1 / (exact + 1e-6))).to(grad.dtype)
        precise: Any = {"rtol": torch.finfo(grad.dtype).eps, "atol": 1e-7}
        torch.testing.assert_close(grad, expected, **(near or precise), msg=name)


@pytest.mark.parametrize(
    ("dtypes", "widest", "policy", "use_orig_params"),
    [
        ((BRAIN, SINGLE, BRAIN), SINGLE, None, False),
        ((BRAIN, SINGLE, BRAIN), SINGLE, ModuleWrapPolicy({nn.Linear}), True),
        ((HALF, BRAIN), SINGLE, None, True),
        ((BRAIN, BRAIN), BRAIN, ModuleWrapPolicy({nn.Linear}), False),
        ((HALF, DOUBLE), DOUBLE, None, True),
    ],
    ids=["bf16-fp32", "bf16-fp32-layer", "fp16-bf16", "bf16", "fp16-fp64"],
)
@ranks(2)
def test_gradients_of_mixed_dtypes(rank, world_size, use_orig_params, policy, dtypes, widest):
    torch.manual_seed(0)
    model = FSDP(Casting(*dtypes), use_orig_params=use_orig_params, auto_wrap_policy=policy)
    torch.manual_seed(rank)
    (30 * model(torch.randn(4, 8))).square().sum().backward()
    assert_norms_and_clipping_in(model, widest)


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


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(("strategy", "use_orig_params"), [("FULL_SHARD", False), ("NO_SHARD", True)])
@ranks(2)
def test_norms_are_of_the_dtype_in_which_gradients_are_kept(
    rank, world_size, strategy, use_orig_params, policy
):
    """On all ranks, also on those without a gradient of their own."""
    mixed_precision, expected = POLICIES[policy]
    options: Any = {"mixed_precision": mixed_precision, "use_orig_params": use_orig_params}
    options |= {"sharding_strategy": ShardingStrategy[strategy]}
    _, model = twins(Transformer, auto_wrap_policy=WRAPPINGS["block"](), **options)
    with pytest.warns(UserWarning, match="no gradients"):
        assert model.clip_grad_norm_(1.0).dtype == expected
    backward(model, rank)
    assert_norms_and_clipping_in(model, expected, {"rtol": 0.01, "atol": 1e-6})


@ranks(2)
def test_large_half_precision_gradients_are_clipped_precisely(rank, world_size):
    """The factor itself is too small for fp16."""
    model = FSDP(nn.Linear(256, 256, bias=False).half())
    grad = torch.full_like(model._flat_param, 60000.0)
    model._flat_param.grad = grad
    total = model.clip_grad_norm_(1.0)
    assert total.isinf() and total.dtype == HALF  # it does not fit the dtype, but is known in a wider one
    torch.testing.assert_close(grad, torch.full_like(grad, 1 / 256), rtol=1e-3, atol=0)


@pytest.mark.parametrize("norm_type", NORMS)
@ranks(3)
def test_exchanged_gradients_count_as_they_are(rank, world_size, norm_type):
    """After a call that may have noted where the reduced gradients lie."""
    _, model = twins(Transformer, DOUBLE, auto_wrap_policy=WRAPPINGS["block"](), use_orig_params=True)
    for way in ("as reduced", "edited", "another tensor", "other data", "none"):
        for exchanges in (False, True):
            model.zero_grad()
            backward(model, rank)
            for number, param in enumerate(
                weight for weight in model.parameters() if weight.numel() and exchanges
            ):
                if way == "edited":
                    param.grad.mul_(number)
                elif way == "another tensor" and number % 2:
                    param.grad = param.grad * 3
                elif way == "other data" and number % 3 == 0:
                    param.grad.data = param.grad * 5
                elif way == "none" and number % 4 == 0:
                    param.grad = None
            before = [None if param.grad is None else param.grad.clone() for param in model.parameters()]
            pieces = torch.cat([grad.flatten() for grad in before if grad is not None])
            expected = torch.linalg.vector_norm(torch.cat(gather_objects(pieces)), norm_type)
            total = model.clip_grad_norm_(1e-3, norm_type)
            torch.testing.assert_close(total, expected, rtol=1e-12, atol=0)
            for param, grad in zip(model.parameters(), before):
                clipped = None if grad is None else grad * (1e-3 / (total + 1e-6))
                torch.testing.assert_close(param.grad, clipped, rtol=1e-12, atol=0)


@ranks(2)
def test_norms_of_large_shards_and_sums_of_many_keep_their_digits(rank, world_size):
    """Small gradients are added in rows that are longer than any of them."""
    torch.manual_seed(rank)
    large = FSDP(nn.Linear(2048, 2048), use_orig_params=True)
    small = nn.Sequential(*(nn.Linear(64, 64) for _ in range(40)))
    many = FSDP(small, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=True)
    for model, norm_type, rtol in ((large, 1.0, 1e-6), (large, 2.0, 1e-6), (many, 1.0, 1.2e-7)):
        for param in model.parameters():
            param.grad = torch.rand_like(param)
        power = sum(param.grad.double().pow(norm_type).sum() for param in model.parameters())
        dist.all_reduce(power)
        expected = (power ** (1 / norm_type)).float()
        torch.testing.assert_close(model.clip_grad_norm_(1e9, norm_type), expected, rtol=rtol, atol=0)


@ranks(2)
def test_modules_that_come_and_go_are_noticed(rank, world_size):
    raw = nn.Sequential(nn.Linear(4, 4), nn.ModuleList([nn.Linear(3, 3)]))
    model = FSDP(raw, use_orig_params=True, ignored_modules=[raw[1]])
    for change in (
        lambda: None,
        lambda: raw[1].append(nn.Linear(2, 2)),
        lambda: raw[1].pop(0),
        lambda: raw[0].register_module(
            "child", nn.Linear(2, 2, bias=False)
        ),  # of the unit, after it was made
        lambda: raw[0].register_module("child", nn.Identity()),
    ):
        change()
        ignored = [*raw[1].parameters(), *(own for part in raw[0].children() for own in part.parameters())]
        for param in ignored:
            param.grad = torch.ones_like(param)
        count = sum(param.numel() for param in ignored)
        assert model.clip_grad_norm_(1e9, 1.0) == count == sum(model.grad_norms(1.0).values())


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(3, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3, dtype=torch.complex128))
        self.linear = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.linear(x).to(torch.complex128) @ self.weight).abs()


class Empty(nn.Module):
    """Parameters without elements, as of an expert or a layer that is switched off."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.columns = nn.Parameter(torch.empty(0, 3)), nn.Parameter(torch.empty(3, 0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.rows.sum() + self.columns.sum()


def net(*modules: type[nn.Module]) -> nn.Sequential:
    """Layers between others, of three inputs and one output."""
    torch.manual_seed(0)
    return nn.Sequential(*(kind() for kind in modules or (Layer, Layer)), nn.Linear(3, 1)).double()


def losses(model: nn.Module, seeds: range) -> torch.Tensor:
    squares = []
    for seed in seeds:
        torch.manual_seed(seed)
        squares.append(model(torch.rand(2, 3).double()).square().sum())
    return torch.stack(squares).mean()


class _NoDTensors(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert DTensor not in types, func
        return func(*args, **(kwargs or {}))


@ranks(2)
def test_gradients_that_were_replaced_or_are_not_there_and_modules_of_nobody(rank, world_size):
    plain, model = net(), net()
    fully_shard(model[0])
    replicate(model[1])  # and the last belongs to nobody
    losses(plain, range(world_size)).backward()
    losses(model, range(rank, rank + 1)).backward()
    for param, same in zip(plain[2].parameters(), model[2].parameters()):
        same.grad.copy_(param.grad)
    for replaced in (False, True):
        for changed in (plain, model) if replaced else ():
            changed[0].up.bias.grad = None
            changed[0].down.weight.grad = changed[0].down.weight.grad * 2
        by_name, total = expected_norms(plain, 2.0)
        torch.testing.assert_close(fsdp_wrap.grad_norms(model), by_name, rtol=1e-10, atol=1e-14)
        torch.testing.assert_close(fsdp_wrap.clip_grad_norm_(model, 1e-3), total, rtol=1e-10, atol=0)
        nn.utils.clip_grad_norm_(plain.parameters(), 1e-3)
        for param, same in zip(plain.parameters(), model.parameters()):
            assert (param.grad is None) == (same.grad is None)
            if param.grad is not None:
                torch.testing.assert_close(fronts.full(same.grad), param.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("kinds", [(Layer, Layer), (Complex,), (Layer, Empty)])
@each_front
@ranks(1, 2)
def test_norms_and_clipped_gradients_are_those_of_a_plain_model(rank, world_size, front, kinds):
    every: tuple[Any, ...] = (0.5, *NORMS, 3.5, "inf", 2)
    for p in every:
        together = 0 if Empty in kinds and front != "flat" else None
        policy = ModuleWrapPolicy({Layer, Complex, Empty})
        plain, model = net(*kinds), shard(front, net(*kinds), policy, travel_together_bytes=together)
        losses(plain, range(world_size)).backward()
        losses(model, range(rank, rank + 1)).backward()
        by_name, total = expected_norms(plain, float(p))
        with _NoDTensors():
            norms = fsdp_wrap.grad_norms(model, p)
            clipped = fsdp_wrap.clip_grad_norm_(model, 0.5 * total.item(), p)
        torch.testing.assert_close(clipped, total, rtol=1e-10, atol=0)
        # With original parameters, empty slices have no gradients.
        by_name = {name: norm for name, norm in by_name.items() if norm or name in norms}
        torch.testing.assert_close(norms, by_name, rtol=1e-10, atol=1e-14)
        params = [param for param in plain.parameters() if param.numel()]
        nn.utils.clip_grad_norm_(params, 0.5 * total.item(), float(p))
        grads = full_grads(model)
        for name, param in plain.named_parameters():
            torch.testing.assert_close(grads[name], param.grad, rtol=1e-9, atol=1e-12)


@each_front
@ranks(4)
def test_ranks_without_elements_take_part(rank, world_size, front):
    plain, model = fronts.twins(front, lambda: nn.Linear(2, 1), DOUBLE)
    # torch's own function finds no infinity norm of an empty shard, and raises on its rank alone.
    norm_types = (1.0, 2.0) if front == "composable" else NORMS
    for module in (plain, model):
        module(torch.tensor([[3.0, -4.0]]).double()).sum().backward()
    with warnings.catch_warnings(action="error"):
        for norm_type in norm_types:
            assert fsdp_wrap.grad_norms(model, norm_type) == expected_norms(plain, norm_type)[0]
            expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5, norm_type)
            torch.testing.assert_close(fronts.clip(model, 0.5, norm_type), expected)
    assert_grads_equal(model, plain)


class Half(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.used, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.used(self.frozen(x))


@each_form
@ranks(2)
def test_parameters_without_a_gradient_are_left_out(rank, world_size, use_orig_params):
    policy = ModuleWrapPolicy({nn.Linear})
    plain, model = twins(Half, DOUBLE, use_orig_params=use_orig_params, auto_wrap_policy=policy)
    for module in (plain, model):
        module(torch.ones(1, 4).double()).sum().backward()
    expected = {"used.weight": plain.used.weight.grad.norm().item(), "used.bias": 2.0}
    assert values(model.grad_norms()) == pytest.approx(expected)
    assert values(model.used.grad_norms()) == pytest.approx({"weight": expected["used.weight"], "bias": 2.0})
    whole = FSDP(copy.deepcopy(plain), use_orig_params=use_orig_params)
    whole(torch.ones(1, 4).double()).sum().backward()
    beside = {} if use_orig_params else {"unused.weight": 0.0, "unused.bias": 0.0}
    assert values(whole.grad_norms()) == pytest.approx(expected | beside)


@pytest.mark.parametrize("where", [0, 1])
@ranks(2)
def test_non_finite_norms_are_the_same_on_all_ranks(rank, world_size, where):
    for value, norm_type in itertools.product((math.nan, math.inf), (2.0, math.inf)):
        plain, model = twins(lambda: nn.Linear(4, 4, bias=False), DOUBLE)
        plain.weight.grad = torch.ones(4, 4).double()
        plain.weight.grad[where * 3, 0] = value
        model._flat_param.grad = plain.weight.grad.flatten().chunk(2)[rank].clone()
        assert repr(model.grad_norms(norm_type)["weight"].item()) == repr(value)
        with pytest.raises(RuntimeError, match="cannot be clipped; leave out error_if_nonfinite"):
            fsdp_wrap.clip_grad_norm_(model, 1.0, norm_type, error_if_nonfinite=True)
        torch.testing.assert_close(full_grads(model)["weight"], plain.weight.grad, equal_nan=True)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 1.0, norm_type)
        assert repr(model.clip_grad_norm_(1.0, norm_type).item()) == repr(expected.item())
        torch.testing.assert_close(full_grads(model)["weight"], plain.weight.grad, equal_nan=True)


@each_front
@ranks(2)
def test_gradients_that_were_nan_and_are_zeroed_leave_none_in_their_memory(rank, world_size, front):
    """That memory has padding between parameters, and stays where gradients are zeroed, not dropped."""
    model = shard(front, nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 3)))
    totals = []
    for factor in (1.0, math.inf, 1.0):
        (model(torch.ones(2, 3)).sum() * (factor if rank else 1.0)).backward()
        totals.append(fronts.full(fsdp_wrap.clip_grad_norm_(model, 1.0)))
        model.zero_grad(set_to_none=False)
    assert totals[1].isnan() and torch.equal(totals[0], totals[2])


def test_plain_models_and_wrong_uses():
    plain, model = net(), net()
    for trained in (plain, model):
        losses(trained, range(1)).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 1e-3)
    torch.testing.assert_close(fsdp_wrap.clip_grad_norm_(model, 1e-3), expected)
    for param, same in zip(plain.parameters(), model.parameters()):
        torch.testing.assert_close(same.grad, param.grad)
    with pytest.raises(ValueError, match="Sequential has no wrapped or sharded module"):
        fsdp_wrap.grad_norms(model)
    with pytest.raises(TypeError, match="takes a model, not a list"):
        fsdp_wrap.grad_norms([])  # type: ignore[arg-type]


@ranks(2)
def test_wrong_calls_are_refused_and_bounds_may_be_large_or_zero(rank, world_size):
    _, model = twins(Transformer, auto_wrap_policy=WRAPPINGS["block"](), use_orig_params=True)
    with pytest.warns(UserWarning, match="found no gradients") as caught:
        total = model.clip_grad_norm_(1.0)
    assert [warning.filename for warning in caught] == [__file__]
    assert total == 0 and total.dtype == SINGLE and total.shape == ()
    assert model.grad_norms() == {}
    backward(model, rank)
    before = full_grads(model)
    for p in (0, -1, -math.inf, math.nan):
        for refused in (partial(model.clip_grad_norm_, 1.0, p), partial(model.grad_norms, p)):
            with pytest.raises(ValueError, match="norm_type must be positive"):
                refused()
    for max_norm in (-1, math.nan):
        with pytest.raises(ValueError, match="max_norm must not be negative"):
            model.clip_grad_norm_(max_norm)
    with pytest.raises(RuntimeError, match=r"on the root, and this is unit 'blocks\.1'"):
        model.blocks[1].clip_grad_norm_(1.0)
    shown = pytest.raises(RuntimeError, match="leave its context before clip_grad_norm_")
    with FSDP.summon_full_params(model), shown:
        model.clip_grad_norm_(1.0)
    for bound in (1e6, math.inf):  # too large to change anything
        model.clip_grad_norm_(bound)
    assert_tensors(before, full_grads(model))
    model.clip_grad_norm_(0)
    assert not any(grad.any() for grad in full_grads(model).values())


@ranks(2)
def test_unreduced_gradients_are_passed_over_and_kept(rank, world_size):
    plain, model = transformer_twins(True)
    with model.no_sync():
        backward(model, rank)
        with pytest.warns(UserWarning, match=r"no_sync\(\) has left unreduced") as caught:
            model.clip_grad_norm_(1e-3)
        assert [warning.filename for warning in caught] == [__file__]
    backward(model, rank)
    large_batch_backward(plain, [0, 0])
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 1e-3)
    torch.testing.assert_close(model.clip_grad_norm_(1e-3), expected)
    assert_grads_equal(model, plain)


@ranks(2)
def test_a_part_that_one_rank_has_none_of_outside_of_units(rank, world_size):
    """A row of a `DTensor` that no unit owns: the second rank has no part of it, nor a gradient at first."""
    mesh = init_device_mesh("cpu", (world_size,))
    model = nn.Sequential(fully_shard(nn.Linear(3, 4)), nn.Linear(4, 1, bias=False)).double()
    model[1].weight = nn.Parameter(distribute_tensor(torch.ones(1, 4).double(), mesh, [Shard(0)]))
    model[0](torch.ones(2, 3).double()).sum().backward()
    norm = fsdp_wrap.clip_grad_norm_(model, 1e9)
    for grad in (torch.full_like(model[1].weight, 3.0), torch.zeros_like(model[1].weight)):
        model[1].weight.grad = grad
        total = fsdp_wrap.clip_grad_norm_(model, 1e9)
        torch.testing.assert_close(total.square(), norm.square() + grad.full_tensor().square().sum())
        largest = fsdp_wrap.clip_grad_norm_(model, 1e9, norm_type=torch.inf)
        assert largest == max(
            grad.full_tensor().max(), *(p.grad.full_tensor().max() for p in model[0].parameters())
        )
    model[1].weight.grad = torch.ones_like(model[1].weight) if rank == 0 else None
    torch.testing.assert_close(fsdp_wrap.clip_grad_norm_(model, 1e9).square(), norm.square() + 4)
