"""Tables of wrong programs, each with what it is told.

A row begins with the mistake, as a reader sees it. The program follows after `>`, if it is another. The last
line has the type of the error or warning, the ranks that are told if it is not all, and a pattern.
"""

from __future__ import annotations

import re
from typing import NamedTuple

_TOLD = re.compile(r" +(\w+)(?: on (rank \d|some rank))?: (.*)")


class Mistake(NamedTuple):
    """A program with a mistake, and what it is told.

    Attributes:
        name: The mistake as a reader sees it.
        source: The program.
        kind: The name of the error's or warning's type.
        says: A pattern of what it says.
        ranks: Those that are told, of two; empty if it is one or the other.
    """

    name: str
    source: str
    kind: str
    says: str
    ranks: tuple[int, ...]


def read(table: str) -> dict[str, Mistake]:
    """Reads a table; returns its rows by their names."""
    rows: dict[str, Mistake] = {}
    name, source = "", []
    for line in filter(None, table.splitlines()):
        told = _TOLD.fullmatch(line)
        if line.startswith("    > "):
            source.append(line[6:])
        elif told is not None:
            kind, where, says = told.groups()
            ranks = () if where == "some rank" else (int(where[-1]),) if where else (0, 1)
            rows[name] = Mistake(name, "\n".join(source or [name]), kind, says, ranks)
        else:
            assert line not in rows, f"a second row of the name {line}"
            name, source = line, []
    return rows
