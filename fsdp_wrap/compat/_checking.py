"""Says what of torch's FSDP programs use, which of it `install` serves, and what it comes too late for.

`python -m fsdp_wrap.compat --check` reads sources, so no program is imported. It does not see which private
attributes of wrappers and modules they read: these raise by name where we have none.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import torch

from fsdp_wrap import api
from fsdp_wrap._core import torch_private as torchs
from fsdp_wrap._core import warn_caller
from fsdp_wrap.compat.installation import Installation

__all__ = ["check", "names_in", "report", "warn_of_held"]

_FSDP = "torch.distributed.fsdp"
_WATCHED = (
    _FSDP,
    "torch.distributed._composable",
    "torch.distributed._composable_state",
    "torch.distributed.checkpoint.state_dict",
)
_NO_CLIENTS = {"torch", "functorch", "torchgen", "fsdp_wrap"}

_IMITATED = (torchs.FSDPState, torchs.FSDPStateContext, torchs.FSDPParamGroup, torchs.FSDPParam)
"""Classes whose instances our units pass for."""

_AS_IN_TORCH = {
    *api.__all__,
    "FSDP_WRAPPED_MODULE",
    "ParamModuleInfo",
    "TrainingState",
    "_get_mesh_info",
    "_get_module_fsdp_state",
    "_get_module_fsdp_state_if_fully_sharded_module",
    "_get_post_forward_mesh_info",
    "_or_policy",
}
"""Names whose objects are torch's own here, or which ours takes, shows or answers."""


@dataclass(frozen=True)
class UsedName:
    """The judgement of one name that a package uses."""

    package: str
    name: str
    verdict: str
    """`served`, `torch's own` (which works with ours), `not served`, or `not in torch` of this version."""
    reason: str = ""

    def __str__(self) -> str:
        return f"{self.package}: {self.verdict:<12} {self.name}{self.reason and f' ({self.reason})'}"


def check(packages: Iterable[str], install: Callable[[], Installation]) -> list[UsedName]:
    """Judges the names of torch's FSDP that packages use.

    Args:
        packages: Names by which they are imported; all installed ones, if there are none.
        install: Makes torch's names stand for ours, for as long as the comparison takes.

    Raises:
        ModuleNotFoundError: If there is no such package.
    """
    used = {package: _names_of(package) for package in packages or _installed()}
    before = {name: _look_up(name) for name in set().union(*used.values())}
    with install():
        judged = {name: _judge(name, old, _look_up(name)) for name, old in before.items()}
    return [
        UsedName(package, name.replace(":", "."), *judged[name])
        for package, names in used.items()
        for name in sorted(names)
        if not isinstance(before[name].holder, ModuleType)
    ]


def report(packages: Iterable[str], install: Callable[[], Installation]) -> bool:
    """Prints what `check` returns; returns whether a name is not served."""
    names = check(packages, install)
    print(*names, sep="\n")
    return any(name.verdict == "not served" for name in names)


def names_in(source: str | bytes) -> set[str]:
    """Returns the names of torch's FSDP that a file uses, as `module:attributes`."""
    tree = ast.parse(source)
    imported = dict(_imports(tree))
    chains = [chain for chain in map(_chain, ast.walk(tree)) if chain and chain[0] in imported]
    read = {_joined(imported[first], *others) for first, *others in chains}
    return {name for name in {*imported.values(), *read} if ":" in name and _is_watched(name)}


def _imports(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yields each name that a file binds by an absolute import, and the path that it imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((alias.asname or alias.name, f"{node.module}:{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                first = alias.name.partition(".")[0]
                yield (alias.asname, alias.name) if alias.asname else (first, first)


def _chain(node: ast.AST) -> list[str]:
    """Returns `["a", "b", "c"]` for `a.b.c`, else nothing."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    return [node.id, *names] if names and isinstance(node, ast.Name) else []


def _joined(imported: str, *attributes: str) -> str:
    return f"{imported}{'.' if ':' in imported else ':'}{'.'.join(attributes)}"


def _is_watched(name: str) -> bool:
    return any(f"{name}.".replace(":", ".").startswith(f"{watched}.") for watched in _WATCHED)


def _installed() -> list[str]:
    """Returns the names of the packages that are installed, and can be found, in order."""
    names = sorted(name for name in importlib.metadata.packages_distributions() if name.isidentifier())
    return [name for name in names if name not in _NO_CLIENTS and importlib.util.find_spec(name)]


def _names_of(package: str) -> set[str]:
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise ModuleNotFoundError(
            f"--check found no package '{package}': give the name by which it is imported"
        )
    folders = [Path(location) for location in spec.submodule_search_locations or ()]
    sources = (path.read_bytes() for folder in folders for path in folder.rglob("*.py"))
    return set().union(*(_names_if_any(source) for source in sources if b"torch.distributed" in source))


def _names_if_any(source: bytes) -> set[str]:
    try:
        return names_in(source)
    except SyntaxError:  # a template, or written for a newer Python
        return set()


class _Absent:
    """Stands for what this version of torch, or our class, does not have."""


@dataclass(frozen=True)
class _Held:
    """The object of a name, from the first that is no module, and the attribute of it that was asked for."""

    holder: Any
    attribute: Any
    of_holder: bool
    """Whether the name goes on below `holder`."""


def _look_up(name: str) -> _Held:
    module, _, attributes = name.partition(":")
    holder: Any = _imported(module)
    parts = attributes.split(".")
    while parts and isinstance(holder, ModuleType):
        part = parts.pop(0)
        held = vars(holder)
        holder = held[part] if part in held else _imported(f"{holder.__name__}.{part}")
    attribute = holder
    for part in parts:
        attribute = getattr(attribute, part, _Absent)
    return _Held(holder, attribute, bool(parts))


def _imported(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return _Absent


def _judge(name: str, before: _Held, after: _Held) -> tuple[str, str]:
    """Returns the verdict and the reason of a name, by what it stands for before and while installed."""
    if before.attribute is _Absent:
        return "not in torch", f"of version {torch.__version__}"
    if after.attribute is _Absent:
        return "not served", f"ours has no '{name.rpartition('.')[2]}'"
    if after.holder is not before.holder:
        return "served", ""
    if before.holder in _IMITATED:
        if after.of_holder and not name.endswith("__"):
            return "not served", "our units pass for instances of this class, and run none of its code"
        return "torch's own", "our units pass for instances"
    known = not _AS_IN_TORCH.isdisjoint(name.replace(":", ".").split("."))
    if known or not _home(name, before.holder).startswith(_FSDP):
        return "torch's own", ""
    return "not served", "it belongs to torch's own runtime"


def _home(name: str, holder: Any) -> str:
    return getattr(holder, "__module__", None) or name.partition(":")[0]


def warn_of_held(objects: Iterable[Any]) -> None:
    """Warns of loaded modules that hold torch's objects inside other objects, where no rebinding reaches."""
    names = {id(original): original.__name__ for original in objects}
    modules = [module for module in sys.modules.values() if isinstance(module, ModuleType)]
    clients = [module for module in modules if module.__name__.partition(".")[0] not in _NO_CLIENTS]
    places = [
        f"{client.__name__}.{place} ({', '.join(held)})"
        for client in clients
        for place, value in list(vars(client).items())
        if (held := sorted({names[id(inner)] for inner in _inside(value, client) if id(inner) in names}))
    ]
    if places:
        warn_caller(
            f"these hold what they have taken of torch's FSDP before fsdp_wrap.compat.install(): "
            f"{'; '.join(places)}. They still use torch's: call install() before their modules are imported"
        )


def _inside(value: Any, module: ModuleType) -> Iterator[Any]:
    """Yields what a module's value holds: items, defaults of functions, bases and attributes of classes."""
    if type(value) in (list, tuple, set, frozenset):
        yield from value
    elif type(value) is dict:
        yield from value.values()
    elif isinstance(value, partial):
        yield from (value.func, *value.args, *value.keywords.values())
    elif isinstance(value, FunctionType) and value.__module__ == module.__name__:
        yield from (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    elif isinstance(value, type) and value.__module__ == module.__name__:
        yield from value.__bases__
        for attribute in vars(value).values():
            # No attribute of anything else is asked for: some import when they are (`six.moves`).
            of_class = isinstance(attribute, (staticmethod, classmethod))
            function = attribute.__func__ if of_class else attribute
            yield function
            yield from _inside(function, module) if isinstance(function, FunctionType) else ()
