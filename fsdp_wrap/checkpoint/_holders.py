"""Which ranks hold a model's parameters between them, and whether all of those save."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_wrap._full_values import handles_of
from fsdp_wrap._modules import clean_fqn
from fsdp_wrap._unit import units_in

__all__ = ["refuse_fewer_ranks"]


def refuse_fewer_ranks(model: nn.Module, ranks: Collection[int]) -> None:
    """Refuses to save by ranks that do not hold all of the model between them.

    Args:
        model: What is to be saved.
        ranks: Those that save, as the default group counts them; this one is among them.

    Raises:
        ValueError: If another rank holds a part of a parameter that a rank here holds parts of.
    """
    for name, holders in _holders(model):
        if lacking := sorted(set(holders) - set(ranks)):
            raise ValueError(
                f"process_group has the ranks {_listed(ranks)}, but '{name}' is sharded over "
                f"{_listed(holders)}: the parts of {_listed(lacking)} would be missing; save by all ranks "
                "that shard the model"
            )


def _holders(model: nn.Module) -> Iterator[tuple[str, Collection[int]]]:
    """Yields names of parameters with the ranks that hold them between them, replicas aside."""
    for handle in handles_of(units_in(model).values()):
        for segment in handle.segments:
            if segment.layout.sharded and segment.layout.fqns:
                yield segment.layout.fqns[0], handle.communicator.members
    for name, param in model.named_parameters():
        if isinstance(param, DTensor):
            for dim, placement in enumerate(param.placements):
                if not placement.is_replicate():
                    yield clean_fqn(name), dist.get_process_group_ranks(param.device_mesh.get_group(dim))


def _listed(ranks: Collection[int]) -> str:
    return ", ".join(map(str, sorted(ranks)))
