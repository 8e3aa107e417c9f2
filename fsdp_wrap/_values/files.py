"""Files of a record: a folder with one file for each rank, of one line for each step."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from fsdp_wrap._core import own_folder
from fsdp_wrap._values.statistics import Statistics

SHARD, PARAMETER, AGAIN, UPDATE = "shard", "parameter", "parameter in backward", "update"
INPUT, OUTPUT = "input", "output"
OUTPUT_GRADIENT, INPUT_GRADIENT = "gradient of output", "gradient of input"
GRADIENT, REDUCED = "gradient", "reduced gradient"
STEP = "gradient at the step"
"""Gradients as an optimizer sees them; `verify` alone records them."""

Key = tuple[str, str]
"""Seam and unit."""

_FORMAT = 1


@dataclass(frozen=True)
class Header:
    """Facts about the run of one rank.

    Attributes:
        rank: Global rank.
        ranks: Number of ranks.
        contributors: Number by which sums of gradients are divided.
        copy: Number of the copy of the parameters that this rank holds a part of, by unit.
        torch: Version of torch.
        format: Version of the file.
    """

    rank: int
    ranks: int
    contributors: float
    copy: Mapping[str, int]
    torch: str
    format: int = _FORMAT


@dataclass(frozen=True)
class RecordedStep:
    """A recorded step of one rank: statistics by seam and unit, in the order of the step.

    Attributes:
        number: Number of the step, from 0.
        passes: Number of outermost forwards in it.
        rows: The statistics.
    """

    number: int
    passes: int
    rows: Mapping[Key, Statistics]


class Writer:
    """Writes the file of one rank."""

    def __init__(self, folder: str | Path, header: Header) -> None:
        self._path = Path(folder) / f"rank-{header.rank:05d}.jsonl"
        if self._path.exists():
            raise ValueError(f"{self._path} is there already: record_values() needs a folder of its own")
        own_folder(self._path.parent)
        with self._path.open("x") as file:
            file.write(json.dumps(asdict(header)) + "\n")

    def write(self, step: RecordedStep) -> None:
        """Appends a step."""
        rows = [[*key, *statistics.as_list()] for key, statistics in step.rows.items() if statistics.tensors]
        with self._path.open("a") as file:
            file.write(json.dumps({"step": step.number, "passes": step.passes, "rows": rows}) + "\n")


@dataclass(frozen=True)
class RankValues:
    """The record of one rank: its steps by number."""

    header: Header
    steps: Mapping[int, RecordedStep]


def read(folder: str | Path) -> list[RankValues]:
    """Returns the records of all ranks, by rank.

    Raises:
        ValueError: If there is none, one is missing, or one is of another format.
    """
    files = sorted(Path(folder).glob("rank-*.jsonl"))
    if not files:
        raise ValueError(f"no rank has written values (rank-*.jsonl) to {folder}: see record_values()")
    records = [*map(_read_rank, files)]
    expected = records[0].header.ranks
    if [record.header.rank for record in records] != [*range(expected)]:
        raise ValueError(
            f"{folder} has the values of {len(records)} of {expected} ranks: copy all files there"
        )
    return records


def _read_rank(path: Path) -> RankValues:
    lines = path.read_text().splitlines()
    try:
        header = Header(**json.loads(lines[0]))
    except (IndexError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no file of record_values(): {error}") from error
    if header.format != _FORMAT:
        raise ValueError(f"{path} has format {header.format}, and this version reads {_FORMAT}")
    steps = {}
    for line in lines[1:]:
        entry = json.loads(line)
        rows = {(row[0], row[1]): Statistics.of_list(row[2:]) for row in entry["rows"]}
        steps[entry["step"]] = RecordedStep(entry["step"], entry["passes"], rows)
    return RankValues(header, steps)
