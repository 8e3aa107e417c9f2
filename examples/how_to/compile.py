"""Use torch.compile: the program behind `docs/how-to/compile.md`.

Run it by `torchrun --nproc-per-node 2 examples/how_to/compile.py`.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import fully_shard
from fsdp_wrap.wrap import NameWrapPolicy

dist.init_process_group("gloo")  # "nccl" on GPUs
rank = dist.get_rank()
WORDS = 64


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.qkv, self.out = (
            nn.LayerNorm(width),
            nn.Linear(width, 3 * width),
            nn.Linear(width, width),
        )
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        heads = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, width=32, blocks=3):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(WORDS, width), nn.Linear(width, WORDS)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Unrolled(Model):
    def forward(self, tokens):
        x = self.blocks[0](self.embed(tokens))
        return self.head(self.blocks[2](self.blocks[1](x)))


def train(called, params):
    """Trains for three steps, and returns the losses."""
    optimizer, losses = torch.optim.SGD(params, lr=0.1), []
    for step in range(3):
        generator = torch.Generator().manual_seed(2 * step + rank)
        loss = called(torch.randint(WORDS, (2, 8), generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def forget():
    torch._dynamo.reset()
    counters.clear()


def shard(model):
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def check(called, params, graphs, breaks):
    """Compares losses with those of the model in eager mode, and counts graphs and breaks."""
    eager = shard(Model())
    torch.testing.assert_close(train(called, params), train(eager, eager.parameters()), rtol=0, atol=1e-5)
    counted = counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())
    assert counted == (graphs, breaks), (counted, counters["graph_break"])
    forget()


backend = "aot_eager"  # leave it out for kernels by inductor

model = Model()
for block in model.blocks:
    block.compile(fullgraph=True, backend=backend)
    fully_shard(block)
fully_shard(model)

assert not any("_orig_mod" in name for name in model.state_dict())
check(model, model.parameters(), graphs=1, breaks=0)

net = Model()
for block in net.blocks:
    block.compile(fullgraph=True, backend=backend)
model = FSDP(net, auto_wrap_policy=NameWrapPolicy("Block"), use_orig_params=True)

check(model, model.parameters(), graphs=1, breaks=0)

model = Model()
for number, block in enumerate(model.blocks):
    block.compile(fullgraph=True, backend=backend)
    model.blocks[number] = fully_shard(checkpoint_wrapper(block))
fully_shard(model)

check(model, model.parameters(), graphs=1, breaks=0)

net = Model()
for number, block in enumerate(net.blocks):
    block.compile(fullgraph=True, backend=backend)
    net.blocks[number] = checkpoint_wrapper(block)
model = FSDP(net, auto_wrap_policy=NameWrapPolicy("Block"), use_orig_params=True)
check(model, model.parameters(), graphs=1, breaks=0)

sharded = shard(Unrolled())
model = torch.compile(sharded, backend=backend)

check(model, sharded.parameters(), graphs=3, breaks=4)

looped = shard(Model())
check(torch.compile(looped, backend=backend), looped.parameters(), graphs=1, breaks=1)

strict = shard(Model())
try:
    torch.compile(strict, fullgraph=True, backend=backend)(torch.zeros(2, 8, dtype=torch.long))
except torch._dynamo.exc.Unsupported as error:
    assert "FSDPModule.__call__" in str(error), error
else:
    raise AssertionError("a graph break was not reported")

print(torch.__version__, "compiled and eager losses agree")
dist.destroy_process_group()
