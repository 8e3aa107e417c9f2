"""What optimizers are made from, in any order and form; those that need whole parameters."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import fronts
from bed import ranks
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import OptimStateKeyType, ShardingStrategy
from fsdp_wrap.wrap import ModuleWrapPolicy
from nets import stack
from optim_states import assert_same, grouped
from state_nets import Net, Tied, adamw, by_hand, per_block, train_side_by_side, whole, wrapped_and_plain

pytestmark = pytest.mark.filterwarnings("ignore:.*optim_input:FutureWarning")


def reversed_list(module: nn.Module) -> Any:
    return list(module.parameters())[::-1]


def groups(module: nn.Module) -> Any:
    """Makes groups, the last units first, each reversed; one is a generator, one a single parameter."""
    params = list(module.parameters())
    first, *middle, last = params if len(params) > 1 else [None, *params]
    chosen = [
        {"params": (param for param in reversed(middle)), "lr": 0.5} if middle else None,
        {"params": last, "weight_decay": 0.3},
        {"params": [first]} if first is not None else None,
    ]
    return [group for group in chosen if group is not None]


INPUTS: list[Callable[[nn.Module], Any]] = [
    lambda module: None,
    reversed_list,
    lambda module: (param for param in reversed_list(module)),
    lambda module: list(module.named_parameters())[::-1],
    groups,
    lambda module: iter(groups(module)[::-1]),
]


class HeadFirst(Net):
    """The root owns what comes before and behind its blocks, in two segments."""

    def __init__(self) -> None:
        super().__init__()
        self.head.requires_grad_(False)
        self.blocks[0].up.requires_grad_(False)


def made_from(optim_input: Any, module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters() if optim_input is None else optim_input, lr=1e-2)


@pytest.mark.parametrize(
    ("net", "wrap", "use_orig_params"),
    [
        (HeadFirst, whole, False),
        (HeadFirst, per_block, True),
        (HeadFirst, by_hand, False),
        (Tied, whole, True),
        (Tied, per_block, False),
        (Tied, by_hand, True),
    ],
)
@ranks(2)
def test_states_reach_their_parameters(rank, world_size, net, wrap, use_orig_params):
    """As an optimizer made from `optim_input` numbers them."""
    for make_input in INPUTS:
        model, plain = wrapped_and_plain(net, wrap, use_orig_params)
        ours = made_from(make_input(model), model)
        train_side_by_side(2, model, ours, plain, adamw(plain))
        on_first = FSDP.full_optim_state_dict(model, ours, make_input(model))
        state = FSDP.full_optim_state_dict(model, ours, make_input(model), rank0_only=False)
        assert bool(on_first) == (rank == 0)
        assert_same(state, FSDP.optim_state_dict(model, ours))
        for given in (
            FSDP.shard_full_optim_state_dict(state, model, make_input(model)),
            FSDP.scatter_full_optim_state_dict(on_first or None, model, make_input(model)),
        ):
            fresh = made_from(make_input(model), model)
            fresh.load_state_dict(given)
            assert_same(FSDP.optim_state_dict(model, fresh), state)
            for param, entry in ours.state.items():
                if param.numel():
                    assert torch.equal(fresh.state[param]["exp_avg"], entry["exp_avg"])
            for group, other in zip(fresh.param_groups, ours.param_groups):
                assert (group["lr"], group["weight_decay"]) == (other["lr"], other["weight_decay"])


@ranks(2)
def test_passing_it_warns_of_its_end(rank, world_size):
    """The warning names the caller's line; the methods do not warn without the argument."""
    model, plain = wrapped_and_plain(Net, whole, True)
    ours, theirs = adamw(model), adamw(plain)
    train_side_by_side(1, model, ours, plain, theirs)
    state = FSDP.full_optim_state_dict(model, ours, rank0_only=False)
    to_ids, to_names = OptimStateKeyType.PARAM_ID, OptimStateKeyType.PARAM_NAME
    for call in (
        lambda **by: FSDP.full_optim_state_dict(model, ours, **by),
        lambda **by: FSDP.shard_full_optim_state_dict(state, model, **by),
        lambda **by: FSDP.scatter_full_optim_state_dict(state, model, **by),
        lambda **by: FSDP.rekey_optim_state_dict(state, to_ids, model, **by),
        lambda **by: FSDP.rekey_optim_state_dict(theirs.state_dict(), to_names, model, **by),
    ):
        with pytest.warns(FutureWarning, match="`optim_input` argument is deprecated") as caught:
            call(optim_input=list(model.parameters()))
        assert [warning.filename for warning in caught] == [__file__]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            call()


@ranks(2)
def test_groups_that_are_not_those_saved_are_refused(rank, world_size):
    model, plain = wrapped_and_plain(Net, per_block, True)
    ours = grouped(model, lambda name: name.endswith("bias"))
    train_side_by_side(1, model, ours, plain, adamw(plain))
    state = FSDP.optim_state_dict(model, ours)
    first, *rest = plain.parameters()
    other = [{"params": rest}, {"params": [first]}]
    with pytest.raises(ValueError, match=r"in one group of the optimizer, but were saved in groups with"):
        FSDP.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, plain, other)
    partial = {"state": {}, "param_groups": [{"lr": 1.0, "params": ["shift"]}]}
    params = dict(model.named_parameters())
    apart = [{"params": [params.pop("_fsdp_wrapped_module.shift")]}, {"params": list(params.values())}]
    with pytest.raises(ValueError, match=r"no group with any of 'stem.weight'.*options are not known"):
        FSDP.shard_full_optim_state_dict(partial, model, apart)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@ranks(2)
def test_what_is_no_input_of_an_optimizer(rank, world_size):
    """It is refused as by optimizers themselves; groups that are given stay as they are."""
    model, _ = wrapped_and_plain(Net, per_block, True)
    state = {"state": {}, "param_groups": [{"lr": 1.0, "params": ["shift"]}]}
    shift = model.module.shift
    twice = [*model.parameters(), shift]
    for error, message, given in (
        (TypeError, "not iterable", 3),
        (TypeError, "should be an iterable of Tensors or dicts", shift),
        (TypeError, "param_group must be a dict", [*groups(model), shift]),
        (TypeError, "one of the params is str", ["shift"]),
        (ValueError, "empty parameter list", []),
        (ValueError, "a parameter group of optim_input has no .params.", [{"lr": 3}]),
        (ValueError, "not one of the model's", Net().parameters()),
        (ValueError, r"'shift'.* occurs twice .*\(rank \d\)", twice),
    ):
        with pytest.raises(error, match=message):
            FSDP.shard_full_optim_state_dict(state, model, given)  # type: ignore[arg-type]
    params = list(model.parameters())
    optim = made_from([{"params": params}], model)
    own, held = [{"params": tuple(params)}], optim.param_groups[0]["params"]
    state = FSDP.full_optim_state_dict(model, optim, rank0_only=False)
    FSDP.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, model, own)
    FSDP.rekey_optim_state_dict(state, OptimStateKeyType.PARAM_ID, model, optim=optim)
    assert own == [{"params": tuple(params)}] and optim.param_groups[0]["params"] is held


# optimizers that are not elementwise: refused where they would see pieces, else as on a plain model


class Lamb(torch.optim.Optimizer):
    """An optimizer of a user, that scales the update of a parameter by two norms."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if closure is not None:
            with torch.enable_grad():
                closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    moment = self.state[param].setdefault("moment", torch.zeros_like(param))
                    moment.lerp_(param.grad, 0.1)
                    param.sub_(moment, alpha=group["lr"] * float(param.norm() / (moment.norm() + 1e-8)))


WHOLE = {"LBFGS": torch.optim.LBFGS, "Adafactor": torch.optim.Adafactor, "Lamb": Lamb}


class Own(torch.optim.Adafactor):
    """A subclass, as users write them."""


def batch(rank: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)


def step(model: nn.Module, optimizer: Any, batches: list[torch.Tensor]) -> None:
    def closure() -> float:
        optimizer.zero_grad()
        total = sum(model(batch).pow(2).mean() for batch in batches) / len(batches)
        total.backward()
        return float(total)

    optimizer.step(closure)


@pytest.mark.parametrize(
    ("kind", "copied", "use_orig_params"),
    [("LBFGS", False, True), ("Adafactor", True, False), ("Lamb", True, True), ("Own", False, False)],
)
@ranks(2)
def test_pieces_are_refused(rank, world_size, use_orig_params, copied, kind):
    model = FSDP(
        stack(4, 6, 2), auto_wrap_policy=ModuleWrapPolicy({nn.Linear}), use_orig_params=use_orig_params
    )
    model = copy.deepcopy(model) if copied else model
    optimizer = {**WHOLE, "Own": Own}[kind](model.parameters(), lr=0.1)
    before = copy.deepcopy(model.state_dict())
    model(batch(rank)).sum().backward()
    told = rf"{kind} computes with whole parameters, and of '0\.weight'.*rank {rank}"
    with pytest.raises(RuntimeError, match=told):
        step(model, optimizer, [batch(rank)])
    assert not optimizer.state_dict()["state"]
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    generator = torch.get_rng_state()
    step(model, torch.optim.SGD(model.parameters(), lr=0.1), [batch(rank)])
    assert torch.equal(torch.get_rng_state(), generator)


@fronts.each_form
@pytest.mark.parametrize("kind", WHOLE)
@ranks(1, 2)
def test_whole_parameters_train_as_a_plain_model(rank, world_size, use_orig_params, kind):
    for strategy in ("FULL_SHARD", "NO_SHARD") if world_size == 1 else ("NO_SHARD",):
        plain = stack(4, 6, 2)
        options: Any = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": use_orig_params}
        model = FSDP(copy.deepcopy(plain), **options)
        ours, theirs = (WHOLE[kind](net.parameters(), lr=0.1) for net in (model, plain))
        wants_shapes, wants_each = kind == "Adafactor" and strategy == "FULL_SHARD", kind != "LBFGS"
        if wants_shapes or (wants_each and not use_orig_params):  # all there, but flat, or as one
            with pytest.raises(RuntimeError, match=f"{kind} computes with whole parameters"):
                step(model, ours, [batch(0)])
            continue
        for _ in range(2):
            step(model, ours, [batch(0)])
            step(plain, theirs, [batch(0)])
        fronts.assert_same_values(model, plain, rtol=0, atol=1e-12)


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    params = [*module.parameters()]
    matrices, others = [p for p in params if p.ndim >= 2], [p for p in params if p.ndim < 2]
    return [{"params": matrices, "weight_decay": 0.5}, {"params": others, "weight_decay": 0.0}]


@fronts.each_front
@ranks(2)
def test_weight_decay_that_groups_lose_is_told(rank, world_size, front):
    """If they are made after wrapping. The cure that is told works."""
    module = stack(4, 6, 2)
    before, plain = groups_of(module), copy.deepcopy(module)
    model = fronts.shard(front, module, ModuleWrapPolicy({nn.Linear}))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        optimizer = torch.optim.AdamW(groups_of(model))
        for _ in range(2):
            model(batch(rank)).sum().backward()
            optimizer.step()
    told = [str(warning.message) for warning in caught if "weight decay may be lost" in str(warning.message)]
    assert len(told) == (0 if front == "composable" else 1)
    assert all("this AdamW has '0.weight' in a group without it" in message for message in told)
    if front == "orig":
        with warnings.catch_warnings():
            warnings.filterwarnings("error", "weight decay")
            model.load_state_dict(plain.state_dict())
            step(model, torch.optim.SGD(before, lr=0.1), [batch(0)])
        step(plain, torch.optim.SGD(groups_of(plain), lr=0.1), [batch(0)])
        fronts.assert_same_values(model, plain, rtol=0, atol=1e-12)
