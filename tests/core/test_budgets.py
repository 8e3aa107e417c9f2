"""Upper bounds of the package's size, and of the way that a reader has to go.

Whoever makes something smaller lowers its number here; only a new capability raises one. These print the
numbers of today, and with `--docstrings` and `--list` what is behind them:

    python tests/tools/size.py
    python tests/tools/walk.py
"""

from __future__ import annotations

import pytest

from bed import run_isolated
from bed.scripts import script

CODE_LINES = {
    "_activations": 295,
    "_comm": 2183,
    "_comm/shared_memory": 1049,
    "_compression": 200,
    "_core": 1688,
    "_params": 3869,
    "_reproducible": 571,
    "_runtime": 3320,
    "_state": 3034,
    "_state_over_replicas": 244,
    "_uneven": 897,
    "_values": 3420,
    "_writer_process": 314,
    "checkpoint": 2481,
    "compat": 795,
    "compat/_checking": 175,
    "compat/_spmd_types": 103,
    "optim": 2139,
    "tools": 4499,
    "tools/tuning": 748,
    "top level": 2220,
    "weights": 795,
    "core": 16314,
    "all": 35039,
}
"""By folder; `core` is all but the add-ons, `tools` and `weights`."""

FILES_IN_CIRCLES: dict[str, int] = {}
"""Files of a folder that import each other in a circle, for types at least."""

DOUBLED_CLASS_NAMES = 1
"""Names that classes in several files have."""

OBSCURE_DOCSTRINGS = 0
"""Docstrings with a sentence that begins with What, Who, Whose, That, Those, As, Of or By which."""

WALKS = {
    ("flat", "construct"): (28, 198),
    ("flat", "step"): (19, 101),
    ("original", "construct"): (28, 195),
    ("original", "step"): (19, 102),
    ("fully_shard", "construct"): (30, 199),
    ("fully_shard", "step"): (19, 100),
}
"""Files and functions that rank 0 of two enters."""

size = script("size", "tests/tools")


def test_folders_have_few_lines_of_code():
    lines = {folder: code for folder, (code, _) in size.lines_by_folder().items()}
    assert lines.keys() == CODE_LINES.keys()
    assert {folder: code for folder, code in lines.items() if code > CODE_LINES[folder]} == {}


def test_few_files_of_a_folder_import_each_other_in_circles():
    files = {folder: sum(map(len, found)) for folder, found in size.circles().items()}
    assert {folder: n for folder, n in files.items() if n > FILES_IN_CIRCLES.get(folder, 0)} == {}


def test_few_class_names_have_two_meanings():
    doubled = size.doubled_classes()
    assert len(doubled) <= DOUBLED_CLASS_NAMES, doubled


def test_docstrings_begin_with_a_verb_or_a_noun():
    found = size.obscure_docstrings()
    assert len(found) <= OBSCURE_DOCSTRINGS, "python tests/tools/size.py --docstrings lists them"


def counted(rank: int, world_size: int, front: str) -> dict[str, tuple[int, int]]:
    """Returns how many files and functions are entered, by what is traced."""
    walks = script("walk", "tests/tools").walk(rank, world_size, front)
    return {name: (len(found.files), len(found.functions)) for name, found in walks.items()}


@pytest.mark.parametrize("front", ["flat", "original", "fully_shard"])
def test_construction_and_step_enter_few_files_and_functions(front):
    """In fresh processes, since what one has cached it does not enter again.

    A rank that waits long for another looks for it, by functions more: the shortest of three walks counts.
    """
    for _ in range(3):
        first, _ = run_isolated(counted, front, world_size=2)
        assert first.kind == "passed", first.text
        most = {name: WALKS[front, name] for name in first.value}
        longer = {
            name: found
            for name, found in first.value.items()
            if found[0] > most[name][0] or found[1] > most[name][1]
        }
        if not longer:
            return
    assert longer == {}, f"more than {WALKS}"
