"""Models for tensor parallelism, the plans by which it cuts them, and meshes of four ranks."""

from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

WIDTH, HIDDEN, VOCABULARY, LENGTH = 6, 10, 13, 4
"""Two ranks cannot divide the vocabulary, nor two ranks of one mesh what two of another have of the rest."""

PLANS = ["columns", "sequence", "loss"]
MESHES: dict[str, tuple[tuple[int, ...], tuple[str, ...]]] = {
    "flat": ((2, 2), ("dp", "tp")),
    "wide": ((1, 4), ("dp", "tp")),
    "long": ((4, 1), ("dp", "tp")),
    "replicas": ((2, 1, 2), ("replicate", "shard", "tp")),
    "shards": ((1, 2, 2), ("replicate", "shard", "tp")),
}


class Block(nn.Module):
    """A residual layer: what is parallelised by columns, by rows, and over the sequence."""

    def __init__(self, checkpointing: str = "none", hidden: int = HIDDEN) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)
        self.checkpointing = checkpointing

    def _compute(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.checkpointing == "none":
            return self._compute(x)
        return checkpoint(self._compute, x, use_reentrant=self.checkpointing == "reentrant")


class Net(nn.Module):
    def __init__(self, checkpointing: str = "none", hidden: int = HIDDEN) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block(checkpointing, hidden) for _ in range(2)])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def net(checkpointing: str = "none", seed: int = 0, hidden: int = HIDDEN) -> Net:
    torch.manual_seed(seed)
    return Net(checkpointing, hidden).double()


def net_for(mesh_name: str, checkpointing: str = "none") -> Net:
    """Makes a model whose matrix products the mesh's ranks can share: evenly cut."""
    return net(checkpointing, hidden=2 * WIDTH if mesh_name == "wide" else HIDDEN)


def freeze(model: nn.Module, which: str) -> None:
    wanted = {"nothing": "-", "up": ".up.", "norms": "norm.", "blocks": "blocks."}[which]
    for name, param in model.named_parameters():
        param.requires_grad_(wanted not in name)


def mesh_of(name: str) -> tuple[DeviceMesh, DeviceMesh, DeviceMesh]:
    """Returns the whole mesh, that of data parallelism, and that of tensor parallelism."""
    shape, names = MESHES[name]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    data = names[:-1]
    return mesh, mesh[data if len(data) > 1 else data[0]], mesh["tp"]


def parallelize(model: Net, mesh: DeviceMesh, plan: str) -> Net:
    """Applies tensor parallelism to a model, in place.

    With "columns" norms, embedding and head are left alone, so that units have parameters of both kinds.
    """
    for block in model.blocks:
        if plan == "columns":
            how: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        else:
            how = {
                "norm": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1)),
            }
        parallelize_module(block, mesh, how)
    if plan != "columns":
        last: dict[str, Any] = {"use_local_output": False, "output_layouts": Shard(-1)}
        if plan == "sequence":
            last = {"output_layouts": Replicate()}
        how = {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), **last),
        }
        parallelize_module(model, mesh, how)
    return model


def loss_of(model: nn.Module, tokens: torch.Tensor, plan: str = "columns") -> torch.Tensor:
    """Runs forward and backward; returns the loss, of which DTensors give the whole."""
    with loss_parallel() if plan == "loss" else nullcontext():
        logits = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        loss.backward()
    return loss.full_tensor().detach() if isinstance(loss, DTensor) else loss.detach()


def batches(copies: int, seed: int) -> torch.Tensor:
    """Returns tokens for each of so many copies of a model: copies x samples x length."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCABULARY, (copies, 2, LENGTH), generator=generator)


def place_in(data: DeviceMesh) -> int:
    place = 0
    for size, here in zip(data.shape, data.get_coordinate() or ()):
        place = place * size + here
    return place


def own_batch(tokens: torch.Tensor, data: DeviceMesh) -> torch.Tensor:
    return tokens[place_in(data)]
