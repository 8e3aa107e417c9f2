"""torchao's tensor subclasses below `fully_shard`: float8 training, frozen NF4 and int8 weights."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from bed import ranks
from bed.references import count_collectives
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import checkpoint, fully_shard
from launch import needs

pytestmark = needs("torchao")

WIDTH, BLOCKS = 64, 3


def sharded(model: Any, **options: Any) -> Any:
    for block in model:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def train(
    model: Any, other: Any, rank: int, world_size: int, steps: int, after: Any = None
) -> dict[str, Any]:
    """Trains a sharded model beside a plain one that sees all parts; returns the last step's traffic."""
    optimizers = [
        torch.optim.AdamW([param for param in net.parameters() if param.requires_grad], lr=1e-2)
        for net in (model, other)
    ]
    for step in range(steps):
        batch = torch.randn(world_size, 4, WIDTH, generator=torch.Generator().manual_seed(step))
        wanted = [other(part).square().mean() for part in batch]
        (sum(wanted) / world_size).backward()
        with count_collectives(objects=False) as traffic:
            loss = model(batch[rank]).square().mean()
            loss.backward()
        torch.testing.assert_close(loss, wanted[rank], rtol=1e-5, atol=0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if after is not None:
            after(model)
    return traffic


@pytest.mark.parametrize("precomputed", [False, True])
@ranks(2)
def test_float8_training_gathers_float8(rank, world_size, precomputed):
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    from torchao.float8.fsdp_utils import (
        WeightWithDynamicFloat8CastTensor,
        precompute_float8_dynamic_scale_for_fsdp,
    )

    torch.manual_seed(0)
    ends = [(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(BLOCKS)]
    plain: Any = nn.Sequential(*(nn.Sequential(first, nn.ReLU(), last) for first, last in ends))
    other = convert_to_float8_training(copy.deepcopy(plain), config=Float8LinearConfig(emulate=True))
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    model = sharded(convert_to_float8_training(plain, config=config), shared_memory=False)
    # Scales computed ahead round a few weights otherwise, which shows from the third step on.
    after = precompute_float8_dynamic_scale_for_fsdp if precomputed else None
    counted = train(model, other, rank, world_size, 2 if precomputed else 4, after)
    assert type(model[0][0].weight.to_local()) is WeightWithDynamicFloat8CastTensor
    matrices, biases = 2 * BLOCKS * WIDTH * WIDTH, 2 * BLOCKS * WIDTH * 4
    notes = BLOCKS * 256
    assert 2 * matrices <= counted["all_gather_into_tensor"].bytes <= 2 * (matrices + biases + notes)
    assert 4 * matrices <= counted["reduce_scatter_tensor"].bytes <= 4 * matrices + biases + notes


def adapted() -> Any:
    from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import linear_nf4, to_nf4

    class Adapted(nn.Module):
        """A frozen NF4 matrix with an adapter that trains."""

        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Parameter(to_nf4(torch.randn(WIDTH, WIDTH), 32, 2), requires_grad=False)
            self.down, self.up = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(linear_nf4(x, self.base) + self.up(self.down(x)))

    return nn.Sequential(*(Adapted() for _ in range(BLOCKS)))


def int8(granularity: str, seed: int, rows: int) -> Any:
    """Blocks of a frozen int8 matrix, whose bias trains, and a norm."""
    import torchao.quantization as quantization

    torch.manual_seed(seed)
    blocks = (
        nn.Sequential(nn.Linear(WIDTH, rows), nn.Tanh(), nn.Linear(rows, WIDTH), nn.LayerNorm(WIDTH))
        for _ in range(BLOCKS)
    )
    model = nn.Sequential(*blocks)
    kinds = {
        "row": quantization.PerRow(),
        "tensor": quantization.PerTensor(),
        "group": quantization.PerGroup(2),
    }
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig(granularity=kinds[granularity]))
    for block in model:
        for layer in (block[0], block[2]):
            layer.weight.requires_grad_(False)
    return model


def inputs() -> torch.Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(7))


def inner(tensor: Any) -> dict[str, torch.Tensor]:
    return {name: getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]}


@pytest.mark.parametrize("granularity", ["row", "tensor", "group"])
@ranks(4)
def test_frozen_int8_is_gathered_quantised(rank, world_size, granularity):
    plain, model = (int8(granularity, 0, 30) for _ in range(2))  # 30 rows over 4 ranks: 8, 8, 8, 6
    sharded(model, shared_memory=False)
    kind = type(plain[0][0].weight)
    counted = train(model, plain, rank, world_size, 3)
    for block, like in zip(model, plain):
        for layer in (0, 2):
            weight, whole = block[layer].weight, like[layer].weight
            assert isinstance(weight, DTensor) and type(weight._local_tensor) is kind and weight.grad is None
            chunk = -(-whole.shape[0] // 4)
            rows = slice(rank * chunk, min((rank + 1) * chunk, whole.shape[0]))
            assert torch.equal(weight._local_tensor.qdata, whole.qdata[rows])
            assert torch.equal(weight._local_tensor.dequantize(), whole.dequantize()[rows])
    travels = 0
    for block in plain:
        weights = [tensor for layer in (0, 2) for tensor in inner(block[layer].weight).values()]
        # Rows are padded to 32, inner tensors to 16 bytes on each rank.
        travels += sum(
            -(-matrix.shape[0] // 4) * 4 * matrix[0].numel() * matrix.element_size() for matrix in weights
        )
        travels += len(weights) * 4 * 16 + 4 * sum(
            param.numel() + 32 for param in block.parameters() if param.ndim == 1
        )
    matrices = BLOCKS * 2 * 30 * WIDTH
    gathered = counted["all_gather_into_tensor"].bytes
    assert 2 * matrices <= gathered <= 2 * travels, (gathered, travels)
    if granularity != "group":  # whose scales are as large
        assert gathered < 2 * 4 * matrices / 2, "less than half of float32"
    assert counted["reduce_scatter_tensor"].bytes < matrices, "gradients of biases and norms alone"


@pytest.mark.parametrize("granularity", ["row", "tensor"])
@ranks(4)
def test_int8_is_loaded_by_other_numbers_of_ranks(rank, world_size, granularity, tmp_path):
    model, plain = sharded(int8(granularity, 0, 30)), int8(granularity, 0, 30)
    with torch.no_grad():
        dcp.save(model.state_dict(), checkpoint_id=tmp_path / "dcp")
    checkpoint.save(tmp_path / "own", model, step=1)
    x = inputs()
    for size in (4, 3, 2, 1):
        group = dist.new_group([*range(size)])
        mesh = None
        if rank < size:
            mesh = DeviceMesh.from_group(group, "cpu")
        for how in ("dcp", "own") if mesh is not None else ():
            other = sharded(int8(granularity, 1, 30), mesh=mesh)
            assert not torch.equal(other(x), plain(x))  # and leaves are there already
            if how == "own":
                checkpoint.load(tmp_path / "own", other, process_group=group)
            else:
                target = other.state_dict()
                with torch.no_grad():
                    dcp.load(target, checkpoint_id=tmp_path / "dcp", process_group=group)
                other.load_state_dict(target)
            assert torch.equal(other(x), plain(x)), (size, how)
            for block, like in zip(other, plain):
                block.unshard()
                for layer in (0, 2):
                    full, wanted = inner(block[layer].weight), inner(like[layer].weight)
                    assert full.keys() == wanted.keys()
                    assert all(torch.equal(full[name], wanted[name]) for name in wanted), (size, how)
                block.reshard()
        dist.barrier()


@pytest.mark.shows("refused: blocks of rows do not fit the cut of shards")
@ranks(2)
def test_int8_by_blocks_of_rows_is_refused(rank, world_size):
    import torchao.quantization as quantization

    layer = nn.Linear(32, 32)
    made = quantization.Int8Tensor.from_hp(layer.weight.detach(), quantization.PerBlock([8, 8]))
    layer.weight = nn.Parameter(made, requires_grad=False)
    with pytest.raises(TypeError, match="'weight' of shape .* is a Int8Tensor that has 'scale' of shape"):
        fully_shard(layer)
    assert type(layer.weight) is type(made) and type(layer) is nn.Linear


@pytest.mark.shows("equal; torchao cannot cut these")
@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
@pytest.mark.parametrize("kind", ["nf4", "row", "tensor", "group"])
@ranks(3)
def test_the_wrapper_shards_frozen_weights_as_bytes(rank, world_size, kind, use_orig_params, tmp_path):
    """Over 3 ranks, into which torchao itself cannot cut an NF4 tensor."""

    def make(seed: int) -> Any:
        if kind != "nf4":
            return int8(kind, seed, 30)
        torch.manual_seed(seed)
        return adapted()

    def wrapped(model: Any, **options: Any) -> Any:
        wrap: Any = partial(FSDP, use_orig_params=use_orig_params, shared_memory=False, **options)
        return wrap(nn.Sequential(*map(wrap, model)))

    plain, model, other, unlike = make(0), wrapped(make(0)), wrapped(make(1)), make(1)
    counted = train(model, plain, rank, world_size, 3)
    frozen = [param for param in plain.parameters() if not param.requires_grad]
    quantised = sum(
        tensor.numel() * tensor.element_size() for param in frozen for tensor in inner(param).values()
    )
    trained = sum(param.numel() for param in plain.parameters() if param.requires_grad) * 4
    gathered = counted["all_gather_into_tensor"].bytes
    # Backward needs all again; every tensor begins at a multiple of 16 bytes.
    assert 2 * quantised <= gathered <= 2 * (quantised + trained) + BLOCKS * 4096, (gathered, quantised)
    held = sum(param.numel() for param in model.parameters() if param.dtype == torch.uint8)
    assert abs(held - quantised / 3) <= 2048
    state = model.state_dict()
    for name, param in plain.named_parameters():
        if not param.requires_grad:
            assert type(state[name]) is type(param.detach())
            pairs = zip(inner(state[name]).values(), inner(param).values())
            assert all(torch.equal(value, wanted) for value, wanted in pairs), name
    with pytest.raises(TypeError, match="plain tensors, and '0.*' is of a tensor subclass"):
        checkpoint.export_safetensors(model, tmp_path / "files")
    assert not (tmp_path / "files").exists()
    x = inputs()
    other(x)
    other.load_state_dict(state)
    unlike.load_state_dict(state)
    assert torch.equal(other(x), model(x)) and torch.equal(unlike(x), model(x))
    checkpoint.save(tmp_path / "own", model, step=1)
    pair = dist.new_group([0, 1])
    if rank < 2:
        fewer = wrapped(make(1), process_group=pair)
        checkpoint.load(tmp_path / "own", fewer, process_group=pair)
        assert torch.equal(fewer(x), unlike(x))
    dist.barrier()
