"""Fine-tune with LoRA: the program behind `docs/how-to/lora.md`.

Run it by `torchrun --nproc-per-node 2 examples/how_to/lora.py`.
"""

import torch
import torch.distributed as dist
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, logging

from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.wrap import NameWrapPolicy

dist.init_process_group("gloo")  # "nccl" on GPUs
rank = dist.get_rank()

logging.set_verbosity_error()


def load_model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(vocab_size=128, max_position_embeddings=32, **sizes))


rank = torch.distributed.get_rank()
tokens = torch.randint(128, (2, 16), generator=torch.Generator().manual_seed(rank))
batches = [{"input_ids": tokens, "labels": tokens}] * 3

lora = LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"])
adapted = get_peft_model(load_model(), lora)  # the same on every rank: seed before
model = FSDP(adapted, auto_wrap_policy=NameWrapPolicy("LlamaDecoderLayer"), use_orig_params=True)
learning = [param for param in model.parameters() if param.requires_grad]
optimizer = torch.optim.AdamW(learning, lr=1e-3)

for batch in batches:
    model(**batch).loss.backward()
    optimizer.step()
    optimizer.zero_grad()

with FSDP.summon_full_params(model, writeback=False, rank0_only=True):  # every rank takes part
    if rank == 0:
        adapted.save_pretrained("runs/adapters")
torch.distributed.barrier()
plain = PeftModel.from_pretrained(load_model(), "runs/adapters")

with torch.no_grad():
    torch.testing.assert_close(plain(**batches[0]).loss, model.eval()(**batches[0]).loss)

dist.destroy_process_group()
