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

ADD_ONS, FRONT_ENDS, STATE, RUNTIME, PARAMETERS = "#b9c6d8", "#8fbcec", "#a9d5b0", "#f2cc85", "#efaf98"
FOLDERS = {
    "tools": ("plan, timeline, command", ADD_ONS),
    "compat": ("programs for torch, unchanged", ADD_ONS),
    "optim": ("steps on shards", ADD_ONS),
    "weights": ("weights to engines", ADD_ONS),
    "_writer_process": ("files beside training", ADD_ONS),
    "checkpoint": ("folders on disk", ADD_ONS),
    TOP: ("the wrapper and fully_shard", FRONT_ENDS),
    "_reproducible": ("the same bits", STATE),
    "_uneven": ("ranks without a batch", STATE),
    "_values": ("values of steps", STATE),
    "_compression": ("fewer bytes", STATE),
    "_state_over_replicas": ("one state for all copies", STATE),
    "_activations": ("activations in host memory", STATE),
    "_state": ("full values, state dicts, norms", STATE),
    "_batching": ("collectives of small units", RUNTIME),
    "_custom_comms": ("users' collectives and hooks", RUNTIME),
    "_checks": ("mistakes that show in a step", RUNTIME),
    "_by_hand": ("what is asked between moments", RUNTIME),
    "_building": ("modules become units", RUNTIME),
    "_runtime": ("when each unit does what", RUNTIME),
    "_params": ("how parameters lie in buffers", PARAMETERS),
    "_comm": ("how bytes travel", PARAMETERS),
    "_core": ("words and small tools", ADD_ONS),
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


STYLE = "svg{color:#24292f}@media (prefers-color-scheme:dark){svg{color:#e2e8f0}}"
"""Words that stand on the page itself are dark or light as the page is; those in boxes are always dark."""


def text(x: float, y: float, words: str, size: int = 13, **more: str) -> str:
    attributes = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
    return f'<text x="{x}" y="{y}" font-size="{size}"{attributes}>{escape(words)}</text>'


def in_box(x: float, y: float, words: str, size: int = 13, **more: str) -> str:
    return text(x, y, words, size, fill="#1f2328", **more)


def box(x: float, y: float, width: float, height: float, colour: str, **more: str) -> str:
    attributes = "".join(f' {name.replace("_", "-")}="{value}"' for name, value in more.items())
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{colour}"{attributes}/>'


def svg(width: int, height: int, parts: list[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'font-family="sans-serif" fill="currentColor"><style>{STYLE}</style>'
    )
    return "\n".join([head, *parts, "</svg>", ""])


def draw_folders() -> str:
    """Draws one row per folder, and a dot where it imports from another."""
    files: dict[str, list[Path]] = {name: [] for name in FOLDERS}
    for path in PACKAGE.rglob("*.py"):
        files[folder_of(path)].append(path)
    parts, names = [], list(FOLDERS)
    first, apart, top = 446, 24, 92
    for column, name in enumerate(names):
        x = first + apart * column
        parts.append(text(x, top - 8, name, 12, transform=f"rotate(-50 {x} {top - 8})"))
    for row, name in enumerate(names):
        answer, colour = FOLDERS[name]
        y = top + 34 * row
        lines = sum(code_lines(path) for path in files[name])
        parts += [
            box(0, y, 424, 29, colour),
            in_box(8, y + 19, f"{name}/" if name != TOP else name, 13, font_weight="bold"),
            in_box(118, y + 19, answer, 12),
            in_box(416, y + 19, f"{lines:,} lines", 12, text_anchor="end"),
        ]
        taken = {folder for path in files[name] for folder in imports_of(path)} - {name}
        for column, other in enumerate(names):
            centre = f'cx="{first + apart * column}" cy="{y + 15}"'
            full = other in taken and not (name == TOP and column < row)
            parts.append(f'<circle {centre} r="{5 if full else 1.5}" opacity="{1 if full else 0.4}"/>')
    return svg(first + apart * len(names) + 30, top + 34 * len(names), parts)


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
    """Draws a column per folder and a line per call, in the order of time; plug-ins are left out."""
    shown = (TOP, "_runtime", "_params", "_comm", "_core")
    columns = {name: 4 + 134 * place for place, name in enumerate(shown)}
    parts = [text(x, 16, name, 14, font_weight="bold") for name, x in columns.items()]
    y, width = 36, 740
    for phase, calls in traced().items():
        parts += [
            box(0, y - 9, width, 22, "currentColor", opacity="0.1"),
            text(4, y + 7, phase, 13, font_weight="bold"),
        ]
        y += 29
        for call in (call for call in calls if call.folder in columns):
            words = call.name.replace(".<locals>", "")
            parts += [
                box(columns[call.folder], y - 12, 12 + 6.4 * len(words), 16, FOLDERS[call.folder][1]),
                in_box(columns[call.folder] + 5, y, words, 11),
            ]
            y += 18
        y += 12
    return svg(width, y - 12, parts)


def main() -> None:
    """Writes the pictures."""
    PICTURES.mkdir(exist_ok=True)
    (PICTURES / "folders.svg").write_text(draw_folders())
    (PICTURES / "step.svg").write_text(draw_step())


if __name__ == "__main__":
    main()
