"""Writes docs/examples.md from what the examples say of themselves.

    python docs/gallery.py
    python docs/gallery.py --notebook

An example's docstring has a first sentence, the commands, some sentences, and what is printed. With
`--notebook` the notebook runs first, and keeps what it shows.
"""

from __future__ import annotations

import ast
import base64
import difflib
import io
import json
import re
import sys
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent
from typing import Any
from unittest import mock

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "examples.md"
NOTEBOOK = ROOT / "examples" / "sharding.ipynb"
GALLERY = (
    "pretrain",
    "chat",
    "vision_transformer",
    "diffusion",
    "rl",
    "uneven",
    "lora",
    "hf_trainer",
    "large_model",
    "resume_elsewhere",
    "experts",
    "gan",
    "vision",
    "ray_train",
)
PORTED = {"vision_transformer": "vision_transformer_ddp"}
"""The program before the port, by what it became."""
BREAK = "\n\n"
HEAD = """# Examples

Each example is one file, runs on two CPU cores in at most two minutes, and downloads
nothing. `docs/gallery.py` writes this page from the files' docstrings. The tests run the commands and compare
the output. Losses differ a little between versions of torch and Python.
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
        parts = [
            f"## `{self.file}`",
            self.title,
            f"```bash\n{commands}\n```",
            self.text,
            *self.port(),
            self.before,
        ]
        return [*parts, f"```text\n{printed}\n```"]

    def port(self) -> list[str]:
        """What was changed to make it of another program, if it was made so."""
        before = PORTED.get(Path(self.file).stem)
        if before is None:
            return []
        file = f"examples/{before}.py"
        lines = difflib.unified_diff(code_of(file), code_of(self.file), file, self.file, n=0, lineterm="")
        shown = "\n".join(line for line in lines if not line.startswith("@@"))
        return ["The difference:", f"```text\n{shown}\n```"]


def code_of(file: str) -> list[str]:
    """The lines of a program after its docstring."""
    text = (ROOT / file).read_text("utf-8")
    return text.splitlines()[ast.parse(text).body[0].end_lineno :]


def page() -> str:
    """The page."""
    sections = [part for name in GALLERY for part in Example.read(name).section()]
    return BREAK.join([HEAD.strip(), *sections, *about_notebook(), "## Others", others()]) + "\n"


def about_notebook() -> list[str]:
    """The notebook's part of the page: how it begins, how to run it, and what it prints."""
    cells = json.loads(NOTEBOOK.read_text("utf-8"))["cells"]
    title, text = "".join(cells[0]["source"]).split(BREAK)[:2]
    printed = "".join(
        line for cell in cells for output in cell.get("outputs", ()) for line in output.get("text", ())
    )
    return [
        f"## `{NOTEBOOK.relative_to(ROOT)}`",
        f"{title.removeprefix('# ')}: a notebook with pictures.",
        "```bash\npip install -e '.[tools]' && python docs/gallery.py --notebook\n```",
        text,
        "The command runs it without Jupyter, and keeps its pictures in the file.",
        "Prints, beside its pictures:",
        f"```text\n{printed.strip()}\n```",
    ]


def others() -> str:
    """The examples that are longer, or that have no output to compare, each with what it says first."""
    lines = []
    for path in sorted((ROOT / "examples").glob("*.py")):
        if path.stem not in GALLERY:
            told = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
            lines.append(f"- `examples/{path.name}`: {' '.join(told.split(BREAK)[0].split())}")
    return "\n".join(lines)


def run_cells(sources: list[str]) -> list[list[dict[str, Any]]]:
    """Runs cells of a notebook in this process, one after the other.

    Returns:
        The outputs of each: what it prints, and its pictures in the way that notebooks keep them.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    outputs: list[list[dict[str, Any]]] = []

    def show() -> None:
        for number in pyplot.get_fignums():
            picture = io.BytesIO()
            pyplot.figure(number).savefig(picture, format="png", dpi=80, metadata={"Software": None})
            data = {"image/png": base64.b64encode(picture.getvalue()).decode()}
            outputs[-1].append({"output_type": "display_data", "data": data, "metadata": {}})
        pyplot.close("all")

    names: dict[str, Any] = {"__name__": "__main__"}
    for source in sources:
        outputs.append([])
        with redirect_stdout(io.StringIO()) as out, mock.patch.object(pyplot, "show", show):
            exec(source, names)
        if out.getvalue():
            text = out.getvalue().splitlines(keepends=True)
            outputs[-1].append({"output_type": "stream", "name": "stdout", "text": text})
    return outputs


def run_notebook() -> None:
    """Runs the notebook, and writes it with its outputs."""
    notebook = json.loads(NOTEBOOK.read_text("utf-8"))
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    outputs_of = run_cells(["".join(cell["source"]) for cell in cells])
    for number, (cell, outputs) in enumerate(zip(cells, outputs_of), 1):
        cell.update(execution_count=number, outputs=outputs)
    NOTEBOOK.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")


if __name__ == "__main__":
    if "--notebook" in sys.argv[1:]:
        run_notebook()
    TARGET.write_text(page(), "utf-8")
    sys.exit(0)
