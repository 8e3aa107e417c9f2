"""The page of interchange, as its script writes it from outcomes."""

from __future__ import annotations

import re
from unittest import mock

import torch

from bed.scripts import script

interchange = script("interchange")
FORMS, WAYS, EXACT = (getattr(interchange, name) for name in ("FORMS", "WAYS", "EXACT"))
PAIRS = [(2, 3), (4, 1)]


def test_the_page_has_the_rows_and_the_command_of_its_script() -> None:
    page = interchange.TARGET.read_text("utf-8")
    head, *sections = page.split("\n## ")
    version = re.search(r"on torch (\S+) with\s+fsdp_wrap", head)
    expected = interchange.head(version[1] if version else torch.__version__)
    assert head == expected, "run python docs/interchange.py"
    assert "$ python docs/interchange.py" in head and "python docs/interchange.py" in interchange.__doc__
    assert [section.partition("\n")[0] for section in sections] == [way.title for way in WAYS.values()]
    for section in sections:
        table = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
        assert table[0] == ["writer", *FORMS] and [row[0] for row in table[1:]] == [*FORMS]
        notes = re.findall(r"^(\d+)\. \S", section, re.M)
        cells = [cell for row in table[1:] for cell in row[1:]]
        assert len(cells) == len(FORMS) ** 2 and all(EXACT in cell or "(" in cell for cell in cells)
        used = {number for cell in cells for number in re.findall(r"\((\d+)\)", cell)}
        assert used == set(notes) and notes == [str(number + 1) for number in range(len(notes))]


@mock.patch.object(interchange, "PAIRS", PAIRS)
def test_only_what_arrived_everywhere_is_exact() -> None:
    way, writer, reader = next(iter(WAYS)), *[*FORMS][:2]

    def cell(told: list[str]) -> tuple[str, list[str]]:
        outcomes = [
            interchange.Outcome(way, writer, reader, pair, result) for pair, result in zip(PAIRS, told)
        ]
        lines = interchange.table_of(way, outcomes)
        (row,) = (line for line in lines if line.startswith(f"| {writer} |"))
        return row.split(" | ")[2], [line for line in lines if line.startswith("1. ")]

    every = [EXACT] * len(PAIRS)
    assert cell(every) == (EXACT, [])
    assert cell(every[1:])[0] != EXACT, "one was not run"
    assert cell(["ValueError: no"] * len(PAIRS)) == ("(1)", ["1. Loading fails: `ValueError: no`"])
    told, notes = cell(["ValueError: no", *every[1:]])
    assert told.startswith(f"{PAIRS[0][0]} → {PAIRS[0][1]}: (1); ") and told.endswith(EXACT) and notes
