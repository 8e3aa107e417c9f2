"""Auto-wrapping: plans the units of a module tree, then replaces the modules.

`plan_wrapping` makes every decision and raises every error while the tree is untouched. `WrapPlan.apply`
then replaces modules by units. The wrapper class is always passed in.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.distributed.fsdp import wrap as torch_wrap

from fsdp_wrap._building import is_container
from fsdp_wrap._core import Place, children_first, walk, warn_caller

AutoWrapPolicy: TypeAlias = "Callable[..., bool] | torch_wrap._Policy"
Kwargs: TypeAlias = dict[str, Any]
Targets: TypeAlias = dict[nn.Module, Kwargs]
Chain: TypeAlias = tuple[nn.Module, ...]
MakeUnit: TypeAlias = Callable[[nn.Module, Kwargs, Set[nn.Parameter]], nn.Module]

_NOTHING: frozenset[nn.Parameter] = frozenset()  # one for all units: each keeps its set
_COMPILED = "_orig_mod"  # name of the original module in the result of `torch.compile`


@dataclass(frozen=True)
class WrapPlan:
    """The plan of the submodules that become units, made before anything changes.

    Attributes:
        targets: The modules to wrap, children before parents, with their wrapper's arguments.
        owners: The owner of each tied parameter that is also used in a unit below its owner: the lowest
            target above all uses of the parameter, or the root. In the order of the module tree.
        left_to_ancestor: For each target, the parameters in its subtree that an ancestor owns.
    """

    targets: Targets
    owners: dict[nn.Parameter, nn.Module]
    left_to_ancestor: dict[nn.Module, frozenset[nn.Parameter]]
    _places: dict[nn.Module, list[Place]] = field(repr=False)

    def apply(self, make_unit: MakeUnit) -> None:
        """Replaces each target, in all its places, by `make_unit(module, kwargs, left_to_ancestor)`.

        Args:
            make_unit: Returns the wrapper of a module.
        """
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
    """Plans which submodules of `root` become units; never `root` itself, which the caller wraps.

    Args:
        root: The module to search.
        policy: A function `(module, recurse, nonwrapped_numel) -> bool`, or a policy object of this
            module or of torch.
        wrapper_cls: The class (or function) that will make the units.
        ignored_modules: Modules to leave alone, with everything below them.
        ignored_params: Parameters that do not count.
        wrapper_kwargs: Default arguments of the wrappers; the policy may override them.
        apart: Classes whose instances always become units, and the arguments that override those of their
            wrappers. A warning names the instances.

    Raises:
        ValueError: If a module is already wrapped, or the policy refuses the tree.
        TypeError: If `policy` is no policy, or `wrapper_cls` does not accept the arguments of a unit.
    """
    tree = _ModuleTree(root, ignored_modules, ignored_params)
    _refuse_nested_wrapping(tree, wrapper_cls)
    kwargs = dict(wrapper_kwargs or {})
    if isinstance(policy, torch_wrap._Policy):
        targets = _ask_policy_object(tree, policy, kwargs)
    else:
        _check_policy_function(policy)
        targets = _ask_policy_function(tree, policy, kwargs)
    targets = _where_they_are_called(tree, _with_those_apart(tree, targets, kwargs, *apart))
    _check_arguments(tree, targets, wrapper_cls)
    owners, left = _assign_tied_params(tree, targets)
    return WrapPlan(targets, owners, left, tree.places)


class _ModuleTree:
    """A module tree in which modules and parameters may be reachable along several paths.

    A module *encloses* a parameter if every path from the root to a use of the parameter passes
    through it. Only an enclosing module can own the parameter as a unit.
    """

    def __init__(
        self, root: nn.Module, ignored_modules: Iterable[nn.Module], ignored_params: Iterable[nn.Parameter]
    ) -> None:
        self.root = root
        self.names = {module: name for name, module in walk(root)}
        self.order = [module for _, module in children_first(walk(root))]
        # For each module, the (parent, name) pairs of its registrations.
        self.places: dict[nn.Module, list[Place]] = {module: [] for module in self.names}
        for module in self.names:
            # Not `named_children`: it hides that one child is registered under two names.
            for name, child in module._modules.items():
                if child is not None:
                    self.places[child].append((module, name))
        self.ignored = {inner for module in ignored_modules for inner in module.modules()}
        # For each parameter that counts, its enclosing modules, from the root downwards.
        self.chains = self._enclosing_modules(set(ignored_params))

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
        """Returns the number of elements that `module` would own as a unit, given the targets below it."""
        chains = ((param, self.chains.get(param, ())) for param in module.parameters())
        free = (p for p, chain in chains if module in chain and targets.keys().isdisjoint(chain))
        return sum(param.numel() for param in free)

    def owner(self, param: nn.Parameter, targets: Targets) -> nn.Module:
        """Returns the lowest target that encloses `param`, or the root."""
        return next((module for module in reversed(self.chains[param]) if module in targets), self.root)

    def describe(self, module: nn.Module) -> str:
        return describe(self.names[module], module)


def _common(chains: list[Chain]) -> Chain:
    first, *rest = chains
    return tuple(module for module in first if all(module in chain for chain in rest))


def describe(name: str, module: nn.Module) -> str:
    return f"{name!r} ({type(module).__name__})" if name else f"the root module ({type(module).__name__})"


def _check_policy_function(policy: Any) -> None:
    """Raises a TypeError that says what to write, unless a policy can be called for a module."""
    rule = "auto_wrap_policy must be a policy object or a function"
    if isinstance(policy, type):
        if issubclass(policy, torch_wrap._Policy):
            raise TypeError(f"{rule}, not the class {policy.__name__}: write {policy.__name__}({{Block}})")
        raise TypeError(
            f"{rule}, not the class {policy.__name__}: write ModuleWrapPolicy({{{policy.__name__}}})"
        )
    if isinstance(policy, str):
        raise TypeError(
            f"{rule}, not the name {policy!r}: write ModuleWrapPolicy({{{policy}}}), or "
            f"NameWrapPolicy({policy!r})"
        )
    if not callable(policy):
        raise TypeError(
            f"{rule}, not {policy!r}: for a set of module classes write ModuleWrapPolicy({{Block}})"
        )
    options = getattr(policy, "keywords", {}) if isinstance(policy, functools.partial) else {}
    for name, value in options.items():
        if isinstance(value, type) and name in ("transformer_layer_cls", "module_classes"):
            raise TypeError(
                f"{name} of the auto_wrap_policy must be a set of module classes, not the class "
                f"{value.__name__}: write {name}={{{value.__name__}}}"
            )
    try:
        inspect.signature(policy).bind(module=None, recurse=False, nonwrapped_numel=0)
    except ValueError:  # a callable that does not tell its signature
        return
    except TypeError as error:
        name = getattr(policy, "__name__", repr(policy))
        raise TypeError(
            f"{rule} of (module, recurse, nonwrapped_numel), and {name} is not ({error}): bind its options, "
            f"as in functools.partial({name}, transformer_layer_cls={{Block}})"
        ) from None


def _refuse_nested_wrapping(tree: _ModuleTree, wrapper_cls: Callable[..., nn.Module]) -> None:
    if not isinstance(wrapper_cls, type):
        return
    for module in tree.names:
        if isinstance(module, wrapper_cls) and module not in tree.ignored:
            raise ValueError(
                f"an auto_wrap_policy needs a module that holds no {wrapper_cls.__name__} yet, but "
                f"{tree.describe(module)} is one; wrap it by the policy too, or wrap everything by hand"
            )


def _ask_policy_function(tree: _ModuleTree, policy: Callable[..., bool], kwargs: Kwargs) -> Targets:
    targets: Targets = {}

    def wants(module: nn.Module, recurse: bool) -> bool:
        return policy(module=module, recurse=recurse, nonwrapped_numel=tree.free_numel(module, targets))

    for module in _descend(tree, tree.root, {tree.root}, wants):
        if module is not tree.root and not is_container(module) and wants(module, False):
            targets[module] = dict(kwargs)
    return targets


def _descend(
    tree: _ModuleTree, module: nn.Module, seen: set[nn.Module], wants: Callable[[nn.Module, bool], bool]
) -> Iterator[nn.Module]:
    """Yields the modules that a policy recurses into, children before parents."""
    if wants(module, True):
        for child in module.children():
            if child not in seen and child not in tree.ignored:
                seen.add(child)
                yield from _descend(tree, child, seen, wants)
        yield module


def _ask_policy_object(tree: _ModuleTree, policy: torch_wrap._Policy, kwargs: Kwargs) -> Targets:
    chosen = policy._run_policy(tree.root, tree.ignored, kwargs)
    targets: Targets = {}
    for module in tree.order:
        if module not in chosen or module in tree.ignored or module is tree.root:
            continue
        if is_container(module):
            warn_caller(
                f"{tree.describe(module)} has no forward and is not wrapped; "
                "what no unit in it owns belongs to the unit above"
            )
        else:
            targets[module] = dict(chosen[module])
    return targets


def _with_those_apart(
    tree: _ModuleTree,
    targets: Targets,
    kwargs: Kwargs,
    classes: tuple[type[nn.Module], ...],
    overrides: Kwargs,
) -> Targets:
    result: Targets = {}
    apart: list[str] = []
    for module in tree.order:
        if isinstance(module, classes) and module not in tree.ignored and module is not tree.root:
            result[module] = {**targets.get(module, kwargs), **overrides}
            apart.append(tree.describe(module))
        elif module in targets:
            result[module] = targets[module]
    if apart:
        warn_caller(
            f"mixed_precision leaves out modules of {', '.join(cls.__name__ for cls in classes)} "
            "(_module_classes_to_ignore). These modules will be wrapped as separate FSDP units, in full "
            f"precision: {', '.join(apart)}"
        )
    return result


def _where_they_are_called(tree: _ModuleTree, targets: Targets) -> Targets:
    """Drops targets inside TorchScript modules, and moves targets from original to compiled modules.

    Neither kind of module would call a wrapper inside of it.
    """
    result: Targets = {}
    for module, kwargs in targets.items():
        parents = {name: parent for parent, name in tree.places[module]}
        compiled = parents.get(_COMPILED, module)
        if not any(isinstance(parent, torch.jit.ScriptModule) for parent, _ in tree.places[module]):
            if compiled is not tree.root:
                result[compiled] = kwargs
    return result


def _check_arguments(tree: _ModuleTree, targets: Targets, wrapper_cls: Callable[..., nn.Module]) -> None:
    """Refuses arguments that the wrapper does not accept, before the first wrapper is constructed."""
    signature = inspect.signature(wrapper_cls)
    accepted: set[tuple[str, ...]] = set()
    for module, kwargs in targets.items():
        if tuple(kwargs) in accepted:
            continue
        try:
            signature.bind(module, **kwargs)
        except TypeError as error:
            raise TypeError(f"cannot wrap {tree.describe(module)}: {error}") from None
        accepted.add(tuple(kwargs))


def _assign_tied_params(
    tree: _ModuleTree, targets: Targets
) -> tuple[dict[nn.Parameter, nn.Module], dict[nn.Module, frozenset[nn.Parameter]]]:
    owners = {param: tree.owner(param, targets) for param in tree.chains}
    left: dict[nn.Module, frozenset[nn.Parameter]] = {}
    for unit in targets:
        inside = set(unit.modules())
        counted = (param for param in unit.parameters() if param in owners)
        left[unit] = frozenset(param for param in counted if owners[param] not in inside) or _NOTHING
    tied = frozenset().union(*left.values())
    return {param: owner for param, owner in owners.items() if param in tied}, left
