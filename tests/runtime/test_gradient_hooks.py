"""Hooks that users put on sharded parameters: optimizers in backward, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward

from bed import ranks
from fronts import each_front, full, full_state, inner, local_numel, no_sync, shard, twins
from fsdp_wrap import CPUOffload
from fsdp_wrap.wrap import ModuleWrapPolicy
from models import WRAPPINGS, Block, Transformer, loss_of, tokens


def held(model: nn.Module) -> list[nn.Parameter]:
    """The sharded parameters of which this rank has a gradient."""
    return [param for param in model.parameters() if local_numel(param)]


def step_in_backward(model: nn.Module) -> list[Any]:
    """Lets each parameter be updated as soon as it has its gradient."""
    optimizers = {param: torch.optim.AdamW([param], lr=0.01) for param in held(model)}

    def step(param: nn.Parameter) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    return [param.register_post_accumulate_grad_hook(step) for param in optimizers]


@each_front
@pytest.mark.parametrize("offload", [False, True], ids=["device", "host"])
@ranks(2)
def test_an_optimizer_in_backward_trains_as_one_after_it(rank, world_size, front, offload):
    options = {"auto_wrap_policy": WRAPPINGS["block"](), "cpu_offload": CPUOffload(offload)}
    _, usual = twins(front, Transformer, **options)
    _, model = twins(front, Transformer, **options)
    handles = step_in_backward(model)
    optimizer = torch.optim.AdamW(usual.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        loss, expected = loss_of(model, tokens(rank, step)), loss_of(usual, tokens(rank, step))
        assert torch.equal(loss, expected)
        loss.backward()
        expected.backward()
        optimizer.step()
        assert all(param.grad is None for param in model.parameters())
    found, wanted = full_state(model), full_state(usual)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    for handle in handles:  # else hooks hold their parameters for ever: garbage collection does not see them
        handle.remove()


@pytest.mark.parametrize("register_hook", [False, True])
@each_front
@ranks(2)
def test_optimizers_that_torch_applies_in_backward(rank, world_size, front, register_hook):
    """Torch notes them on the parameters; a FlatParameter, which stands for several, takes none."""
    _, usual = twins(front, Transformer, auto_wrap_policy=WRAPPINGS["block"]())
    _, model = twins(front, Transformer, auto_wrap_policy=WRAPPINGS["block"]())
    apply = apply_optimizer_in_backward
    apply(torch.optim.AdamW, model.parameters(), {"lr": 0.01}, register_hook=register_hook)
    if front == "flat":
        with pytest.raises(
            RuntimeError, match="FlatParameter of .* only supported with use_orig_params=True"
        ):
            loss_of(model, tokens(rank, 0))
        return
    optimizer = torch.optim.AdamW(usual.parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        for each in (model, usual):
            loss_of(each, tokens(rank, step)).backward()
        optimizer.step()
        assert all(param.grad is None for param in model.parameters())
    found, expected = full_state(model), full_state(usual)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("register_hook", [False, True])
@each_front
@ranks(2)
def test_optimizers_that_torch_applied_in_backward_before_sharding(rank, world_size, front, register_hook):
    """They train the same where the Parameter objects stay; elsewhere they would train nothing."""
    policy = WRAPPINGS["block"]()
    _, usual = twins(front, Transformer, auto_wrap_policy=policy)
    torch.manual_seed(0)
    model: Any = Transformer()
    inside = model.blocks[1].parameters()
    apply_optimizer_in_backward(torch.optim.AdamW, inside, {"lr": 0.01}, register_hook=register_hook)
    if front != "orig":
        cure = {"flat": "use_orig_params=True", "composable": "after fully_shard"}[front]
        rule = r"'(blocks\.1\.)?\w+\.\w+.*' has an optimizer .* would train nothing.*"
        with pytest.raises(ValueError, match=rule + cure):
            shard(front, model, policy)
        assert type(model) is Transformer and model(tokens(rank, 0)) is not None
        return
    model = shard(front, model, policy)
    optimizer = torch.optim.AdamW(inner(usual).blocks[1].parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        for each in (model, usual):
            loss_of(each, tokens(rank, step)).backward()
        optimizer.step()
        assert all(param.grad is None for param in inner(model).blocks[1].parameters())
    found, expected = full_state(model), full_state(usual)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
@each_front
@ranks(2)
def test_gradient_hooks_before_sharding_are_refused(rank, world_size, front, register):
    model = Transformer()
    handle = getattr(model.blocks[1].norm1.weight, register)(lambda _: None)
    with pytest.raises(ValueError, match="norm1.weight' has gradient hooks, .* sharded parameters after it"):
        shard(front, model, WRAPPINGS["block"]())
    handle.remove()


@each_front
@ranks(2)
def test_a_hook_sees_what_was_reduced_once(rank, world_size, front):
    """Not before, under `no_sync`; not after its handle was removed; tied ones call it once."""

    def make() -> nn.Module:
        block = Block()
        model = nn.Sequential(block, Block(), block)
        model[1].requires_grad_(False)
        return model

    plain, model = twins(front, make, torch.float64, auto_wrap_policy=ModuleWrapPolicy({Block}))
    seen: list[tuple[nn.Parameter, torch.Tensor]] = []
    trained = [param for param in held(model) if param.requires_grad]
    handles = [
        param.register_post_accumulate_grad_hook(lambda each: seen.append((each, each.grad.clone())))
        for param in trained
    ]
    x = torch.full((1, 3, 32), rank + 1.0, dtype=torch.float64)
    with no_sync(model):
        model(x).sum().backward()
    assert not seen
    model(x).sum().backward()
    assert {param for param, _ in seen} == {*trained} and len(seen) == len(trained)
    assert all(torch.equal(full(grad), full(param.grad)) for param, grad in seen)
    for handle in handles:
        handle.remove()
    model(x).sum().backward()
    assert len(seen) == len(trained)


@each_front
@ranks(2)
def test_a_parameter_that_no_rank_uses_calls_no_hook(rank, world_size, front):
    class Some(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.idle = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.used * x).sum() if rank == 0 else (self.used * 0).sum()

    model = shard(front, Some())
    seen: list[nn.Parameter] = []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(seen.append)
    model(torch.ones(4)).backward()
    holds = front == "flat" or any(param is inner(model).used for param in held(model))
    assert len(seen) == holds and all(param is not getattr(inner(model), "idle", None) for param in seen)


@each_front
@ranks(2)
def test_an_optimizer_made_before_sharding(rank, world_size, front):
    """It would train nothing, save where the Parameter objects stay."""
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = shard(front, model, WRAPPINGS["block"]())
    before = {name: value.clone() for name, value in full_state(wrapped).items()}
    loss_of(wrapped, tokens(rank, 0)).backward()
    if front == "orig":
        optimizer.step()
        assert not all(torch.equal(value, before[name]) for name, value in full_state(wrapped).items())
        return
    with pytest.raises(RuntimeError, match=rf"SGD was made before .* '.+' .*rank {rank}.* after sharding"):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in full_state(wrapped).items())
    inside = torch.optim.AdamW(
        [{"params": [*wrapped.parameters()]}, {"params": [optimizer.param_groups[0]["params"][-1]]}]
    )
    with pytest.raises(RuntimeError, match=r"AdamW was made before"):
        inside.step()
    torch.optim.SGD(wrapped.parameters(), lr=0.1).step()
    assert not all(torch.equal(value, before[name]) for name, value in full_state(wrapped).items())


@each_front
@ranks(2)
def test_hooks_before_the_gradient_are_refused(rank, world_size, front):
    _, model = twins(front, Transformer, auto_wrap_policy=WRAPPINGS["block"]())
    block = inner(model).blocks[1]
    param = next(iter(held(block)))
    rule = r"register_hook on .*blocks\.1\..* register_post_accumulate_grad_hook"
    if front == "flat":
        with pytest.raises(ValueError, match=r"register_hook on .* register_post_accumulate_grad_hook"):
            param.register_hook(lambda grad: None)
    else:
        handle = param.register_hook(lambda grad: None)
        with pytest.raises(ValueError, match=rf"rank {rank}: {rule}"):
            loss_of(model, tokens(rank, 0))
        handle.remove()
    loss_of(model, tokens(rank, 0)).backward()
