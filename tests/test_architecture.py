"""The layering of the package, read from its source, and its agreement with torch's public API."""

from __future__ import annotations

import ast
import dataclasses
import inspect
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

import pytest
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.fsdp import wrap as torch_wrap
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler as TorchShardedGradScaler

import fsdp_wrap
from fsdp_wrap import FullyShardedDataParallel, api, wrap
from fsdp_wrap.sharded_grad_scaler import ShardedGradScaler

PACKAGE = Path(fsdp_wrap.__file__).parent

LAYERS = [
    [
        "_version.py",
        "_torch_private.py",
        "api.py",
        "_walks.py",
        "_wrap_plan.py",
        "wrap.py",
        "_errors.py",
        "_events.py",
        "_modules.py",
        "_tree.py",
        "_precision.py",
        "_quantize.py",
    ],
    [
        "_compute_device.py",
        "_groups.py",
        "_mesh.py",
        "_device.py",
        "_agreement.py",
        "_positions.py",
        "_watch.py",
        "_resizable.py",
        "_objects.py",
        "_collectives.py",
        "_exchange.py",
        "_mapped_file.py",
        "_shared_memory.py",
        "_signals.py",
        "_channel.py",
        "_rendezvous.py",
        "_shared_collective.py",
        "_lending.py",
        "_host_communicator.py",
        "_two_level.py",
        "_communicators.py",
    ],
    [
        "_gradient_hooks.py",
        "_shown.py",
        "_gradient_mark.py",
        "_layout.py",
        "_held_by.py",
        "_interval_tensor.py",
        "flat_param.py",
        "_slice_layout.py",
        "_cut.py",
        "_dtensor_layout.py",
    ],
    [
        "_steps.py",
        "_gradients.py",
        "_segment.py",
        "_display.py",
        "_in_flight.py",
        "_summon.py",
        "_handle.py",
    ],
    [
        "_exec_order.py",
        "_arrivals.py",
        "_initial_values.py",
        "_unit.py",
        "_same_model.py",
        "_refusals.py",
        "_finalization.py",
        "_schedule.py",
        "_forward.py",
    ],
    [
        "_materialize.py",
        "_registry.py",
        "_param_checks.py",
        "_init.py",
        "_full_values.py",
        "_originals.py",
        "_optim_params.py",
        "_streaming.py",
        "full_params.py",
        "full_stream.py",
        "forward_methods.py",
        "_copies.py",
        "_load_targets.py",
        "_taking.py",
        "state_dict.py",
        "_optim_pieces.py",
        "_optim_load.py",
        "optim_state_dict.py",
        "_held_gradients.py",
        "_norms.py",
        "clip_grad.py",
        "sharded_grad_scaler.py",
        "_compression.py",
        "_custom_comms.py",
        "_ready_hooks.py",
        "_hooks.py",
        "comm_hooks.py",
        "in_place_gradients.py",
    ],
    [
        "_settings.py",
        "_state_dict_methods.py",
        "fully_sharded_data_parallel.py",
        "_internals.py",
        "distributed_state_dict.py",
        "_torch_helpers.py",
        "_fsdp_module.py",
        "fully_shard.py",
        "_installation.py",
        "_fully_shard_state.py",
        "_safetensors.py",
        "_clients.py",
        "_helpers.py",
        "compat.py",
        "checkpoint/_claim.py",
        "checkpoint/_team.py",
        "checkpoint/_metadata.py",
        "checkpoint/_manifest.py",
        "checkpoint/_folders.py",
        "checkpoint/_plain.py",
        "checkpoint/_writer.py",
        "checkpoint/_holders.py",
        "checkpoint/_optimizer_of_dtensors.py",
        "checkpoint/_state.py",
        "checkpoint/_step.py",
        "checkpoint/_saving.py",
        "checkpoint/_putting.py",
        "checkpoint/_loading.py",
        "checkpoint/__init__.py",
        "checkpoint/_convert.py",
        "checkpoint/_inspect.py",
        "checkpoint/__main__.py",
    ],
    ["__init__.py"],
]
"""A file imports from lower layers, and from files before it in its own layer's list. Not all exist yet."""

LAYOUTS = {"Layout", "FlatLayout", "FlatParameterLayout", "SliceLayout", "DTensorLayout"}
MOST_LINES, MOST_ARGUMENTS = 60, 9

FILE_LINES = {
    "api.py": 300,
    "wrap.py": 350,
    "_events.py": 100,
    "_modules.py": 200,
    "_mesh.py": 150,
    "_device.py": 150,
    "_collectives.py": 300,
    "_layout.py": 450,
    "flat_param.py": 400,
    "_dtensor_layout.py": 350,
    "_handle.py": 390,
    "_exec_order.py": 150,
    "_schedule.py": 470,
    "_init.py": 300,
    "full_params.py": 200,
    "state_dict.py": 350,
    "optim_state_dict.py": 350,
    "clip_grad.py": 120,
    "sharded_grad_scaler.py": 100,
    "fully_sharded_data_parallel.py": 455,
    "fully_shard.py": 300,
    "compat.py": 150,
    "__init__.py": 70,
}
"""About how long a file should be; one that is longer by more than a quarter has a second job."""

Function = ast.FunctionDef | ast.AsyncFunctionDef

FILES = sorted(PACKAGE.rglob("*.py"))


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


each_file = pytest.mark.parametrize("path", FILES, ids=name_of)


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def layer_of(name: str) -> int | None:
    return next((level for level, names in enumerate(LAYERS) if name in names), None)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imported_files(tree: ast.Module) -> Iterator[tuple[str, bool]]:
    """Yields the files of the package that a file imports, and whether for type checking only."""
    for_types = {inner for node in ast.walk(tree) if is_type_checking(node) for inner in ast.walk(node)}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            modules = [node.module or ""]
            if modules == ["fsdp_wrap"]:
                modules = [f"fsdp_wrap.{alias.name}" for alias in node.names]
            elif modules == ["fsdp_wrap.checkpoint"]:
                modules = [f"fsdp_wrap.checkpoint.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        else:
            continue
        for module in modules:
            if module.split(".")[0] == "fsdp_wrap":
                yield file_of(module.split(".")[1:]), node in for_types


def file_of(names: list[str]) -> str:
    """The file of a module, or of what is imported from a module."""
    if names[:1] == ["checkpoint"]:
        own = (PACKAGE / "checkpoint" / f"{''.join(names[1:2])}.py").exists()
        return f"checkpoint/{names[1] if own else '__init__'}.py"
    return f"{names[0] if names else '__init__'}.py"


def functions_in(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Yields all functions, nested ones as well, by their qualified names."""
    for child in ast.iter_child_nodes(tree):
        name = f"{prefix}{getattr(child, 'name', '')}"
        if isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield name, child
        scope = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
        yield from functions_in(child, f"{name}." if scope else prefix)


def length(function: Function) -> int:
    """Lines from `def` to the end, without the docstring."""
    documented = ast.get_docstring(function, clean=False) is not None
    first = function.body[0]
    docstring = (first.end_lineno or 0) - first.lineno + 1 if documented else 0
    return (function.end_lineno or 0) - function.lineno + 1 - docstring


def argument_count(function: Function) -> int:
    """All arguments save self and cls."""
    given = function.args
    every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
    return len({argument.arg for argument in every if argument is not None} - {"self", "cls"})


def writes_to(node: ast.AST, attribute: str) -> bool:
    """Whether a statement or call changes `something.attribute` or what it holds."""

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


# Layers.


def test_every_file_has_a_layer():
    assert {name_of(path) for path in FILES if layer_of(name_of(path)) is None} == set()
    listed = [name for names in LAYERS for name in names]
    assert len(listed) == len(set(listed))


@each_file
def test_imports_go_downwards(path):
    level = layer_of(name_of(path))
    assert level is not None
    own_layer = LAYERS[level]
    lower = {name for names in LAYERS[:level] for name in names}
    allowed = lower | set(own_layer[: own_layer.index(name_of(path))])
    for name, for_types in imported_files(parse(path)):
        if for_types and name in own_layer:
            continue  # naming a type is no dependency at run time; of a higher layer not even that
        assert name in allowed, f"{path.name} must not import {name}"


def test_the_check_of_imports_sees_all_forms():
    tree = parse_text(
        """
        import fsdp_wrap.api
        from fsdp_wrap import wrap, _tree
        from fsdp_wrap._unit import Unit
        from fsdp_wrap import checkpoint
        from fsdp_wrap.checkpoint import _folders, save
        from fsdp_wrap.checkpoint._team import Team
        if TYPE_CHECKING:
            from fsdp_wrap._schedule import Schedule
        def late():
            import fsdp_wrap
        """
    )
    expected = {"api.py", "wrap.py", "_tree.py", "_unit.py", "__init__.py"}
    expected |= {f"checkpoint/{name}.py" for name in ("__init__", "_folders", "_team")}
    assert {name for name, for_types in imported_files(tree) if not for_types} == expected
    assert [name for name, for_types in imported_files(tree) if for_types] == ["_schedule.py"]


def parse_text(text: str) -> ast.Module:
    return ast.parse(inspect.cleandoc(text))


def test_the_composable_api_never_imports_the_wrapper():
    for name in ("_fsdp_module.py", "fully_shard.py"):
        imported = {imported for imported, _ in imported_files(parse(PACKAGE / name))}
        assert imported and "fully_sharded_data_parallel.py" not in imported


def test_the_package_only_re_exports():
    tree = parse(PACKAGE / "__init__.py")
    for node in tree.body:
        docstring = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        constants = ("__all__", "__version__")
        constant = isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") in constants
        add_ons = isinstance(node, ast.If) and all(isinstance(each, ast.ImportFrom) for each in node.body)
        assert docstring or constant or add_ons or isinstance(node, ast.ImportFrom), ast.unparse(node)
    imported = {alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert imported == {*fsdp_wrap.__all__, "__version__", "_torch_helpers", "find_spec"}


# One writer, one seam.


@each_file
def test_only_one_file_writes_parameters(path):
    writes = [node.lineno for node in ast.walk(parse(path)) if writes_to(node, "_parameters")]
    if path.name == "_modules.py":
        assert writes, "the check finds nothing any more"
    else:
        assert writes == [], f"{path.name} writes module._parameters in lines {writes}"
    calls = (node for node in ast.walk(parse(path)) if isinstance(node, ast.Call))
    assert path.name == "_modules.py" or "register_parameter" not in map(called_name, calls)


@pytest.mark.parametrize(
    "statement",
    [
        "module._parameters[name] = param",
        "module._parameters.pop(name)",
        "del module._parameters[name]",
        "a, module._parameters[name] = pair",
        "module._parameters = {}",
        "module._parameters.update(other)",
    ],
)
def test_the_check_of_writes_sees_all_forms(statement):
    assert any(writes_to(node, "_parameters") for node in ast.walk(ast.parse(statement)))
    assert not any(writes_to(node, "_buffers") for node in ast.walk(ast.parse(statement)))


@each_file
def test_nobody_asks_which_layout_it_is(path):
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Call) and called_name(node) in ("isinstance", "issubclass", "type"):
            named = {getattr(part, "id", getattr(part, "attr", "")) for part in ast.walk(node)}
            assert named.isdisjoint(LAYOUTS), f"{path.name}:{node.lineno}: {ast.unparse(node)}"


def test_only_the_schedule_registers_runtime_hooks():
    hooks = {
        "register_hook",
        "register_post_accumulate_grad_hook",
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
        "register_multi_grad_hook",
        "queue_callback",
    }
    users = {
        path.name
        for path in FILES
        for node in ast.walk(parse(path))
        if isinstance(node, ast.Call) and called_name(node) in hooks
    }
    assert users == {"_schedule.py"}


# Sizes.


@each_file
def test_functions_are_short(path):
    long = {name: length(function) for name, function in functions_in(parse(path))}
    assert {name: lines for name, lines in long.items() if lines > MOST_LINES} == {}


@pytest.mark.parametrize("name", FILE_LINES)
def test_files_are_short(name):
    assert len((PACKAGE / name).read_text().splitlines()) <= 1.25 * FILE_LINES[name]


@each_file
def test_functions_have_few_arguments(path):
    counts = {name: argument_count(function) for name, function in functions_in(parse(path))}
    counts.pop("FullyShardedDataParallel.__init__", None)  # as many as torch's
    assert {name: count for name, count in counts.items() if count > MOST_ARGUMENTS} == {}


def test_the_checks_of_sizes_count_rightly():
    text = '''
        class A:
            @decorated
            def f(self, a, /, b, *c, d=1, **e):
                """One.

                Two.
                """
                def inner():
                    return 1
                return inner
    '''
    found = dict(functions_in(parse_text(text)))
    assert list(found) == ["A.f", "A.f.inner"]
    assert [length(function) for function in found.values()] == [4, 2]
    assert [argument_count(function) for function in found.values()] == [5, 0]


# Torch's API.


def parameters(function: object) -> list[tuple[str, object, object]]:
    """Name, kind and default of each parameter; enum members of the two libraries compare by name."""
    signature = inspect.signature(function)  # type: ignore[arg-type]
    return [(one.name, one.kind, comparable(one.default)) for one in signature.parameters.values()]


def comparable(default: object) -> object:
    return (type(default).__name__, default.name) if isinstance(default, Enum) else default


OURS_ALONE = "shared_memory"
"""The one argument that torch does not have; by keyword only."""


@pytest.mark.parametrize(
    "name",
    [
        "__init__",
        "clip_grad_norm_",
        "flatten_sharded_optim_state_dict",
        "fsdp_modules",
        "full_optim_state_dict",
        "get_state_dict_type",
        "no_sync",
        "register_comm_hook",
        "optim_state_dict",
        "optim_state_dict_to_load",
        "rekey_optim_state_dict",
        "scatter_full_optim_state_dict",
        "set_state_dict_type",
        "shard_full_optim_state_dict",
        "sharded_optim_state_dict",
        "state_dict_type",
        "summon_full_params",
    ],
)
def test_signatures_equal_those_of_torch(name):
    ours = getattr(FullyShardedDataParallel, name)
    shared = [each for each in parameters(ours) if each[0] != OURS_ALONE]
    assert shared == parameters(getattr(torch_fsdp.FullyShardedDataParallel, name))


def test_the_scaler_is_made_like_that_of_torch():
    assert parameters(ShardedGradScaler) == parameters(TorchShardedGradScaler)


@pytest.mark.parametrize("name", [name for name in api.__all__ if issubclass(getattr(api, name), Enum)])
def test_enums_equal_those_of_torch(name):
    def members(enum: type[Enum]) -> list[tuple[str, object]]:
        return [(member.name, member.value) for member in enum]

    assert members(getattr(api, name)) == members(getattr(torch_fsdp, name))


OF_LATER_TORCH = {("MixedPrecisionPolicy", "param_dtype_override_fn")}
"""What the oldest supported torch has not got, and is offered on it all the same."""


@pytest.mark.parametrize(
    "name", [name for name in api.__all__ if dataclasses.is_dataclass(getattr(api, name))]
)
def test_configurations_equal_those_of_torch(name):
    def fields(cls: type) -> list[tuple[str, object]]:
        return [(field.name, field.default) for field in dataclasses.fields(cls)]

    theirs, ours = fields(getattr(torch_fsdp, name)), fields(getattr(api, name))
    assert [each for each in ours if each in theirs or (name, each[0]) not in OF_LATER_TORCH] == theirs


def test_both_kinds_of_api_objects_are_compared():
    kinds = {issubclass(getattr(api, name), Enum) for name in api.__all__}
    assert kinds == {True, False}


def test_public_names_of_torch_have_the_same_paths():
    assert fsdp_wrap.fully_sharded_data_parallel.FullyShardedDataParallel is FullyShardedDataParallel
    assert fsdp_wrap.api.ShardingStrategy is fsdp_wrap.ShardingStrategy
    assert set(torch_wrap.__all__) <= set(wrap.__all__)
    for name in (*api.__all__, "FullyShardedDataParallel"):
        if hasattr(torch_fsdp.fully_sharded_data_parallel, name):
            assert hasattr(fsdp_wrap.fully_sharded_data_parallel, name), name
