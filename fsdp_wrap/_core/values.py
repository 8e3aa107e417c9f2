"""Values of a step: the runtime tells watchers where it owns or passes on tensors. Free without watchers."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch


class ValueSeam(Enum):
    """The seams of a step, with the names that they have in messages.

    Attributes:
        PARAMETERS: A unit's full parameters are shown, for a forward or a backward.
        INPUTS: A unit begins to compute with these tensors.
        OUTPUTS: A unit's forward has computed these tensors.
        OUTPUT_GRADIENTS: A gradient has reached an output of a unit.
        INPUT_GRADIENTS: The gradient of an input of a unit is done.
        GRADIENTS: This rank's gradients of a unit are about to leave the leaves.
        REDUCED: A gradient shard is summed and divided; the owner is its layout.
    """

    PARAMETERS = "parameter"
    INPUTS = "input"
    OUTPUTS = "output"
    OUTPUT_GRADIENTS = "gradient of output"
    INPUT_GRADIENTS = "gradient of input"
    GRADIENTS = "gradient"
    REDUCED = "reduced gradient"


class ValueWatcher:
    """Sees the values of steps, in the thread in which they happen; a base that ignores all of them."""

    def begin(self, schedule: Any) -> None:
        """Notes that an outermost forward begins; may communicate, and may raise."""

    def see(self, owner: Any, seam: ValueSeam, values: Sequence[torch.Tensor | None]) -> None:
        """Looks at values, which must stay as they are.

        Args:
            owner: The unit, or the layout.
            seam: Place in the step.
            values: None of `PARAMETERS` and `GRADIENTS`, which the leaves of the unit hold.
        """

    def end(self, schedule: Any) -> None:
        """Notes that a backward has ended; may communicate, and may raise."""


value_watchers: list[ValueWatcher] = []
"""Active watchers."""


def tell_values(owner: Any, seam: ValueSeam, values: Sequence[torch.Tensor | None] = ()) -> None:
    """Shows values to every watcher."""
    for watcher in tuple(value_watchers):
        watcher.see(owner, seam, values)
