"""The reference: it has every public name, and the docstrings tell of parameters and errors."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import os
import pkgutil
import re
import socket
import sys
import textwrap
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import fsdp_wrap
from bed import run_ranks
from fsdp_wrap import compat
from site_pages import DOCS, blocks


def public_modules() -> list[ModuleType]:
    """The modules that users import: those without an underscore that say what they have."""
    infos = pkgutil.walk_packages(fsdp_wrap.__path__, "fsdp_wrap.")
    doors = [info.name for info in infos if info.ispkg or info.name.count(".") == 1]
    paths = [path for path in doors if "._" not in path]
    paths += ["fsdp_wrap", "fsdp_wrap.tools.debug_page"]  # of which the latter needs packages of its own
    modules = [importlib.import_module(path) for path in paths]
    return [module for module in modules if hasattr(module, "__all__")]


def listed() -> list[Any]:
    """What the pages of the reference list, resolved, in their order."""
    public = []
    for page in sorted((DOCS / "reference").glob("*.md")):
        for path in re.findall(r"^::: ([\w.]+)$", page.read_text("utf-8"), re.M):
            module, _, name = path.rpartition(".")
            public.append(getattr(importlib.import_module(module), name))
    return public


def is_torchs(value: Any) -> bool:
    return getattr(value, "__module__", "").startswith("torch.")


def public_values() -> dict[str, Any]:
    """Every public value by one of its paths; a value that stands under several is there several times."""
    return {
        f"{module.__name__}.{name}": getattr(module, name)
        for module in public_modules()
        for name in module.__all__
    }


def test_every_public_name_is_in_the_reference_once():
    """Torch's own names are told in its text."""
    of_reference = [id(value) for value in listed()]
    assert len(of_reference) == len(set(of_reference)), "a value is listed under two paths"
    values = public_values()
    assert set(of_reference) <= {*map(id, values.values())}, "the reference lists what is not public"
    text = "".join(page.read_text("utf-8") for page in (DOCS / "reference").glob("*.md"))
    for path, value in values.items():
        told = f"`{path.rpartition('.')[2]}`" in text if is_torchs(value) else id(value) in of_reference
        assert told, path


def documented_constants() -> set[str]:
    """The constants in the package that are followed by a docstring."""
    constants = set()
    for path in Path(fsdp_wrap.__path__[0]).rglob("*.py"):
        body = ast.parse(path.read_text("utf-8")).body
        for statement, after in zip(body, body[1:]):
            told = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            if told and isinstance(statement, ast.Assign | ast.AnnAssign):
                targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
                constants |= {target.id for target in targets if isinstance(target, ast.Name)}
    return constants


def members(kind: type) -> list[tuple[str, Any]]:
    """The public functions and properties that a class adds, or takes from private classes of ours."""
    classes = [base for base in kind.__mro__ if base.__module__.startswith("fsdp_wrap")]
    names = dict.fromkeys(name for base in classes for name in vars(base) if not name.startswith("_"))
    named = [(f"{kind.__qualname__}.{name}", inspect.getattr_static(kind, name)) for name in names]
    functions = (staticmethod, classmethod, property)
    return [
        (name, member)
        for name, member in named
        if inspect.isfunction(member) or isinstance(member, functions)
    ]


def test_every_public_name_has_a_docstring():
    constants, bare = documented_constants(), []
    for path, value in public_values().items():
        if not (inspect.isclass(value) or inspect.isfunction(value)):
            bare += [path] if path.rpartition(".")[2] not in constants else []
            continue
        parts = members(value) if inspect.isclass(value) else []
        bare += [name for name, part in [(path, value), *parts] if not inspect.getdoc(part)]
    assert not bare


def described() -> Iterator[tuple[str, Any, Any]]:
    """Yields what the reference describes: the name, the value, and the function that it is or is made by."""
    for value in {id(value): value for value in listed()}.values():
        if inspect.isfunction(value):
            yield value.__qualname__, value, value
        elif inspect.isclass(value) and not issubclass(value, Enum):
            yield value.__qualname__, value, maker(value)
            for name, member in members(value):
                yield name, function_of(member), function_of(member)


def function_of(member: Any) -> Any:
    """The function of a method, or of a property."""
    return member.fget if isinstance(member, property) else getattr(member, "__func__", member)


def maker(kind: type) -> Any:
    """The function of ours that makes the instances of a class, if there is one."""
    own = [vars(base) for base in kind.__mro__ if base.__module__.startswith("fsdp_wrap")]
    return function_of(
        next((names[name] for names in own for name in ("__init__", "__new__") if name in names), None)
    )


def returned() -> set[str]:
    """The names in what functions of the reference return."""
    functions = [function for _, _, function in described() if inspect.isfunction(function)]
    results = (str(inspect.unwrap(function).__annotations__.get("return")) for function in functions)
    return {name for result in results for name in re.findall(r"\w+", result)}


def told(section: str, *values: Any) -> set[str]:
    """The names that a section of docstrings describes; of a class also in those of its bases."""
    names = set()
    for value in values:
        for owner in inspect.getmro(value) if inspect.isclass(value) else [value]:
            text = inspect.cleandoc(owner.__doc__ or "")
            for lines in re.findall(rf"^{section}:\n((?:    .*\n?|\n)*)", text, re.M):
                names |= set(re.findall(r"^    \**(\w+): ", lines, re.M))
    return names


def test_every_parameter_is_described():
    missing, returns = {}, returned()
    for name, value, function in described():
        names = told("Args", value, function)
        if function is None or (name in returns and not names):  # no user makes what functions return
            continue
        names |= told("Attributes", value)
        missing[name] = [
            parameter.name
            for parameter in inspect.signature(function).parameters.values()
            if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
            if parameter.name not in {"self", "cls", *names} and not parameter.name.startswith("_")
        ]
    assert not {name: left for name, left in missing.items() if left}


def test_every_error_that_a_function_raises_is_described():
    missing = []
    for name, value, function in described():
        if inspect.isclass(value) and dataclasses.is_dataclass(value):
            function = getattr(value, "__post_init__", None)
        names = told("Raises", value, function) if function is not None else set()
        for error in raised(inspect.unwrap(function)) if function is not None else ():
            if not names & {kind.__name__ for kind in error.__mro__}:
                missing.append(f"{name}: {error.__name__}")
    assert not missing


def raised(function: Any) -> list[type[BaseException]]:
    """The classes of errors that a function itself raises."""
    if not inspect.getfile(function).startswith(fsdp_wrap.__path__[0]) or function.__name__ == "<lambda>":
        return []
    source = ast.parse(textwrap.dedent(inspect.getsource(function))).body[0]
    left, errors = [*ast.iter_child_nodes(source)], list[type[BaseException]]()
    for node in left:  # which grows meanwhile
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            error: Any = eval(ast.unparse(node.exc.func), {**function.__globals__})
            if isinstance(error, type) and issubclass(error, BaseException):
                errors.append(error)
        if not isinstance(node, ast.FunctionDef | ast.Lambda):
            left += ast.iter_child_nodes(node)
    return errors


# --- its examples ---------------------------------------------------------------------------------------

PAGES = sorted(page.name for page in (DOCS / "reference").glob("*.md") if page.name != "index.md")
BEFORE = [block.source for block in blocks(DOCS / "reference" / "index.md") if block.language == "python"]
"""What the examples of all pages begin with: definitions, and a model in a process group."""
ALONE = {"tools.md"}
"""Plans need that there is no process group yet."""


def run_examples(rank: int, world_size: int, page: str, folder: str, port: int) -> set[str]:
    """Runs the examples of a page as a program of torchrun; returns the classes of its variables."""
    here, words, places = os.getcwd(), sys.argv, [*sys.path]
    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ.update({name: str(value) for name, value in launched.items()})
    os.environ.update({"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)})
    names: dict[str, Any] = {"__name__": "__main__"}
    os.chdir(folder)
    try:
        for source in BEFORE[: 1 if page in ALONE else None]:
            exec(compile(source, "index.md", "exec"), names)
        for block in blocks(DOCS / "reference" / page):
            if block.language != "python" or block.skipped:
                continue
            lines = "\n" * block.line  # so that errors name the page's line
            exec(compile(lines + block.source, page, "exec"), names)
    finally:
        os.chdir(here)
        compat.uninstall()  # as the end of a program would
        sys.argv, sys.path[:] = words, places
    return {kind.__name__ for value in names.values() for kind in type(value).__mro__}


@pytest.mark.parametrize("page", PAGES)
def test_examples_run_and_show_every_name(page, tmp_path):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    shown, *_ = run_ranks(1 if page in ALONE else 2, run_examples, page, str(tmp_path), port, backend=None)
    text = (DOCS / "reference" / page).read_text("utf-8")
    for block in blocks(DOCS / "reference" / page):
        shown |= set(re.findall(r"\w+", block.source))
    names = {path.rpartition(".")[2] for path in re.findall(r"^::: ([\w.]+)$", text, re.M)}
    missing = names - shown
    assert not missing
