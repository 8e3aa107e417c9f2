"""The memory for batches: the setting of users, and the plug-in that gives a tree the queue for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from fsdp_wrap._batching.queue import BatchingQueue
from fsdp_wrap._core import UNIT_ATTR, PlugIn, Precedence, check_nbytes
from fsdp_wrap._core.torch_private import graph_task
from fsdp_wrap._runtime import Queue, Step, Unit

_ON_CPU = 2 << 20
"""Default memory for batches of collectives, in bytes."""


def set_travel_together_bytes(module: nn.Module, nbytes: int | None) -> None:
    """Sets the memory for collectives that small units share, from the next outermost forward on.

    All ranks must call it with the same value.

    Args:
        module: The root: a wrapped or sharded module, whose forward is outermost.
        nbytes: Memory in bytes: one shared gather may take half of it, one shared reduction the other half.
            0 gives each unit collectives of its own; None is the default of the device.

    Raises:
        TypeError: If `nbytes` is no int.
        ValueError: If it is negative, or `module` is neither wrapped nor sharded.
    """
    check_nbytes("travel_together_bytes", nbytes)
    unit: Unit | None = vars(module).get(UNIT_ATTR) if isinstance(module, nn.Module) else None
    if unit is None:
        raise ValueError(
            f"{type(module).__name__} is neither wrapped nor sharded; pass the root of the model"
        )
    unit.set(travel_together_bytes=nbytes)


class Batching(PlugIn):
    """Gives a tree the queue for the memory that its root has for batches, before its first forward, too."""

    order = Precedence.SETTINGS

    def __init__(self) -> None:
        self._nbytes: int | None = -1  # nothing yet

    def follows(self, step: Step, units: Sequence[Unit]) -> None:
        if not step.depth and graph_task() == -1:
            self.follow_setting(step)

    def follow_setting(self, step: Step) -> None:
        """Makes the tree's queue anew if its root has other memory than before."""
        asked = step.root.options.travel_together_bytes
        if asked != self._nbytes:
            self._nbytes = asked
            nbytes = _default_on(step.device) if asked is None else asked
            batches = nbytes > 1
            step.queue = BatchingQueue(step, step.queue, nbytes) if batches else Queue(step, step.queue)


def _default_on(device: torch.device) -> int:
    """Returns the memory where users set none: none on accelerators, where no figures favour batches."""
    return _ON_CPU if device.type == "cpu" else 0


def follow_setting(step: Step) -> None:
    """Lets a tree have the memory for batches that its root has, now and not at the next forward."""
    for plug_in in step.plug_ins.attached:
        if isinstance(plug_in, Batching):
            plug_in.follow_setting(step)
