"""docs/api.md says what its script finds, and this finds every kind of difference; messages are real ones.

The public API is also the recorded one, and the changelog tells what changed in it since the last release.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
from collections import defaultdict
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fsdp_wrap
from bed.scripts import script
from fsdp_wrap import api
from fsdp_wrap._core import Seam

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


def test_what_torch_does_not_have_is_by_keyword_only():
    rows = [line.split("|") for line in api_table.TARGET.read_text().splitlines() if "here only: `" in line]
    assert len(rows) > 10
    for row in rows:
        name, argument, told, versions = (row[place].strip(" `") for place in (1, 2, 4, 5))
        cls: Any = getattr(api, name, None)
        if dataclasses.is_dataclass(cls):
            by_keyword = {field.name for field in dataclasses.fields(cls) if field.kw_only}
            assert argument in by_keyword or versions, (name, argument)
        else:
            assert "by keyword, " in told, (name, argument)


def test_infos_of_meshes_equal_those_of_torch():
    """Torch has these classes, but does not export them."""
    common = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_common")
    names = ("DataParallelMeshInfo", "DDPMeshInfo", "FSDPMeshInfo", "HSDPMeshInfo", "ShardPlacementResult")
    for name in names:
        if hasattr(common, name):  # torch 2.11 lacks one, and the last fields of the others
            theirs, ours = (
                [
                    (field.name, field.default)
                    for field in dataclasses.fields(getattr(module, name))
                    if field.init
                ]
                for module in (common, api)
            )
            assert ours[: len(theirs)] == theirs
            assert len(theirs) == 2 if name == "ShardPlacementResult" else len(theirs) in (3, 5)


class Theirs:
    def __init__(self, first: int, second: str = "a") -> None: ...

    def step(self, *, count: int = 1, closure: Any = None) -> None: ...

    @property
    def size(self) -> int: ...  # type: ignore[empty-body]


class Other(Theirs):
    """Has another default, one argument too few and one too many, no property, and a method more."""

    def __init__(self, first: int, second: str = "b") -> None: ...

    def step(self, count: int = 1, *, wide: bool = True) -> None: ...  # type: ignore[override]

    def size(self) -> int: ...  # type: ignore[empty-body, override]

    def more(self) -> None: ...


class Colour(Enum):
    RED = 1


def compare(theirs: Any, ours: Any) -> tuple[list[tuple[str, ...]], list[str]]:
    table = api_table.Table()
    table.compare_name("Name", api_table.described("Name", theirs), ours)
    return table.rows, table.unexplained


def test_differences_are_found(monkeypatch):
    rows, differences = compare(Theirs, Other)
    assert differences == [
        "Name(second) (here `'b'`)",
        "Name.size (here `a method`)",
        "Name.step(count) (here `1`)",
        "Name.step(closure) (missing)",
    ]
    assert ("Name.step", "wide", "", "here only: `by keyword, True`") in rows
    assert rows[-1] == ("Name.more", "", "", "public here only")
    assert compare(Theirs, None)[1] == ["Name (missing)"] and compare(Theirs, Theirs)[1] == []
    other = Enum("Colour", {"RED": 2, "BLUE": 3})  # type: ignore[misc]
    assert compare(Colour, other)[1] == ["Name.RED (here `2`)"]
    wide, narrow = (
        dataclasses.make_dataclass("Config", [("wide", bool, default)]) for default in (False, True)
    )
    assert compare(wide, narrow)[1] == ["Name(wide) (here `True`)"]

    monkeypatch.setitem(api_table.REASONS, "Name.step(closure)", "it has none")
    monkeypatch.setitem(api_table.NOTES, "Name(first)", "another meaning since 2.3")
    rows, differences = compare(Theirs, Other)
    assert len(differences) == 3
    assert ("Name.step", "closure", "by keyword, None", "missing: it has none") in rows
    assert ("Name", "first", "required", "same: another meaning since 2.3") in rows
    assert api_table.build()[1] == ["needless: Name.step(closure)", "needless: Name(first)"]


messages = script("messages")


def test_headings_of_messages_are_the_words_of_messages():
    texts = [text.says for text in (*messages.read(), *messages.read_torch())]
    page = messages.TARGET.read_text("utf-8")
    assert "\n".join(messages.faults(page, texts)) == "", "see CONTRIBUTING.md: the page of messages"

    headings = messages.headings(page)
    assert len(headings) == page.count("\n#####") > 100
    for heading in headings:
        last, begins = re.findall(r"\w+", heading.plain)[-1], heading.pattern().match
        changed = [re.sub(rf"\b{last}\b", "other", text) for text in texts if begins(text)]
        assert not any(map(begins, changed)), f"'{heading.words}' fits whatever a message says"


def test_a_heading_that_is_no_message_is_named_with_its_line():
    texts = ["a \0 has no parameters: wrap \0", "'\0' \0 is gone", "steps end (on rank \0)", "\0a step waits"]
    page = "# Page\n\n##### a *Block* has no {}\n##### *the* steps end (on rank *1*)\n##### a step waits\n"
    assert [*messages.faults(page.format("parameters"), texts)] == []
    told = "docs/messages.md:3: 'a *Block* has no {0}' begins no message: mend it, or take the entry out. "
    for words in ("parameter", "gradients", "*parameters*"):
        (fault,) = messages.faults(page.format(words), texts)
        assert fault.startswith(told.format(words)) and "'a *case* has no " in fault
    (fault,) = messages.faults("##### '*name*' *it* is gone\n", texts)
    assert "too few words" in fault


def test_texts_are_read_as_messages_have_them(tmp_path: Path):
    source = tmp_path / "source.py"
    source.write_text(
        """
class Unit:
    \"\"\"No message at all.\"\"\"

    def check(self, name):
        told = "of {name}\\n" + f"no {self.kind[0]} here"
        raise ValueError(f"'{name}' is {'lost' if told else 'there'}: " "look\\nfor it" + told)
"""
    )
    assert [text[1:] for text in messages.texts_in(source, tmp_path)] == [
        ("Unit.check", False, "of \0 no \0 here"),
        ("Unit.check", False, "of \0"),
        ("Unit.check", False, "no \0 here"),
        ("Unit.check", True, "'\0' is \0: look for it\0"),
        ("Unit.check", True, "'\0' is \0: look for it"),
        ("Unit.check", True, "lost"),
        ("Unit.check", True, "there"),
    ]


def test_one_mistake_is_told_by_one_place():
    places = defaultdict(set)
    for text in messages.read():
        if text.told and len(text.says.replace(messages.CASE, "").split()) > 4:
            places[text.says].add((text.file, text.place))
    assert len(places) > 250
    twice = {says: where for says, where in places.items() if len(where) > 1}
    assert not twice, "let both raise what one function returns"


public_api = script("public_api")

BEFORE = ["p.gone(a)", "p.same(a=1)", "p.K.other(a, b)", "p.K.value = 1"]
NOW = ["p.same(a=1)", "p.K.other(a, *, b)", "p.K.value = 2", "p.come"]


def test_record_is_up_to_date():
    recorded, current = public_api.read(public_api.NOW), public_api.lines_of(fsdp_wrap)
    differ = "\n".join(sorted(set(recorded) ^ set(current)))
    assert recorded == current, f"run python docs/public_api.py, and add a line to CHANGELOG.md:\n{differ}"


def test_changelog_tells_every_change_since_the_last_release():
    now, changelog = public_api.lines_of(fsdp_wrap), public_api.CHANGELOG.read_text()
    untold = public_api.untold(public_api.read(public_api.RELEASE), now, changelog)
    assert untold == [], "name these under [Unreleased] in CHANGELOG.md"
    version = public_api.RELEASE.read_text().split()[2]
    assert f"\n## [{version}] - " in changelog


def test_what_came_went_or_changed_must_be_told():
    for told, untold in {
        "`come`, `gone`, `K.other` and `value`": [],
        "`come`, `K.other`": ["gone", "value"],
        "`comes`": ["come", "gone", "other", "value"],
    }.items():
        released = "## [0.1.0] - 2026\n\n- `come` `gone` `other`\n"
        changelog = f"# Changelog\n\n## [Unreleased]\n\n- {told}\n\n{released}"
        assert public_api.untold(BEFORE, NOW, changelog) == untold
        assert public_api.untold(NOW, NOW, changelog) == []


# What is imported when somebody asks.


def test_public_names_are_found_when_asked_for():
    assert fsdp_wrap.plan is importlib.import_module("fsdp_wrap.tools").plan
    modules = {name for name in dir(fsdp_wrap) if isinstance(getattr(fsdp_wrap, name), ModuleType)}
    expected = {"checkpoint", "comm_hooks", "compat", "optim", "replica_groups", "tools", "weights", "wrap"}
    assert modules - {"fully_shard", "replicate"} == expected
    assert {*dir(fsdp_wrap)} - modules == {*fsdp_wrap.__all__} - modules
    with pytest.raises(AttributeError, match="module 'fsdp_wrap' has no attribute 'PRESETS'"):
        fsdp_wrap.__getattr__("PRESETS")  # of a folder, and not exported here
    with pytest.raises(AttributeError, match="'fuly_shard'. Did you mean 'fully_shard'?"):
        fsdp_wrap.__getattr__("fuly_shard")


def test_a_seam_imports_what_fills_it_and_says_where_it_is_not_there(monkeypatch: pytest.MonkeyPatch):
    for folder in ("folder_of_fish", "folder_of_fish.in_another"):
        seam: Seam[Any] = Seam("fish", folder)
        assert seam.filled is None
        with pytest.raises(ImportError, match="dinner needs the add-on for fish"):
            seam.needed("dinner")

    seam = Seam("fish", "folder_of_fish")
    imported = []

    def load(name: str) -> ModuleType:
        imported.append(name)
        seam.fill("a fish")
        return ModuleType(name)

    monkeypatch.setattr("fsdp_wrap._core.add_ons.find_spec", ModuleType)
    monkeypatch.setattr("fsdp_wrap._core.add_ons.import_module", load)
    assert seam.filled == seam.needed("dinner") == "a fish"
    assert imported == ["folder_of_fish"]
