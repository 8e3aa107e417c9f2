"""Fine-tune with QLoRA: the program behind `docs/how-to/qlora.md`.

Run it by `torchrun --nproc-per-node 2 examples/how_to/qlora.py`.
"""

import copy
from pathlib import Path

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig, LlamaForCausalLM, logging

import fsdp_wrap
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import fully_shard
from fsdp_wrap.weights import weight_source
from fsdp_wrap.wrap import NameWrapPolicy

dist.init_process_group("gloo")  # "nccl" on GPUs
rank, device = dist.get_rank(), torch.device("cpu")  # "cuda" on GPUs

logging.set_verbosity_error()
logging.disable_progress_bar()
path = "runs/qlora_base"
if rank == 0:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(vocab_size=128, max_position_embeddings=32, **sizes)).save_pretrained(path)
dist.barrier()
tokens = torch.randint(128, (2, 16), generator=torch.Generator().manual_seed(rank))
batches = [{"input_ids": tokens, "labels": tokens}] * 3
lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])

four_bit = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,
    bnb_4bit_compute_dtype=torch.float32,  # torch.bfloat16 on GPUs
)
base = AutoModelForCausalLM.from_pretrained(path, quantization_config=four_bit)
torch.manual_seed(0)  # the same adapters on every rank
adapted = get_peft_model(base, lora)
model = FSDP(adapted, auto_wrap_policy=NameWrapPolicy("LlamaDecoderLayer"), use_orig_params=True)
learning = [param for param in model.parameters() if param.requires_grad]
optimizer = torch.optim.AdamW(learning, lr=1e-3)

model.train()
for batch in batches:
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()

with FSDP.summon_full_params(model, writeback=False, rank0_only=True):  # every rank takes part
    if rank == 0:
        adapted.save_pretrained("runs/qlora")
dist.barrier()
again = AutoModelForCausalLM.from_pretrained(path, quantization_config=four_bit)
again = PeftModel.from_pretrained(again, "runs/qlora")

with torch.no_grad():
    torch.testing.assert_close(again.train()(**batches[0]).loss, model(**batches[0]).loss)

quantised = AutoModelForCausalLM.from_pretrained(path, quantization_config=four_bit)
quantised = get_peft_model(quantised, lora)
for layer in quantised.base_model.model.model.layers:
    fully_shard(layer)
fully_shard(quantised)
adapters = {name: value.full_tensor() for name, value in quantised.state_dict().items() if "lora_" in name}
if rank == 0:
    quantised.save_pretrained("runs/qlora_parts", state_dict=adapters)

dist.barrier()
assert len(load_file("runs/qlora_parts/adapter_model.safetensors")) == 8

merged = dict(weight_source(model, dtype=torch.bfloat16))  # every rank takes part
if rank == 0:
    Path("runs/qlora_merged").mkdir(exist_ok=True)
    save_file(merged, "runs/qlora_merged/model.safetensors", metadata={"format": "pt"})
    LlamaConfig.from_pretrained(path).save_pretrained("runs/qlora_merged")

dist.barrier()
plain = AutoModelForCausalLM.from_pretrained("runs/qlora_merged", dtype=torch.float32)
with torch.no_grad():
    torch.testing.assert_close(plain(**batches[0]).loss, model(**batches[0]).loss, rtol=1e-2, atol=0)

import bitsandbytes as bnb


def quantise(layer):
    for name, linear in [*layer.named_modules()]:
        if isinstance(linear, nn.Linear):
            made = bnb.nn.Linear4bit(linear.in_features, linear.out_features, bias=False, device="meta")
            values = linear.weight.detach()
            made.weight = bnb.nn.Params4bit(values, requires_grad=False, quant_type="nf4", module=made)
            layer.set_submodule(name, made)
    return layer.to(device)  # which quantises


with torch.device("meta"):
    large = LlamaForCausalLM(LlamaConfig.from_pretrained(path))
with safe_open(f"{path}/model.safetensors", "pt") as file:
    for number, layer in enumerate(large.model.layers):
        names = layer.state_dict()
        values = {name: file.get_tensor(f"model.layers.{number}.{name}") for name in names}
        layer.load_state_dict(values, assign=True)
        fully_shard(quantise(layer))

weight = large.model.layers[0].mlp.up_proj.weight
assert weight.shape == (64 * 128 // 2, 1) and len(weight.to_local()) == len(weight) // 2

base = LlamaForCausalLM.from_pretrained(path)
for module in base.model.layers.modules():
    if isinstance(module, nn.Linear):
        module.weight = nn.Parameter(to_nf4(module.weight.detach(), 64, 16), requires_grad=False)
rows = get_peft_model(base, lora)
for layer in base.model.layers:
    fully_shard(layer)
fully_shard(rows)
with torch.no_grad():
    torch.testing.assert_close(rows(**batches[0]).loss, plain(**batches[0]).loss, rtol=1e-2, atol=0)

dist.destroy_process_group()

bnb.functional.quantize_4bit(torch.zeros(256), compress_statistics=True)  # makes tables, which need numbers


def setup():
    model = LlamaForCausalLM(LlamaConfig.from_pretrained(path))
    for layer in model.model.layers:
        quantise(layer)
    model.is_loaded_in_4bit = True  # tells peft
    model = get_peft_model(model, copy.deepcopy(lora))
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(param for param in model.parameters() if param.requires_grad)
    batch = torch.randint(128, (2, 16))

    def step():
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


print(fsdp_wrap.plan(setup, ranks=2))
