"""Parameters that users or modules change behind training's back: refused by name, never ignored."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel as DDP

from bed import ranks
from bed.references import count_collectives
from fronts import each_front, full_grads, full_state, inner, local_numel, shard, twins
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import ShardingStrategy, StateDictType, fully_shard, iter_full_optim_state, iter_full_params
from models import WRAPPINGS, Block, Transformer, loss_of, tokens

WIDTH = 4


def training(front: str) -> tuple[nn.Module, nn.Module]:
    """A sharded model, and a block of it that is a unit."""
    _, model = twins(front, Transformer, auto_wrap_policy=WRAPPINGS["block"]())
    return model, inner(inner(model).blocks[1])


def names_of(block: nn.Module) -> tuple[nn.Module, str, str]:
    """A module of a block with one of its parameters, by name within the block and the module."""
    for prefix, module in block.named_modules():
        if isinstance(module, nn.Linear):
            return module, f"{prefix}.weight", "weight"
    raise AssertionError


@each_front
@pytest.mark.parametrize("shape", [(3, 3), None], ids=["other", "same"])
@ranks(2)
def test_a_parameter_put_in_the_place_of_a_sharded_one(rank, world_size, front, shape):
    model, block = training(front)
    module, fqn, name = names_of(block)
    before, size = getattr(module, name), (module.out_features, module.in_features)
    module.weight = nn.Parameter(torch.ones(shape or size))
    with pytest.raises(ValueError, match=rf"'(blocks\.1\.)?{fqn}' was replaced by a Parameter of shape"):
        loss_of(model, tokens(rank, 0))
    if front == "flat":
        del module.weight
        with pytest.raises(ValueError, match=rf"'blocks\.1\.{fqn}' was removed .* rank {rank}"):
            loss_of(model, tokens(rank, 0))
        module._parameters["weight"] = None
    else:
        module.weight = before
    loss_of(model, tokens(rank, 0)).backward()


@pytest.mark.parametrize("front", ["flat", "orig"])
@ranks(2)
def test_summoning_does_not_drop_a_parameter_that_was_replaced(rank, world_size, front):
    model, block = training(front)
    module, fqn, name = names_of(block)
    before = getattr(module, name)
    module.weight = nn.Parameter(torch.ones_like(before))
    with pytest.raises(RuntimeError, match=rf"'blocks\.1\.{fqn}' was replaced by a Parameter") as raised:
        with FSDP.summon_full_params(model):
            raise AssertionError("the context was entered")
    assert isinstance(raised.value, ValueError)
    module._parameters["weight"] = None if front == "flat" else before
    loss_of(model, tokens(rank, 0)).backward()


KINDS = pytest.mark.parametrize("kind", list(StateDictType), ids=lambda kind: kind.name)


@KINDS
@pytest.mark.parametrize("front", ["flat", "orig"])
@pytest.mark.parametrize("trained", [False, True], ids=["new", "trained"])
@ranks(2)
def test_state_dicts_do_not_drop_a_parameter_that_was_replaced(rank, world_size, front, kind, trained):
    model, block = training(front)
    if trained:
        loss_of(model, tokens(rank, 0)).backward()
    module, fqn, name = names_of(block)
    before = getattr(module, name)
    with FSDP.state_dict_type(model, kind):
        saved = model.state_dict()
        module.weight = nn.Parameter(torch.ones_like(before))
        with count_collectives() as traffic:
            for use in (model.state_dict, lambda: model.load_state_dict(saved)):
                with pytest.raises(
                    RuntimeError, match=rf"'blocks\.1\.{fqn}' was replaced by a Par"
                ) as raised:
                    use()
                assert isinstance(raised.value, ValueError)
        assert not traffic
        module._parameters["weight"] = None if front == "flat" else before
        model.load_state_dict(saved)
    loss_of(model, tokens(rank, 0)).backward()


@each_front
@ranks(2)
def test_iterating_does_not_drop_a_parameter_that_was_replaced(rank, world_size, front):
    model, block = training(front)
    module, fqn, name = names_of(block)
    module.weight = nn.Parameter(torch.ones(module.out_features, module.in_features))
    with pytest.raises(ValueError, match=rf"'(blocks\.1\.)?{fqn}' was replaced by a Parameter"):
        iter_full_params(model)
    with pytest.raises(ValueError, match=rf"'(blocks\.1\.)?{fqn}' was replaced by a Parameter"):
        iter_full_optim_state(model, torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0))


@ranks(2)
def test_state_dicts_of_fully_shard_refuse_what_is_no_dtensor(rank, world_size):
    model, block = training("composable")
    module, fqn, name = names_of(block)
    before = module.weight
    module.weight = nn.Parameter(torch.ones(module.out_features, module.in_features))
    with pytest.raises(ValueError, match=rf"'{fqn}' was replaced by a Parameter"):
        model.state_dict()
    module.weight = before
    assert isinstance(model.state_dict()[f"blocks.1.{fqn}"], DTensor)


@pytest.mark.parametrize("front", ["flat", "orig"])
@ranks(2)
def test_replacing_inside_of_summon_is_kept(rank, world_size, front):
    model, block = training(front)
    module, fqn, _ = names_of(block)
    with FSDP.summon_full_params(model):
        module.weight = nn.Parameter(torch.full_like(module.weight, 0.5))
    loss_of(model, tokens(rank, 0)).backward()
    assert full_state(model)[f"blocks.1.{fqn}"].eq(0.5).all()


@each_front
@pytest.mark.parametrize("how", ["in place", "data", "step", "fused step"])
@ranks(2)
def test_parameters_written_between_forward_and_backward(rank, world_size, front, how):
    model, block = training(front)
    param = next(each for each in block.parameters() if local_numel(each))
    loss = loss_of(model, tokens(rank, 0))
    if how == "in place":
        with torch.no_grad():
            param.mul_(2)
    elif how == "data":
        param.data = param.data * 2
        if front == "composable":  # which changes no DTensor
            loss.backward()
            return
    else:
        for each in block.parameters():
            each.grad = torch.ones_like(each)
        # The first moves no counters.
        kind: dict[str, Any] = {"fused": True} if how == "fused step" else {"foreach": False}
        torch.optim.AdamW(block.parameters(), lr=0.1, **kind).step()
    with pytest.raises(RuntimeError, match=rf"'blocks\.1\..+' was written to.* on rank {rank}"):
        loss.backward()
    model.zero_grad()
    loss_of(model, tokens(rank, 0)).backward()


class Clamps(nn.Module):
    """A layer that edits its weight in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.bias, self.weight = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.edits = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.edits:
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
        return x @ self.weight + self.bias


@each_front
@pytest.mark.parametrize("grad", [True, False], ids=["train", "no_grad"])
@ranks(2)
def test_weights_edited_in_forward(rank, world_size, front, grad):
    layer = Clamps()
    model = shard(front, nn.Sequential(shard(front, layer), nn.Linear(WIDTH, WIDTH)))
    before = {name: value.clone() for name, value in full_state(model).items()}
    x = torch.randn(2, WIDTH)
    with (
        torch.set_grad_enabled(grad),
        pytest.raises(
            RuntimeError, match=rf"unit '0' wrote to the parameter '0\.weight' in place on rank {rank}"
        ),
    ):
        model(x)
    layer.edits = False
    model(x).sum().backward()
    assert all(torch.equal(value, before[name]) for name, value in full_state(model).items())


@each_front
@ranks(2)
def test_an_embedding_with_max_norm(rank, world_size, front):
    model = shard(front, nn.Sequential(nn.Embedding(6, WIDTH, max_norm=0.1)))
    with pytest.raises(RuntimeError, match=r"'0\.weight' in place on rank .*max_norm"):
        model(torch.arange(3))


@pytest.mark.parametrize("front", ["flat", "orig"])
@ranks(2)
def test_edits_of_what_every_rank_holds_whole_are_kept(rank, world_size, front):
    model = shard(front, Clamps(), sharding_strategy=ShardingStrategy.NO_SHARD)
    model(torch.randn(2, WIDTH)).sum().backward()
    assert full_state(model)["weight"].abs().max() <= 0.1
    assert not any(isinstance(param, DTensor) for param in model.parameters())


@ranks(2)
def test_tied_parameters_that_are_assigned_stay_tied(rank, world_size):
    """Both places get a parameter of their own by `assign=True`; what the first shows holds."""
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False))
    model[1].weight = model[0].weight
    shard("composable", model)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    model(torch.ones(2, WIDTH)).sum().backward()
    assert model[0].weight is model[1].weight and model[0].weight.grad is not None


@pytest.mark.parametrize("kept", [False, True], ids=["sharded", "kept"])
@ranks(2)
def test_what_a_module_inside_of_a_unit_gets_by_assignment_is_taken_over(rank, world_size, kept):
    model = fully_shard(nn.Sequential(nn.Linear(WIDTH, WIDTH)))
    model.set_reshard_after_backward(not kept)
    x = torch.ones(2, WIDTH)
    before = model(x)
    before.sum().backward()
    model[0].load_state_dict({name: 2 * value for name, value in model[0].state_dict().items()}, assign=True)
    torch.testing.assert_close(model(x), 2 * before)


def _new_layer(model: nn.Module) -> str:
    inner(inner(model).blocks[1]).mlp[0] = nn.Linear(32, 96)
    return "blocks.1.mlp.0.weight"


def _new_unit(model: nn.Module) -> str:
    inner(model).blocks[1] = Block()
    return "blocks.1.norm1.weight"


def _new_param(model: nn.Module) -> str:
    inner(inner(model).blocks[1]).norm2.gain = nn.Parameter(torch.ones(1))
    return "blocks.1.norm2.gain"


@each_front
@pytest.mark.parametrize("change", [_new_layer, _new_unit, _new_param])
@ranks(2)
def test_parameters_added_to_a_sharded_model(rank, world_size, front, change):
    """Nobody would average their gradients. Frozen ones have none, nor has an evaluation."""
    model, _ = training(front)
    loss_of(model, tokens(rank, 0)).backward()
    name = change(model)
    for _ in range(2):
        with pytest.raises(ValueError, match=rf"parameter '{name}' was added .* rank {rank}"):
            loss_of(model, tokens(rank, 0))
    with torch.no_grad():
        loss_of(model, tokens(rank, 0))
    for fqn, param in model.named_parameters():
        if "blocks.1." in fqn.replace("_fsdp_wrapped_module.", ""):
            param.requires_grad_(False)
    loss_of(model, tokens(rank, 0)).backward()


@each_front
@ranks(2)
def test_modules_that_are_put_around_others_after_sharding(rank, world_size, front):
    """As clients do for checkpointing; what has no parameters may come besides."""
    plain, model = twins(front, Transformer, auto_wrap_policy=WRAPPINGS["block"]())
    blocks, second = inner(model).blocks, inner(inner(model).blocks[1])
    expected = loss_of(plain, tokens(rank, 0))
    blocks[0], second.mlp, second.extra = (
        checkpoint_wrapper(blocks[0]),
        nn.Sequential(second.mlp),
        nn.Identity(),
    )
    loss = loss_of(model, tokens(rank, 0))
    loss.backward()
    torch.testing.assert_close(loss, expected)


@each_front
@ranks(2)
def test_gradients_from_before_sharding_are_dropped_with_a_warning(rank, world_size, front):
    torch.manual_seed(0)
    plain = Transformer()
    other = copy.deepcopy(plain)
    loss_of(other, tokens(rank, 7)).backward()
    with pytest.warns(
        UserWarning, match=r"gradients that \d+ parameters .* before sharding .* 'embed.weight'"
    ):
        model = shard(front, other, None)
    assert all(param.grad is None for param in model.parameters())
    for module in (DDP(plain), model):
        loss_of(module, tokens(rank, 0)).backward()
    grads = full_grads(model)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(grads[name], param.grad)
