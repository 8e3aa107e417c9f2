"""Reading a step in a store: its bytes are compared with their checksums as they arrive."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import IO

from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from fsdp_wrap.checkpoint._manifest import (
    METADATA,
    ByteRange,
    Fault,
    Manifest,
    metadata_in,
    share_of,
    torn,
)
from fsdp_wrap.checkpoint._places.cache import StoredFiles, SummedRange, Torn
from fsdp_wrap.checkpoint._places.place import where_is
from fsdp_wrap.checkpoint._storage import KnownReader
from fsdp_wrap.checkpoint._team import Team

Runs = list[tuple[int, int]]
"""Ranges of numbers of pieces, in the manifest's order."""


class StoreReader(KnownReader):
    """Reads what a rank needs once, and verifies it; what no rank needs is verified by one of them.

    What is damaged is put nowhere or, as far as it has come, into memory that nobody reads: `faults` tells.

    Raises:
        DamagedCheckpoint: Instead of a reader, if the metadata are damaged.
    """

    def __init__(
        self, files: StoredFiles, manifest: Manifest, refuse: Callable[[list[Fault]], object], team: Team
    ) -> None:
        self._files, self._team, self._refuse = files, team, refuse
        self._pieces = [*manifest.pieces()]
        self._numbers = {(piece.file, piece.offset): number for number, piece in enumerate(self._pieces)}
        self._faults: list[Fault] = []
        self._seen: set[int] = set()
        self._metadata = b""
        if faults := self._checked(METADATA, partial(self._take_metadata, [*manifest.pieces_of(METADATA)])):
            refuse(faults)
        super().__init__(files.folder, metadata_in(self._metadata, files.folder))

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Reads and verifies items file by file."""
        names = {self.storage_data[item.storage_index].relative_path for item in plan.items}
        self._files.take(sorted(names), self._team.rank, self._team.size)
        return super().read_data(plan, planner)

    def read_file(self, name: str, of_pieces: Sequence[Sequence[ReadItem]], planner: LoadPlanner) -> None:
        """Reads and verifies pieces of one file in their order."""
        wanted = [(self._piece_of(items[0]), items) for items in of_pieces]
        self._faults += self._checked(name, partial(self._put_all, wanted, planner))

    def refuse_damage(self) -> None:
        """Raises a `DamagedCheckpoint` if anything that was read is not as it was written."""
        if self._faults:
            self._refuse(self._faults)

    def faults(self, team: Team) -> list[tuple[str, list[Fault]]]:
        """Verifies what no rank has read; returns where each rank reads and what it has found; collective."""
        _, by_rank = team.agreed(lambda: (None, _runs(sorted(self._seen))))
        unseen = bytearray(b"\1" * len(self._pieces))
        for begin, end in (run for runs in by_rank for run in runs):
            unseen[begin:end] = bytes(end - begin)
        rest = [piece for piece, is_unseen in zip(self._pieces, unseen) if is_unseen]
        return team.agreed(lambda: (None, (where_is(self.folder), self._all_faults(rest))))[1]

    def __exit__(self, kind: type[BaseException] | None, *details: object) -> None:
        self._files.close(is_loaded=kind is None)

    def _all_faults(self, rest: Sequence[ByteRange]) -> list[Fault]:
        share = share_of(rest, self._team.rank, self._team.size)
        for name, pieces in groupby(share, attrgetter("file")):
            self._faults += self._checked(name, partial(_torn, [*pieces]))
        return self._faults

    def _piece_of(self, item: ReadItem) -> ByteRange:
        place = self.storage_data[item.storage_index]
        number = self._numbers.get((place.relative_path, place.offset))
        if number is None or self._pieces[number].length != place.length:
            raise RuntimeError(
                f"{self.folder / METADATA} places '{item.storage_index.fqn}' where the manifest has no "
                "checksum: do not trust this folder"
            )
        self._seen.add(number)
        return self._pieces[number]

    def _checked(self, name: str, read: Callable[[IO[bytes]], list[Fault]]) -> list[Fault]:
        """Reads a file by a function that returns its faults; again if a damaged copy was renewed."""
        faults = self._tried(name, read)
        return self._tried(name, read) if faults and self._files.is_renewed(name) else faults

    def _tried(self, name: str, read: Callable[[IO[bytes]], list[Fault]]) -> list[Fault]:
        try:
            with self._files.open(name) as file:
                return read(file)
        except OSError as error:
            return [Fault(name, f"cannot be read: {error}")]

    def _put_all(
        self, wanted: Iterable[tuple[ByteRange, Sequence[ReadItem]]], planner: LoadPlanner, file: IO[bytes]
    ) -> list[Fault]:
        faults = []
        for piece, items in wanted:
            summed = SummedRange(file, piece)
            try:
                self.put(items, summed, piece.length, planner)
                for _ in summed.chunks():  # what follows a tensor's bytes
                    pass
            except Torn:
                faults.append(piece.torn())
        return faults

    def _take_metadata(self, pieces: Sequence[ByteRange], file: IO[bytes]) -> list[Fault]:
        try:
            self._metadata = b"".join(SummedRange(file, piece).read() for piece in pieces)
        except Torn:
            return [Fault(METADATA, "is not as written")]
        self._seen |= {self._numbers[piece.file, piece.offset] for piece in pieces}
        return []


def _torn(pieces: Iterable[ByteRange], file: IO[bytes]) -> list[Fault]:
    return [*torn(file, pieces)]


def _runs(numbers: Iterable[int]) -> Runs:
    """Returns sorted numbers as ranges."""
    runs: Runs = []
    for number in numbers:
        if runs and runs[-1][1] == number:
            runs[-1] = runs[-1][0], number + 1
        else:
            runs.append((number, number + 1))
    return runs
