"""Optimizers for sharded models: the program behind `docs/optimizers.md`.

Run it by `torchrun --nproc-per-node 2 examples/how_to/in_depth/optimizers.py`.
"""

from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch import nn

from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.optim import (
    HostAdamW,
    Muon,
    batch,
    owned_matrices,
    per_head,
    split,
    step_in_backward,
    stochastic_rounding,
)
from fsdp_wrap.wrap import NameWrapPolicy

dist.init_process_group("gloo")  # "nccl" on GPUs
width, kv_width, heads, lr = 8, 4, 2, 1e-3


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(2, 4, 8))

    def forward(self, x):
        return torch.einsum("nd,edh->nh", x[..., :4].flatten(0, -2), self.up).view(*x.shape[:-1], 8)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(width, width + 2 * kv_width)
        self.out = nn.Linear(width, width)
        self.experts = Experts()

    def forward(self, x):
        return x + self.out(self.qkv(x)[..., :width]) + self.experts(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.norm(x).square().mean()


def make():
    torch.manual_seed(0)
    return Net()


def inverse_root(matrix, order):
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values.clamp(min=1e-6) ** (-1 / order)) @ vectors.T


batches = torch.randn(3, 2, 3, width).unbind()

model = FSDP(make(), auto_wrap_policy=NameWrapPolicy("Block"))  # or fully_shard(...)
optimizer = Muon(
    model,
    lr=2e-3,
    adjust_lr_fn="match_rms_adamw",  # so that one learning rate fits the matrices and all else
    select=lambda name, shape: name.startswith("blocks.") and len(shape) == 2,
)

optimizer = Muon(
    model,
    view={
        "*.qkv.weight": split([width, kv_width, kv_width]),  # query, key and value, one below the other
        "*.out.weight": per_head(heads, dim=1),  # of the columns
        "*.experts.up": batch(),  # experts x rows x columns
    },
)

model(batches[0]).backward()
optimizer.step()

matrices = owned_matrices(model)
sums = {}


def shampoo(grad, matrix):
    left, right = sums.setdefault(matrix.name, [torch.eye(n) for n in matrix.shape])
    left += grad @ grad.T
    right += grad.T @ grad
    return inverse_root(left, 4) @ grad @ inverse_root(right, 4)


updates = matrices.update([param.grad for param in matrices.params], shampoo)
for param, update in zip(matrices.params, updates):
    if update is not None:
        param.data.sub_(update, alpha=lr)

if find_spec("torchao"):
    import torchao.optim

    module = nn.Linear(64, 64)
    model = FSDP(
        module, use_orig_params=True, shard_alignment=4096
    )  # or fully_shard(module, shard_alignment=4096)
    optimizer = torchao.optim.AdamW8bit(model.parameters(), lr=1e-3)

    optimizer = stochastic_rounding(torchao.optim.AdamW8bit(model.parameters()), model, seed=0)

model = FSDP(make(), auto_wrap_policy=NameWrapPolicy("Block"))

optimizer = step_in_backward(model, lambda params: torch.optim.AdamW(params, lr=3e-4))
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
for tokens in batches:
    model(tokens).backward()  # updates each unit, and frees its gradients
    scheduler.step()

model = FSDP(make(), auto_wrap_policy=NameWrapPolicy("Block"))

optimizer = step_in_backward(model, lambda params: HostAdamW(params, lr=3e-4, moments=torch.bfloat16))

model(batches[0]).backward()

dist.destroy_process_group()
