"""Ignored modules and parameters stay as they are: whole, on every rank, reduced by no one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from bed import ranks
from fronts import each_form
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import StateDictType
from fsdp_wrap.wrap import ModuleWrapPolicy
from models import WRAPPINGS, Transformer, full_grads, loss_of, tokens, twins


def _ignored(kind: str, model: nn.Module) -> dict[str, Any]:
    modules = [model.blocks[1], model.norm]
    if kind == "modules":
        return {"ignored_modules": modules}
    params = [param for module in modules for param in module.parameters()]
    return {"ignored_states": modules if kind == "states of modules" else params}


@ranks(2)
def test_ignored_states_stay_whole_and_local(rank, world_size):
    ways = [("modules", "whole"), ("states of modules", "block"), ("states of parameters", "block")]
    for (kind, wrapping), use_orig_params in zip([*ways, ways[0]], (True, True, True, False)):
        plain, _ = twins(Transformer, torch.float64)
        raw = copy.deepcopy(plain)
        kept = {f"blocks.1.{name}": param for name, param in raw.blocks[1].named_parameters()}
        kept |= {f"norm.{name}": param for name, param in raw.norm.named_parameters()}
        policy = WRAPPINGS[wrapping]()
        options = {"use_orig_params": use_orig_params, **_ignored(kind, raw)}
        model = FSDP(raw, auto_wrap_policy=policy, **options)
        held = {id(param) for param in model.parameters()}
        for name, param in kept.items():
            assert id(param) in held and param.shape == plain.get_parameter(name).shape, name
        loss_of(model, tokens(rank, 0)).backward()
        sharded = full_grads(model)
        local = loss_of(plain, tokens(rank, 0))
        own = dict(zip(kept, torch.autograd.grad(local, [plain.get_parameter(name) for name in kept])))
        (sum(loss_of(plain, tokens(r, 0)) for r in range(world_size)) / world_size).backward()
        for name, param in plain.named_parameters():
            found, expected = (kept[name].grad, own[name]) if name in kept else (sharded[name], param.grad)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, msg=name)
        state = model.state_dict()
        assert all(torch.equal(state[name], value) for name, value in plain.state_dict().items())
    # Clipping counts gradients once that are the same on all ranks, as after a reduction of the user's own.
    plain, _ = twins(Transformer, torch.float64)
    raw = copy.deepcopy(plain)
    model = FSDP(raw, ignored_modules=[raw.norm], use_orig_params=True)
    for module in (plain, model):
        loss_of(module, tokens(0, 0)).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    torch.testing.assert_close(model.clip_grad_norm_(0.1), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(raw.norm.weight.grad, plain.norm.weight.grad, rtol=1e-12, atol=1e-12)


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.register_buffer("calls", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x)


@pytest.mark.parametrize(("argument", "by_policy"), [("ignored_modules", False), ("ignored_states", True)])
@ranks(2)
def test_what_is_wrapped_may_itself_be_ignored(rank, world_size, by_policy, argument):
    """Its unit has nothing to shard; units that were inside before still do."""
    raw = nn.Sequential(Counting(), nn.Linear(4, 4))
    inner = raw[1] = FSDP(raw[1], use_orig_params=True)
    policy = ModuleWrapPolicy({Counting}) if by_policy else None
    with pytest.warns(UserWarning, match=f"{argument} holds the Sequential that is being wrapped") as caught:
        model = FSDP(raw, auto_wrap_policy=policy, **{argument: [raw]})  # type: ignore[arg-type]
    assert caught[0].filename == __file__
    assert raw[1] is inner and FSDP.fsdp_modules(model) == [model, inner]
    outer = FSDP(nn.Sequential(model, nn.Linear(4, 4)), use_orig_params=True)
    outer(torch.randn(3, 4)).sum().backward()
    held = {id(param) for param in outer.parameters()}
    for param in raw[0].parameters():
        assert id(param) in held and param.grad.shape == param.shape == (4, 4)[: param.dim()]
    assert sorted(model.state_dict()) == ["0.calls", "0.linear.bias", "0.linear.weight", "1.bias", "1.weight"]
    assert outer.state_dict()["0.0.linear.weight"].shape == (4, 4)


@each_form
@ranks(2)
def test_state_dicts_have_the_memory_of_what_is_ignored(rank, world_size, use_orig_params):
    """As that of a plain module; what units own is copied, also parameters that are shown in full now."""
    prefix = "below."
    raw = nn.Sequential(Counting(), Counting(), nn.Linear(4, 4))
    options = {"use_orig_params": use_orig_params}
    raw[1] = FSDP(raw[1], ignored_states=[raw[1].linear.weight], **options)
    model = FSDP(raw, ignored_modules=[raw[0]], **options)
    model(torch.ones(2, 4)).sum().backward()
    ignored = {f"0.{name}": value for name, value in raw[0].state_dict(keep_vars=True).items()}
    ignored["1.linear.weight"] = raw[1].module.linear.weight

    def check(state: dict) -> None:
        for name, value in ignored.items():
            assert state[prefix + name].data_ptr() == value.data_ptr(), name

    for kind in (StateDictType.FULL_STATE_DICT, StateDictType.SHARDED_STATE_DICT):
        with FSDP.state_dict_type(model, kind):
            check(model.state_dict(prefix=prefix))
    with FSDP.summon_full_params(model):
        full = model.state_dict(prefix=prefix)
        check(full)
        shown = {value.data_ptr() for value in (*raw[2].parameters(), raw[1].module.linear.bias)}
        shown.add(raw[1].module.calls.data_ptr())
        owned = (f"{prefix}{name}" for name in ("2.weight", "2.bias", "1.linear.bias", "1.calls"))
        assert shown.isdisjoint(full[name].data_ptr() for name in owned)
