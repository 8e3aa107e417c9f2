"""One small model on meshes of each kind, by each front-end."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common as torch_common
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import moe_nets
import tp_nets
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import ShardingStrategy, api, fully_shard
from fsdp_wrap.wrap import ModuleWrapPolicy

WIDTH, VOCABULARY, LENGTH = tp_nets.WIDTH, 13, 4


class Kind(NamedTuple):
    """A mesh: its shape, its names, and what is done on it."""

    shape: tuple[int, ...]
    names: tuple[str, ...]
    about: str


KINDS = {
    "dp2": Kind((2,), ("dp",), "2 ranks"),
    "dp3": Kind((3,), ("dp",), "3 ranks"),
    "dp4": Kind((4,), ("dp",), "4 ranks"),
    "hybrid": Kind((2, 2), ("replicate", "dp"), "(replicate=2, shard=2)"),
    "tp": Kind((2, 2), ("dp", "tp"), "(dp=2, tp=2)"),
    "hybrid_tp": Kind((2, 1, 2), ("replicate", "dp", "tp"), "(replicate=2, shard=1, tp=2)"),
    "ep": Kind((2, 2), ("edp", "ep"), "4 ranks, experts on (edp=2, ep=2)"),
    "pp": Kind((2, 2), ("pp", "dp"), "(pp=2, dp=2)"),
}
FRONTS = {
    "ours": "`fully_shard`",
    "orig": "wrapper, `use_orig_params=True`",
    "flat": "wrapper, `use_orig_params=False`",
    "torch": "torch's `fully_shard`",
}
PLAIN = "plain"


def can(front: str, kind: str) -> bool:
    """Whether a front-end has such a mesh: only functions take a mesh for each parameter."""
    return kind != "ep" or front in ("ours", "torch")


class Net(nn.Module):
    """Embedding, a layer that tensor parallelism cuts, a mixture of experts, head; or one half of it."""

    def __init__(self, stage: int | None = None) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleDict({"0": tp_nets.Block(hidden=12), "1": moe_nets.MoE()})
        self.head = nn.Linear(WIDTH, VOCABULARY)
        if stage == 0:
            del self.blocks["1"], self.head
        elif stage == 1:
            del self.blocks["0"], self.embed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x) if hasattr(self, "embed") else nn.functional.one_hot(x, WIDTH).double()
        for block in self.blocks.values():
            x = block(x)
        return self.head(x) if hasattr(self, "head") else x


def net(seed: int, stage: int | None = None) -> Net:
    torch.manual_seed(seed)
    return Net(stage).double()


def on_mesh(front: str, kind: str, seed: int) -> nn.Module:
    """The model as a front-end shards it; with pipelines this rank's stage."""
    if front == PLAIN:
        return net(seed)
    shape, names, _ = KINDS[kind]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    model = net(seed, mesh.get_local_rank("pp") if kind == "pp" else None)
    if "tp" in names:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model.blocks["0"], mesh["tp"], plan)
    if kind == "ep":
        data = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        return _function(front, model, data, shard_placement_fn=_experts(front, model, mesh))
    data = mesh["replicate", "dp"] if "replicate" in names else mesh["dp"]
    return _function(front, model, data) if front in ("ours", "torch") else _wrapper(front, model, data)


def _experts(front: str, model: Net, mesh: DeviceMesh) -> Any:
    moe_nets.distribute_in(model.blocks["1"], mesh["ep"])
    classes = api if front == "ours" else torch_common
    return moe_nets.placing(moe_nets.info_of(mesh["edp"], classes), classes=classes)


def _function(front: str, model: Net, mesh: DeviceMesh, **options: Any) -> nn.Module:
    shard: Any = fully_shard if front == "ours" else torch_fully_shard
    for block in model.blocks.values():
        shard(block, mesh=mesh, **options)
    return shard(model, mesh=mesh, **options)


def _wrapper(front: str, model: Net, mesh: DeviceMesh) -> nn.Module:
    return FSDP(
        model,
        auto_wrap_policy=ModuleWrapPolicy({tp_nets.Block, moe_nets.MoE}),
        device_mesh=mesh,
        sharding_strategy=ShardingStrategy.HYBRID_SHARD if mesh.ndim > 1 else None,
        use_orig_params=front == "orig",
    )


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    """A step in which all ranks see the same."""
    tokens = torch.randint(WIDTH, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
    model(tokens).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
