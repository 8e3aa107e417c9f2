"""Auto-wrap policies, and wrapping by hand.

`_runtime/wrap_plan.py` makes units of the modules that the policies choose.
"""

from __future__ import annotations

import contextlib
import difflib
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Set
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp import wrap as torch_wrap

from fsdp_wrap._core import warn_caller
from fsdp_wrap._runtime import Kwargs, Targets, WrapPlan, describe, plan_wrapping

__all__ = [
    "ConfigAutoWrap",
    "CustomPolicy",
    "ModuleWrapPolicy",
    "NameWrapPolicy",
    "WrapPlan",
    "always_wrap_policy",
    "enable_wrap",
    "lambda_auto_wrap_policy",
    "plan_wrapping",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]

# --- policies that are functions: (module, recurse, nonwrapped_numel) -> bool -------------------------


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Makes every submodule a unit."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """Makes a submodule a unit if `lambda_fn(module)` is true."""
    return True if recurse else bool(lambda_fn(module))


def _module_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, module_classes: Set[type[nn.Module]]
) -> bool:
    """Makes units of the instances of `module_classes` and of their subclasses."""
    return recurse or isinstance(module, tuple(module_classes))


def transformer_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, transformer_layer_cls: Set[type[nn.Module]]
) -> bool:
    """Makes units of the instances of the model's layer classes; the usual choice for transformers."""
    return _module_wrap_policy(module, recurse, nonwrapped_numel, transformer_layer_cls)


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: Set[type[nn.Module]] | None = None,
    exclude_wrap_modules: Set[type[nn.Module]] | None = None,
) -> bool:
    """Makes a submodule a unit if it has at least `min_num_params` elements outside of nested units.

    Args:
        module: The module to decide on.
        recurse: True to ask whether to visit the module's children, False to ask whether to wrap the module.
        nonwrapped_numel: Elements of the module's parameters that are in no nested unit.
        min_num_params: Least number of elements in a unit.
        force_leaf_modules: Classes whose children are never visited; by default this function's
            attribute `FORCE_LEAF_MODULES`.
        exclude_wrap_modules: Classes that are never wrapped themselves; by default this function's
            attribute `EXCLUDE_WRAP_MODULES`.
    """
    if nonwrapped_numel < min_num_params:
        return False
    barred = force_leaf_modules if recurse else exclude_wrap_modules
    if barred is None:
        name = "FORCE_LEAF_MODULES" if recurse else "EXCLUDE_WRAP_MODULES"
        barred = getattr(size_based_auto_wrap_policy, name)  # read late: users change these sets
    return not isinstance(module, tuple(barred))


size_based_auto_wrap_policy.FORCE_LEAF_MODULES = {nn.MultiheadAttention}  # type: ignore[attr-defined]
size_based_auto_wrap_policy.EXCLUDE_WRAP_MODULES = {nn.ModuleList, nn.ModuleDict}  # type: ignore[attr-defined]


def _or_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, policies: Iterable[Callable[..., bool]]
) -> bool:
    """Answers True if any of `policies` does."""
    return any(each(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel) for each in policies)


# --- policies that are objects, which see the whole tree ----------------------------------------------


class _Policy(torch_wrap._Policy):
    """The base of policies that see the whole tree; torch's helpers accept them too.

    `_run_policy(root_module, ignored_modules, root_kwargs)` returns the chosen modules, each with the
    keyword arguments of its wrapper.
    """


class ModuleWrapPolicy(_Policy):
    """Policy that makes units of the instances of the given classes and of their subclasses.

    Args:
        module_classes: The classes.
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        self._module_classes = set(module_classes)
        if not all(isinstance(cls, type) for cls in self._module_classes):
            raise TypeError(
                f"ModuleWrapPolicy takes module classes, not {module_classes!r}; "
                "NameWrapPolicy takes the names of classes"
            )

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: Kwargs
    ) -> Targets:
        classes = tuple(self._module_classes)
        chosen = [module for module in root_module.modules() if isinstance(module, classes)]
        if not chosen:
            present = Counter(type(module) for module in root_module.modules())
            wanted = ", ".join(sorted(_class_path(cls) for cls in classes)) or "no class at all"
            message = f"ModuleWrapPolicy: no module is an instance of {wanted}, so the whole is one unit"
            warn_caller(message + _suggest([cls.__name__ for cls in classes], present))
        return {module: dict(root_kwargs) for module in chosen if module not in ignored_modules}

    def __call__(self, module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
        """Answers as a policy function, for use inside of one."""
        return _module_wrap_policy(module, recurse, -1, self._module_classes)

    def __repr__(self) -> str:
        names = ", ".join(sorted(_class_path(cls) for cls in self._module_classes))
        return f"ModuleWrapPolicy({{{names}}})"


class CustomPolicy(_Policy):
    """Policy that asks a function about every module; the function may choose the unit's arguments.

    Args:
        lambda_fn: Takes a module. Returns True to make it a unit with the root's arguments, a dict of
            arguments that override the root's, or False or an empty dict to leave it.
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | Kwargs]) -> None:
        self._lambda_fn = lambda_fn

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: Kwargs
    ) -> Targets:
        targets: Targets = {}
        for name, module in root_module.named_modules():
            if module in ignored_modules:
                continue
            answer = self._lambda_fn(module)
            if not isinstance(answer, (bool, dict)):
                raise ValueError(
                    "the function of a CustomPolicy must return True, False or a dict of arguments, "
                    f"but returned {answer!r} for {describe(name, module)}"
                )
            if answer:
                targets[module] = {**root_kwargs, **(answer if isinstance(answer, dict) else {})}
        return targets


class NameWrapPolicy(_Policy):
    """Policy that chooses modules by the name of their class, so that the class need not be imported.

    A name is a class's own name (`"Block"`) or any dotted end of its path (`"transformer.Block"`,
    `"my_package.transformer.Block"`). Subclasses under another name do not match.

    Args:
        names: One name, or several.
    """

    def __init__(self, names: str | Iterable[str]) -> None:
        self._names = (names,) if isinstance(names, str) else tuple(names)
        if not self._names or not all(isinstance(name, str) and name for name in self._names):
            raise ValueError(f"NameWrapPolicy takes one or more names of module classes, not {names!r}")

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: Kwargs
    ) -> Targets:
        classes = self._matching(Counter(type(module) for module in root_module.modules()))
        chosen = (module for module in root_module.modules() if type(module) in classes)
        return {module: dict(root_kwargs) for module in chosen if module not in ignored_modules}

    def _matching(self, classes: Counter[type]) -> set[type]:
        """Returns the matching classes; raises if there is none, and warns if a name matches none."""
        hits = {name: {cls for cls in classes if _class_matches(cls, name)} for name in self._names}
        unused = [name for name in self._names if not hits[name]]
        if unused:
            message = f"NameWrapPolicy: no module has a class named {', '.join(map(repr, unused))}"
            message += _suggest(unused, classes)
            if len(unused) == len(self._names):
                raise ValueError(message)
            warn_caller(message)
        return set().union(*hits.values())

    def __repr__(self) -> str:
        return f"NameWrapPolicy({list(self._names)!r})"


def _class_path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _class_matches(cls: type, name: str) -> bool:
    return name == cls.__name__ or f".{_class_path(cls)}".endswith(f".{name}")


def _suggest(names: list[str], classes: Counter[type]) -> str:
    counts = Counter(cls.__name__ for cls in classes.elements())
    close = [found for name in names for found in difflib.get_close_matches(name.split(".")[-1], counts, n=1)]
    hint = f" (did you mean {', '.join(map(repr, dict.fromkeys(close)))}?)" if close else ""
    listing = ", ".join(f"{name} ({counts[name]})" for name in sorted(counts))
    return f"{hint}; the classes present, with their counts, are: {listing}"


# --- wrapping by hand ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConfigAutoWrap:
    """The wrapper class of an `enable_wrap` block, and its default arguments."""

    wrapper_cls: Callable[..., nn.Module]
    kwargs: Kwargs


_active: ContextVar[ConfigAutoWrap | None] = ContextVar("fsdp_wrap_enable_wrap", default=None)


@contextlib.contextmanager
def enable_wrap(*, wrapper_cls: Any, **wrapper_kwargs: Any) -> Generator[None, None, None]:
    """Makes `wrap` wrap modules within the block; an inner block replaces the outer one inside of it.

    Args:
        wrapper_cls: The wrapper class, such as `FullyShardedDataParallel`.
        **wrapper_kwargs: Arguments of every wrapper made in the block.
    """
    if not callable(wrapper_cls):
        raise TypeError(f"enable_wrap needs a class or function as wrapper_cls, not {wrapper_cls!r}")
    token = _active.set(ConfigAutoWrap(wrapper_cls, wrapper_kwargs))
    try:
        yield
    finally:
        _active.reset(token)


def wrap(module: nn.Module, **wrap_overrides: Any) -> nn.Module:
    """Returns the module, wrapped by the enclosing `enable_wrap`; unchanged outside of any.

    Args:
        module: The module.
        **wrap_overrides: Arguments that override the arguments of `enable_wrap`.
    """
    config = _active.get()
    if config is None:
        return module
    return config.wrapper_cls(module, **{**config.kwargs, **wrap_overrides})
