"""Writes docs/api.md: every public name, argument and default of `torch.distributed.fsdp`, and what is here.

    python docs/api_table.py

Torch's side is read from docs/torch_api, a file for each version, and this library's from the package. What
is missing or differs needs a reason below, or the page is not written. First the script writes the file of
the torch that runs it.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

TARGET = Path(__file__).with_name("api.md")
FACTS = Path(__file__).with_name("torch_api")

MODULES = ["", "fully_sharded_data_parallel", "api", "wrap", "sharded_grad_scaler"]
"""The public modules of `torch.distributed.fsdp`; "" is the package itself."""

PUBLIC_HERE = "public here only"

REASONS: dict[str, str] = {}
"""Why a name, or `name(argument)`, is missing here or differs. Each must be needed for some version."""

NOTES: dict[str, str] = {
    "MixedPrecisionPolicy(reduce_dtype)": "None means what it does in the torch that is installed: before "
    "2.15 `param_dtype`, from then on each parameter's `grad_dtype`, its own dtype if that was not set",
    "FSDPModule.finalize_backward": "units reduce at the end of a backward what torch leaves to this call",
    "FSDPModule.set_all_reduce_hook": "called once for each dtype in the unit, with what is averaged",
    "FSDPModule.set_allocate_memory_from_process_group_for_comm": "all that a unit "
    "gathers and reduces lies there; nothing changes where NCCL does not communicate",
    "FSDPModule.set_custom_reduce_scatter": "is asked for sums only; the division is ours",
    "FSDPModule.set_separate_reduce_scatter_group": "on the CPU, where nothing queues, nothing changes",
    "FSDPModule.set_symm_mem_for_comm": "for reductions as well, which are sums; an error where NCCL does not"
    " communicate",
    "share_comm_ctx": "accepted; all units of a process share the queues of communication of their device",
    "FSDPModule.set_keep_unsharded_storage": "with `reshard_after_forward=N` all ranks gather for backward",
}
"""What to know of a name, or `name(argument)`, that is as in torch: say, where versions differ in meaning."""


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
    arguments = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "self":
            continue
        keyword = "by keyword, " if parameter.kind is inspect.Parameter.KEYWORD_ONLY else ""
        mark = marks.get(parameter.kind, "")
        arguments[mark + name] = "any number" if mark else keyword + show(parameter.default)
    return arguments


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
            attribute = getattr(cls, member)
            yield Entry(f"{name}.{member}", arguments_of(attribute) if callable(attribute) else None)


def _inherited(name: str, cls: Any) -> Entry | None:
    """Returns a member that a class has from one of another package."""
    member = getattr(cls, name.rpartition(".")[2], None)
    return None if member is None else Entry(name, arguments_of(member) if callable(member) else None)


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


@dataclasses.dataclass(frozen=True)
class Thing:
    """A public name of torch's.

    Attributes:
        path: Where it is defined: names of one path are one object.
        entries: What it consists of.
    """

    path: str
    entries: list[Entry]


Facts = dict[str, dict[str, Thing]]
"""Public names by module."""

Row = tuple[str, str, str, str]
"""Name, argument, torch's default, and what is here."""


def installed() -> str:
    """Returns the version of torch that runs this, as the files of docs/torch_api are named."""
    return ".".join(torch.__version__.split(".")[:2])


def described(name: str, thing: Any) -> Thing:
    """Describes a public name of torch's."""
    return Thing(f"{thing.__module__}.{thing.__qualname__}", list(entries_of(name, thing)))


def facts_of_installed() -> Facts:
    """Reads the torch that is installed."""
    facts: Facts = {}
    for module in MODULES:
        theirs = load("torch.distributed.fsdp", module)
        assert theirs is not None
        facts[module] = {name: described(name, getattr(theirs, name)) for name in public(theirs)}
    return facts


def read(path: Path) -> Facts:
    """Reads a file of docs/torch_api."""
    modules = json.loads(path.read_text())
    return {
        module: {
            name: Thing(thing["path"], [Entry(**entry) for entry in thing["entries"]])
            for name, thing in things.items()
        }
        for module, things in modules.items()
    }


def write(path: Path, facts: Facts) -> None:
    """Writes a file of docs/torch_api."""
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(facts, default=dataclasses.asdict, indent=1) + "\n")


class Table:
    """Compares one version of torch with what is here, and collects rows and what has no reason."""

    def __init__(self) -> None:
        self.rows: list[Row] = []
        self.unexplained: list[str] = []
        self.used: set[str] = set()
        self._listed: dict[str, Any] = {}

    def compare(self, module: str, theirs: dict[str, Thing]) -> list[Row]:
        """Returns the rows of one module."""
        start = len(self.rows)
        ours = load("fsdp_wrap", module)
        for name, thing in theirs.items():
            self.compare_name(name, thing, getattr(ours, name, None))
        for name in [] if ours is None else sorted(set(public(ours)) - set(theirs)):
            if getattr(ours, name) not in self._listed.values():
                self._row(name, "", "", PUBLIC_HERE)
        return self.rows[start:]

    def compare_name(self, name: str, theirs: Thing, ours: Any) -> None:
        """Adds the rows of one name."""
        if ours is None:
            self._row(name, "", "", self._reason(name))
            return
        if theirs.path in self._listed:
            if self._listed[theirs.path] is not ours:
                self.unexplained.append(f"{name} (another object than under the first path)")
            self._row(name, "", "", "as above")
            return
        self._listed[theirs.path] = ours
        mine = {entry.name: entry for entry in entries_of(name, ours)}
        for entry in theirs.entries:
            self._compare_entry(entry, mine.pop(entry.name, None) or _inherited(entry.name, ours))
        for own in mine:
            self._row(own, "", "", PUBLIC_HERE)

    def _compare_entry(self, theirs: Entry, ours: Entry | None) -> None:
        if ours is None:
            self._row(theirs.name, "", theirs.value or "", self._reason(theirs.name))
            return
        kind = ours.value or ("a property" if ours.arguments is None else "a method")
        same = theirs.value == ours.value and (theirs.arguments is None) == (ours.arguments is None)
        here = self._same(theirs.name) if same else self._reason(theirs.name, kind)
        self._row(theirs.name, "", theirs.value or "", here)
        mine = ours.arguments or {}
        order = [name for name in mine if name in (theirs.arguments or {})]
        for place, (name, default) in enumerate((theirs.arguments or {}).items()):
            key = f"{theirs.name}({name})"
            same = mine.get(name) == default and order[place : place + 1] == [name]
            here = self._same(key) if same else self._reason(key, mine.get(name))
            self._row(theirs.name, name, default, here)
        for name, default in mine.items():
            if theirs.arguments is not None and name not in theirs.arguments:
                self._row(theirs.name, name, "", f"here only: `{default}`")

    def _same(self, key: str) -> str:
        if key not in NOTES:
            return "same"
        self.used.add(key)
        return f"same: {NOTES[key]}"

    def _reason(self, key: str, here: str | None = None) -> str:
        name = key.partition("(")[0]
        candidates = [key, name, name.rpartition(".")[0]]
        where = "missing" if here is None else f"here `{here}`"
        for candidate in candidates:
            if candidate in REASONS:
                self.used.add(candidate)
                return f"{where}: {REASONS[candidate]}"
        self.unexplained.append(f"{key} ({where})")
        return where

    def _row(self, name: str, argument: str, default: str, here: str) -> None:
        self.rows.append((name, argument, default, here))


def merged(rows_of: dict[str, list[Row]]) -> list[tuple[Row, list[str]]]:
    """Returns the rows of all versions, in the order of the last, each with the versions that have it."""
    last, *earlier = reversed(rows_of.values())
    result = list(last)
    for rows in earlier:
        place = 0
        for row in rows:
            if row not in result:
                result.insert(place, row)
            place = result.index(row) + 1
    return [(row, [version for version, rows in rows_of.items() if row in rows]) for row in result]


def section(module: str, rows_of: dict[str, list[Row]]) -> list[str]:
    """Returns the lines about one module."""
    path = f".{module}" if module else ""
    lines = [f"## `torch.distributed.fsdp{path}`: `fsdp_wrap{path}`", ""]
    lines += ["| name | argument | default of torch's | here | torch |", "|---|---|---|---|---|"]
    for (name, argument, default, here), versions in merged(rows_of):
        cells = [f"`{cell}`" if cell else "" for cell in (name, argument, default)]
        only = "" if versions == list(rows_of) else ", ".join(versions)
        lines.append(f"| {' | '.join([*cells, here, only])} |")
    return [*lines, ""]


def known() -> dict[str, Facts]:
    """Reads docs/torch_api: facts by version, the last version last."""
    files = sorted(FACTS.glob("*.json"), key=lambda path: [int(number) for number in path.stem.split(".")])
    return {path.stem: read(path) for path in files}


def faults_of(table: Table, version: str) -> list[str]:
    """Returns what has no reason, each once."""
    return [f"no reason for {entry}, torch {version}" for entry in dict.fromkeys(table.unexplained)]


def build() -> tuple[str, list[str]]:
    """Returns the page and its faults: what lacks a reason, and reasons and notes without need."""
    versions = known()
    tables = {version: Table() for version in versions}
    lines: list[str] = []
    for module in MODULES:
        rows_of = {
            version: tables[version].compare(module, facts[module]) for version, facts in versions.items()
        }
        lines += section(module, rows_of)
    faults = [fault for version, table in tables.items() for fault in faults_of(table, version)]
    used = {name for table in tables.values() for name in table.used}
    faults += [f"needless: {name}" for name in [*REASONS, *NOTES] if name not in used]
    head = [
        "# The public API beside torch's",
        "",
        "Every public name, argument and default of torch's FSDP, and what is here. "
        f"`docs/api_table.py` writes this page from the package and from torch {', '.join(versions)}. "
        "The last column says for which of these versions a row holds; an empty cell means all. Methods that "
        "torch's wrapper inherits from `torch.nn.Module` are left out.",
        "",
    ]
    return "\n".join([*head, *lines]).rstrip() + "\n", faults


def main() -> int:
    """Writes the page, and what is known of the installed torch; returns the exit status."""
    sys.path.insert(0, str(TARGET.parents[1]))  # of this checkout
    write(FACTS / f"{installed()}.json", facts_of_installed())
    page, faults = build()
    print("\n".join(faults), file=sys.stderr)
    if not faults:
        TARGET.write_text(page)
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
