"""Compressed gathers and reductions, against rounding by hand, and against training without them."""

from __future__ import annotations

import copy
import math
import time
from collections import OrderedDict
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from bed import ranks
from bed.memory import Peak, only_new_objects
from bed.references import count_collectives
from fronts import assert_tensors, either_front, full_grads, full_state, inner, no_sync, shard, twins
from fsdp_wrap import CPUOffload, MixedPrecision, ShardingStrategy, comm_hooks, fully_shard
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap._compression.codecs import CODECS, ExactTail
from fsdp_wrap.comm_hooks import compress
from fsdp_wrap.sharded_grad_scaler import ShardedGradScaler
from fsdp_wrap.wrap import ModuleWrapPolicy
from models import WRAPPINGS, Transformer, gather_objects, loss_of, tokens
from partly_used import Partly, Wide, assert_small_gradients_count

LEVELS = {"int8": 127, "int4": 7}
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def through(codec: Any, values: torch.Tensor) -> torch.Tensor:
    encoded = torch.full((codec.nbytes(values.numel(), values.dtype),), 255, dtype=torch.uint8)
    again = encoded.clone()
    codec.encode(values, encoded)
    codec.encode(values, again)
    assert torch.equal(encoded, again)
    result = torch.full_like(values, 7)
    for target, value in codec.decoded(encoded, result):
        target.copy_(value)
    return result


def samples(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Blocks of 128 of very different sizes, some all zeros, some with one large number."""
    generator = torch.Generator().manual_seed(numel)
    values = torch.randn(-(-numel // 128), 128, generator=generator, dtype=torch.float64)
    smallest = math.log10(torch.finfo(dtype).tiny)
    values *= 10 ** torch.empty(len(values), 1).uniform_(0.8 * smallest, 3, generator=generator)
    values[::5] = 0
    values[1::5, 17] *= 20
    return values.flatten()[:numel].to(dtype)


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", LEVELS)
def test_blocks_come_back_within_half_of_their_scale(name, dtype):
    for numel in (1, 127, 128, 129, 1029, (1 << 17) + 300):
        assert_within_half_a_scale(name, numel, dtype)
    if dtype is torch.float32:  # below and near the ends of the range
        tiny, largest = torch.finfo(dtype).tiny, torch.finfo(dtype).max
        assert (through(CODECS[name], torch.full((128,), 1e-44)).abs() <= tiny).all()
        ends = torch.tensor([largest / 2, -largest / 2, 0.0])
        torch.testing.assert_close(through(CODECS[name], ends), ends)


def assert_within_half_a_scale(name: str, numel: int, dtype: torch.dtype) -> None:
    values, codec = samples(numel, dtype), CODECS[name]
    decoded = through(codec, values)
    wide = torch.promote_types(dtype, torch.float32)
    for block, result in zip(values.split(128), decoded.split(128)):
        scale = block.abs().max().to(torch.float64) / LEVELS[name]
        error = (result.to(torch.float64) - block.to(torch.float64)).abs()
        rounding = torch.finfo(dtype).eps * block.abs().max() + 2 * torch.finfo(wide).tiny
        assert (error <= scale / 2 * (1 + 1e-5) + rounding).all()
        assert result.unique().numel() <= 2 * LEVELS[name] + 1
    scales = -(-numel // 128) * wide.itemsize
    codes = -(-numel // 128) * {"int8": 128, "int4": 64}[name]
    assert codec.nbytes(numel, dtype) == -(-(scales + codes) // 8) * 8


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_what_is_not_finite_is_not_hidden_and_a_tail_stays_exact(dtype):
    values = torch.randn(5 * 128).to(dtype)
    values[130], values[300], values[301], values[512] = math.nan, math.inf, -1, -math.inf
    for name, codec in CODECS.items():
        finite = through(codec, values).isfinite()
        if name == "bf16":
            assert torch.equal(finite, values.isfinite())
        else:
            assert [bool(block.any()) for block in finite.split(128)] == [True, False, False, True, False]
            assert finite[:128].all() and finite[3 * 128 : 4 * 128].all()
    values = torch.cat([torch.randn(1000) * 1e4, torch.tensor([0.0, 1.25, 3.0])]).to(dtype)
    decoded = through(ExactTail(CODECS["int4"], 3), values)
    assert torch.equal(decoded[-3:], values[-3:]) and not torch.equal(decoded, values)
    assert torch.equal(decoded[:-3], through(CODECS["int4"], values[:-3]))


@pytest.mark.slow
@pytest.mark.parametrize("name", CODECS)
def test_little_memory_beside_the_bytes(name):
    codec = CODECS[name]
    with only_new_objects(), Peak(suspect=math.inf) as peak:
        values = torch.randn(1 << 22)
        encoded = torch.empty(codec.nbytes(values.numel(), values.dtype), dtype=torch.uint8)
        codec.encode(values, encoded)
        for target, value in codec.decoded(encoded, values):
            target.copy_(value)
    assert peak.value < values.nbytes + encoded.nbytes + values.nbytes / 10


def net() -> nn.Module:
    return nn.Sequential(OrderedDict(first=nn.Linear(64, 48), relu=nn.ReLU(), second=nn.Linear(48, 70)))


def pack(front: str, world_size: int, values: list[torch.Tensor]) -> torch.Tensor:
    """All ranks' parts of a unit's parameters, as rows of one matrix."""
    if front != "composable":
        flat = torch.cat([padded(value.flatten(), 4) for value in values])
        flat = flat[: flat.numel() - (-values[-1].numel()) % 4]
        return padded(flat, world_size).view(world_size, -1)
    rows = []
    for value in values:
        chunks = [chunk.flatten() for chunk in value.chunk(world_size)]
        width = -(-chunks[0].numel() // 4) * 4
        parts = [torch.cat([chunk, chunk.new_zeros(width - chunk.numel())]) for chunk in chunks]
        rows.append(torch.stack([*parts, *[torch.zeros(width)] * (world_size - len(parts))]))
    return torch.cat(rows, dim=1)


def padded(flat: torch.Tensor, multiple: int) -> torch.Tensor:
    return torch.cat([flat, flat.new_zeros(-flat.numel() % multiple)])


def rounded(part: torch.Tensor, levels: int) -> torch.Tensor:
    blocks = []
    for block in part.split(128):
        scale = block.abs().max() / levels
        blocks.append(block if scale == 0 else (block / scale).round() * scale)
    return torch.cat(blocks)


def nbytes(numel: int, per_block: int) -> int:
    return -(-(-(-numel // 128) * per_block) // 8) * 8


@either_front
@ranks(2, 3)
def test_a_step_equals_rounding_by_hand(rank, world_size, front):
    """Parameters that modules compute with, bit for bit; gradients; the bytes on the wire."""
    plain, model = twins(front, net)
    exact = copy.deepcopy(plain.state_dict())
    compress(model, gathers="int8", reductions="int4")
    by_hand, seen = partial(pack, front, world_size), {}
    names = [name for name, _ in plain.named_parameters()]

    def look(layer: str, module: nn.Module, _: Any) -> None:
        seen.update(
            {f"{layer}.{kind}": getattr(module, kind).detach().clone() for kind in ("weight", "bias")}
        )

    for layer in ("first", "second"):
        inner(model).get_submodule(layer).register_forward_pre_hook(partial(look, layer))
    inputs = [torch.randn(5, 64, generator=torch.Generator().manual_seed(r)) for r in range(world_size)]
    with count_collectives() as traffic:
        model(inputs[rank]).pow(2).sum().backward()

    rows = by_hand([exact[name] for name in names])
    assert torch.equal(
        by_hand([seen[name] for name in names]), torch.stack([rounded(row, 127) for row in rows])
    )
    plain.load_state_dict(seen)
    by_rank = []
    for x in inputs:
        grads = torch.autograd.grad(plain(x).pow(2).sum(), list(plain.parameters()))
        by_rank.append(by_hand([grad * (1 / world_size) for grad in grads]))
    expected = torch.stack(
        [
            sum(grads[owner] if r == owner else rounded(grads[owner], 7) for r, grads in enumerate(by_rank))  # type: ignore[misc]
            for owner in range(world_size)
        ]
    )
    own = full_grads(model)
    torch.testing.assert_close(by_hand([own[name] for name in names]), expected, rtol=1e-5, atol=1e-6)
    assert not torch.equal(expected, sum(by_rank))  # type: ignore[arg-type]

    flags = len(names) if front == "composable" else 0
    sent = nbytes(rows.shape[1], 68) + -(-4 * flags // 8) * 8
    assert {name: count.bytes for name, count in traffic.items()} == {
        "all_gather_into_tensor": world_size * nbytes(rows.shape[1] + flags, 132),
        "all_to_all_single": world_size * sent,
        **({} if flags else {"all_reduce": 4 * len(names)}),  # who has used what, behind the chunks otherwise
    }
    assert_tensors(exact, full_state(model))


KEPT = {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
LOW = {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32)}
OFFLOADED = {"cpu_offload": CPUOffload(True)}
ZERO_PP = {"gathers": "int8", "reductions": "int4"}


def transformer(checkpoints: bool = False, width: int = 64) -> nn.Module:
    torch.manual_seed(0)
    model = Transformer(width=width)
    for block in model.blocks if checkpoints else ():
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    return model


def train(model: nn.Module, rank: int, accumulates: bool = False, steps: int = 10) -> list[float]:
    """Trains; returns the losses, averaged over the ranks."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = torch.zeros(steps)
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(1 + accumulates):
            with no_sync(model) if part < accumulates else nullcontext():
                loss = loss_of(model, tokens(rank, step % 3, 4))
                loss.backward()
        optimizer.step()
        losses[step] = loss.item() / dist.get_world_size()
    dist.all_reduce(losses)
    return losses.tolist()


def trained_both_ways(rank: int, make: Any, chosen: Any = ZERO_PP, **how: Any) -> tuple[list[Any], list[Any]]:
    """Losses and traffic with codecs and without; the ranks have the same parameters at the end."""
    losses, traffics = [], []
    nothing: dict[str, str] = {}
    for names in (chosen, nothing):
        model = make()
        compress(model, **names)
        with count_collectives() as traffic:
            losses.append(train(model, rank, **how))
        traffics.append(traffic)
        sums = gather_objects([value.double().sum().item() for value in full_state(model).values()])
        assert all(total == sums[0] for total in sums)
    return losses, traffics


def assert_drifted_little(losses: list[Any]) -> None:
    assert losses[0] != losses[1]
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=0.03, atol=0)


LOW_BY_GLOO = {**LOW, "shared_memory": False}
INT8 = {"gathers": "int8", "reductions": "int8"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("front", "options", "chosen", "accumulates", "checkpoints", "gloo", "most"),
    [
        ("orig", {}, ZERO_PP, True, True, None, 0.235),
        ("composable", {}, ZERO_PP, True, False, None, 0.235),
        ("composable", OFFLOADED, {"gathers": "bf16", "reductions": "bf16"}, False, True, None, 0.51),
        ("orig", LOW_BY_GLOO, INT8, False, False, None, 0.52),
        ("orig", LOW_BY_GLOO, INT8, False, False, "plain", 0.39),  # which widens small gradients
        ("flat", KEPT, INT8, True, False, None, 0.26),
        ("flat", OFFLOADED, {"reductions": "int4"}, False, False, None, 0.72),
    ],
)
@ranks(2)
def test_training_drifts_little(
    rank, world_size, monkeypatch, front, options, chosen, accumulates, checkpoints, gloo, most
):
    if gloo:
        monkeypatch.setenv("FSDP_WRAP_GLOO", gloo)
    make = lambda: shard(front, transformer(checkpoints), WRAPPINGS["block"](), **options)  # noqa: E731
    losses, traffics = trained_both_ways(rank, make, chosen, accumulates=accumulates)
    moved = [sum(count.bytes for name, count in one.items() if name != "all_reduce") for one in traffics]
    assert 0.9 * most < moved[0] / moved[1] <= most
    assert losses[0][-1] < 0.8 * losses[0][0]
    assert_drifted_little(losses)


@ranks(4)
def test_replicas_of_hybrid_strategies_stay_alike(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    options: Any = {"device_mesh": mesh, "sharding_strategy": ShardingStrategy.HYBRID_SHARD}
    make = lambda: FSDP(transformer(), **options)  # noqa: E731
    losses, traffics = trained_both_ways(rank, make, accumulates=True, steps=4)
    assert ["all_to_all_single" in traffic for traffic in traffics] == [True, False]
    assert_drifted_little(losses)


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
@ranks(1, 2)
def test_what_no_other_rank_shares_and_small_shards_stay_exact(rank, world_size, strategy):
    width = 8 if strategy == "FULL_SHARD" and world_size == 2 else 64
    options: Any = {"sharding_strategy": ShardingStrategy[strategy], "auto_wrap_policy": WRAPPINGS["block"]()}
    losses, _ = trained_both_ways(rank, lambda: FSDP(transformer(width=width), **options), steps=3)
    assert losses[0] == losses[1]


class Branches(nn.Module):
    """Uses one of three layers, beside a table of integers that must not be rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.neither, self.left, self.right = (nn.Linear(70, 64, bias=False) for _ in range(3))
        self.table = nn.Parameter(self.numbers(), requires_grad=False)

    def numbers(self) -> torch.Tensor:
        return torch.arange(64 * 64, dtype=torch.int32).view(64, 64) * 100_003

    def forward(self, x: torch.Tensor, way: str) -> torch.Tensor:
        assert torch.equal(self.table, self.numbers())
        return getattr(self, way)(x)


@ranks(2, 3)
def test_ranks_agree_on_unused_parameters_beside_large_gradients(rank, world_size):
    model = fully_shard(Branches())
    compress(model, **ZERO_PP)
    scale = 1e6
    (scale * model(torch.ones(1, 70), "left" if rank == 0 else "right").sum()).backward()
    assert model.neither.weight.grad is None and model.table.grad is None
    for layer, share in ((model.left, 1), (model.right, world_size - 1)):
        grad = layer.weight.grad.full_tensor()
        torch.testing.assert_close(grad, torch.full_like(grad, scale * share / world_size))


@either_front
@ranks(2)
def test_full_parameters_are_exact_and_copies_compress_too(rank, world_size, front):
    plain, model = twins(front, net)
    compress(model, **ZERO_PP)
    x = torch.ones(2, 64)
    rounded_output = model(x)
    assert not torch.equal(rounded_output, plain(x))
    assert_tensors(plain.state_dict(), full_state(model))
    if front != "composable":
        with FSDP.summon_full_params(model):
            assert torch.equal(model.module.first.weight, plain.first.weight)
    with torch.inference_mode():
        assert torch.equal(model(x), rounded_output)
    assert torch.equal(copy.deepcopy(model)(x), rounded_output)
    compress(model)
    assert torch.equal(model(x), plain(x))


@ranks(2)
def test_overflow_on_one_rank_is_found_by_all(rank, world_size):
    model = FSDP(net())
    compress(model, **ZERO_PP)
    scaler, optimizer = ShardedGradScaler("cpu"), torch.optim.Adam(model.parameters(), lr=0.1)
    before = model.state_dict()
    scale = math.inf if rank == 1 else 1.0
    scaler.scale(scale * model(torch.ones(1, 64)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert gather_objects(scaler.get_scale()) == [2.0**15] * 2
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not model.clip_grad_norm_(1.0).isfinite()


@ranks(2)
def test_a_mix_up_is_told_and_lateness_is_borne(rank, world_size):
    layers = nn.Sequential(*(nn.Linear(64, 64) for _ in range(2)))
    model = FSDP(layers, auto_wrap_policy=ModuleWrapPolicy({nn.Linear}))
    compress(model, **ZERO_PP)
    loss = model(torch.ones(1, 64)).sum()
    time.sleep(0.6 * rank)
    loss.backward()
    assert all(grad.any() for grad in full_grads(model).values())
    with pytest.raises(RuntimeError, match="^ranks communicate for different units"):
        model.module[rank](torch.ones(1, 64))


@ranks(2)
def test_wrong_calls_are_refused(rank, world_size):
    model = FSDP(net(), use_orig_params=True)
    for chosen, said in (({"gathers": "fp8"}, "gathers {}'fp8'"), ({"reductions": 8}, "reductions {}8")):
        told = said.format("may be compressed as bf16, int8, int4 or None, not as ")
        with pytest.raises(ValueError, match=told):
            compress(model, **chosen)
    with pytest.raises(ValueError, match="Sequential has no wrapped or sharded module"):
        compress(net(), gathers="int8")
    with pytest.raises(ValueError, match=r"same arguments: rank 0 chose .*'int8'.*; rank 1 chose .*'bf16'"):
        compress(model, gathers=["int8", "bf16"][rank])
    handle = model.module.first.register_forward_hook(lambda *_: compress(model, gathers="int8"))
    with pytest.raises(RuntimeError, match=r"compress\(\) must not run inside the forward of the root"):
        model(torch.ones(1, 64))
    handle.remove()

    state, hook = comm_hooks.DefaultState(dist.group.WORLD), comm_hooks.reduce_scatter_hook
    compress(model, reductions="int4")
    with pytest.raises(RuntimeError, match=r"compress\(\) decides how gradients of the root"):
        model.register_comm_hook(state, hook)
    compress(model, gathers="int8")
    model.register_comm_hook(state, hook)
    with pytest.raises(RuntimeError, match="root unit.* has a communication hook already.* gathers only"):
        compress(model, gathers="int8", reductions="int4")
    with count_collectives() as traffic:
        model(torch.ones(1, 64)).sum().backward()
    assert set(traffic) == {"all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"}
    shards = -(-(64 * 48 + 48 + 48 * 70 + 70) // 2)
    assert traffic["all_gather_into_tensor"].bytes == 2 * nbytes(shards, 132)

    composable = fully_shard(nn.Linear(64, 64))
    compress(composable, gathers="int8")
    with pytest.raises(RuntimeError, match="compress"):
        composable.set_custom_all_gather(None)
    compress(composable)
    with pytest.raises(TypeError, match="takes an object that can be called"):  # no longer compressed
        composable.set_custom_all_gather(None)


@pytest.mark.parametrize(("front", "codec"), [("flat", "int8"), ("orig", "int8"), ("orig", "bf16")])
@ranks(2)
def test_reductions_that_round(rank, world_size, front, codec):
    _, model = twins(front, lambda: Wide(Partly()))
    compress(model, reductions=codec)
    assert_small_gradients_count(front, model, rank)
