"""Parameters that users or modules change behind training's back: refused by name, never ignored."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from bed import ranks
from bed.references import count_collectives
from fronts import each_front, either_front, full_grads, full_state, inner, local_numel, shard, twins
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import ShardingStrategy, StateDictType, iter_full_optim_state, iter_full_params
from models import WRAPPINGS, Block, Transformer, loss_of, tokens

WIDTH = 4
FQN = "norm1.weight"


class Training:
    def __init__(self, front: str, rank: int) -> None:
        _, self.model = twins(front, Transformer, auto_wrap_policy=WRAPPINGS["block"]())
        self.front, self.rank = front, rank
        self.block = inner(inner(self.model).blocks[1])
        self.module = self.block.norm1
        self.before = self.module.weight
        self.said = rf"'(blocks\.1\.)?{FQN}' was replaced by a Parameter of shape"

    def loss(self) -> torch.Tensor:
        return loss_of(self.model, tokens(self.rank, 0))

    def replace(self, like: torch.Tensor) -> None:
        self.module.weight = nn.Parameter(torch.full_like(like, 0.5))

    def put_back(self) -> None:
        self.module._parameters["weight"] = None if self.front == "flat" else self.before
        self.loss().backward()


@each_front
@ranks(2)
def test_a_parameter_put_in_the_place_of_a_sharded_one(rank, world_size, front):
    training, optimizer = Training(front, rank), torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    for shape in ((3,), (32,)):
        training.replace(torch.ones(shape))
        with pytest.raises(ValueError, match=training.said):
            training.loss()
        for use in (
            *(iter_full_params, lambda model: iter_full_optim_state(model, optimizer)),
            *((lambda model: model.state_dict(),) if front == "composable" else ()),
        ):
            with pytest.raises(ValueError, match=training.said):
                use(training.model)
        if front == "flat":
            del training.module.weight
            with pytest.raises(ValueError, match=rf"'blocks\.1\.{FQN}' was removed .* rank {rank}"):
                training.loss()
        training.put_back()


@pytest.mark.parametrize("front", ["flat", "orig"])
@ranks(2)
def test_states_and_summoning_do_not_drop_a_parameter_that_was_replaced(rank, world_size, front):
    training = Training(front, rank)
    model = training.model
    for trained in (False, True):
        for kind in StateDictType:
            with FSDP.state_dict_type(model, kind):
                saved = model.state_dict()
                training.replace(training.before)
                with count_collectives() as traffic:
                    for use in (model.state_dict, lambda saved=saved: model.load_state_dict(saved)):
                        with pytest.raises(RuntimeError, match=training.said) as raised:
                            use()
                        assert isinstance(raised.value, ValueError)
                assert not traffic, (kind, trained)
                training.module._parameters["weight"] = None if front == "flat" else training.before
                model.load_state_dict(saved)
        training.replace(training.before)
        with pytest.raises(RuntimeError, match=training.said) as raised:
            with FSDP.summon_full_params(model):
                raise AssertionError("the context was entered")
        assert isinstance(raised.value, ValueError)
        training.put_back()
    with FSDP.summon_full_params(model):
        training.replace(training.module.weight)
    training.loss().backward()
    assert full_state(model)[f"blocks.1.{FQN}"].eq(0.5).all(), "what is put there inside is kept"


@each_front
@ranks(2)
def test_parameters_written_between_forward_and_backward(rank, world_size, front):
    training = Training(front, rank)
    params = [*training.block.parameters()]
    param = next(candidate for candidate in params if local_numel(candidate))

    def step(**kind: Any) -> None:
        for weight in params:
            weight.grad = torch.ones_like(weight)
        torch.optim.AdamW(params, lr=0.1, **kind).step()

    def write() -> None:
        with torch.no_grad():
            param.mul_(2)

    def replace_data() -> None:
        param.data = param.data * 2

    # The first of AdamW's moves no counters. The data of a DTensor are not what is computed with.
    changes = [write, lambda: step(fused=True), lambda: step(foreach=False)]
    for change in changes if front == "composable" else [*changes, replace_data]:
        loss = training.loss()
        change()
        with pytest.raises(RuntimeError, match=rf"'blocks\.1\..+' was written to.* on rank {rank}"):
            loss.backward()
        training.model.zero_grad()
        training.loss().backward()
        training.model.zero_grad()


class Clamps(nn.Linear):
    edits = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.edits:
            with torch.no_grad():
                self.weight.clamp_(-0.1, 0.1)
        return super().forward(x)


@either_front
@ranks(2)
def test_weights_edited_in_forward(rank, world_size, front):
    layer = Clamps(WIDTH, WIDTH)
    model = shard(front, nn.Sequential(shard(front, layer), nn.Linear(WIDTH, WIDTH)))
    before = {name: value.clone() for name, value in full_state(model).items()}
    x = torch.randn(2, WIDTH)
    for grad in (True, False):
        layer.edits = True
        said = rf"unit '0' wrote to the parameter '0\.weight' in place on rank {rank}"
        with torch.set_grad_enabled(grad), pytest.raises(RuntimeError, match=said):
            model(x)
        layer.edits = False
        model(x).sum().backward()
        assert all(torch.equal(value, before[name]) for name, value in full_state(model).items())
    embedding = shard(front, nn.Sequential(nn.Embedding(6, WIDTH, max_norm=0.1)))
    with pytest.raises(RuntimeError, match=r"'0\.weight' in place on rank .*max_norm"):
        embedding(torch.arange(3))
    if front == "orig":
        whole = shard(front, Clamps(WIDTH, WIDTH), sharding_strategy=ShardingStrategy.NO_SHARD)
        whole(x).sum().backward()
        assert full_state(whole)["weight"].abs().max() <= 0.1, "what every rank holds is edited"


NEW: dict[str, tuple[str, str, Callable[[], Any]]] = {
    "blocks.1.mlp.0.weight": ("blocks.1.mlp", "0", lambda: nn.Linear(32, 96)),
    "blocks.1.norm1.weight": ("blocks", "1", Block),
    "blocks.1.norm2.gain": ("blocks.1.norm2", "gain", lambda: nn.Parameter(torch.ones(1))),
}


@either_front
@ranks(2)
def test_parameters_added_to_a_sharded_model(rank, world_size, front):
    """Nobody would average their gradients. Frozen ones have none, nor has an evaluation."""
    for name, (path, attribute, make) in NEW.items():
        training = Training(front, rank)
        training.loss().backward()
        module: Any = training.model
        for part in path.split("."):
            module = getattr(inner(module), part)
        setattr(module, attribute, make())
        for _ in range(2):
            with pytest.raises(ValueError, match=rf"parameter '{name}' was added .* rank {rank}"):
                training.loss()
        with torch.no_grad():
            training.loss()
        for fqn, param in training.model.named_parameters():
            if "blocks.1." in fqn.replace("_fsdp_wrapped_module.", ""):
                param.requires_grad_(False)
        training.loss().backward()


@either_front
@ranks(2)
def test_gradients_from_before_sharding_are_dropped_with_a_warning(rank, world_size, front):
    torch.manual_seed(0)
    plain = Transformer()
    other = copy.deepcopy(plain)
    loss_of(other, tokens(rank, 7)).backward()
    said = r"gradients that \d+ parameters .* before sharding .* 'embed.weight'"
    with pytest.warns(UserWarning, match=said):
        model = shard(front, other, None)
    assert all(param.grad is None for param in model.parameters())
    for module in (DDP(plain), model):
        loss_of(module, tokens(rank, 0)).backward()
    grads = full_grads(model)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(grads[name], param.grad)
