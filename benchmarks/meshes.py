"""Training on a mesh of two dimensions: tensor parallelism below sharding, and replicas of sharded copies."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchModuleWrapPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import fsdp_wrap
from benchmarks.implementations import Trained, over
from benchmarks.models import Block

RANKS, TENSOR, COPIES = 4, 2, 2
BACKWARDS = 4
Make = Callable[[nn.Module, DeviceMesh], nn.Module]


def _sharded_by(fully_shard: Callable[..., object], module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for unit in [*(child for child in module.modules() if isinstance(child, Block)), module]:
        fully_shard(unit, mesh=mesh)
    return module


def _wrapped_by(wrapper: Any, policy: Any, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    wrapped: nn.Module = wrapper(
        module,
        sharding_strategy=torch_fsdp.ShardingStrategy["HYBRID_SHARD" if mesh.ndim > 1 else "FULL_SHARD"],
        auto_wrap_policy=policy,
        device_mesh=mesh,
        device_id=next(module.parameters()).device,
        use_orig_params=True,
    )
    return wrapped


_OUR_WRAPPER = fsdp_wrap.FullyShardedDataParallel
_OURS: dict[str, Make] = {
    "fsdp_wrap": partial(_wrapped_by, _OUR_WRAPPER, fsdp_wrap.wrap.ModuleWrapPolicy({Block})),
    "fully_shard": partial(_sharded_by, fsdp_wrap.fully_shard),
}
OVER_MESHES: dict[str, Make] = {
    "fsdp1": partial(_wrapped_by, torch_fsdp.FullyShardedDataParallel, TorchModuleWrapPolicy({Block})),
    "fsdp2": partial(_sharded_by, torch_fsdp.fully_shard),
    **{name: partial(over, False, make) for name, make in _OURS.items()},
    **{f"{name}_shared": partial(over, True, make) for name, make in _OURS.items()},
}
"""Functions that shard a module over a mesh, or over its last dimension where it has two."""


def parallelize(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Cuts the matrices of a `SplitTransformer`'s blocks over the ranks of a mesh."""
    columns, rows = ("query", "key", "value", "mlp_in"), ("out", "mlp_out")
    plan: dict[str, Any] = {name: ColwiseParallel() for name in columns}
    plan |= {name: RowwiseParallel() for name in rows}
    for block in module.modules():
        if isinstance(block, Block):
            parallelize_module(block, mesh, plan)
    return module


class TensorParallel(Trained):
    """A model whose blocks are cut over two ranks, and sharded over the others."""

    def _made(self, implementation: str, module: nn.Module) -> nn.Module:
        self._mesh = init_device_mesh("cpu", (RANKS // TENSOR, TENSOR), mesh_dim_names=("dp", "tp"))
        return OVER_MESHES[implementation](parallelize(module, self._mesh["tp"]), self._mesh["dp"])

    def _part(self) -> int:
        return self._mesh.get_local_rank("dp")


class Accumulated(Trained):
    """Replicas of sharded copies, over which gradients are summed with the last backward of a step."""

    def _made(self, implementation: str, module: nn.Module) -> nn.Module:
        names = ("replicas", "copy")
        mesh = init_device_mesh("cpu", (COPIES, RANKS // COPIES), mesh_dim_names=names)
        return OVER_MESHES[implementation](module, mesh)

    def step(self) -> None:
        self.optimizer.zero_grad()
        with within_copy(self.model):
            for _ in range(BACKWARDS - 1):
                self.forward().backward()
        loss = self.forward()
        loss.backward()
        self.optimizer.step()
        self.loss = loss.item()


def within_copy(model: Any) -> AbstractContextManager[None]:
    """Leaves sums over the replicas to the last backward; torch's wrapper leaves all reductions to it."""
    if isinstance(model, _OUR_WRAPPER):
        return model.no_sync(reduce_within_copy=True)
    if isinstance(model, torch_fsdp.FullyShardedDataParallel):
        context: AbstractContextManager[None] = model.no_sync()
        return context
    return _without_all_reduce(model)


@contextmanager
def _without_all_reduce(model: Any) -> Any:
    model.set_requires_all_reduce(False)
    yield
    model.set_requires_all_reduce(True)
