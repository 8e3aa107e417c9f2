"""The log that the ranks of one group on one host share: rows of words, and the entries behind them.

A rank writes only its own entries and words. A word tells whether an entry is complete, and has its number
and digest. So one comparison of the words in a row compares the collective of all ranks.

A rank whose word in the first row is 0 runs on another host, or has not begun.
"""

from __future__ import annotations

import fcntl
import mmap
import struct
import zlib
from itertools import product
from typing import NamedTuple

from fsdp_wrap._core import Phase

ENTRY = struct.Struct("<QB235pIB")  # fields of `LogEntry`
write_entry = ENTRY.pack_into
RING = 32  # number of a group's latest collectives that are kept
_REMARKS_KEPT = 8  # number of a rank's latest remarks that are kept
ENTERED, FIRST = 0, 1  # rows: the unit entered last, and the first collective of the ring
_FIRST_REMARK = FIRST + RING
ROWS = _FIRST_REMARK + _REMARKS_KEPT
LOW = 0xFFFFFFFF  # the lower half of a word
RAISED = ", after a step that raised"
_PHASES = list(Phase)


class LogEntry(NamedTuple):
    """A logged collective, or the last entered unit, of a rank.

    `number` counts the group's collectives from 1; 0 means an empty entry. `tries` are those of
    `StepCounts`. `phase` is an index.
    """

    number: int
    tries: int
    text: bytes
    iteration: int
    phase: int

    def __str__(self) -> str:
        what = self.text.decode(errors="replace")
        phase = _PHASES[self.phase]
        when = f"{phase.value} of iteration {self.iteration}"
        if phase is Phase.IDLE:
            when = f"after iteration {self.iteration}" if self.iteration else "before the first iteration"
        return f"{what} ({when}{RAISED if self.tries & 1 else ''})"


class HostLog:
    """The log of one group's ranks on one host. Ranks are counted in the group.

    Layout: `ROWS` rows of one 64-bit word per rank, then `ROWS` entries per rank. Words of row 0 are 1 for
    present ranks. Next comes a ring over the latest collectives, whose words have the number in the higher
    half and the digest in the lower one, and last a ring over a rank's remarks. A word is written
    atomically, and after its entry.

    Args:
        memory: Holds the log.
        rank: This rank.
        ranks: How many ranks the group has.
        descriptor: Of the file, in which each living rank holds the lock of the byte at its rank's offset;
            -1 for a log that this rank has for itself.

    Attributes:
        words: The rows of words.
        entries: Offset of this rank's entries in bytes.
        present: The ranks that have been seen on this host.
        begin: The first of them.
        end: The last of them, plus 1; ranks between that are not present are on other hosts.
        searches: How often to search for ranks yet, before a collective.
    """

    def __init__(self, memory: mmap.mmap, rank: int, ranks: int, descriptor: int = -1) -> None:
        self.memory, self.rank, self.ranks = memory, rank, ranks
        self.words = memoryview(memory)[: 8 * ROWS * ranks].cast("Q")
        self.entries = self.entries_of(rank, ranks)
        self._descriptor = descriptor
        self._remarked = 0
        self.words[rank] = 1
        self.present, self.begin, self.end = [rank], rank, rank + 1
        self.searches = RING  # ranks not seen during the first collectives are on other hosts

    @classmethod
    def unshared(cls, rank: int, ranks: int) -> HostLog:
        """Makes a log that this rank has for itself, without a file."""
        return cls(mmap.mmap(-1, cls.nbytes(ranks)), rank, ranks)

    @staticmethod
    def nbytes(ranks: int) -> int:
        """Returns the size of a log in bytes."""
        return (8 + ENTRY.size) * ROWS * ranks

    @staticmethod
    def entries_of(rank: int, ranks: int) -> int:
        """Returns the offset of a rank's entries in bytes."""
        return (8 * ranks + rank * ENTRY.size) * ROWS

    @staticmethod
    def row_of(number: int) -> int:
        """Returns the row of a collective."""
        return FIRST + number % RING

    def read(self, rank: int, row: int) -> LogEntry:
        """Returns a rank's entry in a row."""
        begin = self.entries_of(rank, self.ranks) + row * ENTRY.size
        return LogEntry._make(ENTRY.unpack_from(self.memory, begin))

    def collective(self, rank: int, number: int) -> LogEntry:
        """Returns a rank's entry in the row of a collective."""
        return self.read(rank, self.row_of(number))

    def last_collective(self, rank: int) -> LogEntry:
        """Returns a rank's latest collective."""
        return max(self.read(rank, row) for row in range(FIRST, _FIRST_REMARK))

    def words_of(self, number: int) -> dict[int, int]:
        """Returns the words in the row of a collective by present rank."""
        row = self.row_of(number) * self.ranks
        return {rank: self.words[row + rank] for rank in self.present}

    def search(self) -> None:
        """Searches for ranks that have come to this host's log."""
        self.searches -= 1 if self.searches else 0
        self.present = [rank for rank, word in enumerate(self.words[: self.ranks]) if word]
        self.begin, self.end = self.present[0], self.present[-1] + 1

    def lives(self, rank: int) -> bool:
        """Whether a rank that was present still holds its lock."""
        if rank == self.rank:
            return True
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return True
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, rank)
        return False

    def write_remark(self, issued: int, about: int, text: bytes) -> None:
        """Writes a remark of this rank on a subject, after so many collectives."""
        row = _FIRST_REMARK + self._remarked % _REMARKS_KEPT
        self._remarked += 1
        write_entry(self.memory, self.entries + row * ENTRY.size, issued, 0, text, about, 0)
        self.words[row * self.ranks + self.rank] = _word_of_remark(issued, about, text)

    def remarks(self, issued: int, about: int) -> dict[int, bytes]:
        """Returns the remarks of present ranks on a subject, after so many collectives."""
        texts = dict[int, bytes]()
        for rank, row in product(self.present, range(_FIRST_REMARK, ROWS)):
            word = self.words[row * self.ranks + rank]
            if word and word >> 32 == issued & LOW:
                text = self.read(rank, row).text
                # Else it is of another subject, or is being written.
                if word == _word_of_remark(issued, about, text):
                    texts[rank] = text
        return texts


def _word_of_remark(issued: int, about: int, text: bytes) -> int:
    """Returns the word of a remark, never 0: the number of collectives before it, and a checksum."""
    return (issued & LOW) << 32 | zlib.crc32(text, about) | 1
