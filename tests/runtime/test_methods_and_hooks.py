"""Methods other than `forward`, which run with full parameters; hooks on sharded parameters."""

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.optim import _apply_optimizer_in_backward as apply_optimizer_in_backward

from bed import ranks
from bed.references import count_collectives
from fronts import (
    FRONTS,
    assert_sharded,
    assert_tensors,
    each_front,
    either_front,
    full,
    full_state,
    inner,
    local_numel,
    no_sync,
    shard,
    twins,
)
from fsdp_wrap import CPUOffload, ShardingStrategy, register_fsdp_forward_method
from fsdp_wrap._core.torch_private import hook_gradient
from fsdp_wrap.wrap import ModuleWrapPolicy
from models import WRAPPINGS, Block, Transformer, loss_of, tokens

WIDTH, VOCABULARY = 6, 11


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH)

    def encode(self, x: torch.Tensor, *, scale: float = 1.0) -> dict[str, torch.Tensor]:
        return {"code": torch.tanh(self.inner(x)) * scale}

    def forward(self, x):
        return x + self.outer(self.encode(x)["code"])


class Writer(nn.Module):
    """Continues sequences as language models do: its `generate` calls the model itself, step by step."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Encoder(), Encoder()])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens):
        x = self.embed(tokens).cumsum(1)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    @torch.no_grad()
    def generate(self, tokens: torch.Tensor) -> torch.Tensor:
        """Generates greedily."""
        for _ in range(3):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], 1)
        return tokens

    def score(self, tokens: torch.Tensor) -> list[torch.Tensor]:
        """Uses a child's method; its result has a graph."""
        x = self.blocks[0].encode(self.embed(tokens), scale=0.5)["code"]
        return [x.square().mean() + self.head.weight.square().mean()]

    def stream(self, tokens: torch.Tensor) -> Iterator[torch.Tensor]:
        yield self(tokens)

    async def later(self, tokens: torch.Tensor) -> torch.Tensor:
        return self(tokens)


def make_pair(front: str, **options: Any) -> tuple[Any, Writer]:
    torch.manual_seed(0)
    plain = Writer().double()
    model = shard(front, copy.deepcopy(plain), ModuleWrapPolicy({Encoder}), **options)
    for name in ("generate", "score"):
        register_fsdp_forward_method(model, name)
    model.blocks[0].register_forward_method("encode")
    return model, plain


def tokens_of(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, VOCABULARY, (dist.get_world_size(), 2, 3), generator=generator)


def assert_trains_like(model: nn.Module, plain: Writer) -> None:
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in (model, plain)]
    for step in range(3):
        batches = tokens_of(step)
        for net, optimizer in zip((model, plain), optimizers):
            batch = batches[dist.get_rank()] if net is model else batches.flatten(0, 1)
            optimizer.zero_grad()
            if step != 1:
                net(batch).square().mean().backward()
            if step != 0:
                net.score(batch)[0].backward()
            optimizer.step()
        assert torch.equal(model.generate(batches[0]), plain.generate(batches[0]))
    assert_tensors(full_state(model), plain.state_dict(), rtol=0, atol=1e-12)


CASES = [(front, "FULL_SHARD") for front in FRONTS]
CASES += [("orig", "SHARD_GRAD_OP"), ("orig", "NO_SHARD"), ("composable", "SHARD_GRAD_OP")]


@pytest.mark.parametrize(("front", "strategy"), CASES)
@ranks(2)
def test_training_and_generating(rank, world_size, front, strategy):
    model, plain = make_pair(front, sharding_strategy=ShardingStrategy[strategy])
    with pytest.raises(TypeError, match="nonsense"):
        model.generate(tokens_of(0)[0], nonsense=True)
    with pytest.raises(IndexError):
        model.generate(tokens_of(0)[0] + VOCABULARY)
    assert_trains_like(model, plain)  # also after an exception inside
    assert_sharded(model)


@either_front
@ranks(2)
def test_what_a_call_gathers(rank, world_size, front):
    model, plain = make_pair(front)
    batch = tokens_of(0)[0]
    with count_collectives() as counts:
        model.generate(batch)
    gathers = sum(calls for name, (calls, _) in counts.items() if "gather" in name)
    assert gathers == 1 + 3 * 2  # the root once, each block in every step
    x = torch.ones(2, WIDTH, dtype=torch.float64)
    for net in (model, getattr(model, "module", model)):
        with torch.no_grad():
            code = net.blocks[0].encode(x, scale=3.0)["code"]
        assert torch.equal(code, plain.blocks[0].encode(x, scale=3.0)["code"])
    assert_sharded(model)


@ranks(2)
def test_what_a_registered_method_looks_like_and_what_cannot_be_one(rank, world_size):
    model, plain = make_pair("orig")
    assert model.generate is model.module.generate
    assert inspect.signature(model.generate) == inspect.signature(plain.generate)
    assert model.generate.__name__ == "generate" and model.generate.__doc__ == "Generates greedily."
    before = model.generate
    register_fsdp_forward_method(model, "generate")
    assert model.generate is before
    register_fsdp_forward_method(plain, "generate")
    assert plain.generate.__func__ is Writer.generate  # not wrapped: left as it is
    assert set(model.state_dict()) == set(plain.state_dict())
    for name, said in {
        "absent": "Writer has no method 'absent'",
        "head": "Writer has no method 'head'",
        "forward": "'forward' is a method of FullyShardedDataParallel itself.*Writer",
        "state_dict": "'state_dict' is a method of FullyShardedDataParallel itself",
        "stream": "Writer.stream is a generator or coroutine",
        "later": "Writer.later is a generator or coroutine",
    }.items():
        with pytest.raises(ValueError, match=said):
            register_fsdp_forward_method(model, name)
        assert name not in vars(model.module)


# hooks that users put on sharded parameters: optimizers in backward, and what is refused


def transformer(front: str, **options: Any) -> Any:
    return twins(front, Transformer, auto_wrap_policy=WRAPPINGS["block"](), **options)[1]


def held(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if local_numel(param)]


def step_in_backward(model: nn.Module) -> list[Any]:
    optimizers = {param: torch.optim.AdamW([param], lr=0.01) for param in held(model)}

    def step(param: nn.Parameter) -> None:
        optimizers[param].step()
        optimizers[param].zero_grad()

    return [param.register_post_accumulate_grad_hook(step) for param in optimizers]


def assert_trains_as(usual: nn.Module, model: nn.Module, rank: int, part: Any = inner) -> None:
    optimizer = torch.optim.AdamW(part(usual).parameters(), lr=0.01)
    for step in range(3):
        optimizer.zero_grad()
        losses = [loss_of(net, tokens(rank, step)) for net in (model, usual)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        optimizer.step()
        assert all(param.grad is None for param in part(model).parameters())
    assert_same_state(model, full_state(usual))


def assert_same_state(model: nn.Module, expected: dict[str, torch.Tensor], same: bool = True) -> None:
    state = full_state(model)
    assert all(torch.equal(state[name], expected[name]) for name in expected) is same


@each_front
@ranks(2)
def test_an_optimizer_in_backward_trains_as_one_after_it(rank, world_size, front):
    """With a hook of the user's, or as torch applies it: a FlatParameter takes none of these."""
    for offload in (False, True):
        usual, model = (transformer(front, cpu_offload=CPUOffload(offload)) for _ in range(2))
        handles = step_in_backward(model)
        assert_trains_as(usual, model, rank)
        for handle in handles:  # else hooks hold their parameters for ever: garbage collection is blind
            handle.remove()
    for register_hook in (False, True):
        usual, model = transformer(front), transformer(front)
        params = model.parameters()
        apply_optimizer_in_backward(torch.optim.AdamW, params, {"lr": 0.01}, register_hook=register_hook)
        if front == "flat":
            words = "FlatParameter of .* only supported with use_orig_params=True"
            with pytest.raises(RuntimeError, match=words):
                loss_of(model, tokens(rank, 0))
        else:
            assert_trains_as(usual, model, rank)


@each_front
@ranks(2)
def test_optimizers_of_before_sharding(rank, world_size, front):
    """They train the same where the Parameter objects stay; elsewhere they would train nothing."""
    policy = WRAPPINGS["block"]()
    cure = {"flat": "use_orig_params=True", "composable": "after fully_shard", "orig": ""}[front]
    rule = r"'(blocks\.1\.)?\w+\.\w+.*' has an optimizer .* would train nothing.*"
    for register_hook in (False, True):
        usual = transformer(front)
        torch.manual_seed(0)
        model: Any = Transformer()
        inside = model.blocks[1].parameters()
        apply_optimizer_in_backward(torch.optim.AdamW, inside, {"lr": 0.01}, register_hook=register_hook)
        if cure:
            with pytest.raises(ValueError, match=rule + cure):
                shard(front, model, policy)
            assert type(model) is Transformer and model(tokens(rank, 0)) is not None
            continue
        model = shard(front, model, policy)
        assert_trains_as(usual, model, rank, lambda net: inner(net).blocks[1])
    model = Transformer()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    wrapped = shard(front, model, policy)
    before = {name: value.clone() for name, value in full_state(wrapped).items()}
    loss_of(wrapped, tokens(rank, 0)).backward()
    if front != "orig":
        words = rf"SGD was made before .* '.+' .*rank {rank}.* after sharding"
        with pytest.raises(RuntimeError, match=words):
            optimizer.step()
        assert_same_state(wrapped, before)
        left = optimizer.param_groups[0]["params"][-1]
        mixed = torch.optim.AdamW([{"params": [*wrapped.parameters()]}, {"params": [left]}])
        with pytest.raises(RuntimeError, match=r"AdamW was made before"):
            mixed.step()
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    optimizer.step()
    assert_same_state(wrapped, before, same=False)


@ranks(2)
def test_gradient_hooks_that_are_refused(rank, world_size):
    """Hooks from before sharding, and hooks that would run before the gradient has come."""
    for front in FRONTS:
        for register in ("register_hook", "register_post_accumulate_grad_hook"):
            plain = Transformer()
            handle = getattr(plain.blocks[1].norm1.weight, register)(lambda _: None)
            words = "norm1.weight' has gradient hooks, .* sharded parameters after it"
            with pytest.raises(ValueError, match=words):
                shard(front, plain, WRAPPINGS["block"]())
            handle.remove()
        model = transformer(front)
        param = next(iter(held(inner(model).blocks[1])))
        if front == "flat":
            with pytest.raises(ValueError, match=r"register_hook on .* register_post_accumulate_grad_hook"):
                param.register_hook(lambda grad: None)
        else:
            handle = param.register_hook(lambda grad: None)
            rule = r"register_hook on .*blocks\.1\..* register_post_accumulate_grad_hook"
            with pytest.raises(ValueError, match=rf"rank {rank}: {rule}"):
                loss_of(model, tokens(rank, 0))
            handle.remove()
        loss_of(model, tokens(rank, 0)).backward()


class Some(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.idle = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor, rank: int) -> torch.Tensor:
        return (self.used * x).sum() if rank == 0 else (self.used * 0).sum()


def tied_and_frozen() -> nn.Module:
    block = Block()
    model = nn.Sequential(block, Block(), block)
    model[1].requires_grad_(False)
    return model


@each_front
@ranks(2)
def test_a_hook_sees_what_was_reduced_once(rank, world_size, front):
    """Not before, under `no_sync`; not after its handle was removed; tied ones call it once."""
    _, model = twins(front, tied_and_frozen, torch.float64, auto_wrap_policy=ModuleWrapPolicy({Block}))
    seen: list[tuple[nn.Parameter, torch.Tensor]] = []
    trained = [param for param in held(model) if param.requires_grad]
    handles = [
        param.register_post_accumulate_grad_hook(lambda leaf: seen.append((leaf, leaf.grad.clone())))
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

    model = shard(front, Some())
    called: list[nn.Parameter] = []
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(called.append)
    model(torch.ones(4), rank).backward()
    holds = front == "flat" or any(param is inner(model).used for param in held(model))
    idle = getattr(inner(model), "idle", None)
    assert len(called) == holds and all(param is not idle for param in called), "of what no rank uses"


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("make", [lambda leaf: leaf * 3, lambda leaf: leaf, lambda leaf: leaf.view(2)])
def test_hooks_on_gradients_are_those_of_register_hook(make, alone):
    """The first ones or after a user's, and where one replaces the gradient, of results and leaves."""

    def seen_by(way: Any) -> list[float]:
        seen: list[float] = []
        leaf = torch.ones(2, requires_grad=True)
        tensor = make(leaf)
        if not alone:
            tensor.register_hook(lambda grad: seen.append(grad.sum().item()))
        way(tensor, lambda grad: grad * 5)
        way(tensor, lambda grad: seen.append(grad.sum().item()))
        tensor.register_hook(lambda grad: seen.append(2 * grad.sum().item()))
        (tensor * 7).sum().backward()
        assert leaf.grad is not None
        return [*seen, *leaf.grad.tolist()]

    ours = seen_by(hook_gradient)
    assert ours == seen_by(torch.Tensor.register_hook)
    assert ours[:-2] == [14, 70, 140][alone:]
