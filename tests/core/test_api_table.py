"""docs/api.md says what its script finds in both packages, and the script finds every kind of difference."""

from __future__ import annotations

import dataclasses
from enum import Enum
from typing import Any

import pytest
import torch

from bed.scripts import script

api_table = script("api_table")


def test_page_is_up_to_date():
    page, faults = api_table.build()
    assert faults == []
    assert page == api_table.TARGET.read_text(), "run python docs/api_table.py"


def test_page_says_what_the_installed_torch_has():
    """A version between those that the page was written from has no names of its own without a reason."""
    facts, version = api_table.facts_of_installed(), api_table.installed()
    if version in api_table.known():
        assert facts == api_table.known()[version], f"run python docs/api_table.py with torch {version}"
    table = api_table.Table()
    for module in api_table.MODULES:
        table.compare(module, facts[module])
    assert api_table.faults_of(table, version) == []


def test_page_lists_what_torch_exports():
    import torch.distributed.fsdp as torch_fsdp

    lines = api_table.TARGET.read_text().splitlines()
    for name in torch_fsdp.__all__:
        assert any(line.startswith((f"| `{name}`", f"| `{name}.")) for line in lines), name
    assert "| `FullyShardedDataParallel` | `limit_all_gathers` | `True` | same |  |" in lines
    assert "| `FSDPModule.reset_iter_state` |  |  | same | 2.13, 2.15 |" in lines
    assert "| `FSDPModule.reset_iter_state` |  |  | public here only | 2.11 |" in lines


def test_rows_of_several_versions_become_one_list():
    a, b, c, d = ((name, "", "", "same") for name in "abcd")
    assert api_table.merged({"2.1": [d, a, b], "2.2": [a, b, c], "2.3": [a, c]}) == [
        (d, ["2.1"]),
        (a, ["2.1", "2.2", "2.3"]),
        (b, ["2.1", "2.2"]),
        (c, ["2.2", "2.3"]),
    ]


def test_what_is_known_of_a_version_is_read_as_it_was_written(tmp_path):
    facts = {"wrap": {"Theirs": api_table.described("Theirs", Theirs)}}
    api_table.write(tmp_path / "new" / "2.1.json", facts)
    assert api_table.read(tmp_path / "new" / "2.1.json") == facts


class Theirs:
    def __init__(self, first: int, second: str = "a") -> None: ...

    def step(self, *, count: int = 1, closure: Any = None) -> None: ...

    @property
    def size(self) -> int: ...  # type: ignore[empty-body]


class Colour(Enum):
    RED = 1


@dataclasses.dataclass
class Config:
    wide: bool = False
    colours: list[Colour] = dataclasses.field(default_factory=list)


def same() -> type:
    class Ours(Theirs):
        def __init__(self, first: int, second: str = "a") -> None: ...

        def step(self, *, count: int = 1, closure: Any = None) -> None: ...

        @property
        def size(self) -> int: ...  # type: ignore[empty-body]

        def more(self) -> None: ...

    return Ours


def another_default() -> type:
    cls = same()

    def __init__(self: Any, first: int, second: str = "b") -> None: ...

    cls.__init__ = __init__  # type: ignore[misc]
    return cls


def another_order() -> type:
    cls = same()

    def step(self: Any, *, closure: Any = None, count: int = 1) -> None: ...

    cls.step = step
    return cls


def no_argument() -> type:
    cls = same()
    cls.step = lambda self, *, count=1: None
    return cls


def by_position() -> type:
    cls = same()
    cls.step = lambda self, count=1, *, closure=None: None
    return cls


def no_property() -> type:
    cls = same()
    cls.size = lambda self: 3
    return cls


def compare(theirs: Any, ours: Any) -> tuple[list[tuple[str, ...]], list[str]]:
    table = api_table.Table()
    table.compare_name("Name", api_table.described("Name", theirs), ours)
    return table.rows, table.unexplained


@pytest.mark.parametrize(
    ("make", "faults"),
    [
        (same, []),
        (another_default, ["Name(second) (here `'b'`)"]),
        (another_order, ["Name.step(count)", "Name.step(closure)"]),
        (no_argument, ["Name.step(closure) (missing)"]),
        (by_position, ["Name.step(count) (here `1`)"]),
        (no_property, ["Name.size (here `a method`)"]),
    ],
)
def test_differences_of_a_class_are_found(make, faults):
    rows, found = compare(Theirs, make())
    assert len(found) == len(faults)
    assert all(one.startswith(fault) for one, fault in zip(found, faults)), found
    assert rows[-1] == ("Name.more", "", "", "public here only")


def test_arguments_that_torch_does_not_have_are_listed():
    cls = same()
    cls.step = lambda self, *, count=1, closure=None, wide=True: None
    rows, found = compare(Theirs, cls)
    assert not found
    assert ("Name.step", "wide", "", "here only: `by keyword, True`") in rows


def test_inherited_methods_count():
    class Scaler(torch.amp.GradScaler):
        pass

    class Theirs(torch.amp.GradScaler):
        def update(self, new_scale: Any = None) -> None: ...

        def step(self, optimizer: Any) -> None: ...

    rows, faults = compare(Theirs, Scaler)
    assert ("Name.update", "new_scale", "None", "same") in rows
    assert faults == []


def test_differences_of_other_kinds_are_found():
    assert compare(Theirs, None)[1] == ["Name (missing)"]
    other = Enum("Colour", {"RED": 2, "BLUE": 3})  # type: ignore[misc]
    assert compare(Colour, other)[1] == ["Name.RED (here `2`)"]
    narrow = dataclasses.make_dataclass("Config", [("wide", bool, True), ("colours", list, ())])
    assert compare(Config, narrow)[1] == ["Name(wide) (here `True`)"]
    assert compare(Config, Config)[1] == []
    table = api_table.Table()
    config = api_table.described("Name", Config)
    table.compare_name("Name", config, Config)
    table.compare_name("Name", config, narrow)
    assert table.unexplained == ["Name (another object than under the first path)"]


def test_reasons_are_used_and_counted(monkeypatch):
    monkeypatch.setitem(api_table.REASONS, "Name.step(closure)", "it has none")
    monkeypatch.setitem(api_table.REASONS, "Name.never", "no need")
    rows, faults = compare(Theirs, no_argument())
    assert faults == []
    assert ("Name.step", "closure", "by keyword, None", "missing: it has none") in rows
    assert set(api_table.build()[1]) == {"needless: Name.step(closure)", "needless: Name.never"}


def test_notes_stand_beside_what_is_the_same(monkeypatch):
    monkeypatch.setitem(api_table.NOTES, "Name.step(count)", "another meaning since 2.3")
    monkeypatch.setitem(api_table.NOTES, "Name.never", "no need")
    rows, faults = compare(Theirs, same())
    assert faults == []
    assert ("Name.step", "count", "by keyword, 1", "same: another meaning since 2.3") in rows
    assert set(api_table.build()[1]) == {"needless: Name.step(count)", "needless: Name.never"}
