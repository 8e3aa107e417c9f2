"""The record of one rank's steps: plain data to exchange and to save.

All times are nanoseconds of the rank's own clock; `RankRecord.offset` converts them to the clock of rank 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

FORMAT = 2
"""Version of saved records; others are refused."""

GATHER, REDUCE, HELP = "gather", "reduce", "help other ranks"

# How well the end of a transfer is known.
TOLD, SEEN, AT_MOST = "told", "seen", "at most"


@dataclass(frozen=True)
class TransferWait:
    """A wait of a unit for a transfer, which held up the computation."""

    unit: str
    begin: int
    end: int


@dataclass(frozen=True)
class Transfer:
    """A gather or a reduction of one unit, or of several in one collective.

    Attributes:
        kind: "gather" or "reduce".
        number: How many transfers of this kind and of these units came before.
        phase: The phase of its issue: "forward", "backward", ...
        nbytes: Bytes of the full buffers.
        way: How it is sent, if not by the process group's own collectives.
        ranks: The global ranks that take part.
        begin: When this rank began to issue it.
        issued: When it had issued it.
        known: How well `end` is known: "told" (by the work or an event of the device), "seen" (it ended a
            wait) or "at most" (it was complete before somebody waited).
    """

    kind: str
    units: tuple[str, ...]
    number: int
    phase: str
    nbytes: int
    dtypes: tuple[str, ...]
    way: str
    ranks: tuple[int, ...]
    begin: int
    issued: int
    end: int
    known: str
    waits: tuple[TransferWait, ...]


@dataclass(frozen=True)
class Slice:
    """A slice of a track of the computation, where slices nest, or a copy.

    Attributes:
        what: "forward", "recompute", "backward", "issue gather", "issue reduce", "wait for gather",
            "wait for reduction", "wait for copies", "optimizer", "update", "help other ranks", "to device",
            "to host", "activations to device" or "activations to host".
        unit: Its unit; "" for the root and where there is none.
        transfer: Index in the record of the transfer that it issues or waits for; -1 for none.
        nbytes: Bytes that it copies.
    """

    what: str
    unit: str
    begin: int
    end: int
    transfer: int = -1
    nbytes: int = 0


@dataclass(frozen=True)
class Level:
    """Memory from one moment on: bytes of full parameters, of how many units, and of reduced gradients."""

    at: int
    unsharded: int
    units: int
    gradients: int


@dataclass(frozen=True)
class RankRecord:
    """The record of one rank.

    Attributes:
        rank: The global rank.
        host: The name of its host and boot, equal for ranks of one host.
        device: "cpu", or an accelerator's type.
        offset: Added to its times, gives those of rank 0.
        clock_error: The largest error of the offset; 0 where both read one clock.
        passes: When the outermost forwards began: its own, and those of other ranks that it has helped.
        compute: Slices of the computation, in the order of their beginnings.
        host_side: Slices of an accelerator's host; none on a CPU.
        copies: Copies between host and device.
        transfers: Gathers and reductions, in the order of their issue.
        levels: Memory after each change.
        peaks: The most bytes of each unit's full parameters and reduced gradients at once.
        updates: Updates by `step_in_backward` in a thread of the host beside the backward.
    """

    rank: int
    host: str
    device: str
    offset: int
    clock_error: int
    begin: int
    end: int
    passes: tuple[int, ...]
    compute: tuple[Slice, ...]
    host_side: tuple[Slice, ...]
    copies: tuple[Slice, ...]
    transfers: tuple[Transfer, ...]
    levels: tuple[Level, ...]
    peaks: Mapping[str, int]
    updates: tuple[Slice, ...] = ()

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> RankRecord:
        """Makes a record of its fields, as JSON gives them back.

        Raises:
            KeyError, TypeError: If they are others.
        """
        given = {field.name: plain[field.name] for field in fields(cls)}
        for name, kind in _ROWS.items():
            given[name] = tuple(_from_row(row, kind) for row in given[name])
        return cls(**{**given, "passes": tuple(given["passes"])})


_TRACKS = ("compute", "host_side", "copies", "updates")
_ROWS: Mapping[str, type[Any]] = {**dict.fromkeys(_TRACKS, Slice), "transfers": Transfer, "levels": Level}


def _from_row(row: Sequence[Any], kind: type[Any]) -> Any:
    values = [tuple(value) if isinstance(value, list) else value for value in row]
    if kind is Transfer:
        values[-1] = tuple(TransferWait(*wait) for wait in values[-1])
    return kind(*values)
