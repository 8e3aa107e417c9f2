"""Start from a Hub model: the program behind `docs/how-to/hub.md`.

Run it by `torchrun --nproc-per-node 2 examples/how_to/hub.py`. It makes a small model of its own first.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Qwen3MoeConfig,
)

dist.init_process_group("gloo")  # "nccl" on GPUs
rank, folder = dist.get_rank(), "tiny-moe"
if rank == 0:  # as `huggingface-cli download` leaves it
    tiny = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
    )
    AutoModelForCausalLM.from_config(tiny, dtype=torch.bfloat16).save_pretrained(folder)
dist.barrier()

from fsdp_wrap import checkpoint, fully_shard

config = AutoConfig.from_pretrained(folder)
with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
for layer in model.model.layers:
    fully_shard(layer)
fully_shard(model)
checkpoint.import_safetensors(model, folder)

plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
for name, param in model.named_parameters():
    assert torch.equal(param.full_tensor(), plain.get_parameter(name))
tokens = torch.arange(8).view(1, -1)
assert torch.equal(model(tokens).logits, plain(tokens).logits)

checkpoint.import_safetensors(model, folder, budget="1GiB")

with torch.device("meta"):
    classifier = AutoModelForSequenceClassification.from_config(config, dtype=torch.bfloat16)
for layer in classifier.model.layers:
    fully_shard(layer)
fully_shard(classifier)

checkpoint.import_safetensors(classifier, folder, strict=False, initialize=["score.weight"])

assert classifier.score.weight.full_tensor().std() > 0
assert torch.equal(classifier.model.norm.weight.full_tensor(), plain.model.norm.weight)

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model(tokens, labels=tokens).loss.backward()
optimizer.step()

files = [*Path(folder).glob("*.json")]
checkpoint.export_safetensors(model, "trained", files=[file for file in files if "index" not in file.name])

trained = AutoModelForCausalLM.from_pretrained("trained", dtype=torch.bfloat16)
for name, param in model.named_parameters():
    assert torch.equal(param.full_tensor(), trained.get_parameter(name))
if rank == 0:
    print("the trained model lies in trained/")
dist.destroy_process_group()
