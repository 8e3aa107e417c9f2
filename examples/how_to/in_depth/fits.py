"""Fits: the program behind `docs/command.md`.

Run it by `python examples/how_to/in_depth/fits.py`: it needs no ranks.
"""

import torch
from torch import nn

import fsdp_wrap
from fsdp_wrap import MixedPrecisionPolicy, Recipe
from fsdp_wrap.tools import step_of


class Block(nn.Sequential):
    def __init__(self):
        super().__init__(nn.LayerNorm(64), nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


class Transformer(nn.Module):
    def __init__(self, length=1024):
        super().__init__()
        self.embedding = nn.Embedding(50257, 64)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(64, 50257)

    def forward(self, tokens):
        return self.head(self.blocks(self.embedding(tokens)))


POLICY, PLAIN = MixedPrecisionPolicy(torch.bfloat16, torch.float32), Recipe()


def setup(*, batch=1, length=2048, accumulation=1, recipe=PLAIN):
    with torch.device("meta"):
        model = Transformer(length)
    model = recipe.apply(model, Block, mp_policy=POLICY)
    optimizer = torch.optim.AdamW(model.parameters())

    def loss():
        tokens = torch.zeros(batch, length, dtype=torch.long, device="cuda")
        return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    return model, optimizer, step_of(model, optimizer, loss, accumulation)


if __name__ == "__main__":
    machine = fsdp_wrap.preset("h100", attained=0.6)
    vary = {"length": [4096, 8192]}
    fit = fsdp_wrap.fit(setup, ranks=64, device_memory="75GB", vary=vary, device="cuda", machine=machine)
    print(fit)
    recipe = fit.best.recipe
