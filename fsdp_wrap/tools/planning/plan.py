"""`Plan`: what one training step will hold in memory, send and take, as found without running it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fsdp_wrap.tools.planning.comparison import Comparison, compared
from fsdp_wrap.tools.planning.machine import Machine
from fsdp_wrap.tools.planning.page import page_of
from fsdp_wrap.tools.planning.picture import draw

if TYPE_CHECKING:
    from fsdp_wrap.tools.timeline import Timeline

KINDS = (
    "shards",
    "gathered",
    "gradients",
    "reduce buffers",
    "activations",
    "optimizer state",
    "optimizer temporaries",
    "communicator",
    "others",
)
"""What memory of the device is used for.

"gradients" are those of leaves on their way and those of sharded parameters; "activations" is all else that a
forward or backward makes, batches and losses included; "communicator" is what collectives need beside what
travels; "others" are buffers of modules and tensors of the user.
"""


@dataclass(frozen=True)
class Place:
    """A place in a step.

    Attributes:
        unit: Fully qualified name of the unit that computes; "" for the root and outside of units.
        phase: "forward", "backward", "optimizer", or "step" for what lies between.
    """

    unit: str
    phase: str

    def __str__(self) -> str:
        return (
            f"{self.phase} of {self.unit or 'the root'}"
            if self.phase in ("forward", "backward")
            else self.phase
        )


@dataclass(frozen=True)
class Moment:
    """The time that a step spends at one place.

    Attributes:
        place: It.
        bytes_by_kind: What was held when most was held there, by kind; see `KINDS`.
        begin: Predicted seconds from the beginning of the step; None without a machine.
    """

    place: Place
    bytes_by_kind: Mapping[str, int]
    begin: float | None = None

    @property
    def nbytes(self) -> int:
        """Their sum."""
        return sum(self.bytes_by_kind.values())


@dataclass(frozen=True)
class UnitPlan:
    """One unit's part in a step.

    Attributes:
        name: Fully qualified name, "" for the root.
        parameters: How many numbers its parameters have in all ranks together.
        shard_bytes: Bytes of this rank's part, in the master dtype.
        gathered_bytes: Bytes of its full parameters as it computes with them.
        gathers: How often they are gathered in a step.
        reductions: How often its gradients are reduced in a step.
        payload_bytes: Bytes of the full buffers that are gathered and reduced for it in a step.
        wire_bytes: Bytes that this rank receives for it in a step, by kind of collective.
        compute_seconds: Predicted seconds in which it computes; None without a machine.
        communication_seconds: Predicted seconds in which its collectives run; None without a machine.
        wait_seconds: Predicted seconds in which its computation waits for them; None without a machine.
        padding_bytes: Bytes of all ranks' shards that belong to no parameter, in the master dtype, where
            `shard_alignment` says where these begin; else 0.
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


@dataclass(frozen=True)
class HostMemory:
    """Bytes of the host's memory that one rank needs, where its device has memory of its own.

    Attributes:
        offloaded: Tensors that lie there from step to step: shards, gradients and optimizer state.
        pinned: Those of them that the device copies by itself.
        peak: The most that tensors take there in a step.
        loading: What the model's full values take where a full state dict is read before it is loaded.
        checkpoint: What an asynchronous save of model and optimizer holds meanwhile.
    """

    offloaded: int = 0
    pinned: int = 0
    peak: int = 0
    loading: int = 0
    checkpoint: int = 0


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What one rank holds, sends and does in a training step that was not run.

    All bytes are of this rank, and of its device save in `host`. The step is the second, in which the
    optimizer has its state.

    Attributes:
        ranks: How many ranks train.
        rank: Which of them this is.
        device: Type of the device, such as "cuda".
        parameters: How many numbers the model's parameters have, in all ranks together.
        rest_bytes: Bytes held between steps.
        rest_by_kind: The same by kind; see `KINDS`.
        peak_bytes: The most bytes that are held at any time in the step.
        peak_by_kind: What they are.
        peak_at: Where in the step that is.
        first_peak_bytes: The most bytes at any time in the first step, in which optimizers make their state.
        setup_peak_bytes: The most bytes at any time while the model was built.
        moments: The step in the order of time, by place.
        units: The units in the order of the model.
        wire_bytes: Bytes that this rank receives in a step by kind of collective: "all_gather",
            "reduce_scatter", "all_reduce", "broadcast", "all_to_all".
        collectives: How many collectives are issued in a step, by kind.
        payload_bytes: Bytes of the full tensors that those gather, reduce or send, by kind.
        host: Memory of the host.
        flops: Floating-point operations of a step, as torch counts them: matrices, convolutions, attention.
        machine: The machine of the prediction; None if none was given.
        predicted_seconds: Of a step; None without a machine.
        compute_seconds: In which the device computes; None without a machine.
        communication_seconds: In which collectives run; None without a machine.
        exposed_seconds: In which the computation waits for collectives and copies; None without a machine.
    """

    ranks: int
    rank: int
    device: str
    parameters: int
    rest_bytes: int
    rest_by_kind: Mapping[str, int]
    peak_bytes: int
    peak_by_kind: Mapping[str, int]
    peak_at: Place
    first_peak_bytes: int
    setup_peak_bytes: int
    moments: tuple[Moment, ...]
    units: tuple[UnitPlan, ...]
    wire_bytes: Mapping[str, int]
    collectives: Mapping[str, int]
    payload_bytes: Mapping[str, int]
    host: HostMemory = HostMemory()
    flops: int = 0
    machine: Machine | None = None
    predicted_seconds: float | None = None
    compute_seconds: float | None = None
    communication_seconds: float | None = None
    exposed_seconds: float | None = None

    def __str__(self) -> str:
        """The page that a person reads: at most 80 columns."""
        return page_of(self)

    def plot(self, path: str | Path) -> None:
        """Draws the step's memory by kind, and writes it to a file.

        Args:
            path: Of the file; its ending tells the format, such as ".svg".

        Raises:
            ImportError: If matplotlib is not installed.
        """
        draw(self, path)

    def compare(self, timeline: Timeline) -> Comparison:
        """Sets what was planned beside what a timeline has measured, by unit.

        Args:
            timeline: What `fsdp_wrap.timeline` gave for steps like the one planned.

        Raises:
            ValueError: If the timeline is of other units, of more ranks, or has no record of the plan's rank.
        """
        return compared(self, timeline)

    def to_json(self, path: str | Path | None = None) -> str:
        """Returns the plan as JSON, and writes it to a file if one is named."""
        text = json.dumps(dataclasses.asdict(self), indent=1)
        if path is not None:
            Path(path).write_text(text)
        return text

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Makes a plan of what `to_json` returned.

        Raises:
            ValueError: If it is not such a text.
        """
        try:
            told: dict[str, Any] = json.loads(text)
            machine = told["machine"]
            told.update(
                peak_at=Place(**told["peak_at"]),
                moments=tuple(Moment(Place(**each.pop("place")), **each) for each in told["moments"]),
                units=tuple(UnitPlan(**each) for each in told["units"]),
                host=HostMemory(**told["host"]),
                machine=None if machine is None else Machine.from_dict(machine),
            )
            return cls(**told)
        except (TypeError, KeyError, AttributeError, json.JSONDecodeError) as error:
            raise ValueError(f"this is not what Plan.to_json() writes: {error}") from error
