import random
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of text that is no Python library."""
    folder = tmp_path_factory.mktemp("text")
    words = random.Random(0).choices("the quick brown fox jumps over a lazy dog ".split(), k=4000)
    for index in range(40):
        (folder / f"{index}.txt").write_text(" ".join(words[index * 100 : index * 100 + 100]))
    return folder
