"""What transformers loads of our exports, and what we load of what transformers saves."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from fsdp_wrap.checkpoint import export_safetensors, import_safetensors
from launch import client_rank, needs
from tiny_models import LENGTH, llama, t5

pytestmark = needs("transformers")


MODELS: dict[str, Any] = {"llama": (llama, "LlamaDecoderLayer"), "t5": (t5, "T5Block")}


def _output(model):
    tokens = torch.arange(LENGTH).view(1, -1) + 3
    model.eval()
    with torch.no_grad():
        labels = {"labels": tokens} if model.config.is_encoder_decoder else {}
        return model(input_ids=tokens, **labels).logits


def _exchange(rank, world_size, port, kind, theirs, ours, use_orig_params):
    """Imports what transformers has saved, and exports it again."""
    with client_rank(rank, port, True):
        import torch.distributed as dist
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

        dist.init_process_group("gloo")
        make, name = MODELS[kind]
        model = make()
        layers = {type(module) for module in model.modules() if type(module).__name__ == name}
        policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=layers)
        wrapped = FSDP(model, auto_wrap_policy=policy, use_orig_params=use_orig_params)
        assert import_safetensors(wrapped, theirs) == ([], [])
        output = _output(wrapped)
        files = export_safetensors(wrapped, ours, max_shard_size="30KB", budget=10**4)
        assert len(files) > 1
        return output


@pytest.mark.parametrize("use_orig_params", [False, True], ids=["flat", "orig"])
@pytest.mark.parametrize("kind", list(MODELS))
def test_files_go_both_ways(run, tmp_path, kind, use_orig_params):
    model = MODELS[kind][0]()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param), alpha=0.02)
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    model.save_pretrained(theirs, max_shard_size="50KB")
    for output in run(_exchange, kind, str(theirs), str(ours), use_orig_params):
        torch.testing.assert_close(output, _output(model), rtol=0, atol=1e-6)
    model.config.save_pretrained(ours)
    loaded, report = type(model).from_pretrained(ours, output_loading_info=True)
    assert not any(report.values()), report
    assert torch.equal(_output(loaded), _output(model))
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value), name
