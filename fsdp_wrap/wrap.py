"""Auto-wrap policies, and the rewriting of a module tree into nested units.

Planning and rewriting are two steps: `plan_wrapping` makes every decision and refuses what is wrong
while the tree is untouched, `WrapPlan.apply` then replaces modules by units. The wrapper class is
always passed in.
"""

from __future__ import annotations

import contextlib
import difflib
import inspect
import warnings
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Set
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from torch import nn
from torch.distributed.fsdp import wrap as torch_wrap

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

AutoWrapPolicy: TypeAlias = "Callable[..., bool] | torch_wrap._Policy"
Kwargs: TypeAlias = dict[str, Any]
Targets: TypeAlias = dict[nn.Module, Kwargs]
Chain: TypeAlias = tuple[nn.Module, ...]
MakeUnit: TypeAlias = Callable[[nn.Module, Kwargs, Set[nn.Parameter]], nn.Module]

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


# --- policies that are functions: (module, recurse, nonwrapped_numel) -> bool -------------------------


def always_wrap_policy(*args: Any, **kwargs: Any) -> bool:
    """Makes every submodule a unit."""
    return True


def lambda_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, lambda_fn: Callable[[nn.Module], bool]
) -> bool:
    """Makes the submodules for which `lambda_fn(module)` is true units."""
    return True if recurse else bool(lambda_fn(module))


def _module_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, module_classes: Set[type[nn.Module]]
) -> bool:
    """Makes instances of `module_classes`, subclasses included, units."""
    return recurse or isinstance(module, tuple(module_classes))


def transformer_auto_wrap_policy(
    module: nn.Module, recurse: bool, nonwrapped_numel: int, transformer_layer_cls: Set[type[nn.Module]]
) -> bool:
    """Makes instances of the model's layer classes units; the usual choice for transformers."""
    return _module_wrap_policy(module, recurse, nonwrapped_numel, transformer_layer_cls)


def size_based_auto_wrap_policy(
    module: nn.Module,
    recurse: bool,
    nonwrapped_numel: int,
    min_num_params: int = int(1e8),
    force_leaf_modules: Set[type[nn.Module]] | None = None,
    exclude_wrap_modules: Set[type[nn.Module]] | None = None,
) -> bool:
    """Makes a submodule a unit once it holds `min_num_params` elements that no nested unit has taken.

    Args:
        module: The module asked about.
        recurse: Whether the question is to look at the module's children, or to wrap the module.
        nonwrapped_numel: Elements of the module's parameters that are in no nested unit.
        min_num_params: Least number of elements in a unit.
        force_leaf_modules: Classes whose children are never looked at; by default this function's
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
    """Says yes where any of `policies` does."""
    return any(
        policy(module=module, recurse=recurse, nonwrapped_numel=nonwrapped_numel) for policy in policies
    )


# --- policies that are objects: they see the whole tree -----------------------------------------------


class _Policy(torch_wrap._Policy):
    """Base of the policies that choose from the whole tree; torch's helpers accept them as well.

    `_run_policy(root_module, ignored_modules, root_kwargs)` returns the chosen modules, each with the
    keyword arguments of its wrapper.
    """


class ModuleWrapPolicy(_Policy):
    """Makes instances of the given classes, subclasses included, units.

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
        chosen = (module for module in root_module.modules() if isinstance(module, classes))
        return {module: dict(root_kwargs) for module in chosen if module not in ignored_modules}

    def __call__(self, module: nn.Module, recurse: bool, *args: Any, **kwargs: Any) -> bool:
        """Answers like a policy that is a function, for use inside one."""
        return _module_wrap_policy(module, recurse, -1, self._module_classes)

    def __repr__(self) -> str:
        names = ", ".join(sorted(_class_path(cls) for cls in self._module_classes))
        return f"ModuleWrapPolicy({{{names}}})"


class CustomPolicy(_Policy):
    """Asks a function about every module, and lets it choose the unit's arguments.

    Args:
        lambda_fn: Given a module, returns True to make it a unit with the root's arguments, a dict to
            make it a unit with these arguments overriding the root's, False or an empty dict to leave it.
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
                    f"but returned {answer!r} for {_describe(name, module)}"
                )
            if answer:
                targets[module] = {**root_kwargs, **(answer if isinstance(answer, dict) else {})}
        return targets


class NameWrapPolicy(_Policy):
    """Makes modules units by the name of their class, so that the class need not be imported.

    A name is a class's own name (`"Block"`) or any dotted end of its path (`"transformer.Block"`,
    `"my_package.transformer.Block"`). Subclasses under another name do not match.

    Args:
        names: One name or several.
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
        """Returns the classes that match; it is an error if none does, a warning if a name is unused."""
        hits = {name: {cls for cls in classes if _class_matches(cls, name)} for name in self._names}
        unused = [name for name in self._names if not hits[name]]
        if unused:
            message = f"NameWrapPolicy: no module has a class named {', '.join(map(repr, unused))}"
            message += _suggest(unused, classes)
            if len(unused) == len(self._names):
                raise ValueError(message)
            warnings.warn(message, stacklevel=2)
        return set().union(*hits.values())

    def __repr__(self) -> str:
        return f"NameWrapPolicy({list(self._names)!r})"


def _class_path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _class_matches(cls: type, name: str) -> bool:
    return name == cls.__name__ or f".{_class_path(cls)}".endswith(f".{name}")


def _suggest(names: list[str], classes: Counter[type]) -> str:
    counts: Counter[str] = Counter()
    for cls, count in classes.items():
        counts[cls.__name__] += count
    close = [found for name in names for found in difflib.get_close_matches(name.split(".")[-1], counts, n=1)]
    hint = f" (did you mean {', '.join(map(repr, dict.fromkeys(close)))}?)" if close else ""
    listing = ", ".join(f"{name} ({counts[name]})" for name in sorted(counts))
    return f"{hint}; the classes present, with their counts, are: {listing}"


# --- wrapping by hand ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class ConfigAutoWrap:
    """What `wrap` does inside an `enable_wrap` block: the wrapper class and its default arguments."""

    wrapper_cls: Callable[..., nn.Module]
    kwargs: Kwargs


_active: ContextVar[ConfigAutoWrap | None] = ContextVar("fsdp_wrap_enable_wrap", default=None)


@contextlib.contextmanager
def enable_wrap(*, wrapper_cls: Any, **wrapper_kwargs: Any) -> Generator[None, None, None]:
    """Lets `wrap` wrap within the block; blocks nest, and the inner one alone holds inside itself.

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
    """Returns the module wrapped as the enclosing `enable_wrap` says; outside of one, unchanged.

    Args:
        module: The module.
        **wrap_overrides: Arguments that take precedence over those given to `enable_wrap`.
    """
    config = _active.get()
    if config is None:
        return module
    return config.wrapper_cls(module, **{**config.kwargs, **wrap_overrides})


# --- planning and rewriting ---------------------------------------------------------------------------


@dataclass(frozen=True)
class WrapPlan:
    """Which submodules become units, decided before anything changes.

    Attributes:
        targets: The modules to wrap, children before parents, with their wrapper's arguments.
        owners: Each tied parameter that meets a unit which must not take it, with the module that owns
            it: the lowest target above all its uses, or the root. In the order of the module tree.
        left_to_ancestor: For each target, the parameters in its subtree that an ancestor owns.
    """

    targets: Targets
    owners: dict[nn.Parameter, nn.Module]
    left_to_ancestor: dict[nn.Module, frozenset[nn.Parameter]]
    _places: dict[nn.Module, list[tuple[nn.Module, str]]] = field(repr=False)

    def apply(self, make_unit: MakeUnit) -> None:
        """Puts `make_unit(module, kwargs, left_to_ancestor)` in every place that holds a target."""
        for module, kwargs in self.targets.items():
            unit = make_unit(module, kwargs, self.left_to_ancestor[module])
            for parent, name in self._places[module]:
                setattr(parent, name, unit)


def plan_wrapping(
    root: nn.Module,
    policy: AutoWrapPolicy,
    wrapper_cls: Callable[..., nn.Module],
    *,
    ignored_modules: Iterable[nn.Module] = (),
    ignored_params: Iterable[nn.Parameter] = (),
    wrapper_kwargs: Mapping[str, Any] | None = None,
    apart: tuple[tuple[type[nn.Module], ...], Kwargs] = ((), {}),
) -> WrapPlan:
    """Decides which submodules of `root` become units; never `root` itself, which the caller wraps.

    Args:
        root: The module whose submodules are looked at.
        policy: A function `(module, recurse, nonwrapped_numel) -> bool`, or a policy object of this
            module or of torch.
        wrapper_cls: The class (or function) that will make the units.
        ignored_modules: Modules to leave alone together with everything below them.
        ignored_params: Parameters that do not count.
        wrapper_kwargs: Arguments of the units' wrappers, where the policy does not override them.
        apart: Classes whose instances become units whatever the policy says, and what then overrides
            their wrapper's arguments.

    Raises:
        ValueError: If a module is already wrapped, or the policy refuses the tree.
        TypeError: If `policy` is no policy, or `wrapper_cls` cannot take a unit's arguments.
    """
    tree = _Tree(root, ignored_modules, ignored_params)
    _refuse_nested_wrapping(tree, wrapper_cls)
    kwargs = dict(wrapper_kwargs or {})
    if isinstance(policy, torch_wrap._Policy):
        targets = _ask_policy_object(tree, policy, kwargs)
    elif callable(policy):
        targets = _ask_policy_function(tree, policy, kwargs)
    else:
        raise TypeError(
            f"auto_wrap_policy must be a function or a policy object, not {policy!r}; "
            "for a set of module classes use ModuleWrapPolicy"
        )
    targets = _with_those_apart(tree, targets, kwargs, *apart)
    _check_arguments(tree, targets, wrapper_cls)
    owners, left = _assign_tied_params(tree, targets)
    return WrapPlan(targets, owners, left, tree.places)


class _Tree:
    """A module tree as planning sees it; modules and parameters may be reachable along several paths.

    A module *encloses* a parameter if every path from the root to a use of the parameter passes
    through it. Only an enclosing module can own the parameter as a unit.

    Attributes:
        names: The FQN of each module, the first of several.
        order: The modules, children before parents.
        places: For each module, the (parent, name) pairs under which it is registered.
        ignored: The ignored modules, with everything below them.
        chains: For each parameter that counts, the modules that enclose it, from the root downwards.
    """

    def __init__(
        self, root: nn.Module, ignored_modules: Iterable[nn.Module], ignored_params: Iterable[nn.Parameter]
    ) -> None:
        self.root = root
        self.names: dict[nn.Module, str] = {root: ""}
        self.order: list[nn.Module] = []
        self.places: dict[nn.Module, list[tuple[nn.Module, str]]] = {root: []}
        self._visit(root)
        self.ignored = {inner for module in ignored_modules for inner in module.modules()}
        self.chains = self._enclosing_modules(set(ignored_params))
        self._enclosed: dict[nn.Module, list[nn.Parameter]] = {module: [] for module in self.order}
        for param, chain in self.chains.items():
            for module in chain:
                self._enclosed[module].append(param)

    def _visit(self, module: nn.Module) -> None:
        # Not `named_children`: it hides that one child is registered under two names.
        for name, child in module._modules.items():
            if child is None:
                continue
            self.places.setdefault(child, []).append((module, name))
            if child not in self.names:
                self.names[child] = f"{self.names[module]}.{name}".lstrip(".")
                self._visit(child)
        self.order.append(module)

    def _enclosing_modules(self, ignored_params: set[nn.Parameter]) -> dict[nn.Parameter, Chain]:
        above: dict[nn.Module, Chain] = {self.root: (self.root,)}
        uses: dict[nn.Parameter, list[Chain]] = {}
        skipped = ignored_params.union(*(module.parameters() for module in self.ignored))
        for module in reversed(self.order):  # parents before children
            if module is not self.root:
                parents = [above[parent] for parent, _ in self.places[module] if parent in above]
                above[module] = (*_common(parents), module)
            for param in module.parameters(recurse=False):
                if param not in skipped:
                    uses.setdefault(param, []).append(above[module])
        return {param: _common(uses[param]) for param in self.root.parameters() if param in uses}

    def free_numel(self, module: nn.Module, targets: Targets) -> int:
        """Counts the elements that `module` would own as a unit, given the targets below it."""
        free = (p for p in self._enclosed[module] if targets.keys().isdisjoint(self.chains[p]))
        return sum(param.numel() for param in free)

    def owner(self, param: nn.Parameter, targets: Targets) -> nn.Module:
        """Returns the lowest target that encloses `param`, or the root."""
        return next((module for module in reversed(self.chains[param]) if module in targets), self.root)

    def describe(self, module: nn.Module) -> str:
        return _describe(self.names[module], module)


def _common(chains: list[Chain]) -> Chain:
    first, *rest = chains
    return tuple(module for module in first if all(module in chain for chain in rest))


def _describe(name: str, module: nn.Module) -> str:
    return f"{name!r} ({type(module).__name__})" if name else f"the root module ({type(module).__name__})"


def _refuse_nested_wrapping(tree: _Tree, wrapper_cls: Callable[..., nn.Module]) -> None:
    if not isinstance(wrapper_cls, type):
        return
    for module in tree.names:
        if isinstance(module, wrapper_cls) and module not in tree.ignored:
            raise ValueError(
                f"an auto_wrap_policy needs a module that holds no {wrapper_cls.__name__} yet, but "
                f"{tree.describe(module)} is one; wrap it by the policy too, or wrap everything by hand"
            )


def _ask_policy_function(tree: _Tree, policy: Callable[..., bool], kwargs: Kwargs) -> Targets:
    targets: Targets = {}
    seen = {tree.root}

    def visit(module: nn.Module) -> None:
        if not policy(module=module, recurse=True, nonwrapped_numel=tree.free_numel(module, targets)):
            return
        for child in module.children():
            if child not in seen and child not in tree.ignored:
                seen.add(child)
                visit(child)
        if module is tree.root or _is_container(module):
            return
        if policy(module=module, recurse=False, nonwrapped_numel=tree.free_numel(module, targets)):
            targets[module] = dict(kwargs)

    visit(tree.root)
    return targets


def _ask_policy_object(tree: _Tree, policy: torch_wrap._Policy, kwargs: Kwargs) -> Targets:
    chosen = policy._run_policy(tree.root, tree.ignored, kwargs)
    targets: Targets = {}
    for module in tree.order:
        if module not in chosen or module in tree.ignored or module is tree.root:
            continue
        if _is_container(module):
            warnings.warn(
                f"{tree.describe(module)} has no forward and is not wrapped; "
                "what no unit in it owns belongs to the unit above",
                stacklevel=2,
            )
        else:
            targets[module] = dict(chosen[module])
    return targets


def _with_those_apart(
    tree: _Tree, targets: Targets, kwargs: Kwargs, classes: tuple[type[nn.Module], ...], overrides: Kwargs
) -> Targets:
    result: Targets = {}
    for module in tree.order:
        if isinstance(module, classes) and module not in tree.ignored and module is not tree.root:
            result[module] = {**targets.get(module, kwargs), **overrides}
        elif module in targets:
            result[module] = targets[module]
    return result


def _is_container(module: nn.Module) -> bool:
    """Whether the module is a container without a forward: as a unit it would never be unsharded."""
    forward = getattr(module.forward, "__func__", module.forward)
    return isinstance(module, _CONTAINERS) and forward is nn.Module.forward


def _check_arguments(tree: _Tree, targets: Targets, wrapper_cls: Callable[..., nn.Module]) -> None:
    """Finds arguments that the wrapper does not know before the first one is constructed."""
    signature = inspect.signature(wrapper_cls)
    for module, kwargs in targets.items():
        try:
            signature.bind(module, **kwargs)
        except TypeError as error:
            raise TypeError(f"cannot wrap {tree.describe(module)}: {error}") from None


def _assign_tied_params(
    tree: _Tree, targets: Targets
) -> tuple[dict[nn.Parameter, nn.Module], dict[nn.Module, frozenset[nn.Parameter]]]:
    owners = {param: tree.owner(param, targets) for param in tree.chains}
    left: dict[nn.Module, frozenset[nn.Parameter]] = {}
    for unit in targets:
        inside = set(unit.modules())
        counted = (param for param in unit.parameters() if param in owners)
        left[unit] = frozenset(param for param in counted if owners[param] not in inside)
    tied = frozenset().union(*left.values())
    return {param: owner for param, owner in owners.items() if param in tied}, left
