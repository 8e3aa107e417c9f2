"""One small model on meshes of each kind, by each front-end; how models and optimizers save and load."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import state_dict as torch_functions
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common as torch_common
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import moe_nets
import tp_nets
from fronts import HYBRID, full, shard
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import api, fully_shard
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


def has_experts(front: str) -> bool:
    """Whether a front-end can put experts on a mesh of their own: torch 2.11 cannot."""
    return front != "torch" or hasattr(torch_common, "ShardPlacementResult")


def on_mesh(front: str, kind: str, seed: int) -> nn.Module:
    """Makes the model as a front-end shards it; with pipelines this rank's stage."""
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
    if front in ("ours", "torch"):
        return _function(front, model, data)
    policy, strategy = ModuleWrapPolicy({tp_nets.Block, moe_nets.MoE}), HYBRID if data.ndim > 1 else None
    return shard(front, model, policy, device_mesh=data, sharding_strategy=strategy)


def _experts(front: str, model: Net, mesh: DeviceMesh) -> Any:
    moe_nets.distribute_in(model.blocks["1"], mesh["ep"])
    classes = api if front == "ours" else torch_common
    return moe_nets.placing(moe_nets.info_of(mesh["edp"], classes), classes=classes)


def _function(front: str, model: Net, mesh: DeviceMesh, **options: Any) -> nn.Module:
    shard: Any = fully_shard if front == "ours" else torch_fully_shard
    for block in model.blocks.values():
        shard(block, mesh=mesh, **options)
    return shard(model, mesh=mesh, **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    tokens = torch.randint(WIDTH, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
    model(tokens).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


class Side:
    """A model with its optimizer, which torch's functions save and load."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        self.model, self._options = model, options
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    def state(self, **options: Any) -> dict[str, Any]:
        told = torch_functions.StateDictOptions(**{**self._options, **options})
        model, optim = torch_functions.get_state_dict(self.model, self.optimizer, options=told)
        return {"model": model, "optim": optim}

    def take(self, state: dict[str, Any], **options: Any) -> None:
        torch_functions.set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optim"],
            options=torch_functions.StateDictOptions(**{**self._options, **options}),
        )

    def save(self, way: str, path: Path) -> None:
        if way == "folder":
            from fsdp_wrap import checkpoint  # only here: it can be left out

            checkpoint.save(path, self.model, self.optimizer)
        else:
            dcp.save(self.state(), checkpoint_id=path)

    def load(self, way: str, path: Path) -> None:
        if way == "folder":
            from fsdp_wrap import checkpoint

            checkpoint.load(path, self.model, self.optimizer)
            return
        state = self.state()
        dcp.load(state, checkpoint_id=path)
        self.take(state)

    def give(self, taker: Side, way: str, path: Path) -> None:
        """Gives the state to another side: by a save, or by full state dicts."""
        if way == "full":
            taker.take(copy.deepcopy(self.state(full_state_dict=True)), full_state_dict=True)
        else:
            self.save(way, path)
            taker.load(way, path)

    def values(self) -> dict[str, torch.Tensor]:
        """Returns parameters and state of the optimizer: whole from wrappers, else as they are sharded."""
        wraps = isinstance(self.model, FSDP)
        state = self.state(flatten_optimizer_state_dict=True, full_state_dict=wraps)
        optim = {name: value for name, value in state["optim"].items() if name.startswith("state.")}
        assert len(optim) == 3 * len(state["model"])
        return {**state["model"], **optim}


def assert_same_sides(one: Side, other: Side, atol: float = 0) -> None:
    values, expected = one.values(), other.values()
    assert values.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            full(values[name]), full(value), rtol=0, atol=atol, msg=f"{name}: {{}}".format
        )
