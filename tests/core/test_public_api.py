"""The public API is the recorded one, and the changelog tells what changed in it since the last release."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import pytest

import fsdp_wrap
from bed.scripts import script
from fsdp_wrap._core import Seam

public_api = script("public_api")

BEFORE = ["p.gone(a)", "p.same(a=1)", "p.K.other(a, b)", "p.K.value = 1"]
NOW = ["p.same(a=1)", "p.K.other(a, *, b)", "p.K.value = 2", "p.come"]


def test_record_is_up_to_date():
    recorded, found = public_api.read(public_api.NOW), public_api.lines_of(fsdp_wrap)
    differ = "\n".join(sorted(set(recorded) ^ set(found)))
    assert recorded == found, f"run python docs/public_api.py, and add a line to CHANGELOG.md:\n{differ}"


def test_changelog_tells_every_change_since_the_last_release():
    now, changelog = public_api.lines_of(fsdp_wrap), public_api.CHANGELOG.read_text()
    untold = public_api.untold(public_api.read(public_api.RELEASE), now, changelog)
    assert untold == [], "name these under [Unreleased] in CHANGELOG.md"
    version = public_api.RELEASE.read_text().split()[2]
    assert f"\n## [{version}] - " in changelog


def test_record_has_what_users_call():
    lines = public_api.lines_of(fsdp_wrap)
    for start in (
        "fsdp_wrap.fully_shard(module, *, mesh=None, ",
        "fsdp_wrap.FullyShardedDataParallel.no_sync(*, reduce_within_copy=False)",
        "fsdp_wrap.ShardingStrategy.FULL_SHARD = 1",
        "fsdp_wrap.checkpoint.save(",
        "fsdp_wrap.optim.Muon.step(",
        "fsdp_wrap.wrap.",
    ):
        assert any(line.startswith(start) for line in lines), start
    assert not any("._" in line.partition("(")[0] for line in lines if " = " not in line)
    assert not any("forward(*args" in line and "FSDPModule" in line for line in lines)


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


def test_names_of_folders_are_found_when_asked_for():
    assert fsdp_wrap.plan is importlib.import_module("fsdp_wrap.tools").plan
    assert fsdp_wrap.optim is sys.modules["fsdp_wrap.optim"]
    with pytest.raises(AttributeError, match="module 'fsdp_wrap' has no attribute 'PRESETS'"):
        fsdp_wrap.__getattr__("PRESETS")  # of a folder, and not exported here


def test_a_seam_imports_what_fills_it_and_says_where_it_is_not_there(monkeypatch: pytest.MonkeyPatch):
    seam: Seam[Any] = Seam("fish", "folder_of_fish")
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
