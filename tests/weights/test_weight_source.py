"""`weight_source`: full tensors under an engine's names, within a budget."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from bed import ranks
from bed.memory import live_bytes
from fronts import ONE, SIDE, either_front, full_state, shard
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import ShardingStrategy, fully_shard, weight_source
from fsdp_wrap._state.full_values import FullValue
from fsdp_wrap.wrap import ModuleWrapPolicy

WIDTH = 6


ROWS = {"q_proj": WIDTH, "k_proj": 2, "v_proj": 2, "o_proj": WIDTH}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = {name: nn.Linear(WIDTH, rows, bias=name != "o_proj") for name, rows in ROWS.items()}
        self.attn = nn.ModuleDict(layers)
        self.experts = nn.ModuleList(nn.Linear(WIDTH, 5, bias=False) for _ in range(3))
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        q, k, v = (self.attn[name](x) for name in ("q_proj", "k_proj", "v_proj"))
        x = x + self.attn["o_proj"](q * k.sum(-1, True) + v.sum(-1, True))
        return self.norm(x + sum(expert(x).sum(-1, True) for expert in self.experts))


class Net(nn.Module):
    """Embedding and head are tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH, bias=False)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


POLICY = ModuleWrapPolicy({Block})
QKV = {"qkv_proj": ("q_proj", "k_proj", "v_proj")}
STACK = {"w1": "experts.*"}


def trained(front: str, **options: Any) -> tuple[nn.Module, nn.Module]:
    """A sharded model after a step, and a plain one with its values."""
    torch.manual_seed(0)
    plain = Net().double()
    model = shard(front, copy.deepcopy(plain), POLICY, **options)
    step(model)
    full = {name: value.clone() for name, value in full_state(model).items()}
    plain.load_state_dict(full)
    return model, plain


def step(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.randn(4, WIDTH, dtype=torch.float64)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert [*actual] == [*expected]
    for name, value in expected.items():
        assert torch.equal(actual[name], value.detach()), name


@either_front
@ranks(2)
def test_full_tensors_under_plain_names(rank, world_size, front):
    model, plain = trained(front)
    source = weight_source(model)
    same(dict(source), {**dict(plain.named_parameters()), **dict(plain.named_buffers())})
    assert "blocks.0.norm.running_mean" in dict(source)
    for name, _ in source:
        if rank == 0 and "k_proj" in name:
            break  # which leaves a usable model
    step(model)
    now = full_state(model)
    assert all(torch.equal(value, now[name]) for name, value in source), "it gives the values of now"
    same(dict(source), dict(source))

    joined = weight_source(model, "model.{}".format, fuse=QKV | STACK, dtype=torch.bfloat16, buffers=True)
    described = [(name, value.dtype, tuple(value.shape)) for name, value in joined]
    assert [tuple(meta) for meta in joined.metadata()] == described
    assert len(joined) == len(described) and described[0][0] == "model.embed.weight"
    kept = dict(weight_source(model, fuse=QKV, rank0_only=True))
    assert kept["blocks.0.attn.qkv_proj.weight"].shape == (WIDTH + 4, WIDTH)
    if rank == 0:
        assert torch.equal(kept["embed.weight"], now["embed.weight"])
    else:
        assert all(value.is_meta for value in kept.values())


@pytest.mark.parametrize(("front", "dtype"), [("orig", None), ("composable", torch.bfloat16)])
@ranks(2)
def test_joined_tensors(rank, world_size, front, dtype):
    model, plain = trained(front)
    exported = dict(weight_source(model, fuse=QKV | STACK, dtype=dtype, buffers=False))
    expected = {"embed.weight": plain.embed.weight}
    for index, block in enumerate(plain.blocks):
        parts = [block.attn.q_proj, block.attn.k_proj, block.attn.v_proj]
        attn = f"blocks.{index}.attn"
        expected[f"{attn}.qkv_proj.weight"] = torch.cat([part.weight for part in parts])
        expected[f"{attn}.qkv_proj.bias"] = torch.cat([part.bias for part in parts])
        expected[f"{attn}.o_proj.weight"] = block.attn.o_proj.weight
        expected[f"blocks.{index}.w1.weight"] = torch.stack([expert.weight for expert in block.experts])
        expected |= {f"blocks.{index}.norm.{name}": value for name, value in block.norm.named_parameters()}
    same(exported, {name: value.to(dtype or torch.float64) for name, value in expected.items()})
    exported = dict(weight_source(model, dtype=torch.bfloat16, adapters="apart"))
    plain = plain.to(torch.bfloat16)
    same(exported, {**dict(plain.named_parameters()), **dict(plain.named_buffers())})  # buffers too


@ranks(2)
def test_what_is_joined_may_be_stacked(rank, world_size):
    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Sequential() for _ in range(2)))
    for layer in plain:
        layer.gate, layer.up = nn.Linear(3, 4), nn.Linear(3, 4)
    model = fully_shard(copy.deepcopy(plain))
    exported = dict(weight_source(model, fuse={"w13": ("gate", "up"), "experts.w13": "*.w13"}))
    pairs = [torch.cat([layer.gate.weight, layer.up.weight]) for layer in plain]
    assert [*exported] == ["experts.w13.weight", "experts.w13.bias"]
    assert torch.equal(exported["experts.w13.weight"], torch.stack(pairs))


@ranks(4)
def test_replicas_and_tensor_parallelism(rank, world_size):
    for strategy in (ShardingStrategy.HYBRID_SHARD, ShardingStrategy.NO_SHARD):
        mesh = init_device_mesh("cpu", (2, 2)) if strategy is ShardingStrategy.HYBRID_SHARD else None
        model, plain = trained("orig", sharding_strategy=strategy, device_mesh=mesh)
        same(dict(weight_source(model, buffers=False)), dict(plain.named_parameters()))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = copy.deepcopy(plain)
    for block in model.blocks:
        parallelize_module(block.attn.q_proj, mesh["tp"], ColwiseParallel())
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    exported = dict(weight_source(model, fuse=QKV))
    parts = [plain.blocks[1].attn.q_proj, plain.blocks[1].attn.k_proj, plain.blocks[1].attn.v_proj]
    assert torch.equal(exported["blocks.1.attn.qkv_proj.weight"], torch.cat([part.weight for part in parts]))


@either_front
@ranks(2)
def test_memory_stays_within_the_budget(rank, world_size, front):
    net = nn.Sequential(*(nn.Sequential() for _ in range(6)))
    for layer in net:
        layer.a, layer.b = nn.Linear(SIDE, SIDE, bias=False), nn.Linear(SIDE, SIDE, bias=False)
    own = {*net.children()}
    model = shard(front, net, lambda module, recurse, nonwrapped_numel: recurse or module in own)
    at_rest, most = live_bytes(), 0
    for _, value in weight_source(model, fuse={"ab": ("a", "b")}, budget=7 * ONE):
        most = max(most, live_bytes() - at_rest)
        assert value.shape == (2 * SIDE, SIDE)
    assert 2 * ONE <= most <= 7 * ONE


@ranks(2)
def test_what_does_not_fit_is_refused_by_name(rank, world_size):
    model, _ = trained("orig")
    cases: dict[str, dict[str, Any]] = {
        "fits no parameter": {"fuse": {"qkv": ("query", "key")}},
        "and no 'blocks.0.attn.o_proj.bias'": {"fuse": {"qo": ("q_proj", "o_proj")}},
        "must have one `*`": {"fuse": {"w1": "experts.w1"}},
        "must name two or more parts": {"fuse": {"w1": ("up",)}},
        "rename makes 'same' of both 'embed.weight' and": {"rename": lambda name: "same"},
        "budget must be positive": {"budget": 0},
        "budget must look like": {"budget": "a lot"},
        "must be 'merge' or 'apart'": {"adapters": "never"},
        "must be a floating-point type": {"dtype": torch.int8},
    }
    for words, options in cases.items():
        with pytest.raises(ValueError, match=words.replace("*", r"\*")):
            weight_source(model, **options)
    for options in ({"rename": 3}, {"budget": 1.5}, {"fuse": ["q"]}, {"rename": lambda name: None}):
        with pytest.raises(TypeError):
            weight_source(model, **options)
    with FSDP.summon_full_params(model), pytest.raises(RuntimeError, match="weight_source"):
        weight_source(model)
    step(model)
    net, numbered = nn.Module(), nn.Module()
    net.up, net.down = nn.Linear(4, 3), nn.Linear(5, 3)
    with pytest.raises(ValueError, match=r"'down.weight' \(torch.float32, \(3, 5\)\) does not fit"):
        weight_source(fully_shard(net), fuse={"both": ("up", "down")})
    numbered.experts = nn.ModuleDict({"0": nn.Linear(2, 2), "2": nn.Linear(2, 2)})
    with pytest.raises(ValueError, match="the numbers must be 0 to 1, and are 0, 2"):
        weight_source(fully_shard(numbered), fuse={"w": "experts.*"})


@ranks(2)
def test_many_small_parameters_take_time_in_proportion(rank, world_size):
    """Each is looked at a few times while they are put together for their gathers, however many there are."""
    count = 300
    layer = nn.Linear(2, 2)
    layer.many = nn.ParameterList(nn.Parameter(torch.zeros(2)) for _ in range(count))
    model = fully_shard(layer)
    source, sizes = weight_source(model), mock.Mock(side_effect=FullValue.nbytes.fget)
    with mock.patch.object(FullValue, "nbytes", property(lambda value: sizes(value))):
        assert len(dict(source)) == count + 2
    assert sizes.call_count <= 8 * count
