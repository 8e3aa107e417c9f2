"""Tests of how the package warns; that warnings name the caller's line is tested with each of them."""

from __future__ import annotations

import re

from bed.paths import PACKAGE


def test_there_is_one_way_to_warn():
    """A fixed number of frames is wrong as soon as a function is put in between."""
    found = [
        path.relative_to(PACKAGE).as_posix()
        for path in PACKAGE.rglob("*.py")
        if re.search(r"\bwarnings\.warn\(|stacklevel", path.read_text())
    ]
    assert found == ["_core/cautions.py"]
