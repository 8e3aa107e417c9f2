"""A plain Llama of 70 billion parameters, and its plan at any number of ranks.

python -m benchmarks.llama --ranks 512
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.checkpoint import checkpoint

import fsdp_wrap


class Attention(nn.Module):
    """Heads of queries, of which several share keys and values; positions by rotation."""

    def __init__(self, width: int, heads: int, shared: int) -> None:
        super().__init__()
        self.head_width = width // heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, shared * self.head_width, bias=False)
        self.value = nn.Linear(width, shared * self.head_width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        made = (project(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for project in self._all)
        query, key, value = made
        query, key = rotated(query, *turns), rotated(key, *turns)
        shared = query.shape[1] != key.shape[1]
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=shared)
        return self.out(mixed.transpose(1, 2).flatten(2))

    @property
    def _all(self) -> tuple[nn.Module, ...]:
        return self.query, self.key, self.value


def rotated(x: torch.Tensor, cosine: torch.Tensor, sine: torch.Tensor) -> torch.Tensor:
    """Turns pairs of numbers by angles that tell positions."""
    first, second = x.chunk(2, -1)
    return x * cosine + torch.cat([-second, first], -1) * sine


class LlamaBlock(nn.Module):
    """One block, which keeps its input alone for its backward."""

    def __init__(self, width: int, hidden: int, heads: int, shared: int) -> None:
        super().__init__()
        self.attention_norm, self.mlp_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attention = Attention(width, heads, shared)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return checkpoint(self._compute, x, turns, use_reentrant=False)  # type: ignore[no-any-return]

    def _compute(self, x: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        x = x + self.attention(self.attention_norm(x), turns)
        normed = self.mlp_norm(x)
        return x + self.down(F.silu(self.gate(normed)) * self.up(normed))


class WholeLlamaBlock(LlamaBlock):
    """One block, which keeps all that its backward needs."""

    def forward(self, x: torch.Tensor, turns: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return self._compute(x, turns)


class Llama(nn.Module):
    """Next-token prediction; as large as Llama 3 70B unless told otherwise."""

    def __init__(
        self,
        blocks: int = 80,
        width: int = 8192,
        hidden: int = 28672,
        heads: int = 64,
        shared: int = 8,
        vocabulary: int = 128256,
        block: type[LlamaBlock] = LlamaBlock,
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(block(width, hidden, heads, shared) for _ in range(blocks))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head_width = width // heads

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens[:, :-1])
        places = torch.arange(x.shape[1], device=x.device)
        speeds = 5e5 ** -(torch.arange(0, self.head_width, 2, device=x.device) / self.head_width)
        angles = torch.outer(places, speeds).repeat(1, 2)
        turns = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        for block in self.blocks:
            x = block(x, turns)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1).float(), tokens[:, 1:].flatten())


def setup(
    hosts: int = 1,
    over_replicas: bool = False,
    length: int = 4096,
    batch: int = 1,
    model: Callable[[], nn.Module] = Llama,
) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], object]]:
    """Shards it by block, to be trained in bfloat16 on CUDA devices.

    Args:
        hosts: Over how many groups of ranks it is replicated; 1 to shard over all.
        over_replicas: Whether replicas share one state.
        length: Tokens of a sequence.
        batch: Sequences of a rank.
        model: Makes it.
    """
    ranks = torch.distributed.get_world_size()
    names = ("replicate", "shard") if hosts > 1 else ("shard",)
    mesh = init_device_mesh("cuda", (hosts, ranks // hosts)[-len(names) :], mesh_dim_names=names)
    with torch.device("meta"):
        made: Any = model()
    policy = fsdp_wrap.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    for part in (*made.blocks, made):
        fsdp_wrap.fully_shard(part, mesh=mesh, mp_policy=policy, state_over_replicas=over_replicas)
    made.to_empty(device="cuda")
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        tokens = torch.randint(made.token.num_embeddings, (batch, length + 1), device="cuda")
        made(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return made, optimizer, step


def main() -> None:
    """Prints the pages, and what it took to make them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("--hosts", type=int, default=16, help="replicas of the hybrid plans")
    options = parser.parse_args()
    for hosts, over in ((1, False), (options.hosts, False), (options.hosts, True)):
        begin, worked = time.monotonic(), time.process_time()
        plan = fsdp_wrap.plan(partial(setup, hosts, over), options.ranks, device="cuda", machine=H100)
        seconds, worked = time.monotonic() - begin, time.process_time() - worked
        print(plan)
        memory = _most_resident() / 1e9
        print(f"\nplanned in {seconds:.0f} s ({worked:.0f} s of one core), {memory:.1f} GB at most\n")


def _most_resident() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


H100 = fsdp_wrap.Machine(
    name="H100 SXM, 8 a host",
    flops={"bfloat16": 989e12 * 0.5, "float32": 67e12 * 0.5},
    memory_bandwidth=3.35e12 * 0.8,
    bandwidth_within=450e9 * 0.7,
    bandwidth_between=50e9 * 0.8,
    ranks_per_host=8,
    device_memory=80 * 10**9,
    source="NVIDIA's data sheet of the H100 SXM, of which about half of the FLOP/s and 70 to 80 % of the "
    "bandwidths are taken to be reached; one link of 400 Gbit/s for each rank",
)

if __name__ == "__main__":
    main()
