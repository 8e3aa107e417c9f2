"""The mutants are a spread of the core, and each is a program."""

from __future__ import annotations

from typing import Any

import pytest

from bed.scripts import script

mutants = script("mutants", "tests/tools")


def test_mutants_are_spread_over_folders_and_operators_and_each_is_another_program():
    drawn = mutants.mutants()
    assert len({mutant.name for mutant in drawn}) == len(drawn) >= mutants.NUMBER
    assert {mutant.path.split("/")[1] for mutant in drawn} == set(mutants.FOLDERS)
    kinds = [mutant.operator for mutant in drawn]
    expected = {"arithmetic", "call", "comparison", "condition", "constant", "order"}
    assert {*kinds} == expected and min(map(kinds.count, expected)) >= mutants.NUMBER // 6
    for number, mutant in enumerate(drawn):
        text = (mutants.ROOT / mutant.path).read_text()
        changed = mutants.mutated(text, [mutant])
        compile(changed, mutant.path, "exec")
        assert changed != text and text[mutant.begin : mutant.end] == mutant.old
        compile(mutants.marked(text, {number: mutant}), mutant.path, "exec")


TEST = "tests/test_it.py::test_it[a (b)]"


@pytest.mark.parametrize(
    "told", [f"{TEST} (call)", f"{TEST} (setup)", TEST], ids=["call", "setup", "in a rank"]
)
def test_a_mark_notes_the_test_that_reaches_it_once(told, tmp_path, monkeypatch):
    noted = tmp_path / "reached"
    monkeypatch.setenv("MUTANTS_REACHED", str(noted))
    monkeypatch.setenv("PYTEST_CURRENT_TEST", told)
    mark: dict[str, Any] = {}
    exec(mutants.REACHED, mark)
    for _ in range(2):
        mark["reached"](3)
    assert noted.read_text() == f"3 {TEST}\n"


def test_failed_tests_are_told_from_lines_of_logs(tmp_path):
    log = tmp_path / "log"
    log.write_text(
        f"ERROR    a.module:module.py:1 of the package\nFAILED {TEST} - AssertionError\nERROR {TEST}\n"
    )
    assert mutants.failures(log) == [TEST, TEST]
