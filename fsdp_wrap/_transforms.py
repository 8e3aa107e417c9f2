"""`Transformed`: forward calls inside a transform of `torch.func`, where no hook of the runtime could run.

What a transform calls computes with tensors of its own kind, and neither may buffers be written to nor hooks
be registered there. So the runtime does its part outside of all transforms, and the modules compute with
copies of the full parameters: graphs that need them later need no gather. Gradients reach the leaves through
the copies.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from fsdp_wrap._schedule import Schedule, schedule_of
from fsdp_wrap._torch_private import outside_transforms
from fsdp_wrap._unit import Copies, Unit, Use, graph_task

__all__ = ["Transformed"]


class Transformed:
    """One forward call of units inside a transform.

    Args:
        units: Those that run.
        part: The module whose forward it is, where a unit has several.
    """

    def __init__(self, units: Sequence[Unit], part: nn.Module | None) -> None:
        self._units, self._part = units, part
        self._uses: list[tuple[Schedule, Use]] = []
        self._shown: list[tuple[Unit, Copies, Copies | None]] = []

    def enter(self) -> None:
        """Unshards, and lets the modules compute with copies; `exit` must follow, also if this raises.

        Raises:
            RuntimeError: If a unit's parameters are in the user's hands.
        """
        with outside_transforms():
            for unit in self._units:
                schedule = schedule_of(unit)
                self._uses.append((schedule, schedule.pre_forward(unit, self._part)))
                if unit.handle is not None:
                    copies = [[*map(_copy, segment.leaves)] for segment in unit.handle.segments]
                    self._shown.append((unit, copies, unit.show_copies(copies)))

    def require_unchanged(self) -> None:
        """Refuses a forward that has written to the copies, which are lost.

        Raises:
            RuntimeError: If it has.
        """
        for unit, copies, _ in self._shown:
            assert unit.handle is not None
            for segment, of_segment in zip(unit.handle.segments, copies):
                for fqn, copy in zip(segment.layout.fqns, of_segment):
                    if copy._version:
                        raise RuntimeError(
                            f"the forward of {unit.name} wrote to the parameter '{unit.name_of(fqn)}' in "
                            f"place on rank {dist.get_rank()}, which is lost: inside a transform of "
                            "torch.func it computes with a copy; edit parameters between steps (inside "
                            "summon_full_params, or each shard by itself)"
                        )

    def exit(self) -> None:
        """Ends the call, whether it returned or raised, and reshards."""
        with outside_transforms():
            for unit, _, before in reversed(self._shown):
                unit.show_copies(before)
            for schedule, use in self._uses:
                schedule.exit_forward(use)
                if graph_task() == -1:  # or the backward that recomputes will reshard
                    schedule.reshard(use.unit)


def _copy(leaf: nn.Parameter) -> torch.Tensor:
    copy = leaf.clone()
    copy.__dict__.update(leaf.__dict__)
    copy._is_param = True  # modules may ask whether it is a parameter
    return copy
