"""Clipping and per-parameter norms, against `torch.nn.utils` on a plain model with all ranks' batches."""

from __future__ import annotations

import copy
import itertools
import math
import warnings

import pytest
import torch
import torch.distributed as dist
from torch import nn

import fronts
from bed import ranks
from bed.references import count_collectives
from fronts import each_form
from fsdp_wrap import CPUOffload, ShardingStrategy
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap._runtime.unit import units_in
from fsdp_wrap.wrap import ModuleWrapPolicy
from models import (
    WRAPPINGS,
    Transformer,
    full_grads,
    gather_objects,
    loss_of,
    tokens,
    transformer_twins,
    twins,
)
from state_nets import Casting

NORM_TYPES = (0.5, 1.0, 2, 3.5, float("inf"), "inf")


def backward(model: nn.Module, rank: int) -> None:
    loss_of(model, tokens(rank, 0)).backward()


def backward_of_all(plain: nn.Module, world_size: int) -> None:
    (sum(loss_of(plain, tokens(r, 0)) for r in range(world_size)) / world_size).backward()


def assert_grads_equal(model: nn.Module, plain: nn.Module) -> None:
    found = fronts.full_grads(model)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(found[name], param.grad, rtol=1e-9, atol=1e-13, msg=name)


def values(norms: dict[str, torch.Tensor]) -> dict[str, float]:
    return {name: norm.item() for name, norm in norms.items()}


def calls(traffic) -> dict[str, int]:
    return {name: count for name, (count, _) in traffic.items()}


# Norms and clipped gradients.


@pytest.mark.parametrize(
    ("strategy", "use_orig_params", "offload"),
    [
        ("FULL_SHARD", False, True),
        ("FULL_SHARD", True, False),
        ("SHARD_GRAD_OP", True, True),
        ("NO_SHARD", True, False),
        ("NO_SHARD", False, True),
    ],
)
@ranks(1, 3)
def test_every_norm_type_equals_plain(rank, world_size, use_orig_params, strategy, offload):
    plain, model = transformer_twins(use_orig_params, strategy, cpu_offload=CPUOffload(offload))
    backward(model, rank)
    backward_of_all(plain, world_size)
    assert_grads_equal(model, plain)
    for name, grad in full_grads(model).items():  # so that only norms can differ
        plain.get_parameter(name).grad = grad
    sharded = strategy != "NO_SHARD" and world_size > 1
    for norm_type in NORM_TYPES:
        norms = {n: torch.linalg.vector_norm(p.grad, float(norm_type)) for n, p in plain.named_parameters()}
        with count_collectives() as traffic:
            found = model.grad_norms(norm_type)  # type: ignore[arg-type]
        assert calls(traffic) == ({"all_reduce": 1} if sharded else {})
        assert list(found) == list(norms)
        for name, norm in norms.items():
            torch.testing.assert_close(found[name], norm, rtol=1e-10, atol=1e-12, msg=name)

        expected = nn.utils.clip_grad_norm_(plain.parameters(), 1e-3, norm_type)  # type: ignore[arg-type]
        with count_collectives() as traffic:
            total = model.clip_grad_norm_(1e-3, norm_type)  # type: ignore[arg-type]
        assert calls(traffic) == ({"all_reduce": 1} if sharded else {})
        torch.testing.assert_close(total, expected, rtol=1e-10, atol=1e-12)
        assert_grads_equal(model, plain)


# Strategies and groups that differ per unit.


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
    backward_of_all(plain, world_size)
    for param in raw.norm.parameters():  # no unit reduces them
        dist.all_reduce(param.grad)
        param.grad /= world_size
    for norm_type in (1.0, 2.0, float("inf")):
        norms = {n: torch.linalg.vector_norm(p.grad, norm_type) for n, p in plain.named_parameters()}
        found = model.grad_norms(norm_type)
        assert list(found) == list(norms)
        for name, norm in norms.items():
            torch.testing.assert_close(found[name], norm, rtol=1e-10, atol=1e-12, msg=name)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 1e-3, norm_type)
        with count_collectives() as traffic:
            total = model.clip_grad_norm_(1e-3, norm_type)
        assert calls(traffic) == ({"all_reduce": collectives} if collectives else {})
        torch.testing.assert_close(total, expected, rtol=1e-10, atol=1e-12)
        assert len(set(gather_objects(total.item()))) == 1
    found = full_grads(model) | {f"norm.{name}": param.grad for name, param in raw.norm.named_parameters()}
    for name, param in plain.named_parameters():
        torch.testing.assert_close(found[name], param.grad, rtol=1e-9, atol=1e-13, msg=name)


@ranks(2)
def test_a_tied_parameter_of_another_root_counts_there(rank, world_size):
    torch.manual_seed(0)
    first, second = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
    second.weight = first.weight
    plain = copy.deepcopy(nn.ModuleList([first, second]))
    lender, borrower = FSDP(first, use_orig_params=True), FSDP(second, use_orig_params=True)
    borrower(lender(torch.ones(2, 4).double())).square().sum().backward()
    plain[1](plain[0](torch.ones(2, 4).double())).square().sum().backward()
    norms = {name: param.grad.norm().item() for name, param in plain.named_parameters()}
    assert values(lender.grad_norms()) == pytest.approx(
        {"weight": norms["0.weight"], "bias": norms["0.bias"]}
    )
    assert values(borrower.grad_norms()) == pytest.approx({"bias": norms["1.bias"]})
    assert borrower.clip_grad_norm_(1.0).item() == pytest.approx(norms["1.bias"])


@ranks(2)
def test_tied_parameters_go_by_their_first_name(rank, world_size):
    plain, _ = twins(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.float64)
    plain[1].weight = plain[0].weight
    by_policy = FSDP(copy.deepcopy(plain), use_orig_params=True)
    by_hand = copy.deepcopy(plain)
    for number in (1, 0):  # the second layer owns the weight
        by_hand[number] = FSDP(by_hand[number], use_orig_params=True)
    x = torch.ones(2, 4).double()
    plain(x).square().sum().backward()
    norms = {name: param.grad.norm().item() for name, param in plain.named_parameters()}
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
    for model in (by_policy, FSDP(by_hand, use_orig_params=True)):
        model(x).square().sum().backward()
        found = model.grad_norms()
        assert list(found) == list(norms)
        assert values(found) == pytest.approx(norms)
        torch.testing.assert_close(model.clip_grad_norm_(1.0), expected)


# Dtypes.


HALF, BRAIN, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64


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
    before = {name: grad.double() for name, grad in full_grads(model).items()}
    for norm_type in (1, 2, float("inf")):
        found = model.grad_norms(norm_type)
        for name, grad in before.items():
            expected = torch.linalg.vector_norm(grad, norm_type)
            assert found[name].dtype in (SINGLE, DOUBLE)
            torch.testing.assert_close(found[name].double(), expected, rtol=1e-6, atol=0)
    flat = torch.cat([grad.flatten() for grad in before.values()])
    total = model.clip_grad_norm_(1.0)
    assert total.dtype == widest
    torch.testing.assert_close(total, flat.norm().to(widest))
    for name, grad in full_grads(model).items():
        expected = (before[name] / flat.norm()).to(grad.dtype)
        torch.testing.assert_close(grad, expected, rtol=torch.finfo(grad.dtype).eps, atol=1e-7)


@ranks(2)
def test_a_conversion_between_calls_is_noticed(rank, world_size):
    model = FSDP(nn.Linear(8, 8), use_orig_params=True)
    for dtype in (SINGLE, DOUBLE, BRAIN):
        model.to(dtype)
        model.zero_grad()
        model(torch.ones(2, 8, dtype=dtype)).sum().backward()
        assert model.clip_grad_norm_(1.0).dtype == dtype


@ranks(2)
def test_large_half_precision_gradients_are_clipped_precisely(rank, world_size):
    """The factor itself is too small for fp16."""
    model = FSDP(nn.Linear(256, 256, bias=False).half())
    grad = torch.full_like(model._flat_param, 60000.0)
    model._flat_param.grad = grad
    total = model.clip_grad_norm_(1.0)
    assert total.isinf() and total.dtype == HALF  # it does not fit the dtype, but is known in a wider one
    torch.testing.assert_close(grad, torch.full_like(grad, 1 / 256), rtol=1e-3, atol=0)


# One norm per reduced shard.


@pytest.mark.parametrize("norm_type", [1.0, 2.0, float("inf")])
@ranks(3)
def test_exchanged_gradients_count_as_they_are(rank, world_size, norm_type):
    _, model = twins(Transformer, torch.float64, auto_wrap_policy=WRAPPINGS["block"](), use_orig_params=True)
    layouts = [each.layout for unit in units_in(model).values() for each in unit.handle.segments]

    def blocks() -> list[int]:
        return [len(layout.gradient_blocks()) for layout in layouts]

    def exchange(way: str) -> None:
        held = [param for param in model.parameters() if param.numel() > 0]
        for number, param in enumerate(held):
            if way == "edited":
                param.grad.mul_(number)
            elif way == "another tensor" and number % 2:
                param.grad = param.grad * 3
            elif way == "other data" and number % 3 == 0:
                param.grad.data = param.grad * 5
            elif way == "none" and number % 4 == 0:
                param.grad = None
            elif way == "longer" and number == 0:
                param.grad = param.new_ones(param.numel() + 1)[:-1]
        for source in layouts[-1].sources if way == "none of a layout" else ():
            source.grad = None

    def reduced_anew(way: str) -> None:
        model.zero_grad()
        backward(model, rank)
        assert blocks() == [1] * len(layouts)
        exchange(way)

    ways = ("as reduced", "edited", "another tensor", "other data", "none", "none of a layout", "longer")
    for last, way in itertools.product(("as reduced", "none of a layout"), ways):
        reduced_anew(last)
        model.clip_grad_norm_(1e9, norm_type)  # which may note how these lie
        reduced_anew(way)
        if way != "longer":  # which a layout of one piece has in one block as well
            assert (blocks() == [1] * len(layouts)) == (way in ("as reduced", "edited"))
        before = [None if param.grad is None else param.grad.clone() for param in model.parameters()]
        pieces = torch.cat([grad.flatten() for grad in before if grad is not None])
        expected = torch.linalg.vector_norm(torch.cat(gather_objects(pieces)), norm_type)
        total = model.clip_grad_norm_(1e-3, norm_type)
        torch.testing.assert_close(total, expected, rtol=1e-12, atol=0)
        for param, grad in zip(model.parameters(), before):
            clipped = None if grad is None else grad * (1e-3 / (total + 1e-6))
            assert (param.grad is None) == (clipped is None)
            if clipped is not None:
                torch.testing.assert_close(param.grad, clipped, rtol=1e-12, atol=0)
        again = model.clip_grad_norm_(1e9, norm_type)
        torch.testing.assert_close(again, total * (1e-3 / (total + 1e-6)), rtol=1e-12, atol=0)


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
    raw = nn.Sequential(nn.Linear(4, 4), nn.ModuleList([nn.Linear(3, 3), nn.Linear(3, 3)]))
    model = FSDP(raw, use_orig_params=True, ignored_modules=[raw[1]])
    first, second = raw[1]
    ignored = [first.weight, first.bias, second.weight, second.bias]

    def total(*expected: nn.Parameter) -> None:
        for param in raw[0].parameters():
            param.grad = None
        for param in (*ignored, *expected):
            param.grad = torch.ones_like(param)
        count = sum(param.numel() for param in expected)
        assert model.clip_grad_norm_(1e9, 1.0) == count == sum(model.grad_norms(1.0).values())

    total(*ignored)
    del raw[1][1]
    total(first.weight, first.bias)
    first.weight = nn.Parameter(torch.ones(5))
    total(first.weight, first.bias)
    raw[1].insert(0, second)
    total(first.weight, first.bias, second.weight, second.bias)
    first.register_parameter("more", nn.Parameter(torch.ones(7)))
    total(first.weight, first.bias, first.more, second.weight, second.bias)
    del first.more
    total(first.weight, first.bias, second.weight, second.bias)
    own = raw[0]  # the unit's, but not what is added to it
    own.register_parameter("more", nn.Parameter(torch.ones(7)))
    total(first.weight, first.bias, second.weight, second.bias, own.more)
    own.child = nn.Linear(2, 2, bias=False)
    total(first.weight, first.bias, second.weight, second.bias, own.more, own.child.weight)
    del own.child
    own.child = nn.Identity()
    total(first.weight, first.bias, second.weight, second.bias, own.more)
    assert copy.deepcopy(model).grad_norms() == {}


# What is missing.


@fronts.each_front
@ranks(4)
def test_ranks_without_elements_take_part(rank, world_size, front):
    plain, model = fronts.twins(front, lambda: nn.Linear(2, 1), torch.float64)
    # torch's own function finds no infinity norm of an empty shard, and raises on its rank alone.
    norm_types = (1.0, 2.0) if front == "composable" else (1.0, 2.0, float("inf"))
    for module in (plain, model):
        module(torch.tensor([[3.0, -4.0]]).double()).sum().backward()
    with warnings.catch_warnings(action="error"):
        for norm_type in norm_types:
            norms = {n: torch.linalg.vector_norm(p.grad, norm_type) for n, p in plain.named_parameters()}
            if front != "composable":
                assert model.grad_norms(norm_type) == norms
            expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.5, norm_type)
            torch.testing.assert_close(fronts.clip(model, 0.5, norm_type), expected)
    assert_grads_equal(model, plain)


@ranks(2)
def test_no_gradients_at_all(rank, world_size):
    model = FSDP(nn.Linear(4, 4), use_orig_params=True)
    with pytest.warns(UserWarning, match="found no gradients") as caught:
        total = model.clip_grad_norm_(1.0)
    assert [warning.filename for warning in caught] == [__file__]
    assert total == 0 and total.dtype == torch.float32 and total.shape == ()
    assert model.grad_norms() == {}


class Half(nn.Module):
    """Uses the first of two layers only, and one that is frozen."""

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
    plain, model = twins(Half, torch.float64, use_orig_params=use_orig_params, auto_wrap_policy=policy)
    for module in (plain, model):
        module(torch.ones(1, 4).double()).sum().backward()
    expected = {"used.weight": plain.used.weight.grad.norm().item(), "used.bias": 2.0}
    assert values(model.grad_norms()) == pytest.approx(expected)
    assert values(model.used.grad_norms()) == pytest.approx({"weight": expected["used.weight"], "bias": 2.0})
    whole = FSDP(copy.deepcopy(plain), use_orig_params=use_orig_params)
    whole(torch.ones(1, 4).double()).sum().backward()
    beside = {} if use_orig_params else {"unused.weight": 0.0, "unused.bias": 0.0}
    assert values(whole.grad_norms()) == pytest.approx(expected | beside)


@ranks(2)
def test_an_ignored_sparse_gradient_counts_once_per_element(rank, world_size):
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2)).double()
    raw = copy.deepcopy(plain)
    model = FSDP(raw, ignored_modules=[raw[0]], use_orig_params=True)
    for module in (plain, model):
        module(torch.tensor([1, 1, 4])).square().sum().backward()
    plain[0].weight.grad = plain[0].weight.grad.to_dense()
    norms = {name: param.grad.norm().item() for name, param in plain.named_parameters()}
    assert values(model.grad_norms()) == pytest.approx(norms)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    torch.testing.assert_close(model.clip_grad_norm_(0.1), expected)
    torch.testing.assert_close(raw[0].weight.grad.to_dense(), plain[0].weight.grad)


# Norms that are not finite.


@pytest.mark.parametrize("where", [0, 1])
@ranks(2)
def test_non_finite_norms_are_the_same_on_all_ranks(rank, world_size, where):
    for value, norm_type in itertools.product((float("nan"), float("inf")), (2.0, float("inf"))):
        plain, model = twins(lambda: nn.Linear(4, 4, bias=False), torch.float64)
        plain.weight.grad = torch.ones(4, 4).double()
        plain.weight.grad[where * 3, 0] = value
        model._flat_param.grad = plain.weight.grad.flatten().chunk(2)[rank].clone()
        assert repr(model.grad_norms(norm_type)["weight"].item()) == repr(value)
        expected = nn.utils.clip_grad_norm_(plain.parameters(), 1.0, norm_type)
        assert repr(model.clip_grad_norm_(1.0, norm_type).item()) == repr(expected.item())
        torch.testing.assert_close(full_grads(model)["weight"], plain.weight.grad, equal_nan=True)


# When it is refused, and what waits.


@ranks(2)
def test_wrong_calls_are_refused_and_bounds_may_be_large_or_zero(rank, world_size):
    _, model = twins(Transformer, auto_wrap_policy=WRAPPINGS["block"](), use_orig_params=True)
    backward(model, rank)
    before = full_grads(model)
    for norm_type in (0, -1, float("-inf"), float("nan")):
        with pytest.raises(ValueError, match="norm_type must be positive"):
            model.clip_grad_norm_(1.0, norm_type)
        with pytest.raises(ValueError, match="norm_type must be positive"):
            model.grad_norms(norm_type)
    for max_norm in (-1, float("nan")):
        with pytest.raises(ValueError, match="max_norm must not be negative"):
            model.clip_grad_norm_(max_norm)
    with pytest.raises(RuntimeError, match=r"on the root, and this is unit 'blocks\.1'"):
        model.blocks[1].clip_grad_norm_(1.0)
    with (
        FSDP.summon_full_params(model),
        pytest.raises(RuntimeError, match="leave its context before clip_grad_norm_"),
    ):
        model.clip_grad_norm_(1.0)
    for bound in (1e6, math.inf):  # too large to change anything
        model.clip_grad_norm_(bound)
    for name, grad in full_grads(model).items():
        assert torch.equal(grad, before[name])
    model.clip_grad_norm_(0)
    assert not any(grad.any() for grad in full_grads(model).values())


@ranks(2)
def test_not_inside_a_forward_or_backward(rank, world_size):
    model = FSDP(nn.Sequential(nn.Linear(4, 4), nn.Tanh()))
    for call in (lambda: model.clip_grad_norm_(1.0), model.grad_norms):
        hook = model.module[0].register_forward_hook(lambda *_, call=call: call() and None)
        with pytest.raises(RuntimeError, match="must not run inside the forward of the root unit"):
            model(torch.ones(1, 4))
        hook.remove()
        output = model(torch.ones(1, 4))
        output.register_hook(lambda _, call=call: call() and None)
        with pytest.raises(RuntimeError, match="must not run inside a backward"):
            output.sum().backward()


@ranks(2)
def test_unreduced_gradients_are_passed_over_and_kept(rank, world_size):
    plain, model = transformer_twins(True)
    with model.no_sync():
        backward(model, rank)
        with pytest.warns(UserWarning, match=r"no_sync\(\) has left unreduced") as caught:
            model.clip_grad_norm_(1e-3)
        assert [warning.filename for warning in caught] == [__file__]
    backward(model, rank)
    for _ in range(2):
        backward_of_all(plain, world_size)
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 1e-3)
    torch.testing.assert_close(model.clip_grad_norm_(1e-3), expected)
    assert_grads_equal(model, plain)
