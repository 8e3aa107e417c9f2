"""transformers' own FSDP2, unmodified: `from_pretrained` with a `DistributedConfig` shards what it loads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from launch import client_rank, needs, require_units
from tiny_models import LENGTH, VOCABULARY, llama

pytestmark = needs("transformers")

WORLD_SIZE, STEPS = 4, 3
FOUR = 1e-6
"""Bound where four ranks sum, in another order than gloo does. Where two do, all is equal to the bit."""


def _train(rank, world_size, port, ours, folder, options):
    """Returns loss and norms of each step, what is generated then, and the weights that are saved."""
    with client_rank(rank, port, ours, True, world_size):
        from safetensors.torch import load_file
        from transformers import LlamaForCausalLM
        from transformers.distributed import DistributedConfig

        config: Any = DistributedConfig(**options)
        model: Any = LlamaForCausalLM.from_pretrained(folder / "model", distributed_config=config)
        require_units(model, "fsdp_wrap" if ours else "torch")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        part = rank // options.get("tp_size", 1)  # of the batch
        generator = torch.Generator().manual_seed(part)
        log = []
        for _ in range(STEPS):
            batch = torch.randint(3, VOCABULARY, (2, LENGTH), generator=generator)
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
            loss.backward()
            if "tp_size" not in options:  # torch's function takes one mesh for all
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            norms = [param.grad.full_tensor().norm() for param in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
            log.append((loss.item(), *(norm.item() for norm in norms)))
        with torch.no_grad():
            prompt = torch.arange(3, 3 + 4 + part).unsqueeze(0)  # of different lengths
            generated = model.generate(prompt, max_new_tokens=3 + part, do_sample=False)
        saved = folder / f"saved-{'ours' if ours else 'torchs'}"
        model.save_pretrained(saved)
        torch.distributed.barrier()
        return log, generated, load_file(saved / "model.safetensors")


@pytest.mark.parametrize(
    "options, bound",
    [
        ({"fsdp_size": 4}, FOUR),
        ({"fsdp_size": 2, "dp_replicate_size": 2}, 0),
        ({"fsdp_size": 2, "dp_replicate_size": 2, "fsdp_mixed_precision": True}, 0),
        ({"fsdp_size": 2, "tp_size": 2, "tp_plan": "auto"}, 0),
    ],
    ids=["sharded", "replicas", "bf16", "tensor parallel"],
)
def test_native_fsdp2_equals_torchs(run, tmp_path, options, bound):
    llama().save_pretrained(tmp_path / "model")
    torchs, ours = (run(_train, own, tmp_path, options) for own in (False, True))
    assert len({loss for loss, *_ in torchs[0][0]}) == STEPS
    torch.testing.assert_close(ours, torchs, rtol=0, atol=bound)


@pytest.mark.shows("equal to torch's without offload, which needs a GPU there")
def test_native_fsdp2_on_the_host(run, tmp_path):
    llama().save_pretrained(tmp_path / "model")
    torchs = run(_train, False, tmp_path, {"fsdp_size": 4})
    ours = run(_train, True, tmp_path, {"fsdp_size": 4, "fsdp_cpu_offload": True})
    torch.testing.assert_close(ours, torchs, rtol=0, atol=FOUR)
