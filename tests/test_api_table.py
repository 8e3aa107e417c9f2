"""docs/api.md says what its script finds in both packages, and the script finds every kind of difference."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "docs" / "api_table.py"


def load_script() -> Any:
    spec = importlib.util.spec_from_file_location("api_table", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["api_table"] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    return module


api_table = load_script()


def test_page_is_up_to_date():
    page, faults = api_table.build()
    assert faults == []
    assert page == api_table.TARGET.read_text(), "run python docs/api_table.py"


def test_page_lists_what_torch_exports():
    import torch.distributed.fsdp as torch_fsdp

    lines = api_table.TARGET.read_text().splitlines()
    for name in torch_fsdp.__all__:
        assert any(line.startswith((f"| `{name}`", f"| `{name}.")) for line in lines), name
    assert "| `FullyShardedDataParallel` | `limit_all_gathers` | `True` | same |" in lines


class Theirs:
    def __init__(self, first: int, second: str = "a") -> None: ...

    def step(self, *, count: int = 1, closure: Any = None) -> None: ...

    @property
    def size(self) -> int: ...


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
        def size(self) -> int: ...

        def more(self) -> None: ...

    return Ours


def another_default() -> type:
    cls = same()

    def __init__(self: Any, first: int, second: str = "b") -> None: ...

    cls.__init__ = __init__
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


def compare(theirs: Any, ours: Any) -> tuple[list[str], list[str]]:
    table = api_table.Table()
    table._compare_name("Name", theirs, ours)
    return table.lines, table.unexplained


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
    lines, found = compare(Theirs, make())
    assert len(found) == len(faults)
    assert all(one.startswith(fault) for one, fault in zip(found, faults)), found
    assert lines[-1] == "| `Name` |  |  | and also `.more` |"


def test_arguments_that_torch_does_not_have_are_listed():
    cls = same()
    cls.step = lambda self, *, count=1, closure=None, wide=True: None
    lines, found = compare(Theirs, cls)
    assert not found
    assert "| `Name.step` | `wide` |  | here only: `by keyword, True` |" in lines


def test_inherited_methods_count():
    class Scaler(torch.amp.GradScaler):
        pass

    class Theirs(torch.amp.GradScaler):
        def update(self, new_scale: Any = None) -> None: ...

        def step(self, optimizer: Any) -> None: ...

    lines, faults = compare(Theirs, Scaler)
    assert "| `Name.update` | `new_scale` | `None` | same |" in lines
    assert faults == []


def test_differences_of_other_kinds_are_found():
    assert compare(Theirs, None)[1] == ["Name (missing)"]
    other = Enum("Colour", {"RED": 2, "BLUE": 3})
    assert compare(Colour, other)[1] == ["Name.RED (here `2`)"]
    narrow = dataclasses.make_dataclass("Config", [("wide", bool, True), ("colours", list, ())])
    assert compare(Config, narrow)[1] == ["Name(wide) (here `True`)"]
    assert compare(Config, Config)[1] == []
    table = api_table.Table()
    table._compare_name("Name", Config, Config)
    table._compare_name("Name", Config, narrow)
    assert table.unexplained == ["Name (another object than under the first path)"]


def test_reasons_are_used_and_counted(monkeypatch):
    monkeypatch.setitem(api_table.REASONS, "Name.step(closure)", "it has none")
    monkeypatch.setitem(api_table.REASONS, "Name.never", "no need")
    lines, faults = compare(Theirs, no_argument())
    assert faults == []
    assert "| `Name.step` | `closure` | `by keyword, None` | missing: it has none |" in lines
    assert set(api_table.build()[1]) == {"needless reason: Name.step(closure)", "needless reason: Name.never"}
