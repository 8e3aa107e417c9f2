"""A program as people publish them, small: on torch's FSDP and, unchanged, on ours, with equal numbers.

It fine-tunes a Llama, all of it or adapters, and names torch's modules only.
"""

from __future__ import annotations

import functools

import pytest
import torch
import torch.distributed as dist

from launch import client_rank, needs
from tiny_models import VOCABULARY, llama

pytestmark = needs("transformers", "peft")

LENGTH, STEPS = 10, 4


def _batch(step):
    """The tokens of this rank at a step."""
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randint(3, VOCABULARY, (2, LENGTH), generator=generator)


def _policy(lora):
    """Wraps layers, and what is trainable by itself where the rest is frozen."""
    from torch.distributed.fsdp.wrap import _or_policy, lambda_auto_wrap_policy, transformer_auto_wrap_policy
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    def trainable_leaf(module):
        weight = getattr(module, "weight", None)
        return not list(module.children()) and weight is not None and weight.requires_grad

    layers = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})
    leaves = functools.partial(lambda_auto_wrap_policy, lambda_fn=trainable_leaf)
    return functools.partial(_or_policy, policies=[leaves, layers]) if lora else layers


def _fine_tune(rank, world_size, port, ours, folder, lora):
    """Returns losses and norms, the loss after loading, and how many parameters have optimizer state."""
    with client_rank(rank, port, ours):
        from peft import LoraConfig, get_peft_model
        from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter, load, save
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        from torch.distributed.fsdp import MixedPrecision, StateDictType

        dist.init_process_group("gloo")
        model = llama()
        if lora:
            torch.manual_seed(1)
            model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
        model = FSDP(
            model,
            auto_wrap_policy=_policy(lora),
            mixed_precision=MixedPrecision(torch.float32, torch.float32, torch.float32),
            use_orig_params=lora,
            device_id=torch.device("cpu"),
        )
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
        log = []
        for step in range(2 * STEPS):
            text = _batch(step)
            loss = model(input_ids=text, labels=text).loss / 2
            loss.backward()
            if step % 2:
                norm = model.clip_grad_norm_(1.0)
                optimizer.step()
                optimizer.zero_grad()
                log.append((loss.item(), norm.item()))
        with FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            pieces = model.state_dict()
            save({"model": pieces}, storage_writer=FileSystemWriter(folder))
            load({"model": pieces}, storage_reader=FileSystemReader(folder))
            model.load_state_dict(pieces)
        moments = FSDP.full_optim_state_dict(model, optimizer) if not lora else None
        with torch.no_grad():
            after = model(input_ids=_batch(0), labels=_batch(0)).loss.item()
        return log, after, len(moments["state"]) if moments else 0


@pytest.mark.parametrize("lora", [False, True], ids=["all", "adapters"])
def test_fine_tuning_a_llama(run, tmp_path, lora):
    torchs, ours = (run(_fine_tune, each, str(tmp_path / str(each)), lora) for each in (False, True))
    torch.testing.assert_close(ours, torchs, rtol=1e-4, atol=1e-5)
    log, _, moments = ours[0]
    assert len(log) == STEPS and all(norm > 0 for _, norm in log)
    assert lora or moments == len(list(llama().parameters()))
