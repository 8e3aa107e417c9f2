"""Writes docs/examples.md from what the examples say of themselves.

    python docs/gallery.py

An example's docstring has a first sentence, the commands, some sentences, and what is printed.
"""

from __future__ import annotations

import ast
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "examples.md"
GALLERY = (
    "pretrain",
    "lora",
    "hf_trainer",
    "large_model",
    "resume_elsewhere",
    "experts",
    "gan",
    "vision",
    "ray_train",
)
BREAK = "\n\n"
HEAD = """# Examples

Each is one file of less than 120 lines, runs on two CPU cores in seconds, and downloads nothing. This page is
written by `docs/gallery.py` from what the files say of themselves; the tests run the commands and compare.
Losses differ a little between versions of torch and Python.
"""


@dataclass(frozen=True)
class Example:
    """What an example says of itself.

    Attributes:
        file: Relative to the repository.
        title: What it does, in a sentence.
        commands: To be run one after the other, in the repository.
        text: More about it.
        before: What introduces that which is printed.
        printed: What the last command prints.
    """

    file: str
    title: str
    commands: list[str]
    text: str
    before: str
    printed: list[str]

    @classmethod
    def read(cls, name: str) -> Example:
        """Reads the docstring of one."""
        file = f"examples/{name}.py"
        told = ast.get_docstring(ast.parse((ROOT / file).read_text("utf-8")))
        assert told is not None
        title, commands, *texts, before, printed = re.split(r"\n\n(?=\S|    )", told)
        lines = [dedent(block).strip().splitlines() for block in (commands, printed)]
        return cls(file, " ".join(title.split()), lines[0], "\n\n".join(texts), before, lines[1])

    def section(self) -> list[str]:
        """Its part of the page."""
        commands, printed = "\n".join(self.commands), "\n".join(self.printed)
        parts = [f"## `{self.file}`", self.title, f"```bash\n{commands}\n```", self.text, self.before]
        return [*parts, f"```text\n{printed}\n```"]


def page() -> str:
    """The page."""
    sections = [part for name in GALLERY for part in Example.read(name).section()]
    return "\n\n".join([HEAD.strip(), *sections, "## Others", others()]) + "\n"


def others() -> str:
    """The examples that are longer, or that have no output to compare, each with what it says first."""
    lines = []
    for path in sorted((ROOT / "examples").glob("*.py")):
        if path.stem not in GALLERY:
            told = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
            lines.append(f"- `examples/{path.name}`: {' '.join(told.split(BREAK)[0].split())}")
    return "\n".join(lines)


if __name__ == "__main__":
    TARGET.write_text(page(), "utf-8")
    sys.exit(0)
