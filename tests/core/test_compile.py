"""`torch.compile` inside and outside of wrapped blocks: eager's numbers, few breaks, no recompilation."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo as dynamo
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as DDP

import bed
from bed import ranks
from fronts import full
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import ShardingStrategy, fully_shard
from fsdp_wrap.wrap import ModuleWrapPolicy
from models import Block, Transformer, tokens, train


@pytest.fixture(scope="module", autouse=True)
def ranks_of_its_own() -> Iterator[None]:
    """Ends the ranks after these tests: what the compiler caches would slow all later ones."""
    yield
    bed.shutdown()


class Unrolled(Transformer):
    """A transformer without a loop: dynamo gives up a frame whose graph breaks inside of one."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.embed(tokens)) * 2.0
        x = self.blocks[1](x) * 0.5
        return self.head(self.norm(self.blocks[2](x)))


WRAPPED_BLOCK = "_fsdp_wrapped_module.blocks.1._fsdp_wrapped_module"

WAYS = {
    "blocks-then-wrapped": False,
    "compiled-blocks-by-policy": False,
    "blocks-in-place": True,
    "wrapped-blocks": True,
    "whole-then-wrapped": False,
    "wrapped-whole": True,
    "whole-by-calls": True,
}
"""Each compiled before or after sharding; the last by `fully_shard`, others with this `use_orig_params`."""
FAST = ("compiled-blocks-by-policy", "wrapped-whole")


def _compile(module: nn.Module, backend: str) -> Any:
    return torch.compile(module, backend=backend)


def _prepared(way: str, model: nn.Module, backend: str, **options: Any) -> tuple[nn.Module, nn.Module]:
    if way == "whole-by-calls":
        for module in (*model.blocks, model):
            fully_shard(module)
        return model, _compile(model, backend)
    options = {"use_orig_params": WAYS[way], **options}
    for index, block in enumerate(model.blocks):
        if way == "blocks-then-wrapped":
            model.blocks[index] = FSDP(_compile(block, backend), **options)
        elif way == "compiled-blocks-by-policy":
            model.blocks[index] = _compile(block, backend)
        elif way == "wrapped-blocks":
            model.blocks[index] = _compile(FSDP(block, **options), backend)
        elif way == "blocks-in-place":
            block.compile(backend=backend)
    if way == "whole-then-wrapped":
        model = _compile(model, backend)
    policy = None if way in ("blocks-then-wrapped", "wrapped-blocks") else ModuleWrapPolicy({Block})
    wrapped = FSDP(model, auto_wrap_policy=policy, **options)
    return wrapped, _compile(wrapped, backend) if way == "wrapped-whole" else wrapped


def _check_against_eager(way: str, backend: str, rank: int, **options) -> None:
    """Trains compiled and, by DDP, in eager mode; nothing is compiled after the second step."""
    _forget()
    torch.manual_seed(0)
    plain = Unrolled().double()  # in fp32 AdamW makes rounding errors of small gradients large
    model, called = _prepared(way, copy.deepcopy(plain), backend, **options)
    ddp = DDP(plain)
    optimizer, reference = (torch.optim.AdamW(net.parameters(), lr=1e-2) for net in (model, ddp))
    for step in range(4):
        if step == 2:
            compiled = _compiled()
            assert compiled > 0
        losses = train(called, optimizer, rank, range(step, step + 1))
        expected = train(ddp, reference, rank, range(step, step + 1))
        assert losses == pytest.approx(expected, rel=0, abs=1e-5)
    assert _compiled() == compiled, "a later step compiled again"
    state = {name.replace("_orig_mod.", ""): full(value) for name, value in model.state_dict().items()}
    for name, param in plain.named_parameters():
        if not name.endswith("attention.in_proj_bias"):  # AdamW blows up its gradient of nearly zero
            torch.testing.assert_close(state[name], param.detach(), rtol=0, atol=1e-5)


def _forget() -> None:
    dynamo.reset()
    counters.clear()


def _compiled() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=() if way in FAST else pytest.mark.slow) for way in WAYS]
)
@ranks(2)
def test_compiled_training_equals_eager(rank, world_size, way):
    _check_against_eager(way, "aot_eager", rank)


@pytest.mark.slow
@ranks(2, timeout=300)
def test_training_with_inductor_equals_eager(rank, world_size):
    for way in ("blocks-in-place", "whole-by-calls"):
        _check_against_eager(way, "inductor", rank)


@pytest.mark.slow
@ranks(4, timeout=300)
def test_inductor_at_four_ranks(rank, world_size):
    options = {"sharding_strategy": ShardingStrategy.HYBRID_SHARD, "use_orig_params": True}
    mesh = init_device_mesh("cpu", (2, 2))
    _check_against_eager("wrapped-whole", "inductor", rank, device_mesh=mesh, **options)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["SHARD_GRAD_OP", "NO_SHARD"])
@ranks(2)
def test_compiled_training_in_other_strategies(rank, world_size, strategy):
    options = {"sharding_strategy": ShardingStrategy[strategy], "forward_prefetch": True}
    _check_against_eager("wrapped-whole", "aot_eager", rank, **options)


class Sliced(nn.Module):
    """Runs a part of its layers, as decoders of Hugging Face do: a slice is a new module."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:2]:
            x = layer(x)
        return x


@ranks(1)
def test_sharding_a_model_breaks_no_graph_of_another(rank, world_size):
    """Nor one of its own blocks, which are compiled in place."""
    FSDP(nn.Linear(2, 2))
    fully_shard(nn.Linear(2, 2))
    other, block, x = Sliced(), Sliced(), torch.randn(2, 4)
    plain = copy.deepcopy(block)
    for module, called, reference in (
        (other, other, copy.deepcopy(other)),
        (block, fully_shard(nn.Sequential(block)), plain),
    ):
        _forget()
        module.compile(fullgraph=True, backend="eager")
        assert torch.equal(called(x), reference(x))
        assert _compiled() == 1 and not counters["graph_break"]


@pytest.mark.slow
@ranks(2)
def test_one_graph_break_per_unit(rank, world_size):
    """All blocks run the same graph, which no break cuts; the root's module is cut into four."""
    for way, breaks, graphs in (("blocks-in-place", 0, 1), ("wrapped-whole", 4, 1 + 4)):
        _forget()
        wrapped, called = _prepared(way, Unrolled(), "aot_eager")
        train(called, torch.optim.AdamW(wrapped.parameters(), lr=1e-2), rank, range(3))
        counted = sum(counters["graph_break"].values())
        assert (counted, _compiled()) == (breaks, graphs), counters["graph_break"]


@pytest.mark.slow
@ranks(2)
def test_graphs_follow_what_trains_and_evaluation(rank, world_size):
    _forget()
    torch.manual_seed(0)
    plain = Unrolled()
    wrapped, called = _prepared("wrapped-whole", copy.deepcopy(plain), "aot_eager")
    for trains in (True, False, True):
        plain.blocks[1].requires_grad_(trains)
        wrapped.get_submodule(WRAPPED_BLOCK).requires_grad_(trains)
        ddp = DDP(plain)  # asks only now what trains
        reference, optimizer = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (ddp, wrapped))
        for step in range(2):
            losses = train(called, optimizer, rank, range(step, step + 1))
            assert losses == pytest.approx(train(ddp, reference, rank, range(step, step + 1)), abs=1e-5)
            with torch.no_grad():
                torch.testing.assert_close(called(tokens(rank, 9)), ddp(tokens(rank, 9)), rtol=0, atol=1e-5)
            if step == 0:
                compiled = _compiled()
        assert _compiled() == compiled
