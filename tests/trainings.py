"""Training programs as `verify` takes them: right ones, and those with mistakes that forums show."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import cross_entropy, dropout

from fronts import no_sync, shard
from fsdp_wrap import MixedPrecision, clip_grad_norm_
from fsdp_wrap.wrap import ModuleWrapPolicy

TOKENS, WIDTH, ROWS, LENGTH = 11, 16, 8, 6
IGNORED = -100


class Mix(nn.Module):
    """A residual block."""

    def __init__(self, norm: bool, noise: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(LENGTH) if norm else nn.LayerNorm(WIDTH)
        self.drop, self.noise = nn.Dropout(0.1), noise

    def forward(self, x):
        x = dropout(x, 0.1) if self.noise else x
        return x + self.drop(self.down(torch.tanh(self.up(self.norm(x)))))


class Tokens(nn.Module):
    """A small language model of two blocks."""

    def __init__(self, norm: bool = False, noise: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.blocks = nn.ModuleList([Mix(norm, noise), Mix(False, False)])
        self.head = nn.Linear(WIDTH, TOKENS)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batch_of(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the tokens and targets of all ranks; some rows are padded, the later ones more."""
    tokens = torch.randint(TOKENS, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
    targets = tokens.roll(-1, 1)
    return tokens, targets


def own(rows: torch.Tensor) -> torch.Tensor:
    return rows.chunk(dist.get_world_size())[dist.get_rank()]


def decays(params: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    """Groups parameters by shape: matrices decay."""
    all_params = [*params]
    matrices, others = [p for p in all_params if p.ndim > 1], [p for p in all_params if p.ndim < 2]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def freeze(model: Any, sharded: bool, front: str) -> None:
    inner = model.module if sharded and front != "composable" else model
    inner.embedding.weight.requires_grad_(False)


def setup(
    sharded: bool,
    front: str = "composable",
    mistake: str = "",
    micro: int = 1,
    bf16: bool = False,
    clip: float | None = None,
    optim: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    compiled: bool = False,
) -> Any:
    """Makes model, optimizer and step."""
    torch.manual_seed(dist.get_rank() if mistake == "seed" else 0)
    model: Any = Tokens(mistake == "batch norm", mistake == "noise")
    optimizer = optim(model.parameters(), lr=0.01) if mistake == "optimizer" else None
    if sharded:
        options = {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)} if bf16 else {}
        model = shard(front, model, ModuleWrapPolicy({Mix}), **options)
    if mistake == "freeze":
        freeze(model, sharded, front)
    if optimizer is None:
        params = decays(model.parameters()) if mistake == "decay" else model.parameters()
        optimizer = optim(model if optim.__name__ == "Muon" else params, lr=0.01)
    if compiled:
        model = torch.compile(model, backend="aot_eager")
    counter = iter(range(100))

    def loss_of(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if mistake == "padding":
            targets = targets.masked_fill(pads(own), IGNORED)
        loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        if mistake == "sum":
            loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="sum")
        elif mistake == "divide":
            loss = loss / dist.get_world_size()
        elif mistake == "multiply":
            loss = loss * dist.get_world_size()
        elif mistake == "penalty":
            inner = model.module if sharded and front != "composable" else model
            block = inner.blocks[1]
            loss = (
                loss + 0.5 * (block.module if sharded and front != "composable" else block).down.weight.norm()
            )
        return loss

    def syncing(last: bool) -> AbstractContextManager[None]:
        return nullcontext() if last or not sharded or mistake == "no no_sync" else no_sync(model)

    def step() -> float:
        tokens, targets = batch_of(next(counter))
        if mistake != "same batch":
            tokens, targets = own(tokens), own(targets)
        if mistake not in ("never zero", "zero before step"):
            optimizer.zero_grad()
        parts = [*zip(tokens.chunk(micro), targets.chunk(micro))]
        total = 0.0
        for number, part in enumerate(parts):
            with syncing(number == len(parts) - 1 and mistake != "no_sync"):
                loss = loss_of(*part) / len(parts)
                total += loss.item()
                if mistake == "early step":
                    optimizer.step()
                loss.backward()
        if mistake == "zero before step":
            optimizer.zero_grad()
        if clip is not None:
            clipping(clip)
        if mistake != "early step":
            optimizer.step()
        return total

    def clipping(norm: float) -> None:
        if sharded and mistake != "clip":
            clip_grad_norm_(model, norm)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), norm)

    return model, optimizer, step


def pads(part: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Returns where a rank's rows are padded."""
    lengths = torch.arange(ROWS) // 2 + 2
    return part(torch.arange(LENGTH) >= lengths.unsqueeze(1))
