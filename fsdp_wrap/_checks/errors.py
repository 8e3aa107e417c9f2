"""`ErrorNames`: adds to errors that leave a step what may have caused them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fsdp_wrap._building import shows_shards
from fsdp_wrap._core import PlugIn, Precedence, Seam
from fsdp_wrap._params import ShardedParams
from fsdp_wrap._runtime import Step, Unit

out_of_memory: Seam[Callable[[BaseException, Iterable[Unit]], None]] = Seam("tools", "fsdp_wrap.tools")
"""Adds the units' memory to an out-of-memory error."""

_OUTSIDE = (
    "If this is {} used outside of its module's forward: it was sharded then (on rank {}). Use its "
    "full_tensor() (fully_shard), keep it from resharding, or make one unit of the modules that use it"
)


class ErrorNames(PlugIn):
    """Names the sharded parameters that an operator may have met, and the units' memory where it ran out."""

    order = Precedence.CHECKS

    def explains(self, step: Step, error: BaseException) -> None:
        _name_sharded(error, step.units)
        if out_of_memory.filled is not None:
            out_of_memory.filled(error, step.units)


def _name_sharded(error: BaseException, units: Iterable[Unit]) -> None:
    """Adds to an operator's error the sharded parameters that may have caused it.

    An error about mixed `DTensor`s names no tensor. An error about sizes has the size of the shard.
    """
    message = str(error)
    mixed, sizes = "mixed torch.Tensor and DTensor" in message, {*map(int, re.findall(r"\d+", message))}
    vague = "1-D tensor" in message
    of_sizes = vague or re.search("size mismatch|The size of tensor|shapes cannot be", message)
    if type(error) is not RuntimeError or _OUTSIDE[-30:] in message or not (mixed or of_sizes):
        return
    names = [
        unit.name_of(fqn)
        for unit in units
        for sharded in (unit.params if shows_shards(unit.buffers) else ())
        for fqn, numel in _shown_pieces(sharded)
        if mixed or (numel is not None and (vague or numel in sizes))
    ]
    if names:
        several = f" or another of {len(names)} parameters" if len(names) > 1 else ""
        error.args = (
            f"{message}\n{_OUTSIDE.format(repr(names[0]) + several, dist.get_rank())}",
            *error.args[1:],
        )


def _shown_pieces(sharded: ShardedParams) -> Iterable[tuple[str, int | None]]:
    """Returns the parameter names, with the numbers of elements shown; None for `DTensor`s."""
    if any(isinstance(source, DTensor) for source in sharded.sources):
        return ((fqn, None) for fqn in sharded.layout.fqns)
    return ((interval.fqn, interval.data.numel()) for interval in sharded.intervals())
