"""Full precision in eval mode, by torch's environment variable `FSDP_USE_FULL_PREC_IN_EVAL`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from fsdp_wrap._core import WRAPPED_ATTR, Phase, PlugIn, Precedence
from fsdp_wrap._core.torch_private import graph_task
from fsdp_wrap._params import Where
from fsdp_wrap._runtime import Unit

FULL_PRECISION_IN_EVAL = "FSDP_USE_FULL_PREC_IN_EVAL"
"""Environment variable: 1 turns off the mixed precision of modules in eval mode."""


class FullInEval(PlugIn):
    """Switches units to full precision with their modules' eval mode, and back with their train mode."""

    order = Precedence.SETTINGS

    def follows(self, step: Any, units: Sequence[Unit]) -> None:
        for unit in () if step.depth or graph_task() != -1 else units:
            if unit.options.full_in_eval and not unit.gone:
                _follow_mode(unit)


def _follow_mode(unit: Unit) -> None:
    """Switches a unit to its module mode's precision; raises while gradients accumulate."""
    in_full, buffers = _computes_in_full(unit), unit.buffers
    if buffers.segments.in_full == in_full:
        return
    unit.reshard(Phase.IDLE)
    if unit.params and buffers.where is not Where.SHARDED:
        return  # it is in the user's hands
    if buffers.gradients.accumulated:
        raise RuntimeError(
            f"{unit.name} went to {'eval' if in_full else 'train'} mode, and so to another precision "
            f"({FULL_PRECISION_IN_EVAL}=1), on rank {dist.get_rank()} while gradients left by no_sync "
            "wait for a backward; evaluate before or after the accumulation"
        )
    unit.compute_in_full(in_full)


def _computes_in_full(unit: Unit) -> bool:
    """Whether a forward that begins now leaves out the unit's mixed precision."""
    if (unit.module._modules.get(WRAPPED_ATTR) or unit.module).training:
        return False
    if not unit.params:
        return not unit.options.casts.restores_outputs  # casts that restore outputs cast to full precision
    return unit.buffers.segments.mix_dtypes
