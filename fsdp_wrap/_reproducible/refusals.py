"""Refusals of what would let the number of ranks change bits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from fsdp_wrap._comm import accelerator_of
from fsdp_wrap._core import warn_caller
from fsdp_wrap._core.torch_private import NormBase
from fsdp_wrap._custom_comms import hook_of
from fsdp_wrap._params import Buffers, distributed_names
from fsdp_wrap._runtime import Step, Unit

_ELEMENTWISE = {
    *("Adam", "AdamW", "SGD", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta", "ASGD", "Rprop"),
    *("Muon", "OwnedMatrices"),
}
"""Optimizers that update equal elements equally, wherever they lie, or whole matrices on one rank."""

_WIDE = (torch.float32, torch.float64)


def norms_over_batches(module: nn.Module) -> dict[str, nn.Module]:
    """Returns by name the modules that keep statistics over batches, of one rank or of all."""
    return {
        name: submodule
        for name, submodule in module.named_modules()
        if isinstance(submodule, nn.SyncBatchNorm)
        or (isinstance(submodule, NormBase) and submodule.track_running_stats)
    }


def refuse_training(norms: dict[str, nn.Module]) -> None:
    """Refuses modules with statistics over batches while they are in training mode."""
    for name, module in norms.items():
        if module.training:
            raise RuntimeError(
                f"'{name}' is a {type(module).__name__} in training mode, whose statistics depend on which "
                "batches a rank has: a reproducible model needs GroupNorm or LayerNorm, or "
                "track_running_stats=False, or eval() of this module"
            )


def refuse_others_sums(unit: Unit, buffers: Buffers) -> None:
    """Refuses collectives and updates of a unit that sum or round by themselves."""
    distributed = distributed_names(buffers.params)
    if distributed:
        raise RuntimeError(
            f"'{unit.name_of(distributed[0])}' is distributed by tensor or expert parallelism, whose "
            "groups sum by themselves: reproducible() takes parameters that are sharded over data only"
        )
    if buffers.gradients.has_own_reduction or hook_of(unit) is not None:
        raise RuntimeError(
            f"{unit.name} has a hook of its reductions, which may sum or round by itself: a reproducible "
            "model takes none"
        )
    if buffers.transport is not buffers.communicator:
        raise RuntimeError(
            f"{unit.name} is compressed, or has collectives of the user's, or state over replicas: these "
            "round by shards, or sum by themselves. A reproducible model takes the package's own"
        )
    if unit.plug_ins.updates(unit):
        raise RuntimeError(
            f"{unit.name} is updated in its backward (step_in_backward), before the step's other "
            "micro-batches are in its gradients: step a reproducible model after its last backward"
        )


def refuse_aligned(step: Step) -> None:
    """Refuses a model in `uneven` or `Join`, or one that is reproducible already."""
    if step.plug_ins.align:
        raise RuntimeError(
            f"{step.root.name} is reproducible already, or in uneven() or Join, where ranks may have "
            "different numbers of micro-batches: call remove() or leave the context first"
        )


def refuse_unowned(module: nn.Module, owned: Iterable[nn.Parameter]) -> None:
    """Refuses parameters that train and that no unit owns."""
    known = set(owned)
    for name, param in module.named_parameters():
        if param.requires_grad and param not in known:
            raise RuntimeError(
                f"'{name}' trains and belongs to no wrapped or sharded module: its gradients are this rank's "
                "alone. Wrap it, or set requires_grad=False"
            )


def warn_of_kernels(steps: Sequence[Step]) -> None:
    """Warns of an accelerator whose kernels may not be deterministic."""
    if any(accelerator_of(step.device) is not None for step in steps):
        if not torch.are_deterministic_algorithms_enabled():
            warn_caller(
                "reproducible() was called while kernels need not be deterministic: call "
                "torch.use_deterministic_algorithms(True), and set CUBLAS_WORKSPACE_CONFIG=:4096:8"
            )


def refuse_optimizer(optimizer: torch.optim.Optimizer, held: Sequence[nn.Parameter]) -> None:
    """Refuses an optimizer, or warns of one, whose kernels round by the place of an element in a shard."""
    kind = type(optimizer).__name__
    on_host = any(param.device.type == "cpu" for param in held)
    if on_host and (kind == "HostAdamW" or any(group.get("fused") for group in optimizer.param_groups)):
        raise RuntimeError(
            f"this {kind} is fused, whose kernel on the CPU rounds the last elements of a shard differently: "
            "a reproducible model needs fused=False"
        )
    narrow = next((param.dtype for param in held if param.dtype not in _WIDE), None)
    if narrow is not None:
        warn_caller(
            f"this {kind} updates parameters of {narrow}, whose kernels may round the last elements of a "
            "shard differently: keep them in float32, and compute in a narrower dtype by mixed precision"
        )
    if kind not in _ELEMENTWISE:
        warn_caller(
            f"reproducible() does not know whether {kind} updates equal elements equally, wherever they lie "
            "in a shard: compare two numbers of ranks"
        )


def too_few(done: int, expected: int) -> RuntimeError:
    """Returns the error of a step that comes too early."""
    return RuntimeError(
        f"a step came after {done} of this rank's {expected} micro-batches (rank {dist.get_rank()}): run one "
        "backward for each, as Reproducible.micro_batches() gives them. After an error begin the step anew"
    )


def leftovers(expected: int) -> RuntimeError:
    """Returns the error of a backward that would add to the gradients of a step before."""
    return RuntimeError(
        f"a backward came on rank {dist.get_rank()} while the gradients of a complete step are still there: "
        f"this rank has {expected} micro-batches in a step. Call zero_grad() after the step, or choose a "
        "larger micro_batches"
    )
