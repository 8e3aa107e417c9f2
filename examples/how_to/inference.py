"""Export weights for inference: the program behind `docs/how-to/inference.md`.

Run it by `torchrun --nproc-per-node 2 examples/how_to/inference.py`.
"""

import torch
import torch.distributed as dist
from torch import nn

import fsdp_wrap
from fsdp_wrap import FullStateDictConfig, StateDictType, checkpoint, register_fsdp_forward_method
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.wrap import NameWrapPolicy

dist.init_process_group("gloo")  # "nccl" on GPUs
rank = dist.get_rank()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x):
        return x + torch.tanh(self.q_proj(x) * self.k_proj(x) + self.v_proj(x))


class Model(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(64, width), nn.Linear(width, 64)
        self.layers = nn.Sequential(*(Block(width) for _ in range(2)))

    def forward(self, tokens):
        return self.head(self.layers(self.embed(tokens)))

    def generate(self, tokens, length):
        for _ in range(length):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], dim=1)
        return tokens


model = FSDP(Model(), auto_wrap_policy=NameWrapPolicy("Block"))
prompt = torch.tensor([[1, 2, 3]])
received = {}

checkpoint.export_safetensors(model, "out", max_shard_size="5GB", dtype=torch.bfloat16)  # every rank calls it

plain = Model()
checkpoint.import_safetensors(plain, "out")

assert torch.equal(plain.head.weight, model.state_dict()["head.weight"].bfloat16().float())

wide = FSDP(Model(width=128), auto_wrap_policy=NameWrapPolicy("Block"))

checkpoint.export_safetensors(wide, "out_fp8", dtype=torch.float8_e4m3fn)

again = Model(width=128)
checkpoint.import_safetensors(again, "out_fp8")
assert torch.equal(again.head.weight, wide.state_dict()["head.weight"])
error = again.layers[0].q_proj.weight - wide.state_dict()["layers.0.q_proj.weight"]
assert 0 < error.abs().max() < 1e-2

with FSDP.state_dict_type(
    model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
):
    state = model.state_dict()  # every rank calls it
if rank == 0:
    torch.save(state, "model.pt")

source = fsdp_wrap.weight_source(
    model, fuse={"qkv_proj": ("q_proj", "k_proj", "v_proj")}, dtype=torch.bfloat16, budget="1GB"
)
for name, tensor in source:  # on every rank
    if rank == 0:
        received[name] = tensor  # hand it to the engine

if rank == 0:
    assert received["layers.0.qkv_proj.weight"].shape == (48, 16), list(received)

register_fsdp_forward_method(model, "generate")
model.eval()
with torch.no_grad():
    text = model.generate(prompt, 8)  # every rank, the same number of forwards

with torch.no_grad(), FSDP.summon_full_params(model):
    assert torch.equal(text, model.module.generate(prompt, 8))

dist.destroy_process_group()
