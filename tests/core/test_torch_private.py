"""The private names of torch that the package touches: all in one file, and all there in the installed torch.

Nothing here imports the package, which may not even load where torch has dropped a name.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bed.paths import PACKAGE

PRIVATE = PACKAGE / "_core" / "torch_private.py"
IMPORTED_LATE = PACKAGE / "checkpoint" / "_torch_private.py"
"""Whose import is slow, and needed only to save."""
FILES = sorted(PACKAGE.rglob("*.py"))

OF_CLIENTS = {"clients.py", "hub_layout.py"}
"""Touches private names of other libraries only."""

NOT_TORCHS = {"_fields", "_make", "_replace", "_core", "_init_weights"}
"""Of named tuples, numpy and transformers."""


INSTANCES = {
    "torch.nn.Module": nn.Module(),
    # A parameter that keeps its class is marked as one.
    "torch.nn.Parameter": nn.Parameter(torch.zeros(1).as_subclass(type("Special", (torch.Tensor,), {}))),
}
"""Instances of classes whose instances alone have the name."""


OF_BUILDS = {"torch._C._distributed_c10d._dump_nccl_trace_json"}
"""Names that only some builds have; the package does without."""

SINCE = {
    "torch.UntypedStorage._swap_data_ptr_": (2, 13),
    "torch.Tensor._has_grad_dtype_override": (2, 15),
}
"""Versions from which on a name must be there; before, the package does without."""

VERSION = tuple(int(number) for number in torch.__version__.split(".")[:2])


PURPOSES: dict[str, str] = next(
    ast.literal_eval(node.value)
    for node in ast.parse(PRIVATE.read_text()).body
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "PURPOSES"
)


def look_up(path: str) -> Any:
    """Returns what a path names; a module, something in it, or an attribute of a class's instances.

    Raises:
        AttributeError: If it is not there.
    """
    parts = path.split(".")
    for count in range(len(parts), 0, -1):
        try:
            value: Any = importlib.import_module(".".join(parts[:count]))
        except ModuleNotFoundError:
            continue
        break
    for place in range(count, len(parts)):
        owner = INSTANCES.get(".".join(parts[:place]), value)
        if isinstance(owner, type) and not hasattr(owner, parts[place]):
            if re.search(rf"self\.{parts[place]}(: .*)? = ", inspect.getsource(owner)):
                return None  # given to its instances
        value = getattr(owner, parts[place])
    return value


def test_torch_has_every_name():
    absent = []
    for path, purpose in PURPOSES.items():
        if VERSION >= SINCE.get(path, VERSION) and path not in OF_BUILDS:
            try:
                look_up(path)
            except (AttributeError, ImportError) as error:
                absent.append(f"torch {torch.__version__} has no {path} ({purpose}): {error}")
    assert absent == []


def is_private(name: str) -> bool:
    return re.match("_(?!_)", name) is not None


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.split(".")[0] == "torch")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def attributes(tree: ast.AST) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            yield node.attr, ast.unparse(node)


def defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fsdp_wrap"):
            yield from (alias.name for alias in node.names)


LISTED = {path.split(".")[-1] for path in PURPOSES}


@cache
def trees() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in FILES}


@cache
def own() -> set[str]:
    return {name for tree in trees().values() for name in defined(tree)} - LISTED


def touched(tree: ast.AST) -> list[str]:
    """Returns what only the one file may do, and attributes of torch's objects that it does not list."""
    imported = [path for path in imports(tree) if any(map(is_private, path.split(".")))]
    named = [
        whole
        for name, whole in attributes(tree)
        if re.match(r"(torch|dist)\.", whole) or name not in own() | LISTED | NOT_TORCHS
    ]
    return imported + named


def test_no_other_file_names_what_is_private_to_torch():
    for path, tree in trees().items():
        if path not in {PRIVATE, IMPORTED_LATE} and path.name not in OF_CLIENTS:
            assert touched(tree) == [], f"{path}: see {PRIVATE.name}"


def test_nothing_is_listed_without_need():
    used = {name for tree in trees().values() for name, _ in attributes(tree)}
    for tree in trees().values():
        strings = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant))
        used.update(value for value in strings if isinstance(value, str) and value.isidentifier())
        used.update(part for path in imports(tree) for part in path.split("."))
        used.update(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))
    assert LISTED - used == set()


@pytest.mark.parametrize("path", [PRIVATE, IMPORTED_LATE], ids=lambda path: path.parent.name)
def test_it_imports_and_reads_what_is_listed(path):
    tree = trees()[path]
    paths = {path for path in imports(tree) if any(map(is_private, path.split(".")))}
    read = {whole for _, whole in attributes(tree) if re.match(r"(torch|dist)\.", whole)}
    read = {re.sub(r"^dist\.", "torch.distributed.", whole) for whole in read}
    inner = {whole for whole in read if any(other.startswith(f"{whole}.") for other in read)}
    assert paths | (read - inner) <= set(PURPOSES)
