"""What newcomers are told of their mistakes: an error at once, on the ranks that can know, with a cure."""

import re

import pytest

from bed import run_ranks
from mistakes import MISTAKES, observe


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told(name):
    row = MISTAKES[name]
    for rank, told in enumerate(run_ranks(2, observe, name)):
        if rank not in row.ranks:
            assert told is None, (rank, told)
            continue
        assert told is not None, f"rank {rank} was told nothing"
        assert row.kind.__name__ in told.kinds, told
        assert re.search(row.says, told.line), told
