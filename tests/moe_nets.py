"""A model with mixtures of experts, plain and with the experts distributed over ranks, and meshes of four."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from composable import shard_blocks
from fsdp_wrap import api

WIDTH, HIDDEN, EXPERTS, VOCABULARY, LENGTH = 6, 8, 4, 11, 5
RANKS = 4


class Exchange(torch.autograd.Function):
    """Sends rows to the ranks of a group; gradients come back."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: Any) -> Any:
        ctx.sizes = sent, received, group
        out = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        sent, received, group = ctx.sizes
        return Exchange.apply(grad, received, sent, group), None, None, None


class MoE(nn.Module):
    """A residual layer in which each token goes to one of the experts, wherever that is."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, EXPERTS)
        self.up = nn.Parameter(torch.randn(EXPERTS, WIDTH, HIDDEN))
        self.down = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.norm(x).flatten(0, -2)
        gate, chosen = torch.softmax(self.router(rows), -1).max(-1)
        order = chosen.argsort(stable=True)
        counts = chosen.bincount(minlength=EXPERTS)
        sorted_rows = rows[order]
        if isinstance(self.up, DTensor):
            computed = self._elsewhere(sorted_rows, counts, self.up.device_mesh.get_group())
        else:
            computed = self._compute(sorted_rows, torch.arange(EXPERTS).repeat_interleave(counts))
        outputs = torch.zeros_like(computed).index_copy(0, order, computed)
        return x + (gate[:, None] * outputs).view_as(x)

    def _elsewhere(self, rows: torch.Tensor, counts: torch.Tensor, group: Any) -> torch.Tensor:
        size = dist.get_world_size(group)
        coming = torch.empty_like(counts)
        dist.all_to_all_single(coming, counts, group=group)
        there, here = counts.view(size, -1).sum(1).tolist(), coming.view(size, -1).sum(1).tolist()
        received = Exchange.apply(rows, there, here, group)
        own = torch.arange(EXPERTS // size).repeat(size).repeat_interleave(coming)
        return Exchange.apply(self._compute(received, own), here, there, group)

    def _compute(self, rows: torch.Tensor, experts: torch.Tensor) -> torch.Tensor:
        up, down = (
            weight.to_local() if isinstance(weight, DTensor) else weight for weight in (self.up, self.down)
        )
        hidden = torch.tanh(torch.einsum("nd,ndh->nh", rows, up[experts]))
        return torch.einsum("nh,nhd->nd", hidden, down[experts])


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([MoE() for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def net(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def is_expert(param: nn.Parameter) -> bool:
    return param.ndim == 3


def distribute(model: Net, mesh: DeviceMesh) -> Net:
    """Gives each rank of a mesh some of the experts."""
    for block in model.blocks:
        distribute_in(block, mesh)
    return model


def distribute_in(block: nn.Module, mesh: DeviceMesh) -> None:
    for name in ("up", "down"):
        whole = getattr(block, name)
        part = nn.Parameter(distribute_tensor(whole.detach(), mesh, [Shard(0)]), whole.requires_grad)
        setattr(block, name, part)


def meshes(replicas: bool = False) -> tuple[DeviceMesh, DeviceMesh, DeviceMesh]:
    """Returns the meshes over which all else is sharded, one expert is sharded, and experts are spread."""
    experts = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
    if replicas:
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "dp")), experts["edp"], experts["ep"]
    return init_device_mesh("cpu", (RANKS,), mesh_dim_names=("dp",)), experts["edp"], experts["ep"]


def info_of(mesh: DeviceMesh, classes: Any = api) -> Any:
    return classes.FSDPMeshInfo(mesh=mesh, shard_mesh_dim=0)


def placing(info: Any, experts: Shard | None = None, classes: Any = api) -> Callable[[nn.Parameter], Any]:
    told = classes.ShardPlacementResult(placement=experts, mesh_info=info)
    return lambda param: told if is_expert(param) else None


def shard(model: Net, fully_shard: Callable[..., Any], **options: Any) -> Net:
    shard_blocks(model, fully_shard, **options)
    for block in model.blocks:  # experts have seen the tokens of all ranks, not only of those that share them
        block.set_gradient_divide_factor(RANKS)
    return model


def batches(seed: int) -> torch.Tensor:
    return torch.randint(VOCABULARY, (RANKS, 2, LENGTH), generator=torch.Generator().manual_seed(seed))


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Runs forward and backward; returns the loss."""
    loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    return loss.detach()
