"""fp8 weights with a scale for each block, in exports and imports of models that are not of transformers."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from bed import ranks
from buckets import bucket_in, impatient
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import fully_shard
from fsdp_wrap.checkpoint import export_safetensors, import_safetensors
from fsdp_wrap.wrap import ModuleWrapPolicy

FP8 = torch.float8_e4m3fn
SCALE = "_scale_inv"


class Layer(nn.Module):
    """A small attention layer beside a mixture of experts whose router has whole blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(256)
        self.wide = nn.Linear(256, 384)
        self.odd = nn.Linear(384, 144)
        self.gate = nn.Linear(256, 128)
        self.experts = nn.ModuleList([nn.Linear(256, 128), nn.Linear(128, 256, bias=False)])


def net() -> nn.Sequential:
    """Returns a net with blocks of very different magnitudes, one of zeros, and a head."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(128, 256), Layer(), nn.Linear(256, 128))
    with torch.no_grad():
        for param in (model[1].wide.weight, *model[1].experts.parameters()):
            if param.dim() == 2:
                factors = 10.0 ** -torch.arange(param.numel() // 128**2).view(param.shape[0] // 128, -1)
                param.mul_(factors.repeat_interleave(128, 0).repeat_interleave(128, 1))
        model[1].wide.weight[128:256, :128] = 0
    return model


CONVERTED = ["1.experts.0.weight", "1.experts.1.weight", "1.wide.weight"]


def assert_near(name: str, codes: torch.Tensor, scales: torch.Tensor, weight: torch.Tensor) -> None:
    """Compares with what rounding to three bits allows, block by block."""
    assert (codes.dtype, scales.dtype) == (FP8, torch.float32)
    assert [*scales.shape] == [size // 128 for size in weight.shape]
    for row, column in ((row, column) for row in range(scales.shape[0]) for column in range(scales.shape[1])):
        block = slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128)
        meant = codes[block].double() * scales[row, column].double()
        wanted = weight[block].double()
        allowed = torch.maximum(wanted.abs() / 16, wanted.abs().max() / 448 / 2**10) * (1 + 1e-6)
        assert ((meant - wanted).abs() <= allowed).all(), (name, row, column)


def sharded(model: nn.Sequential, how: str) -> nn.Module:
    if how == "plain":
        return model
    if how == "fully_shard":
        fully_shard(model[1])
        return fully_shard(model)
    return FSDP(model, auto_wrap_policy=ModuleWrapPolicy({Layer}), use_orig_params=how == "orig")


def full(model: nn.Module) -> dict[str, torch.Tensor]:
    if isinstance(model, FSDP):
        with FSDP.summon_full_params(model):
            return {
                name.replace("_fsdp_wrapped_module.", ""): value.detach().clone()
                for name, value in model.named_parameters()
            }
    values = model.state_dict()
    return {
        name: value.full_tensor() if hasattr(value, "full_tensor") else value
        for name, value in values.items()
    }


@pytest.mark.parametrize(
    ("kind", "how"),
    [*(("disk", how) for how in ("plain", "fully_shard", "orig", "flat")), ("bucket", "fully_shard")],
)
@ranks(2)
def test_linear_weights_go_both_ways_with_scales(rank, world_size, tmp_path, kind, how):
    place = tmp_path / "out" if kind == "disk" else bucket_in(tmp_path / "out")
    config = tmp_path / "config.json"
    if rank == 0:
        config.write_text('{"of": "net"}')
    dist.barrier()
    model, wanted = sharded(net(), how), net().state_dict()
    with impatient():
        export_safetensors(model, place, dtype=FP8, files=[config], max_shard_size="300KB")
        dist.barrier()
        stored = {
            name: value
            for path in sorted((tmp_path / "out").glob("*.safetensors"))
            for name, value in load_file(path).items()
        }
        assert stored.keys() == wanted.keys() | {name + SCALE for name in CONVERTED}
        for name, weight in wanted.items():
            if name in CONVERTED:
                assert_near(name, stored[name], stored[name + SCALE], weight)
            else:
                assert torch.equal(stored[name], weight), name
        about = json.loads((tmp_path / "out" / "config.json").read_text())
        assert about == {
            "of": "net",
            "quantization_config": {
                "quant_method": "fp8",
                "activation_scheme": "dynamic",
                "weight_block_size": [128, 128],
                "modules_to_not_convert": ["0", "1.odd", "1.gate", "2"],
            },
        }
        again = sharded(nn.Sequential(nn.Embedding(128, 256), Layer(), nn.Linear(256, 128)), how)
        assert import_safetensors(again, place, budget="40KB") == ([], [])
    for name, value in full(again).items():
        if name in CONVERTED:
            scales = stored[name + SCALE].repeat_interleave(128, 0).repeat_interleave(128, 1)
            assert torch.equal(value, stored[name].float() * scales), name
        else:
            assert torch.equal(value, wanted[name]), name


@pytest.mark.parametrize("budget", ["256MiB", 1])
@ranks(2)
def test_blocks_at_the_ends_may_be_smaller(rank, world_size, tmp_path, budget):
    """As the keys and values of DeepSeek V3, of 576 rows; where the scales' count could mean other blocks."""
    generator = torch.Generator().manual_seed(1)
    tensors: dict[str, torch.Tensor] = {}
    wanted: dict[str, torch.Tensor] = {}
    for name, (rows, columns), block in (
        ("0", (192, 144), 128),
        ("1", (576, 192), 128),
        ("2", (96, 576), 32),
    ):
        codes = torch.randn(rows, columns, generator=generator).to(FP8)
        scales = torch.rand(-(-rows // block), -(-columns // block), generator=generator) + 0.5
        tensors |= {f"{name}.weight": codes, f"{name}.weight{SCALE}": scales}
        wanted[name] = torch.stack(
            [
                torch.stack([codes[r, c].float() * scales[r // block, c // block] for c in range(columns)])
                for r in range(rows)
            ]
        )
    if rank == 0:
        save_file(tensors, tmp_path / "model.safetensors")
    dist.barrier()
    model = nn.Sequential(*(nn.Linear(w.shape[1], w.shape[0], bias=False) for w in wanted.values()))
    for layer in model:
        fully_shard(layer)
    assert import_safetensors(model, tmp_path, budget=budget) == ([], [])
    for name, layer in zip(wanted, model):
        assert torch.equal(layer.weight.full_tensor(), wanted[name]), name


def test_what_cannot_be_fp8_is_refused(tmp_path):
    small = nn.Sequential(nn.Linear(64, 128), nn.LayerNorm(128), nn.Linear(128, 128))
    with pytest.raises(ValueError, match="whose dimensions are multiples of 128, and this model has none"):
        export_safetensors(small, tmp_path / "out", dtype=FP8)
    with pytest.raises(
        ValueError, match="float8_e5m2 is no dtype of files on the Hub: pass torch.float8_e4m3fn"
    ):
        export_safetensors(net(), tmp_path / "out", dtype=torch.float8_e5m2)
    assert not (tmp_path / "out").exists()


def test_scales_that_a_model_has_itself_are_loaded_as_they_are(tmp_path):
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(128, 128).to(FP8), requires_grad=False)
    model.weight_scale_inv = nn.Parameter(torch.zeros(1, 1))
    tensors = {"weight": torch.ones(128, 128).to(FP8), "weight_scale_inv": torch.full((1, 1), 3.0)}
    save_file(tensors, tmp_path / "model.safetensors")
    assert import_safetensors(model, tmp_path) == ([], [])
    assert model.weight.dtype == FP8 and (model.weight.float() == 1).all()
    assert model.weight_scale_inv == 3


class Largest(TorchDispatchMode):
    """Notes the most bytes of a tensor that an operation makes."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.dtype == torch.float32:
            self.most = max(self.most, result.nbytes)
        return result


def test_one_row_of_blocks_is_converted_at_a_time(tmp_path):
    model = nn.Sequential(nn.Linear(1024, 2048, bias=False), nn.Linear(8, 8)).bfloat16()
    with Largest() as largest:
        export_safetensors(model, tmp_path, dtype=FP8)
    assert 0 < largest.most <= 128 * 1024 * 4
