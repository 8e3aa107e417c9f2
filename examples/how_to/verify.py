"""Verify sharded training: the program behind `docs/how-to/verify.md`.

Run it by `python examples/how_to/verify.py`, or `torchrun --nproc-per-node 2 examples/how_to/verify.py`.
"""

import functools

import torch
import torch.distributed as dist
from torch import nn

import fsdp_wrap
from fsdp_wrap import fully_shard


def loss_of(model, tokens, wrong=False):
    """Returns the mean over this rank's tokens that are no padding; token 0 is."""
    logits, targets = model(tokens), tokens.roll(-1, 1)
    total = nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), ignore_index=0, reduction="sum"
    )
    count = (targets != 0).sum()
    if not wrong:
        dist.all_reduce(count)
        count = count / dist.get_world_size()  # gradients are averaged over the ranks
    return total / count


def setup(sharded, wrong=False):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Dropout(0.1)) for _ in range(3)]
    model = nn.Sequential(nn.Embedding(100, 32), *blocks, nn.Linear(32, 100))
    if sharded:
        for block in blocks:
            fully_shard(block)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = make_batches()

    def step():
        tokens = next(batches).chunk(dist.get_world_size())[dist.get_rank()]  # this rank's rows
        optimizer.zero_grad()
        loss = loss_of(model, tokens, wrong)
        loss.backward()
        optimizer.step()
        return loss

    return model, optimizer, step


def make_batches():
    generator = torch.Generator().manual_seed(1)
    while True:
        tokens = torch.randint(1, 100, (8, 16), generator=generator)
        lengths = torch.arange(8).unsqueeze(1) * 2 + 2
        yield tokens.masked_fill(torch.arange(16) >= lengths, 0)


def main():
    for wrong in (False, True):
        report = fsdp_wrap.verify(functools.partial(setup, wrong=wrong), ranks=2)
        if not dist.is_initialized() or dist.get_rank() == 0:
            print(report, end="\n\n")


if __name__ == "__main__":
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")  # "nccl" on GPUs
    main()
    if dist.is_initialized():
        dist.destroy_process_group()
