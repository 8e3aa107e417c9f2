"""The folders of the package and what they may know of each other, read from its source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import fsdp_wrap
from bed.paths import PACKAGE, ROOT, TESTS
from bed.scripts import script

FILES = sorted(PACKAGE.rglob("*.py"))

INNER = [
    "_core",
    "_comm",
    "_params",
    "_runtime",
    "_building",
    "_by_hand",
    "_batching",
    "_checks",
    "_custom_comms",
    "_state",
    "_activations",
    "_compression",
    "_state_over_replicas",
    "_uneven",
    "_reproducible",
    "_values",
]
FLOORS = [*INNER, "", "checkpoint", "_writer_process", "weights", "optim", "compat", "tools"]
"""Folders from the lowest on; the empty name is the top of the package."""

ALL_MAY_READ = "fsdp_wrap._core.torch_private"
"""The one file that others import directly: its list of names is what it is for."""

size = script("size", "tests/tools")


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def module_of(path: Path) -> str:
    return ".".join(["fsdp_wrap", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__")


MODULES = {module_of(path): path for path in FILES}


def folder_of(module: str) -> str:
    path = MODULES[module].relative_to(PACKAGE)
    return path.parts[0] if len(path.parts) > 1 else ""


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports_in(tree: ast.Module) -> Iterator[str]:
    for_types = {inner for node in ast.walk(tree) if is_type_checking(node) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if node in for_types:
            continue
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                whole, exported = f"{node.module}.{alias.name}", alias.name in exports(node.module)
                yield whole if whole in MODULES and not exported else node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


@cache
def exports(module: str | None) -> set[str]:
    """What a folder's `__init__` takes from its files, under the names that it gives them."""
    if module not in MODULES:
        return set()
    imports = (node for node in parse(MODULES[module]).body if isinstance(node, ast.ImportFrom))
    return {alias.asname or alias.name for node in imports for alias in node.names}


@cache
def imported_by(module: str) -> set[str]:
    return {name for name in imports_in(parse(MODULES[module])) if name.split(".")[0] == "fsdp_wrap"}


# Folders.


def test_every_folder_has_a_floor():
    assert {*map(folder_of, MODULES)} == set(FLOORS)


def test_every_folder_says_what_lives_in_it():
    for path in FILES:
        if path.name == "__init__.py" and folder_of(module_of(path)).startswith("_"):
            text = ast.get_docstring(parse(path)) or ""
            assert all(f"{word}:" in text for word in ("Lives here", "May import", "Must never know")), path


def test_imports_go_downwards():
    for module in MODULES:
        floor = FLOORS.index(folder_of(module))
        if module in ("fsdp_wrap", "fsdp_wrap.__main__"):
            floor = len(FLOORS)
        higher = {name for name in imported_by(module) if FLOORS.index(folder_of(name)) > floor}
        assert higher == set(), f"{module} must not import what lies higher"


def test_imports_of_files_make_no_circles():
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, f"a circle: {' -> '.join((*way, module))}"
        if module not in done:
            for name in imported_by(module) - {module}:
                visit(name, (*way, module))
            done.add(module)

    for module in MODULES:
        visit(module, ())
    assert size.circles() == {}, "in a folder, with imports for types"


def test_names_of_classes_have_one_meaning():
    assert {*size.doubled_classes()} <= {"FlatParameter"}, "which clients read under torch's name"


def test_folders_are_entered_by_their_door():
    """From another folder, names come from what the folder's `__init__` exports."""
    for module in MODULES:
        for name in imported_by(module) - {ALL_MAY_READ}:
            own, other = folder_of(module), folder_of(name)
            if own != other and other.startswith("_"):
                assert name == f"fsdp_wrap.{other}", f"{module} reaches into {other} for {name}"


def test_folders_export_only_what_others_use():
    for folder in FLOORS:
        door = f"fsdp_wrap.{folder}"
        if not folder.startswith("_"):
            continue
        used = {
            alias.name
            for module, path in MODULES.items()
            if folder_of(module) != folder
            for node in ast.walk(parse(path))
            if isinstance(node, ast.ImportFrom) and node.module == door
            for alias in node.names
        }
        too_many = {name for name in exports(door) - used if f"{door}.{name}" not in MODULES}
        assert too_many == set(), f"{door} exports what nobody takes"


def test_names_with_an_underscore_stay_in_their_file():
    """The other names of a file are for its folder, and those that the door takes for all folders."""
    for module, path in MODULES.items():
        for node in ast.walk(parse(path)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fsdp_wrap"):
                private = {
                    alias.name for alias in node.names if alias.name[0] == "_" and alias.name[1] != "_"
                }
                files = {name for name in private if f"{node.module}.{name}" in MODULES}
                assert private == files, f"{module} takes what {node.module} keeps to itself"


def test_the_composable_api_never_imports_the_wrapper():
    for name in ("fsdp_wrap._fsdp_module", "fsdp_wrap.fully_shard"):
        assert imported_by(name) and "fsdp_wrap.fully_sharded_data_parallel" not in imported_by(name)


def test_the_package_only_re_exports():
    tree = parse(PACKAGE / "__init__.py")
    late = {node for block in ast.walk(tree) if is_type_checking(block) for node in ast.walk(block)}
    of_folders = {alias.name for node in late if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert set(fsdp_wrap.__all__) <= exports("fsdp_wrap") | of_folders
    assert all(getattr(fsdp_wrap, name).__name__.split(".")[-1] == name for name in of_folders)
    assert not any(isinstance(node, (ast.ClassDef, ast.FunctionDef)) for node in ast.walk(tree))


def test_every_law_names_a_test_that_is_there():
    page = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`(test_[a-z_0-9]+)`", page))
    texts = (path.read_text() for path in TESTS.rglob("test_*.py"))
    there = {name for text in texts for name in re.findall(r"^def (test_\w+)", text, re.MULTILINE)}
    assert len(named) > 20 and named <= there


# One writer, one registrar.


def writes_to(node: ast.AST, attribute: str) -> bool:
    def names_it(value: ast.AST) -> bool:
        if isinstance(value, ast.Subscript):
            return names_it(value.value)
        if isinstance(value, (ast.Tuple, ast.List)):
            return any(names_it(element) for element in value.elts)
        return isinstance(value, ast.Attribute) and value.attr == attribute

    if isinstance(node, (ast.Assign, ast.Delete)):
        return any(names_it(target) for target in node.targets)
    if isinstance(node, (ast.AugAssign, ast.AnnAssign)):
        return names_it(node.target)
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in {"pop", "popitem", "update", "setdefault", "clear", "move_to_end"}
        and names_it(node.func.value)
    )


def called_name(node: ast.Call) -> str:
    return getattr(node.func, "attr", getattr(node.func, "id", ""))


def calls_in(path: Path) -> Iterator[ast.Call]:
    return (node for node in ast.walk(parse(path)) if isinstance(node, ast.Call))


def test_only_one_file_writes_parameters():
    writers = {
        module_of(path)
        for path in FILES
        if any(writes_to(node, "_parameters") for node in ast.walk(parse(path)))
        or any(called_name(call) == "register_parameter" for call in calls_in(path))
    }
    assert writers == {"fsdp_wrap._core.modules"}


def test_only_the_path_of_a_step_registers_runtime_hooks():
    hooks = {
        *("register_hook", "register_post_accumulate_grad_hook", "register_forward_hook"),
        *("register_forward_pre_hook", "register_full_backward_hook", "register_full_backward_pre_hook"),
        *("register_multi_grad_hook", "queue_callback"),
    }
    users = {module_of(path) for path in FILES for call in calls_in(path) if called_name(call) in hooks}
    assert users == {"fsdp_wrap._runtime.step", "fsdp_wrap._building.build"}, "a guard"


COLLECTIVES = {
    *("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "batch_isend_irecv"),
    *("isend", "irecv", "_allgather_base", "_reduce_scatter_base"),
}


def test_only_communicators_move_parameters_and_gradients():
    calls = ((path, called_name(call)) for path in FILES for call in calls_in(path))
    users = {folder_of(module_of(path)) for path, name in calls if name in COLLECTIVES}
    assert users <= {"_comm", "_compression"}, "hooks of users reduce by themselves; nobody else does"


def layouts() -> set[str]:
    """Classes that say how one front-end shards: where parameters lie, and what optimizers see."""
    classes = [node for path in FILES for node in ast.walk(parse(path)) if isinstance(node, ast.ClassDef)]
    bases = {node.name: {ast.unparse(base) for base in node.bases} for node in classes}
    names, before = {"Layout", "ShardedParams"}, 0
    while len(names) > before:
        before = len(names)
        names |= {name for name, named in bases.items() if names & named}
    return names


def test_nobody_asks_which_layout_it_is():
    kinds = layouts()
    assert len(kinds) > 1
    for path in FILES:
        for call in calls_in(path):
            if called_name(call) in ("isinstance", "issubclass", "type"):
                named = {getattr(part, "id", getattr(part, "attr", "")) for part in ast.walk(call)}
                assert named.isdisjoint(kinds), f"{path.name}:{call.lineno}: {ast.unparse(call)}"


def test_there_is_one_way_to_warn():
    """It finds the program's line; a fixed number of frames is wrong once a function is put in between."""
    places = [path for path in FILES if re.search(r"\bwarnings\.warn\(|stacklevel", path.read_text())]
    assert places == [PACKAGE / "_core" / "errors.py"]
