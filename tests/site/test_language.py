"""The language of the site: phrases that nobody in this field would write, with what to write instead."""

from __future__ import annotations

import re

import pytest

from site_pages import DOCS, name_of, pages

ELSEWHERE = {"docs/changelog.md"}
"""A page that is another file."""
PHRASES = {
    "refused by name": "raises an error that names it",
    "refused by its name": "raises an error that names it",
    "refused by their names": "raises an error that names them",
    "told by name": "an error names it",
    "in the place of": "instead of",
    "compute wrong": "is faulty",
    "computes wrong": "is faulty",
    "computing wrong": "is faulty",
    "(a client)": "the name of the library",
    "what was given": "the argument, or its name",
}
"""Each phrase, and what to write instead."""
_FENCED = re.compile(r"^ *```.*?^ *```$", re.M | re.S)


def faults(text: str) -> list[str]:
    """Finds the phrases of a page outside of its fenced blocks, also over the end of a line."""
    prose = _FENCED.sub(lambda block: "\n" * block[0].count("\n"), text)
    return [
        f"line {prose.count(chr(10), 0, match.start()) + 1}: {phrase!r}; write: {better}"
        for phrase, better in PHRASES.items()
        for match in re.finditer(r"\s+".join(map(re.escape, phrase.split())), prose, re.I)
    ]


@pytest.mark.parametrize("page", [name_of(page) for page in pages() if name_of(page) not in ELSEWHERE])
def test_pages_have_none_of_the_phrases(page: str) -> None:
    assert not faults((DOCS.parent / page).read_text("utf-8"))


def test_phrases_are_found_outside_of_code() -> None:
    text = "It is refused\nby its name.\n```text\nIn the place of it.\n```\nA GPU Computes wrong (a client)."
    assert not faults("A call raises an error that names it, instead of a hang: `refused_by_name`.")
    assert [fault.partition(";")[0] for fault in faults(text)] == [
        "line 1: 'refused by its name'",
        "line 6: 'computes wrong'",
        "line 6: '(a client)'",
    ]
