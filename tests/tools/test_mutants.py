"""The mutants are a spread of the core, and each is a program."""

from __future__ import annotations

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
