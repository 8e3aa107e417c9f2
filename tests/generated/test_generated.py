"""Generated programs, compared with a plain model in float64 after each event (`generated_programs.py`).

A program that fails is shrunk. To run one alone, as a failure tells: `FSDP_WRAP_GENERATED='<program>' pytest
-m slow tests/generated`. Which are drawn the commit decides; `FSDP_WRAP_DRAW=TEXT` draws others.
"""

from __future__ import annotations

import os
import re
from functools import partial

import pytest

from bed import RankFailure, run_ranks
from bed.sampling import DRAW, THOROUGH, draw
from generated_programs import Program, run, shrink
from generated_programs import draw as drawn

ALONE = "FSDP_WRAP_GENERATED"
PARTS, EACH = 8, 40 if not THOROUGH else 800
STUCK, STUCK_AGAIN = 60.0, 8.0
"""Seconds in which no rank has worked, after which they hang; the second while a program is shrunk."""
GRACE = 1.0
"""Seconds for the other ranks once one has failed: mostly they wait for it."""
TRIES = 60
HANGS = "hangs"


def run_program(rank: int, world_size: int, text: str) -> None:
    run(Program.of(text), rank)


def failure_of(program: Program, stuck: float = STUCK) -> RankFailure | None:
    try:
        run_ranks(program.size, run_program, str(program), grace=GRACE, timeout=stuck)
    except RankFailure as failure:
        return failure
    return None


def kind_of(failure: RankFailure) -> str:
    """Returns what failures of one cause have alike: the first words of the first error, without names."""
    told = next((one.headline for one in failure.outcomes if one.kind in ("died", "failed")), "")
    words = re.sub(r"'[^']*'|\d+", "", told.partition(" after event")[0]).split()
    return " ".join(words[:6]) or HANGS


def start(rank: int, world_size: int) -> None:
    """Starts the ranks: what they import is no part of a program's time."""


def fails_as(kind: str, program: Program) -> bool:
    """Whether a program fails in a way, in one of two runs; in both if it hangs, since a rank may be slow."""
    for again in (False, True):
        run_ranks(program.size, start)
        failure = failure_of(program, STUCK_AGAIN)
        alike = failure is not None and kind_of(failure) == kind
        if alike != (kind == HANGS) or again:
            return alike
    return False


def report(program: Program, failure: RankFailure) -> str:
    small = shrink(program, partial(fails_as, kind_of(failure)), TRIES)
    run_ranks(small.size, start)
    return (
        f"{program}\nfails. What is left of it that fails alike:\n"
        f"    {ALONE}='{small}' pytest -m slow tests/generated\n{failure_of(small, STUCK_AGAIN) or failure}"
    )


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_generated_programs(part: int) -> None:
    alone = os.environ.get(ALONE)
    if alone:
        programs = [Program.of(alone)] * (part == 0)
    else:
        programs = [drawn(f"{draw()} {part} {number}") for number in range(EACH)]
    print(f"drawn by {DRAW}='{draw()}'")
    for program in programs:
        failure = failure_of(program)
        if failure is not None:
            pytest.fail(str(failure) if alone else report(program, failure), pytrace=False)


def test_a_seed_draws_one_program_and_its_text_is_the_program():
    for seed in range(200):
        program = drawn(str(seed))
        assert drawn(str(seed)) == program == Program.of(str(program)) and program.can_run


def test_what_a_failure_does_not_need_is_left_out():
    text = "4 orig NO_SHARD tied adamw alone : audit step:TF,twice toggle uneven:n2013,weights,left edit step"
    program = Program.of(text)

    def fails(candidate: Program) -> bool:
        events = [item.event for item in candidate.items]
        weighs = any("weights" in item.options for item in candidate.items)
        return candidate.net == "tied" and weighs and "edit" in events[events.index("uneven") :]

    assert str(shrink(program, fails, 100)) == "2 orig FULL_SHARD tied sgd : uneven:weights edit"
