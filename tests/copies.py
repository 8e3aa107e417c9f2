"""A transformer in copies that hold one state between them, or each a whole one; and what ranks receive."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from composable import shard_blocks
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import ShardingStrategy
from models import WRAPPINGS, Transformer, loss_of, tokens

HYBRID = ShardingStrategy.HYBRID_SHARD


def in_copies(
    front: str,
    model: nn.Module,
    over: bool = True,
    shape: tuple[int, ...] = (2, 2),
    names: tuple[str, ...] | None = ("replicate", "shard"),
    **options: Any,
) -> Any:
    """Shards a transformer on a mesh of copies; `over` lets these hold one state."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    if front == "composable":
        return shard_blocks(model, mesh=mesh, state_over_replicas=over, **options)
    return FSDP(
        model,
        device_mesh=mesh,
        **{"sharding_strategy": HYBRID, **options},
        auto_wrap_policy=WRAPPINGS["block"](),
        use_orig_params=front == "orig",
        state_over_replicas=over,
    )


def transformer(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return Transformer().to(dtype)


def both(front: str, **options: Any) -> tuple[Any, Any]:
    """Returns the same transformer with whole states, and with one."""
    model = transformer()
    return in_copies(front, copy.deepcopy(model), False, **options), in_copies(front, model, **options)


def step(model: Any, optimizer: torch.optim.Optimizer, number: int = 0) -> float:
    optimizer.zero_grad()
    loss = loss_of(model, tokens(dist.get_rank(), number))
    loss.backward()
    optimizer.step()
    return loss.item()


def adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, **options)


@contextmanager
def received() -> Iterator[Counter[tuple[str, tuple[int, ...]]]]:
    """Counts the bytes that this rank receives, by collective and ranks, over gloo's plain collectives."""
    counts: Counter[tuple[str, tuple[int, ...]]] = Counter()
    with _Receiving(counts):
        yield counts


class _Receiving(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, counts: Counter[tuple[str, tuple[int, ...]]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            kind = func._schema.name.partition("::")[2].strip("_")
            if kind in ("allgather_base", "reduce_scatter_base", "allreduce"):
                self._count(kind, args)
        return result

    def _count(self, kind: str, args: Any) -> None:
        boxed = next(argument for argument in args if isinstance(argument, torch.ScriptObject))
        group = dist.ProcessGroup.unbox(boxed)
        tensors = args[0] if isinstance(args[0], list) else [*args[:2]]
        nbytes = max(tensor.nbytes for tensor in tensors) * (group.size() - 1) // group.size()
        ranks = tuple(dist.get_process_group_ranks(group))
        self._counts[kind, ranks] += nbytes * (2 if kind == "allreduce" else 1)
