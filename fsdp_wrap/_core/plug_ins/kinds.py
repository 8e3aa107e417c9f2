"""The kinds of what happens in a step."""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """Phases of an iteration.

    Attributes:
        index: Position in the order of the phases.
    """

    index: int

    IDLE = "idle"
    FORWARD = "forward"
    BACKWARD = "backward"
    FINAL_CALLBACK = "final_callback"

    def __init__(self, value: str) -> None:
        self.index = len(type(self).__members__)


class Computing(Enum):
    """Kinds of a unit's computation; `RECOMPUTE`: a forward in a backward (activation checkpointing)."""

    FORWARD = "forward"
    RECOMPUTE = "recompute"
    BACKWARD = "backward"


class SpanKind(Enum):
    """Kinds of runtime activity.

    Attributes:
        GATHER: Fills the send buffers of one or more units and issues their all-gather.
        AWAIT_GATHER: Waits for a unit's all-gather, and makes its parameters usable.
        REDUCE: Issues the reduction of the gradients of one or more units.
        AWAIT_REDUCTION: Waits for the reduction, and takes its result.
        COPY: Issues the copy of a unit's shards, or of its activations, between host memory and the device.
        AWAIT_COPIES: Blocks the host until copies from and to its memory are done.
        UPDATE: Updates a unit by its optimizer in the backward.
        HELP: Takes part in a forward and backward of other ranks, without a batch (`uneven`); for the root.
    """

    GATHER = "gather"
    AWAIT_GATHER = "await gather"
    REDUCE = "reduce"
    AWAIT_REDUCTION = "await reduction"
    COPY = "copy"
    AWAIT_COPIES = "await copies"
    UPDATE = "update"
    HELP = "help"


class ValueSeam(Enum):
    """The seams of a step at which values pass, with the names that they have in messages.

    Attributes:
        PARAMETERS: A unit's full parameters are shown, for a forward or a backward.
        INPUTS: A unit begins to compute with these tensors.
        OUTPUTS: A unit's forward has computed these tensors.
        OUTPUT_GRADIENTS: A gradient has reached an output of a unit.
        INPUT_GRADIENTS: The gradient of an input of a unit is done.
        GRADIENTS: This rank's gradients of a unit are about to leave the leaves.
        REDUCED: A gradient shard is summed and divided; the owner is its `ShardedParams`.
    """

    PARAMETERS = "parameter"
    INPUTS = "input"
    OUTPUTS = "output"
    OUTPUT_GRADIENTS = "gradient of output"
    INPUT_GRADIENTS = "gradient of input"
    GRADIENTS = "gradient"
    REDUCED = "reduced gradient"
