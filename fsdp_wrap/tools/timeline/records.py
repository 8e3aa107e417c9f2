"""What one rank has recorded of its steps: plain data, which travels and is saved as it is.

All times are nanoseconds of the rank's own clock; `RankRecord.offset` takes them to that of rank 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

FORMAT = 2
"""Of saved records; another one is refused."""

GATHER, REDUCE = "gather", "reduce"

# How well it is known when a transfer was complete.
TOLD, SEEN, AT_MOST = "told", "seen", "at most"


@dataclass(frozen=True)
class Wait:
    """A wait for a transfer, which held up the computation.

    Attributes:
        unit: Who waited.
        begin: When.
        end: Until when; what is done at once with what came is part of it.
    """

    unit: str
    begin: int
    end: int


@dataclass(frozen=True)
class Transfer:
    """A gather or a reduction of one unit, or of several that travel together.

    Attributes:
        kind: "gather" or "reduce".
        units: Whose buffers travel.
        number: How many of this kind and of these units came before, since the recording began.
        phase: Where in the iteration it was issued: "forward", "backward", ...
        nbytes: Bytes of the full buffers.
        dtypes: In which they travel.
        way: How they travel, if not by the process group's own collectives.
        ranks: Who takes part, as the default group counts them.
        begin: When this rank began to issue it.
        issued: When it had issued it.
        end: When it was complete, as far as is known.
        known: How well: "told" (by the work or an event of the device), "seen" (by a wait that it ended) or
            "at most" (it was complete when somebody waited; when it became so nobody knows).
        waits: For it.
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
    waits: tuple[Wait, ...]


@dataclass(frozen=True)
class Slice:
    """Something that took a while on the computation's track, or a copy.

    Those of the computation nest.

    Attributes:
        what: "forward", "recompute", "backward", "issue gather", "issue reduce", "wait for gather",
            "wait for reduction", "wait for copies", "optimizer", "update", "to device" or "to host".
        unit: Of whom; "" for the root, or where it is nobody's.
        begin: When it began.
        end: When it ended.
        transfer: The number, in the record, of the transfer that it issues or waits for; -1 for none.
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
    """What was held from some moment on.

    Attributes:
        at: When.
        unsharded: Bytes of full parameters.
        units: How many units' full parameters.
        gradients: Bytes of gradients that are being reduced.
    """

    at: int
    unsharded: int
    units: int
    gradients: int


@dataclass(frozen=True)
class RankRecord:
    """What one rank has recorded.

    Attributes:
        rank: As the default group counts.
        host: Names its host, so that ranks of one host are known as such.
        device: Where it computes: "cpu", or an accelerator's type.
        offset: What to add to its times so that they are those of rank 0.
        clock_error: How wrong that may be at most; 0 where both read one clock.
        begin: When the recording began.
        end: When it ended.
        passes: When the outermost forwards began.
        compute: On the computation's track, in the order of their beginnings.
        host_side: Of what an accelerator's host did, likewise; none on a CPU, where both are one.
        copies: Between host and device.
        transfers: Gathers and reductions, in the order of their issue.
        levels: What was held.
        peaks: The most bytes of each unit's full parameters and of its gradients on their way at once.
        updates: Of units by `step_in_backward`, in a thread of the host beside the backward.
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

    def to_json(self) -> dict[str, Any]:
        """Returns the same as JSON knows it: lists of values in place of objects."""
        plain = asdict(self)
        for name, kind in _ROWS.items():
            plain[name] = [_row(each, kind) for each in getattr(self, name)]
        return plain

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> RankRecord:
        """Returns what `to_json` was made of.

        Raises:
            KeyError, TypeError: If it is nothing of the kind.
        """
        given = {field.name: plain[field.name] for field in fields(cls)}
        for name, kind in _ROWS.items():
            given[name] = tuple(_from_row(each, kind) for each in given[name])
        return cls(**{**given, "passes": tuple(given["passes"])})


_ROWS: Mapping[str, type[Any]] = {
    "compute": Slice,
    "host_side": Slice,
    "copies": Slice,
    "updates": Slice,
    "transfers": Transfer,
    "levels": Level,
}


def _row(value: Any, kind: type[Any]) -> list[Any]:
    row = [getattr(value, field.name) for field in fields(kind)]
    if kind is Transfer:
        row[-1] = [_row(wait, Wait) for wait in value.waits]
    return row


def _from_row(row: Sequence[Any], kind: type[Any]) -> Any:
    values = [tuple(each) if isinstance(each, list) else each for each in row]
    if kind is Transfer:
        values[-1] = tuple(Wait(*wait) for wait in values[-1])
    return kind(*values)
