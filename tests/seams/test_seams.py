"""Capabilities of the package, some at a time in one program (`programs.py`).

A draw has an optimizer, a way of saving and loading, and three other capabilities (`draws.py`). To run one
alone, as a failing one tells: `FSDP_WRAP_SEAMS=<draw> pytest -m slow tests/seams`. `FSDP_WRAP_SEAMS_SEED`
draws others.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bed import run_ranks
from bed.sampling import THOROUGH
from draws import Draw, draws
from programs import Program

SEED = int(os.environ.get("FSDP_WRAP_SEAMS_SEED", "0"))
ALONE = os.environ.get("FSDP_WRAP_SEAMS")


def _chosen() -> list[Draw]:
    if ALONE:
        return [Draw.of(ALONE)]
    seeds = range(SEED, SEED + (5 if THOROUGH else 1))
    return [*dict.fromkeys(draw for seed in seeds for draw in draws(seed))]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Draws, which takes seconds, unless all that is drawn would be left out."""
    is_left_out = metafunc.config.option.markexpr in ("not slow", "core")
    metafunc.parametrize("draw", [] if is_left_out else _chosen(), ids=str)


@pytest.mark.slow
def test_capabilities_that_meet(draw: Draw, tmp_path: Path) -> None:
    print(f"FSDP_WRAP_SEAMS='{draw}' (drawn with FSDP_WRAP_SEAMS_SEED={SEED})")
    run_ranks(draw.size, run_draw, str(draw), str(tmp_path))


def run_draw(rank: int, world_size: int, draw: str, folder: str) -> None:
    drawn = Draw.of(draw)
    Program(drawn.front, drawn.capabilities(), Path(folder)).run()
