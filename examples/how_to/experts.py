"""Train a mixture of experts: the program behind `docs/how-to/experts.md`.

Run it by `torchrun --nproc-per-node 2 examples/how_to/experts.py`.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, logging

import fsdp_wrap
from fsdp_wrap import checkpoint, clip_grad_norm_, compat, fully_shard

dist.init_process_group("gloo")  # "nccl" on GPUs
rank, ranks, device = dist.get_rank(), dist.get_world_size(), "cpu"  # "cuda" on GPUs

logging.set_verbosity_error()
logging.disable_progress_bar()
path = "runs/experts_base"
if rank == 0:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "moe_intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4}
    counts = {"num_key_value_heads": 2, "num_experts": 8, "num_experts_per_tok": 2}
    config = Qwen3MoeConfig(vocab_size=64, max_position_embeddings=32, **sizes, **counts)
    Qwen3MoeForCausalLM(config).save_pretrained(path)
dist.barrier()
tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(rank))
batches = [{"input_ids": tokens, "labels": tokens}] * 3

compat.install(fully_shard=True)  # transformers calls torch's fully_shard

from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

spread = DistributedConfig(fsdp_size=ranks, ep_size=2)
model = AutoModelForCausalLM.from_pretrained(path, distributed_config=spread)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

for batch in batches:
    model(**batch).loss.backward()
    clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()

assert isinstance(model, fsdp_wrap.FSDPModule)
assert model.model.layers[0].mlp.experts.down_proj.to_local().shape[0] == 8 // ranks

checkpoint.save("runs/experts", model, optimizer, step=3)  # to train on
model.save_pretrained("runs/experts_full")  # full weights, for any program

together = DistributedConfig(fsdp_size=ranks)  # no expert parallelism
resumed = AutoModelForCausalLM.from_pretrained(path, distributed_config=together)
optimizer = torch.optim.AdamW(resumed.parameters(), lr=1e-3)
checkpoint.load("runs/experts", resumed, optimizer)

dist.barrier()
plain = AutoModelForCausalLM.from_pretrained("runs/experts_full")
with torch.no_grad():
    losses = [net(**batches[0]).loss for net in (model, resumed, plain)]
torch.testing.assert_close(losses, [losses[-1]] * 3)


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
    """A matrix for each expert. Each rank of a mesh keeps some of them, and computes with them."""

    def __init__(self, mesh, experts=8, width=16):
        super().__init__()
        self.group, self.here = mesh.get_group(), experts // mesh.size()
        full = torch.randn(experts, width, width) / width**0.5
        self.weight = nn.Parameter(distribute_tensor(full, mesh, [Shard(0)]))

    def forward(self, rows, counts):
        """Takes rows in the order of their experts, and how many each expert gets."""
        dist.all_to_all_single(coming := torch.empty_like(counts), counts, group=self.group)
        to, from_ = (per_expert.view(-1, self.here).sum(1).tolist() for per_expert in (counts, coming))
        rows = Send.apply(rows, to, from_, self.group)
        expert = torch.arange(self.here).repeat(len(to)).repeat_interleave(coming)
        out = torch.empty_like(rows)
        for number in range(self.here):  # also those without a row, so that all get a gradient
            out[expert == number] = rows[expert == number] @ self.weight.to_local()[number]
        return Send.apply(out, from_, to, self.group)


class Net(nn.Module):
    """Predicts the next token; the router sends each token to one expert."""

    def __init__(self, mesh):
        super().__init__()
        self.embed, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)
        self.router, self.experts = nn.Linear(16, 8), Experts(mesh)

    def forward(self, text):
        x = self.embed(text[:, :-1]).flatten(0, 1)
        gate, chosen = self.router(x).softmax(-1).max(-1)
        order = chosen.argsort(stable=True)
        output = self.experts(x[order], chosen.bincount(minlength=8))
        x = x + gate[:, None] * torch.zeros_like(x).index_copy(0, order, output)
        return F.cross_entropy(self.head(x), text[:, 1:].flatten())


def make(experts_over):
    """Spreads the experts over so many ranks; the ranks that have the same experts shard them."""
    mesh = init_device_mesh(
        device, (ranks // experts_over, experts_over), mesh_dim_names=("copies", "experts")
    )
    torch.manual_seed(0)  # the same weights on every rank
    net = Net(mesh["experts"])
    fully_shard(net.experts, mesh=mesh["copies"])
    net.experts.set_gradient_divide_factor(ranks)  # they have seen the tokens of all ranks
    fully_shard(net)
    return net, torch.optim.AdamW(net.parameters(), lr=1e-3)


net, optimizer = make(experts_over=2)
net(tokens).backward()
clip_grad_norm_(net, 1.0)
optimizer.step()
optimizer.zero_grad()

checkpoint.save("runs/experts_by_hand", net, optimizer, step=1)
net, optimizer = make(experts_over=1)
checkpoint.load("runs/experts_by_hand", net, optimizer)

again, _ = make(experts_over=2)
checkpoint.load("runs/experts_by_hand", again)
with torch.no_grad():
    torch.testing.assert_close(net(tokens), again(tokens))


class Choice(nn.Module):
    """Experts that are modules of their own. A rank runs those that its tokens need."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(16, 4)
        self.experts = nn.ModuleList(nn.Linear(16, 16) for _ in range(4))

    def forward(self, x):
        shares = self.router(x).softmax(-1)
        chosen, out = shares.argmax(-1), x
        for number in chosen.unique().tolist():
            share = shares[..., number] * (chosen == number)
            out = out + share[..., None] * self.experts[number](x)
        return out


torch.manual_seed(0)
moe = nn.Sequential(nn.Embedding(64, 16), Choice(), nn.Linear(16, 64))
for module in (*moe[1].experts, moe[1], moe):
    fully_shard(module)
fsdp_wrap.allow_skipping(moe[1].experts)  # all units below it

one = tokens[:1, :2]  # two tokens need two experts at most
F.cross_entropy(moe(one).flatten(0, 1), one.flatten()).backward()
assert clip_grad_norm_(moe, 1.0) > 0

dist.destroy_process_group()
