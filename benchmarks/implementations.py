"""The implementations to compare, each an entry in `IMPLEMENTATIONS`, and one model of each in training."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import count
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy as TorchModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import fsdp_wrap
from benchmarks.models import Block, Case
from fsdp_wrap._comm import Ranks, select
from fsdp_wrap._comm.process_group import GroupCommunicator


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device


def _fsdp1(module: nn.Module, use_orig_params: bool = True, strategy: str = "FULL_SHARD") -> nn.Module:
    return torch_fsdp.FullyShardedDataParallel(
        module,
        sharding_strategy=torch_fsdp.ShardingStrategy[strategy],
        auto_wrap_policy=TorchModuleWrapPolicy({Block}),
        device_id=_device(module),
        forward_prefetch=False,
        use_orig_params=use_orig_params,
    )


def _fsdp_wrap(module: nn.Module, use_orig_params: bool = True, strategy: str = "FULL_SHARD") -> nn.Module:
    return fsdp_wrap.FullyShardedDataParallel(
        module,
        sharding_strategy=fsdp_wrap.ShardingStrategy[strategy],
        auto_wrap_policy=fsdp_wrap.wrap.ModuleWrapPolicy({Block}),
        use_orig_params=use_orig_params,
    )


def _fsdp_wrap_in_place(module: nn.Module) -> nn.Module:
    wrapped = _fsdp_wrap(module)
    fsdp_wrap.set_gradients_in_place(wrapped)
    return wrapped


def over(memory: bool, make: Callable[..., nn.Module], module: nn.Module, *mesh: DeviceMesh) -> nn.Module:
    """Wraps with our library, whose ranks then communicate through shared memory, or over gloo."""
    with patch.dict(os.environ, FSDP_WRAP_SHARED_MEMORY="1" if memory else "0"):
        return make(module, *mesh)


@contextmanager
def over_the_group(asked: bool = True) -> Iterator[None]:
    """Lets our library communicate by its process group where one rank alone would copy.

    So a single GPU runs the collectives on the streams on which several would run them.

    Args:
        asked: Whether to do so, if the rank is alone; otherwise all stays as it is.
    """
    if not asked or dist.get_world_size() > 1:
        yield
        return

    def communicator(rank: int, size: int, device: torch.device) -> GroupCommunicator:
        return GroupCommunicator(Ranks(dist.distributed_c10d._get_default_group(), rank, size), device)

    with patch.object(select, "Communicator", communicator):
        yield


_numbers = count()


def _sharded_by(
    fully_shard: Callable[..., object], module: nn.Module, reshard_after_forward: bool = True
) -> nn.Module:
    # Of a name of its own: on equal meshes one model's `DTensor`s would find in torch's caches what another's
    # have left there, and would be compared with those at each operator.
    names = (f"ranks of model {next(_numbers)}",)
    mesh = init_device_mesh(_device(module).type, (dist.get_world_size(),), mesh_dim_names=names)
    for unit in [*(child for child in module.modules() if isinstance(child, Block)), module]:
        fully_shard(unit, mesh=mesh, reshard_after_forward=reshard_after_forward)
    return module


_OURS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "fsdp_wrap": _fsdp_wrap,
    "fsdp_wrap_flat": partial(_fsdp_wrap, use_orig_params=False),
    "fsdp_wrap_grad_op": partial(_fsdp_wrap, strategy="SHARD_GRAD_OP"),
    "fsdp_wrap_in_place": _fsdp_wrap_in_place,
    "fully_shard": partial(_sharded_by, fsdp_wrap.fully_shard),
    "fully_shard_keep": partial(_sharded_by, fsdp_wrap.fully_shard, reshard_after_forward=False),
}
# By the name of the same over gloo.
SHARED = {name: f"{name}_shared" for name in ("fsdp_wrap", "fully_shard")}
IMPLEMENTATIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": DistributedDataParallel,
    "fsdp1": _fsdp1,
    "fsdp1_flat": partial(_fsdp1, use_orig_params=False),
    "fsdp1_grad_op": partial(_fsdp1, strategy="SHARD_GRAD_OP"),
    "fsdp2": partial(_sharded_by, torch_fsdp.fully_shard),
    "fsdp2_keep": partial(_sharded_by, torch_fsdp.fully_shard, reshard_after_forward=False),
    **{name: partial(over, False, make) for name, make in _OURS.items()},
    **{shared: partial(over, True, _OURS[name]) for name, shared in SHARED.items()},
}
PLAIN = "plain"  # the model as it is, without communication
DEEPSPEED = ("deepspeed",) if importlib.util.find_spec("deepspeed") else ()
# What keeps parameters after the forward; in their backward only gradients travel.
KEEPING = {
    "ddp": "ddp",
    "fsdp1": "fsdp1_grad_op",
    "fsdp2": "fsdp2_keep",
    "fsdp_wrap": "fsdp_wrap_grad_op",
    "fully_shard": "fully_shard_keep",
}
MAX_NORM = 1e-2  # so little that every call scales the gradients
OURS = ("fsdp_wrap", "fsdp_wrap_flat", "fully_shard")
DEFAULTS = ["ddp", "fsdp1", "fsdp1_flat", "fsdp2", *OURS]  # as users have them
ON_SHARDS = "fully_shard_on_shards"  # with our clipping, and an optimizer that steps on shards
IN_PLACE = "fsdp_wrap_in_place"  # with `set_gradients_in_place`
OVER_GLOO = [name for name in IMPLEMENTATIONS if not name.endswith("_shared")]
SHARDING = [name for name in OVER_GLOO if name != "ddp"]  # at home on a fake group, where DDP fails


class Trained:
    """One implementation's model, AdamW and batch."""

    def __init__(self, implementation: str, case: Case, fused: bool = False) -> None:
        torch.manual_seed(0)
        self.model: Any = self._made(implementation, case.model())
        trainable = [param for param in self.model.parameters() if param.requires_grad]
        self.optimizer = torch.optim.AdamW(trainable, fused=fused)
        torch.manual_seed(1 + self._part())
        self._batch = case.batch()
        self.loss = float("nan")

    def _made(self, implementation: str, module: nn.Module) -> nn.Module:
        """Returns the module as the implementation trains it."""
        return {**IMPLEMENTATIONS, PLAIN: lambda module: module}[implementation](module)

    def _part(self) -> int:
        """Returns the part of the data that this rank trains with."""
        return dist.get_rank()

    def step(self) -> None:
        """Runs zero_grad, forward, backward and AdamW."""
        self.optimizer.zero_grad()
        loss = self.forward()
        loss.backward()
        self.optimizer.step()
        self.loss = loss.item()

    def forward(self) -> torch.Tensor:
        """Runs one forward; returns the loss."""
        loss: torch.Tensor = self.model(self._batch)
        return loss

    def pass_through(self) -> None:
        """Runs a step without the optimizer's part."""
        self.optimizer.zero_grad()
        self.forward().backward()

    def clip(self) -> None:
        """Clips by the library's own method where there is one."""
        clip = getattr(self.model, "clip_grad_norm_", None)
        if clip is None:
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), MAX_NORM)
            getattr(norm, "full_tensor", lambda: norm)()
        else:
            clip(MAX_NORM)


class DeepSpeedTrained(Trained):
    """The same by DeepSpeed's ZeRO-3, whose engine has methods of its own for each part of a step."""

    def __init__(self, case: Case) -> None:
        import deepspeed

        os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
        torch.manual_seed(0)
        module = case.model()
        trainable = [param for param in module.parameters() if param.requires_grad]
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": 3, "memory_efficient_linear": False},
        }
        self.model, self.optimizer, *_ = deepspeed.initialize(
            model=module, optimizer=torch.optim.AdamW(trainable), config=config, dist_init_required=False
        )
        torch.manual_seed(1 + dist.get_rank())
        self._batch = case.batch()

    def step(self) -> None:
        loss = self.forward()
        self.model.backward(loss)
        self.model.step()
        self.loss = loss.item()


def trained(implementation: str, case: Case) -> Trained:
    """Returns an implementation's model in training, whatever it takes to train it."""
    return DeepSpeedTrained(case) if implementation in DEEPSPEED else Trained(implementation, case)
