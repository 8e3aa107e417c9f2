"""Ignored modules and parameters stay as they are: whole, on every rank, reduced by no one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from bed import ranks
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.wrap import ModuleWrapPolicy
from models import Block, Transformer, full_grads, gather_objects, loss_of, tokens, twins

each_form = pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])


def _ignored(kind: str, model: Transformer) -> dict:
    if kind == "modules":
        return {"ignored_modules": [model.blocks[1], model.norm]}
    if kind == "states of modules":
        return {"ignored_states": [model.blocks[1], model.norm]}
    return {"ignored_states": [*model.blocks[1].parameters(), *model.norm.parameters()]}


@pytest.mark.parametrize("wrapping", ["whole", "block"])
@pytest.mark.parametrize("kind", ["modules", "states of modules", "states of parameters"])
@each_form
@ranks(2)
def test_ignored_states_stay_whole_and_local(rank, world_size, use_orig_params, kind, wrapping):
    plain, _ = twins(Transformer, torch.float64)
    torch.manual_seed(0)
    raw = Transformer().double()
    kept = {f"blocks.1.{name}": param for name, param in raw.blocks[1].named_parameters()}
    kept |= {f"norm.{name}": param for name, param in raw.norm.named_parameters()}
    policy = ModuleWrapPolicy({Block}) if wrapping == "block" else None
    model = FSDP(raw, auto_wrap_policy=policy, use_orig_params=use_orig_params, **_ignored(kind, raw))
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


@ranks(2)
def test_clipping_counts_ignored_gradients_once(rank, world_size):
    """They must be the same on all ranks, as after a reduction of the user's own."""
    plain, _ = twins(Transformer, torch.float64)
    torch.manual_seed(0)
    raw = Transformer().double()
    model = FSDP(raw, ignored_modules=[raw.norm], use_orig_params=True)
    for module in (plain, model):
        loss_of(module, tokens(0, 0)).backward()
    expected = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
    torch.testing.assert_close(model.clip_grad_norm_(0.1), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(raw.norm.weight.grad, plain.norm.weight.grad, rtol=1e-12, atol=1e-12)
    assert len({norm.item() for norm in gather_objects(expected)}) == 1
