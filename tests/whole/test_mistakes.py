"""What newcomers are told of their mistakes: an error at once, on the ranks that can know, with a cure."""

import re

import pytest

from bed import run_ranks
from mistakes import MISTAKES, observe


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told(name):
    row = MISTAKES[name]
    by_rank = dict(enumerate(run_ranks(2, observe, name)))
    told = {rank: each for rank, each in by_rank.items() if each is not None}
    assert told and (not row.ranks or tuple(told) == row.ranks), by_rank
    for each in told.values():
        assert row.kind.__name__ in each.kinds, each
        assert re.search(row.says, each.line), each
