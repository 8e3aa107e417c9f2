"""Draws the pictures of docs/architecture.md from the code: `python docs/pictures.py`.

`folders.svg` is read from the source: the folders, their sizes, and which imports which.
`step.svg` is a traced step of
two units: the functions that are called from another folder, in the order of their first calls.
"""

from __future__ import annotations

import ast
import dataclasses
import sys
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp_wrap
from fsdp_wrap import FullyShardedDataParallel

PACKAGE = Path(fsdp_wrap.__file__).parent
PICTURES = Path(__file__).parent / "pictures"
TOP = "top level"

FOLDERS = {
    "tools": ("plan, timeline, command", "#b8c4d6"),
    "compat": ("programs written for torch, unchanged", "#b8c4d6"),
    "optim": ("steps on shards", "#b8c4d6"),
    "weights": ("weights to engines", "#b8c4d6"),
    "checkpoint": ("folders on disk", "#b8c4d6"),
    TOP: ("the wrapper and fully_shard", "#9fc0e8"),
    "_compression": ("fewer bytes", "#cdbfe3"),
    "_state": ("full values, state dicts, norms", "#bfe0c5"),
    "_runtime": ("when each unit does what", "#f4d6a0"),
    "_params": ("how parameters lie in buffers", "#f1bfa9"),
    "_comm": ("how bytes travel", "#e8a8b4"),
    "_core": ("words and small tools", "#d9d9d9"),
}
"""From the highest to the lowest, with what each answers, and its colour."""


# The folders.


def folder_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).parts
    return parts[0] if len(parts) > 1 else TOP


def code_lines(path: Path) -> int:
    """Counts lines that are no docstring, comment or blank."""
    tree = ast.parse(path.read_text())
    docstrings = {
        line
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        for line in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    lines = enumerate(map(str.strip, path.read_text().splitlines()), 1)
    return sum(number not in docstrings for number, line in lines if line and not line.startswith("#"))


def imports_of(path: Path) -> Iterator[str]:
    """Yields the folders from which a file imports when it runs."""
    tree = ast.parse(path.read_text())
    checks = (node for node in ast.walk(tree) if isinstance(node, ast.If))
    for_types = {
        inner for check in checks if "TYPE_CHECKING" in ast.unparse(check.test) for inner in ast.walk(check)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node not in for_types:
            package, *below = (node.module or "").split(".")
            if package == "fsdp_wrap":
                yield below[0] if below and below[0] in FOLDERS else TOP


def text(x: float, y: float, words: str, size: int = 13, **more: str) -> str:
    attributes = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
    return f'<text x="{x}" y="{y}" font-size="{size}"{attributes}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, colour: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{colour}"/>'


def svg(width: int, height: int, parts: list[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'font-family="sans-serif" fill="#222">'
    )
    return "\n".join([head, box(0, 0, width, height, "#ffffff"), *parts, "</svg>", ""])


def draw_folders() -> str:
    """Draws one row per folder, and a dot where it imports from another."""
    files: dict[str, list[Path]] = {name: [] for name in FOLDERS}
    for path in PACKAGE.rglob("*.py"):
        files[folder_of(path)].append(path)
    parts, names = [], list(FOLDERS)
    for column, name in enumerate(names):
        x = 548 + 34 * column
        parts.append(text(x, 76, name, 11, transform=f"rotate(-45 {x} 76)"))
    for row, name in enumerate(names):
        answer, colour = FOLDERS[name]
        y = 86 + 42 * row
        lines = sum(code_lines(path) for path in files[name])
        parts += [
            box(10, y, 510, 36, colour),
            text(20, y + 23, f"{name}/" if name != TOP else name, 14, font_weight="bold"),
            text(142, y + 23, answer, 12),
            text(512, y + 23, f"{len(files[name])} files, {lines:,} lines", 11, text_anchor="end"),
        ]
        taken = {folder for path in files[name] for folder in imports_of(path)} - {name}
        for column, other in enumerate(names):
            centre = f'cx="{552 + 34 * column}" cy="{y + 18}"'
            full = other in taken and not (name == TOP and column < row)
            parts.append(f'<circle {centre} r="{6 if full else 1.5}" fill="{"#444" if full else "#bbb"}"/>')
    return svg(880, 86 + 42 * len(names) + 6, parts)


# A step.


@dataclasses.dataclass(frozen=True)
class Call:
    """A function that is called from another folder."""

    folder: str
    name: str


class Trace:
    """Notes which functions are called from another folder of the package, each when it is first called."""

    def __init__(self) -> None:
        self.calls: dict[Call, None] = {}

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)):
            folder = folder_of(Path(code.co_filename))
            if self._caller(frame) != folder and not code.co_name.startswith("<"):
                self.calls.setdefault(Call(folder, getattr(code, "co_qualname", code.co_name)))

    def _caller(self, frame: FrameType) -> str | None:
        """Returns the folder of the package from which a call came, if it did."""
        caller = frame.f_back
        while caller is not None:
            if caller.f_code.co_filename.startswith(str(PACKAGE)):
                return folder_of(Path(caller.f_code.co_filename))
            caller = caller.f_back
        return None

    def during(self, work: Callable[[], Any]) -> tuple[list[Call], Any]:
        """Runs a part of a step and returns the calls in it, with its result."""
        self.calls = {}
        sys.setprofile(self)
        result = work()
        sys.setprofile(None)
        return list(self.calls), result


def traced() -> dict[str, list[Call]]:
    """Traces forward and backward of a unit below a root, in the fourth step."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    unit = FullyShardedDataParallel(nn.Linear(4, 4), use_orig_params=True)
    model = FullyShardedDataParallel(nn.Sequential(nn.Linear(4, 4), unit), use_orig_params=True)
    x = torch.randn(2, 4)
    for _ in range(3):
        model(x).sum().backward()
        model.zero_grad()
    trace = Trace()
    forward, loss = trace.during(lambda: model(x).sum())
    backward, _ = trace.during(loss.backward)
    dist.destroy_process_group()
    return {"forward": forward, "backward": backward}


def draw_step() -> str:
    """Draws a column per folder and a line per call, in the order of time."""
    shown = (TOP, "_runtime", "_params", "_comm", "_core")
    columns = {name: 12 + 178 * place for place, name in enumerate(shown)}
    parts = [text(x, 24, name, 14, font_weight="bold") for name, x in columns.items()]
    y = 44
    for phase, calls in traced().items():
        parts += [box(0, y - 8, 906, 22, "#eeeeee"), text(12, y + 8, phase, 13, font_weight="bold")]
        y += 28
        for call in calls:
            x, words = columns.get(call.folder, 20), call.name.replace(".<locals>", "")
            parts += [box(x, y - 11, 172, 15, FOLDERS[call.folder][1]), text(x + 4, y, words, 9)]
            y += 17
        y += 12
    return svg(906, y, parts)


def main() -> None:
    """Writes the pictures."""
    PICTURES.mkdir(exist_ok=True)
    (PICTURES / "folders.svg").write_text(draw_folders())
    (PICTURES / "step.svg").write_text(draw_step())


if __name__ == "__main__":
    main()
