"""The figures of a plan: kinds of memory, places in a step, and each unit's part in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

KINDS = (
    SHARDS := "shards",
    GATHERED := "gathered",
    GRADIENTS := "gradients",
    REDUCE_BUFFERS := "reduce buffers",
    ACTIVATIONS := "activations",
    OPTIMIZER_STATE := "optimizer state",
    OPTIMIZER_TEMPORARIES := "optimizer temporaries",
    COMMUNICATOR := "communicator",
    OTHERS := "others",
)
"""Uses of the device's memory.

"gradients" are both unsharded and reduced ones; "activations" are all other tensors of a forward or backward,
batches and losses included; "communicator" is memory of collectives beside their buffers; "others" are
buffers of modules and tensors of the user.
"""

FORWARD, BACKWARD, OPTIMIZER, STEP = "forward", "backward", "optimizer", "step"
HELP = "helping other ranks"
"""The phases of a step."""


@dataclass(frozen=True)
class Place:
    """A place in a step.

    Attributes:
        unit: Fully qualified name of the unit that computes; "" for the root and outside of units.
        phase: "forward", "backward", "helping other ranks", "optimizer", or "step" for what lies between.
    """

    unit: str
    phase: str

    def __str__(self) -> str:
        if self.phase not in (FORWARD, BACKWARD):
            return self.phase
        return f"{self.phase} of {self.unit or 'the root'}"


@dataclass(frozen=True)
class Moment:
    """The time that a step spends at one place.

    Attributes:
        place: The place.
        bytes_by_kind: Bytes by kind when most was held there; see `KINDS`.
        begin: Predicted seconds from the beginning of the step; None without a machine.
    """

    place: Place
    bytes_by_kind: Mapping[str, int]
    begin: float | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of all kinds together."""
        return sum(self.bytes_by_kind.values())


@dataclass(frozen=True)
class UnitPlan:
    """One unit's part in a step.

    Attributes:
        name: Fully qualified name, "" for the root.
        parameters: Number of elements of its parameters, over all ranks.
        shard_bytes: Bytes of this rank's shard, in the master dtype.
        gathered_bytes: Bytes of its full parameters, in the dtype of its computation.
        gathers: Number of all-gathers in a step.
        reductions: Number of gradient reductions in a step.
        activation_bytes: The most bytes made in its forward that its device holds when a backward begins.
        payload_bytes: Bytes of the full buffers that are gathered and reduced for it in a step.
        wire_bytes: Bytes that this rank receives for it in a step, by kind of collective.
        compute_seconds: Predicted seconds in which it computes; None without a machine.
        communication_seconds: Predicted seconds in which its collectives run; None without a machine.
        wait_seconds: Predicted seconds in which its computation waits for them; None without a machine.
        padding_bytes: Bytes of padding in all ranks' shards, in the master dtype, where `shard_alignment`
            is set; else 0.
    """

    name: str
    parameters: int
    shard_bytes: int
    gathered_bytes: int
    gathers: int
    reductions: int
    payload_bytes: int
    wire_bytes: Mapping[str, int]
    compute_seconds: float | None = None
    communication_seconds: float | None = None
    wait_seconds: float | None = None
    padding_bytes: int = 0
    activation_bytes: int = 0


@dataclass(frozen=True)
class HostMemory:
    """Bytes of the host's memory that one rank needs, where its device has memory of its own.

    Attributes:
        offloaded: Tensors that lie there from step to step: shards, gradients and optimizer state.
        pinned: The part of them in pinned memory.
        peak: The most that tensors take there in a step.
        loading: The model's full values, as a full state dict holds them before it is loaded.
        checkpoint: Bytes that an asynchronous save of model and optimizer holds while it runs.
    """

    offloaded: int = 0
    pinned: int = 0
    peak: int = 0
    loading: int = 0
    checkpoint: int = 0
