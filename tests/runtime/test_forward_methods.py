"""Methods other than `forward`: they run with full parameters, on the wrapper and on the wrapped module."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bed import ranks
from bed.references import count_collectives
from fronts import FRONTS, full_state, shard
from fsdp_wrap import ShardingStrategy, register_fsdp_forward_method
from fsdp_wrap._runtime.unit import units_in
from fsdp_wrap.wrap import ModuleWrapPolicy

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
        """Greedy."""
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
    found = full_state(model)
    for name, expected in plain.state_dict().items():
        torch.testing.assert_close(found[name], expected, rtol=0, atol=1e-12)


def assert_sharded(model: nn.Module) -> None:
    for unit in units_in(model).values():
        assert unit.handle.state.name == "SHARDED" and not unit.handle.shows_full


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


@pytest.mark.parametrize("front", ["orig", "composable"])
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
            found = net.blocks[0].encode(x, scale=3.0)["code"]
        assert torch.equal(found, plain.blocks[0].encode(x, scale=3.0)["code"])
    assert_sharded(model)


@ranks(2)
def test_what_a_registered_method_looks_like_and_what_cannot_be_one(rank, world_size):
    model, plain = make_pair("orig")
    assert model.generate is model.module.generate
    assert inspect.signature(model.generate) == inspect.signature(plain.generate)
    assert model.generate.__name__ == "generate" and model.generate.__doc__ == "Greedy."
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
