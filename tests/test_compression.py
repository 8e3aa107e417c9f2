"""Compressed gathers and reductions, against rounding by hand, and against training without them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

from bed import ranks
from bed.references import count_collectives
from fronts import each_front, full_grads, full_state, no_sync, shard, twins
from fsdp_wrap import CPUOffload, MixedPrecision, ShardingStrategy, comm_hooks, fully_shard
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap._quantize import CODECS, ExactTail
from fsdp_wrap.comm_hooks import compress
from fsdp_wrap.sharded_grad_scaler import ShardedGradScaler
from models import WRAPPINGS, Transformer, gather_objects, loss_of, tokens

LEVELS = {"int8": 127, "int4": 7}
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


# The codecs.


def through(codec: Any, values: torch.Tensor) -> torch.Tensor:
    """What comes back."""
    encoded = torch.full((codec.nbytes(values.numel(), values.dtype),), 255, dtype=torch.uint8)
    again = encoded.clone()
    codec.encode(values, encoded)
    codec.encode(values, again)
    assert torch.equal(encoded, again)
    result = torch.full_like(values, 7)
    for target, found in codec.decoded(encoded, result):
        target.copy_(found)
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
@pytest.mark.parametrize("numel", [1, 127, 128, 129, 1029, (1 << 17) + 300])
@pytest.mark.parametrize("name", LEVELS)
def test_blocks_come_back_within_half_of_their_scale(name, numel, dtype):
    values, codec = samples(numel, dtype), CODECS[name]
    found = through(codec, values)
    wide = torch.promote_types(dtype, torch.float32)
    for block, result in zip(values.split(128), found.split(128)):
        scale = block.abs().max().to(torch.float64) / LEVELS[name]
        error = (result.to(torch.float64) - block.to(torch.float64)).abs()
        rounding = torch.finfo(dtype).eps * block.abs().max() + 2 * torch.finfo(wide).tiny
        assert (error <= scale / 2 * (1 + 1e-5) + rounding).all()
        assert result.unique().numel() <= 2 * LEVELS[name] + 1
    scales = -(-numel // 128) * wide.itemsize
    codes = -(-numel // 128) * {"int8": 128, "int4": 64}[name]
    assert codec.nbytes(numel, dtype) == -(-(scales + codes) // 8) * 8


@pytest.mark.parametrize("name", LEVELS)
def test_numbers_below_and_near_the_ends_of_the_range(name):
    tiny, largest = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max
    assert (through(CODECS[name], torch.full((128,), 1e-44)).abs() <= tiny).all()
    found = through(CODECS[name], torch.tensor([largest / 2, -largest / 2, 0.0]))
    torch.testing.assert_close(found, torch.tensor([largest / 2, -largest / 2, 0.0]))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("name", CODECS)
def test_nothing_that_is_not_finite_is_hidden(name, dtype):
    values = torch.randn(5 * 128).to(dtype)
    values[130], values[300], values[301], values[512] = math.nan, math.inf, -1, -math.inf
    finite = through(CODECS[name], values).isfinite()
    if name == "bf16":
        assert torch.equal(finite, values.isfinite())
    else:
        assert [bool(block.any()) for block in finite.split(128)] == [True, False, False, True, False]
        assert finite[:128].all() and finite[3 * 128 : 4 * 128].all()


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_a_tail_stays_exact(dtype):
    values = torch.cat([torch.randn(1000) * 1e4, torch.tensor([0.0, 1.0, 3.0])]).to(dtype)
    found = through(ExactTail(CODECS["int4"], 3), values)
    assert torch.equal(found[-3:], values[-3:]) and not torch.equal(found, values)
    assert torch.equal(found[:-3], through(CODECS["int4"], values[:-3]))


# One step by hand.


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 48), nn.Linear(48, 70)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu())


class ByHand:
    """All ranks' parts of a unit's parameters, as rows of one matrix."""

    def __init__(self, front: str, world_size: int) -> None:
        self._front, self._ranks = front, world_size

    def pack(self, values: list[torch.Tensor]) -> torch.Tensor:
        if self._front != "composable":
            flat = torch.cat([padded(value.flatten(), 4) for value in values])
            flat = flat[: flat.numel() - (-values[-1].numel()) % 4]
            return padded(flat, self._ranks).view(self._ranks, -1)
        return torch.cat([self._rows(value) for value in values], dim=1)

    def _rows(self, value: torch.Tensor) -> torch.Tensor:
        chunks = [chunk.flatten() for chunk in value.chunk(self._ranks)]
        width = -(-chunks[0].numel() // 4) * 4
        parts = [torch.cat([chunk, chunk.new_zeros(width - chunk.numel())]) for chunk in chunks]
        return torch.stack([*parts, *[torch.zeros(width)] * (self._ranks - len(parts))])


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


@each_front
@ranks(2, 3)
def test_a_step_equals_rounding_by_hand(rank, world_size, front):
    """Parameters that modules compute with, bit for bit; gradients; the bytes on the wire."""
    plain, model = twins(front, Net)
    exact = copy.deepcopy(plain.state_dict())
    compress(model, gathers="int8", reductions="int4")
    by_hand, seen = ByHand(front, world_size), {}
    names = [name for name, _ in plain.named_parameters()]
    for layer in ("first", "second"):
        module = model.get_submodule(layer) if front == "composable" else model.module.get_submodule(layer)
        module.register_forward_pre_hook(
            lambda module, _, layer=layer: seen.update(
                {f"{layer}.{name}": getattr(module, name).detach().clone() for name in ("weight", "bias")}
            )
        )
    inputs = [torch.randn(5, 64, generator=torch.Generator().manual_seed(r)) for r in range(world_size)]
    with count_collectives() as traffic:
        model(inputs[rank]).pow(2).sum().backward()

    rows = by_hand.pack([exact[name] for name in names])
    assert torch.equal(
        by_hand.pack([seen[name] for name in names]), torch.stack([rounded(row, 127) for row in rows])
    )
    plain.load_state_dict(seen)
    by_rank = []
    for x in inputs:
        grads = torch.autograd.grad(plain(x).pow(2).sum(), list(plain.parameters()))
        by_rank.append(by_hand.pack([grad * (1 / world_size) for grad in grads]))
    expected = torch.stack(
        [
            sum(grads[owner] if r == owner else rounded(grads[owner], 7) for r, grads in enumerate(by_rank))
            for owner in range(world_size)
        ]
    )
    found = full_grads(model)
    torch.testing.assert_close(by_hand.pack([found[name] for name in names]), expected, rtol=1e-5, atol=1e-6)
    assert not torch.equal(expected, sum(by_rank))

    flags = len(names) if front == "composable" else 0
    gathers = 1 if front == "composable" else 2  # the root of fully_shard stays unsharded after forward
    sent = nbytes(rows.shape[1], 68) + -(-4 * flags // 8) * 8
    assert {name: each.bytes for name, each in traffic.items()} == {
        "all_gather_into_tensor": gathers * world_size * nbytes(rows.shape[1] + flags, 132),
        "all_to_all_single": world_size * sent,
    }
    for name, value in full_state(model).items():
        assert torch.equal(value, exact[name]), name


# Training.

FULL, HYBRID = {}, {"sharding_strategy": ShardingStrategy.HYBRID_SHARD}
LOW = {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32)}
KEPT = {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP}
OFFLOADED = {"cpu_offload": CPUOffload(True)}


def checkpointed(model: nn.Module) -> None:
    for module in model.modules():
        if type(module).__name__.endswith("Block"):
            forward = module.forward
            module.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)


def train(model: nn.Module, rank: int, accumulates: bool = False, steps: int = 15) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        for part in range(1 + accumulates):
            with no_sync(model) if part < accumulates else nullcontext():
                loss = loss_of(model, tokens(rank, step % 3, 4))
                loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def compared(
    prepare: Callable[[], nn.Module], rank: int, chosen: dict[str, str], accumulates: bool = False
) -> tuple[dict[str, float], list[list[float]]]:
    """Bytes by collective with compression, divided by those without, and the losses of both."""
    losses, moved = [], []
    for names in (chosen, {}):
        model = prepare()
        compress(model, **names)
        with count_collectives() as traffic:
            losses.append(train(model, rank, accumulates))
        moved.append({name: each.bytes for name, each in traffic.items()})
        states = gather_objects({name: value.sum().item() for name, value in full_state(model).items()})
        assert all(state == states[0] for state in states)
    gathered = [each["all_gather_into_tensor"] for each in moved]
    reduced = [each.get("all_to_all_single", 0) + each.get("reduce_scatter_tensor", 0) for each in moved]
    ratios = {"gathers": gathered[0] / gathered[1], "reductions": reduced[0] / reduced[1]}
    return {**ratios, "all": sum(map(sum, zip(gathered, reduced))) and
            (gathered[0] + reduced[0]) / (gathered[1] + reduced[1])}, losses


@pytest.mark.parametrize(
    ("front", "options", "chosen", "accumulates", "checkpoints", "most"),
    [
        ("flat", FULL, {"gathers": "int8", "reductions": "int4"}, False, False, 0.25),
        ("orig", FULL, {"gathers": "int8", "reductions": "int4"}, True, True, 0.25),
        ("composable", FULL, {"gathers": "int8", "reductions": "int4"}, True, False, 0.25),
        ("composable", OFFLOADED, {"gathers": "bf16", "reductions": "bf16"}, False, True, 0.51),
        ("orig", LOW, {"gathers": "int8", "reductions": "int8"}, False, False, 0.41),
        ("flat", KEPT, {"gathers": "int8", "reductions": "int8"}, True, False, 0.28),
        ("flat", OFFLOADED, {"reductions": "int4"}, False, False, 0.75),
    ],
)
@ranks(2)
def test_training_drifts_little(rank, world_size, front, options, chosen, accumulates, checkpoints, most):
    def prepare() -> nn.Module:
        torch.manual_seed(0)
        model = Transformer(width=64)
        if checkpoints:
            checkpointed(model)
        return shard(front, model, WRAPPINGS["block"](), **options)

    ratios, (losses, reference) = compared(prepare, rank, chosen, accumulates)
    assert ratios["all"] <= most, ratios
    assert losses != reference
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(reference), rtol=0.05, atol=0.05)
    assert losses[-1] < 0.7 * losses[0]
