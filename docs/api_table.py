"""Writes docs/api.md: every public name, argument and default of `torch.distributed.fsdp`, and what is here.

    python docs/api_table.py

Both sides are read from the installed packages. What is missing or differs needs a reason below, or nothing
is written.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

TARGET = Path(__file__).with_name("api.md")

MODULES = ["", "fully_sharded_data_parallel", "api", "wrap", "sharded_grad_scaler"]
"""The public modules of `torch.distributed.fsdp`; "" is the package itself."""

COMMUNICATOR = "one file chooses how to communicate (`_communicators.py`), as a whole"
ONE_IN_FLIGHT = "one reduction is in flight at most, on a queue of its own beside the gathers'"
NESTED_DTENSORS = "parameters that are `DTensor`s already (tensor parallelism) are refused by name"

REASONS = {
    "DataParallelMeshDims": NESTED_DTENSORS,
    "fully_shard(dp_mesh_dims)": NESTED_DTENSORS,
    "FSDPModule.set_all_reduce_hook": "the reduction over the replicas is not open to hooks",
    "FSDPModule.set_allocate_memory_from_process_group_for_comm": COMMUNICATOR,
    "FSDPModule.set_custom_all_gather": COMMUNICATOR,
    "FSDPModule.set_custom_reduce_scatter": COMMUNICATOR,
    "FSDPModule.set_reduce_scatter_max_input_buffers": ONE_IN_FLIGHT,
    "FSDPModule.set_separate_reduce_scatter_group": ONE_IN_FLIGHT,
    "FSDPModule.set_symm_mem_for_comm": COMMUNICATOR,
    "UnshardHandle": "`unshard` alone makes one",
    "share_comm_ctx": "all units of a process share the queues of communication of their device anyway",
}
"""Why a name, or `name(argument)`, is missing here or differs. Each must be needed."""


@dataclasses.dataclass(frozen=True)
class Entry:
    """One thing that can be called or read: a function, method, property, enum member or field.

    Attributes:
        name: With its class, such as `FullyShardedDataParallel.no_sync`.
        arguments: Name to default, in order; None for what is not called.
        value: Of an enum member.
    """

    name: str
    arguments: dict[str, str] | None = None
    value: str | None = None


def show(value: Any) -> str:
    """Writes a default so that equal ones of the two libraries look equal."""
    if value is inspect.Parameter.empty or value is dataclasses.MISSING:
        return "required"
    if isinstance(value, Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, type):
        return value.__name__
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(show, value))})"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return f"{type(value).__name__}(...)"
    return repr(value)


def arguments_of(function: Any) -> dict[str, str]:
    """Returns the arguments with their defaults, save self; `*` marks those by keyword only."""
    marks: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    found = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "self":
            continue
        keyword = "by keyword, " if parameter.kind is inspect.Parameter.KEYWORD_ONLY else ""
        mark = marks.get(parameter.kind, "")
        found[mark + name] = "any number" if mark else keyword + show(parameter.default)
    return found


def entries_of(name: str, thing: Any) -> Iterator[Entry]:
    """Yields what a public name consists of."""
    if not isinstance(thing, type):
        yield Entry(name, arguments_of(thing))
    elif issubclass(thing, Enum):
        for member in thing:
            yield Entry(f"{name}.{member.name}", value=repr(member.value))
    elif dataclasses.is_dataclass(thing):
        yield Entry(name, {field.name: _default(field) for field in dataclasses.fields(thing)})
    elif not issubclass(thing, torch.Tensor):
        yield Entry(name, arguments_of(thing.__init__))
        yield from _members(name, thing)
    else:
        yield Entry(name)


def _default(field: dataclasses.Field[Any]) -> str:
    factory = field.default_factory
    return show(field.default if factory is dataclasses.MISSING else factory())


def _members(name: str, cls: type) -> Iterator[Entry]:
    """Yields public methods and properties, also those of `torch.nn.Module` that the class has anew."""
    for member in sorted(member for member in dir(cls) if not member.startswith("_")):
        inherited = any(member in vars(base) for base in cls.__mro__[1:] if base.__module__ != cls.__module__)
        if member in vars(cls) or not inherited:
            found = getattr(cls, member)
            yield Entry(f"{name}.{member}", arguments_of(found) if callable(found) else None)


def _inherited(name: str, cls: Any) -> Entry | None:
    """Returns a member that a class has from one of another package."""
    found = getattr(cls, name.rpartition(".")[2], None)
    return None if found is None else Entry(name, arguments_of(found) if callable(found) else None)


def public(module: ModuleType) -> list[str]:
    """Returns a module's public names: what it exports, or else defines."""
    exported = getattr(module, "__all__", None)
    if exported is not None:
        return list(exported)
    own = (name for name in vars(module) if not name.startswith("_"))
    return [name for name in own if getattr(vars(module)[name], "__module__", "") == module.__name__]


def load(package: str, module: str) -> ModuleType | None:
    """Imports a module of a package; None if it has none of this name."""
    full = f"{package}.{module}".rstrip(".")
    if module and importlib.util.find_spec(full) is None:
        return None
    return importlib.import_module(full)


class Table:
    """Compares module by module and collects lines, and what has no reason."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.unexplained: list[str] = []
        self.used: set[str] = set()
        self._listed: dict[Any, Any] = {}

    def compare(self, module: str) -> None:
        """Adds the section of one module."""
        theirs, ours = load("torch.distributed.fsdp", module), load("fsdp_wrap", module)
        assert theirs is not None
        path = f".{module}" if module else ""
        self.lines += [f"## `torch.distributed.fsdp{path}`: `fsdp_wrap{path}`", ""]
        self.lines += ["| name | argument | default of torch's | here |", "|---|---|---|---|"]
        for name in public(theirs):
            self._compare_name(name, getattr(theirs, name), getattr(ours, name, None))
        more = [name for name in public(ours) if not hasattr(theirs, name)] if ours is not None else []
        if more:
            self.lines += ["", f"Here only: {', '.join(f'`{name}`' for name in sorted(more))}."]
        self.lines.append("")

    def _compare_name(self, name: str, theirs: Any, ours: Any) -> None:
        if ours is None:
            self._row(name, "", "", self._reason(name))
            return
        if theirs in self._listed:
            if self._listed[theirs] is not ours:
                self.unexplained.append(f"{name} (another object than under the first path)")
            self._row(name, "", "", "as above")
            return
        self._listed[theirs] = ours
        mine = {entry.name: entry for entry in entries_of(name, ours)}
        listed = list(entries_of(name, theirs))
        for entry in listed:
            self._compare_entry(entry, mine.pop(entry.name, None) or _inherited(entry.name, ours))
        if mine:
            self._row(name, "", "", f"and also {', '.join(f'`{each.removeprefix(name)}`' for each in mine)}")

    def _compare_entry(self, theirs: Entry, ours: Entry | None) -> None:
        if ours is None:
            self._row(theirs.name, "", theirs.value or "", self._reason(theirs.name))
            return
        kind = ours.value or ("a property" if ours.arguments is None else "a method")
        same = theirs.value == ours.value and (theirs.arguments is None) == (ours.arguments is None)
        self._row(theirs.name, "", theirs.value or "", "same" if same else self._reason(theirs.name, kind))
        mine = ours.arguments or {}
        order = [name for name in mine if name in (theirs.arguments or {})]
        for place, (name, default) in enumerate((theirs.arguments or {}).items()):
            same = mine.get(name) == default and order[place : place + 1] == [name]
            here = "same" if same else self._reason(f"{theirs.name}({name})", mine.get(name))
            self._row(theirs.name, name, default, here)
        for name, default in mine.items():
            if theirs.arguments is not None and name not in theirs.arguments:
                self._row(theirs.name, name, "", f"here only: `{default}`")

    def _reason(self, key: str, found: str | None = None) -> str:
        name = key.partition("(")[0]
        candidates = [key, name, name.rpartition(".")[0]]
        where = "missing" if found is None else f"here `{found}`"
        for each in candidates:
            if each in REASONS:
                self.used.add(each)
                return f"{where}: {REASONS[each]}"
        self.unexplained.append(f"{key} ({where})")
        return where

    def _row(self, name: str, argument: str, default: str, here: str) -> None:
        cells = [f"`{name}`", f"`{argument}`" if argument else "", f"`{default}`" if default else "", here]
        self.lines.append(f"| {' | '.join(cells)} |")


def build() -> tuple[str, list[str]]:
    """Returns the page and its faults: what lacks a reason, and reasons without need."""
    table = Table()
    for module in MODULES:
        table.compare(module)
    faults = [f"no reason for {each}" for each in dict.fromkeys(table.unexplained)]
    faults += [f"needless reason: {each}" for each in REASONS if each not in table.used]
    version = torch.__version__.partition("+")[0]
    head = [
        "# The public API beside torch's",
        "",
        f"Written by `docs/api_table.py` from both packages (torch {version}), not by hand. Methods of "
        "`torch.nn.Module` are left out where torch's wrapper inherits them.",
        "",
    ]
    return "\n".join([*head, *table.lines]).rstrip() + "\n", faults


def main() -> int:
    """Writes the page; returns the exit status."""
    sys.path.insert(0, str(TARGET.parents[1]))  # of this checkout
    page, faults = build()
    print("\n".join(faults), file=sys.stderr)
    if not faults:
        TARGET.write_text(page)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
