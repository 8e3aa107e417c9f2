"""What optimizers are made from: `optim_input` in any order and form, and parameters that occur twice."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from bed import ranks
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import OptimStateKeyType
from optim_states import assert_same, grouped
from state_nets import Net, Tied, adamw, by_hand, per_block, train_side_by_side, whole, wrapped_and_plain

pytestmark = pytest.mark.filterwarnings("ignore:.*optim_input:FutureWarning")


def reversed_list(module: nn.Module) -> Any:
    return list(module.parameters())[::-1]


def groups(module: nn.Module) -> Any:
    """Those of the last units first, each reversed; one of them a generator, one a single parameter."""
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
    """At the caller's line; nothing else of the methods that take it does."""
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
