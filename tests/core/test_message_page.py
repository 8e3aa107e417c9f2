"""docs/messages.md says what the package says, and no mistake is told in the same words at two places."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from typing import Any

from bed.scripts import script

messages = script("messages")

SOURCE = '''
import warnings

_GONE = "the group is gone; make another"

class OwnError(ValueError): ...

class Part:
    def check(self, name, size):
        """Raises "nothing"."""
        if size < 0:
            raise OwnError(f"{name} must not be negative, but is {size!r}: " + "choose another")
        if size > 9:
            raise self.error(size) from None
        raise RuntimeError(_GONE)

    def error(self, size):
        return KeyError(f"{type(size).__name__} on rank {dist.get_rank()}: {', '.join(self._names)}")

def warn(rank):
    if rank:
        told = "the first | rank"
    else:
        told = "another"
    warnings.warn(told, stacklevel=2)
    warnings.warn("old", FutureWarning)
    log("no message")
'''


def read(source: str) -> list[Any]:
    tree = ast.parse(source)
    reader = messages.Reader("folder/part.py", tree, messages.error_classes({"folder/part.py": tree}))
    reader.visit(tree)
    return reader.messages


def test_every_kind_of_message_is_found():
    found = [(each.place, each.kind, each.text) for each in read(SOURCE)]
    assert found == [
        ("Part.check", "OwnError", "{name} must not be negative, but is {size}: choose another"),
        ("Part.check", "RuntimeError", "the group is gone; make another"),
        ("Part.error", "KeyError", "{class of size} on rank {rank}: {names}"),
        ("warn", "UserWarning", "the first | rank"),
        ("warn", "UserWarning", "another"),
        ("warn", "FutureWarning", "old"),
    ]
    assert messages.cell("a | of b_c and _d") == r"a \| of b_c and \_d"


def test_page_is_up_to_date():
    assert messages.page() == messages.TARGET.read_text("utf-8"), "run python docs/messages.py"


def test_one_mistake_is_told_by_one_place():
    places = defaultdict(set)
    for each in messages.read():
        text = re.sub(r"\{[^}]*\}", "", each.text)
        if len(text.split()) > 4:
            places[text].add((each.file, each.place))
    assert len(places) > 250
    twice = {text: found for text, found in places.items() if len(found) > 1}
    assert not twice, "let both raise what one function returns"
