"""Hugging Face Trainer: the program behind `docs/how-to/hf-trainer.md`.

Run it by `torchrun --nproc-per-node 2 examples/how_to/hf_trainer.py`.
"""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, logging

logging.set_verbosity_error()
torch.manual_seed(0)
sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
model = LlamaForCausalLM(LlamaConfig(vocab_size=64, max_position_embeddings=16, **sizes))
data = [{"input_ids": row, "labels": row} for row in torch.randint(64, (32, 12))]

from fsdp_wrap import compat

compat.install(cpu=True, fully_shard=True)  # cpu=True only on a host without accelerators

from transformers import Trainer, TrainingArguments

arguments = TrainingArguments(
    "runs/trainer",
    fsdp=True,
    fsdp_config={"version": 2, "transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]},
    per_device_train_batch_size=2,
    gradient_accumulation_steps=2,
    learning_rate=3e-3,
    max_steps=2,
    save_steps=2,
    logging_steps=1,
    report_to=[],
    disable_tqdm=True,
    dataloader_pin_memory=False,
)
trainer = Trainer(model, arguments, train_dataset=data)
trainer.train()
trainer.save_model("runs/trainer/final")

import fsdp_wrap

assert isinstance(trainer.model_wrapped, fsdp_wrap.FSDPModule)

trainer.accelerator.wait_for_everyone()
plain = LlamaForCausalLM.from_pretrained("runs/trainer/final")

from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

full = get_model_state_dict(trainer.model_wrapped, options=StateDictOptions(full_state_dict=True))
if trainer.is_world_process_zero():
    assert torch.equal(full["lm_head.weight"], plain.lm_head.weight)
