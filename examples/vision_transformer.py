"""Train a vision transformer, ported from DDP, to classify shapes in noisy pictures.

    torchrun --nproc-per-node 2 examples/vision_transformer.py

This is the program after the port; `examples/vision_transformer_ddp.py` is the one before. Losses are the
same. Each rank keeps half of the weights and optimizer state. Pictures are split into 16 patches, the tokens
of the transformer.

Prints:

    step 50: loss 0.848
    step 100: loss 0.713
    step 150: loss 0.675
    70 % of 512 new pictures are classified correctly
    this rank keeps 1.8 MB of weights and optimizer state
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from vision import NEW, draw  # the pictures: circles, squares and crosses

from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.wrap import NameWrapPolicy

SIZE, PATCH, WIDTH, LAYERS, BATCH, STEPS = 16, 4, 64, 3, 32, 150


class Block(nn.TransformerEncoderLayer):
    """Attention between patches, and a perceptron."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 4, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)


class ViT(nn.Module):
    """Pictures in, logits of the three shapes out."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, PATCH, stride=PATCH)
        self.places = nn.Parameter(0.02 * torch.randn((SIZE // PATCH) ** 2, WIDTH))
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3))

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(pictures).flatten(2).mT + self.places
        return self.head(self.blocks(tokens).mean(1))


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_default_dtype(torch.float64)  # so that rounding does not blur the comparison
    torch.manual_seed(0)  # the same weights on every rank
    model = FSDP(ViT(), auto_wrap_policy=NameWrapPolicy("Block"), use_orig_params=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    torch.manual_seed(1 + rank)  # other pictures on each
    for step in range(1, STEPS + 1):
        pictures, kinds = draw(BATCH)
        loss = F.cross_entropy(model(pictures), kinds)
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(loss := loss.detach() / dist.get_world_size())
        if rank == 0 and step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)

    with torch.no_grad():
        pictures, kinds = draw(NEW)
        right = (model(pictures).argmax(1) == kinds).sum()
    dist.all_reduce(right)
    if rank == 0:
        new = NEW * dist.get_world_size()
        print(f"{100 * right.item() / new:.0f} % of {new} new pictures are classified correctly")
        states = [value for state in optimizer.state.values() for value in state.values()]
        kept = sum(tensor.nbytes for tensor in (*model.parameters(), *states))
        print(f"this rank keeps {kept / 1e6:.1f} MB of weights and optimizer state")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
