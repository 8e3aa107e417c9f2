"""Auto-wrap policies, and wrapping by hand.

`_wrap_plan.py` makes units of the modules that the policies choose.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.distributed.fsdp import wrap as torch_wrap
from torch.distributed.fsdp.wrap import always_wrap_policy

from fsdp_wrap._core import warn_caller
from fsdp_wrap._wrap_plan import Kwargs, Targets, WrapPlan, describe, plan_wrapping

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

# Names that programs take from torch's file.
_Policy = torch_wrap._Policy
_module_wrap_policy, _or_policy = torch_wrap._module_wrap_policy, torch_wrap._or_policy

# --- policies that are functions, whose options `functools.partial` binds -----------------------------


def _as_policy(function: Callable[..., bool]) -> Callable[..., bool]:
    """Makes torch's policy tell how it is given where a program calls it with its options alone."""
    signature, name = inspect.signature(function), function.__name__

    @functools.wraps(function)
    def policy(*args: Any, **options: Any) -> bool:
        try:
            bound = signature.bind(*args, **options)
        except TypeError as error:
            given = ", ".join([name, *(f"{option}=..." for option in options)])
            raise TypeError(
                f"{name}() is called for every module, by the wrapper ({error}): pass it without a call, as "
                f"auto_wrap_policy=functools.partial({given})"
            ) from None
        for attribute, value in vars(policy).items():
            if attribute.lower() in signature.parameters:  # a default, which programs set
                bound.arguments.setdefault(attribute.lower(), value)
        return function(*bound.args, **bound.kwargs)

    return policy


lambda_auto_wrap_policy = _as_policy(torch_wrap.lambda_auto_wrap_policy)
size_based_auto_wrap_policy = _as_policy(torch_wrap.size_based_auto_wrap_policy)
transformer_auto_wrap_policy = _as_policy(torch_wrap.transformer_auto_wrap_policy)

# --- policies that are objects, which see the whole tree ----------------------------------------------


class ModuleWrapPolicy(torch_wrap.ModuleWrapPolicy):
    """Policy that makes units of the instances of the given classes and of their subclasses.

    Args:
        module_classes: The classes.

    Raises:
        TypeError: If one of them is no class.
    """

    def __init__(self, module_classes: Iterable[type[nn.Module]]) -> None:
        if isinstance(module_classes, (type, str)):
            raise TypeError(_of_one_class("ModuleWrapPolicy takes a set of module classes", module_classes))
        self._classes = set(module_classes)
        super().__init__(self._classes)
        if not all(isinstance(cls, type) for cls in self._classes):
            raise TypeError(
                f"ModuleWrapPolicy takes module classes, not {module_classes!r}; "
                "NameWrapPolicy takes the names of classes"
            )

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: Kwargs
    ) -> Targets:
        classes = tuple(self._classes)
        chosen = [module for module in root_module.modules() if isinstance(module, classes)]
        if not chosen:
            present = Counter(type(module) for module in root_module.modules())
            wanted = ", ".join(sorted(_class_path(cls) for cls in classes)) or "no class at all"
            message = f"ModuleWrapPolicy: no module is an instance of {wanted}, so the whole is one unit"
            warn_caller(message + _suggest([cls.__name__ for cls in classes], present))
        return {module: dict(root_kwargs) for module in chosen if module not in ignored_modules}

    def __repr__(self) -> str:
        names = ", ".join(sorted(_class_path(cls) for cls in self._classes))
        return f"ModuleWrapPolicy({{{names}}})"


class CustomPolicy(torch_wrap.CustomPolicy):
    """Policy that asks a function about every module; the function may choose the unit's arguments.

    Args:
        lambda_fn: Takes a module. Returns True to make it a unit with the root's arguments, a dict of
            arguments that override the root's, or False or an empty dict to leave it.
    """

    def __init__(self, lambda_fn: Callable[[nn.Module], bool | Kwargs]) -> None:
        super().__init__(lambda_fn)
        self._choose = lambda_fn

    def _run_policy(
        self, root_module: nn.Module, ignored_modules: set[nn.Module], root_kwargs: Kwargs
    ) -> Targets:
        targets: Targets = {}
        for name, module in root_module.named_modules():
            if module in ignored_modules:
                continue
            answer = self._choose(module)
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

    Raises:
        ValueError: If there is no name, or something else than a name.
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


def _of_one_class(rule: str, given: type | str) -> str:
    """Returns a message on a class, or its name, where a set of classes or a policy is needed."""
    if isinstance(given, str):
        return f"{rule}, not the name {given!r}: write NameWrapPolicy({given!r})"
    return f"{rule}, not the class {given.__name__}: write ModuleWrapPolicy({{{given.__name__}}})"


def _class_path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _class_matches(cls: type, name: str) -> bool:
    return name == cls.__name__ or f".{_class_path(cls)}".endswith(f".{name}")


def _suggest(names: list[str], classes: Counter[type]) -> str:
    counts = Counter(cls.__name__ for cls in classes.elements())
    close = [
        similar for name in names for similar in difflib.get_close_matches(name.split(".")[-1], counts, n=1)
    ]
    hint = f" (did you mean {', '.join(map(repr, dict.fromkeys(close)))}?)" if close else ""
    listing = ", ".join(f"{name} ({counts[name]})" for name in sorted(counts))
    return f"{hint}; the classes present, with their counts, are: {listing}"


# --- wrapping by hand ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConfigAutoWrap:
    """The wrapper class of an `enable_wrap` block, and its default arguments.

    Attributes:
        wrapper_cls: The class.
        kwargs: The arguments.
    """

    wrapper_cls: Callable[..., nn.Module]
    kwargs: Kwargs


_active: ContextVar[ConfigAutoWrap | None] = ContextVar("fsdp_wrap_enable_wrap", default=None)


@contextlib.contextmanager
def enable_wrap(*, wrapper_cls: Any, **wrapper_kwargs: Any) -> Generator[None, None, None]:
    """Makes `wrap` wrap modules within the block; an inner block replaces the outer one inside of it.

    Args:
        wrapper_cls: The wrapper class, such as `FullyShardedDataParallel`.
        **wrapper_kwargs: Arguments of every wrapper made in the block.

    Raises:
        TypeError: If the wrapper cannot be called.
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
