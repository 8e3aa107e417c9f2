"""The pages of the site and README, and the fenced blocks in them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from bed.paths import ROOT

DOCS = ROOT / "docs"
_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>[^\n`]*)\n(?P<source>.*?)^(?P=indent)```$", re.M | re.S)


class Block(NamedTuple):
    """A fenced block: its language, its text, the line on which it begins, and whether a comment skips it."""

    language: str
    source: str
    line: int
    skipped: bool


def pages() -> list[Path]:
    """README and every page below `docs/`."""
    return [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]


def blocks(page: Path) -> list[Block]:
    """The fenced blocks of a page, in order; those in comments, which readers do not see, are none."""
    text = page.read_text("utf-8")
    return [
        Block(
            fence["language"].strip(),
            fence["source"],
            text.count("\n", 0, fence.start()) + 1,
            text[: fence.start()].rstrip().rpartition("\n")[2].startswith("<!--- skip: next"),
        )
        for fence in _FENCE.finditer(text)
    ]


def name_of(page: Path) -> str:
    """A page's path in the repository."""
    return page.relative_to(ROOT).as_posix()


def program_of(page: str) -> Path | None:
    """The program of which a page shows parts: the one that the page's command runs."""
    matched = re.search(
        r"(?:torchrun --nproc-per-node 2|python) (examples/how_to/(?:in_depth/)?\w+\.py)$",
        (ROOT / page).read_text(),
        re.M,
    )
    return ROOT / matched[1] if matched else None
