"""The command that kills: what it draws, and a receiver of weights that dies and comes back."""

from __future__ import annotations

import random
import sys
from collections import Counter

import pytest

from bed.paths import ROOT

sys.path.insert(0, str(ROOT))  # benchmarks are not installed

from benchmarks import receiver_kills
from benchmarks.kills import KINDS, drawn


def test_kinds_are_drawn_equally_often_and_by_the_seed():
    first, again, other = (drawn(50, KINDS, random.Random(seed)) for seed in (0, 0, 1))
    assert first == again != other
    assert sorted(Counter(first).values()) == [8, 8, 8, 8, 9, 9]


@pytest.mark.slow
def test_a_receiver_that_is_killed_costs_no_step_and_the_next_one_has_all():
    """The trainers' bits are those of a run without receivers, and the last receiver has them."""
    events, same = receiver_kills.disturbed(1, seed=3)
    assert [event.lost for event in events] == [0]
    assert events[0].seconds < events[0].away
    assert same
