"""Train a mixture of experts: the experts are distributed over the ranks, and everything else is sharded.

    torchrun --nproc-per-node 2 examples/experts.py

A router sends each letter to one of eight experts. Half of the experts are on one rank, half on the other,
and letters are sent there and back. With four ranks or more, ranks with the same experts shard them. The
model learns ciphers: with cipher k, letter t becomes ((2 k + 1) t + k) mod 32. Balance is 1 for equal work.

Prints:

    this rank has 4 of 8 experts
    step 15: loss 1.82, balance 1.11
    step 30: loss 0.16, balance 1.15
    step 45: loss 0.03, balance 1.25
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import fsdp_wrap
from fsdp_wrap import fully_shard

WIDTH, HIDDEN, EXPERTS, CIPHERS, LETTERS, STEPS = 32, 64, 8, 8, 32, 45


class Send(torch.autograd.Function):
    """Rows go to the ranks of a group, and their gradients come back."""

    @staticmethod
    def forward(ctx, rows, to, from_, group):
        ctx.way = to, from_, group
        arrived = rows.new_empty(sum(from_), rows.shape[1])
        dist.all_to_all_single(arrived, rows.contiguous(), from_, to, group=group)
        return arrived

    @staticmethod
    def backward(ctx, grad):
        to, from_, group = ctx.way
        return Send.apply(grad, from_, to, group), None, None, None


class Experts(nn.Module):
    """Two matrices for each expert; each rank of a mesh keeps some of the experts, and computes with them."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.group, self.here = mesh.get_group(), EXPERTS // mesh.size()
        for name, shape in ("up", (WIDTH, HIDDEN)), ("down", (HIDDEN, WIDTH)):
            full = torch.randn(EXPERTS, *shape) / shape[0] ** 0.5
            self.register_parameter(name, nn.Parameter(distribute_tensor(full, mesh, [Shard(0)])))

    def forward(self, rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """Takes rows in the order of their experts, and how many each expert gets."""
        dist.all_to_all_single(coming := torch.empty_like(counts), counts, group=self.group)
        to, from_ = (per_expert.view(-1, self.here).sum(1).tolist() for per_expert in (counts, coming))
        rows = Send.apply(rows, to, from_, self.group)
        expert = torch.arange(self.here).repeat(len(to)).repeat_interleave(coming)
        out = torch.empty_like(rows)
        for index in range(self.here):
            chosen = expert == index
            out[chosen] = F.gelu(rows[chosen] @ self.up.to_local()[index]) @ self.down.to_local()[index]
        return Send.apply(out, from_, to, self.group)


class Net(nn.Module):
    """Ciphers and letters in, logits of the new letters out, with 1 for equal work of all experts."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.cipher, self.letter = nn.Embedding(CIPHERS, WIDTH), nn.Embedding(LETTERS, WIDTH)
        self.router, self.experts = nn.Linear(WIDTH, EXPERTS), Experts(mesh)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, LETTERS)

    def forward(self, ciphers: torch.Tensor, letters: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.norm(self.cipher(ciphers) + self.letter(letters))
        likely = torch.softmax(self.router(x), -1)
        gate, chosen = likely.max(-1)
        counts, order = chosen.bincount(minlength=EXPERTS), chosen.argsort(stable=True)
        output = torch.zeros_like(x).index_copy(0, order, self.experts(x[order], counts))
        balance = EXPERTS * (counts / len(x) * likely.mean(0)).sum()
        return self.head(x + gate[:, None] * output), balance


def main() -> None:
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    if ranks % 2:
        sys.exit(f"experts.py: error: two ranks share the experts, so start an even number, not {ranks}")
    mesh = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("copies", "experts"))
    torch.manual_seed(0)  # the same weights on every rank
    model = Net(mesh["experts"])
    fully_shard(model.experts, mesh=mesh["copies"])
    model.experts.set_gradient_divide_factor(ranks)  # letters of all ranks come to them
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    if rank == 0:
        print(f"this rank has {model.experts.here} of {EXPERTS} experts", flush=True)
    torch.manual_seed(1 + rank)  # other letters on each
    for step in range(1, STEPS + 1):
        k, letters = torch.randint(CIPHERS, (256,)), torch.randint(LETTERS, (256,))
        logits, balance = model(k, letters)
        loss = F.cross_entropy(logits, ((2 * k + 1) * letters + k) % LETTERS)
        (loss + 0.01 * balance).backward()
        fsdp_wrap.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0 and step % 15 == 0:
            print(f"step {step}: loss {loss.item():.2f}, balance {balance.item():.2f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
