"""Walks over the modules of a tree, names in it, and parameter slots; the only writer of `_parameters`."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.utils.weak import WeakIdKeyDictionary

from fsdp_wrap._core.torch_private import composable_registry

T = TypeVar("T")

WRAPPED_ATTR = "_fsdp_wrapped_module"
"""Attribute under which a wrapper holds the module that it wraps (torch's name)."""

UNIT_ATTR = "_fsdp_unit"
"""Key in the `__dict__` of a module that a front-end has made a unit."""

_PREFIXES = (WRAPPED_ATTR + ".", "_checkpoint_wrapped_module.")


def clean_fqn(name: str) -> str:
    """Removes the prefixes that wrappers add to a parameter's or module's name."""
    name += "."  # it may end with one of them
    for prefix in _PREFIXES:
        name = name.replace(prefix, "")
    return name[:-1]


Place = tuple[nn.Module, str]  # and the name under which it shows a parameter


def joined(prefix: str, name: str) -> str:
    """Returns the name of something within the module of a prefix."""
    return f"{prefix}.{name}" if prefix else name


def walk(
    module: nn.Module, *, all_names: bool = False, into: Callable[[nn.Module], bool] | None = None
) -> Iterator[tuple[str, nn.Module]]:
    """Yields what `module.named_modules()` does, in its order, at a cost that does not grow with the depth.

    `all_names` yields a module once for every name that it has. `into` tells whether to yield a module below,
    and those below that; None for all. Raises a TypeError for anything but a module.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"a model must be a torch.nn.Module, not a {type(module).__name__}")
    stack, seen = [("", module)], set[nn.Module]()
    while stack:
        name, current = stack.pop()
        if not all_names:
            if current in seen:
                continue
            seen.add(current)
        yield name, current
        if not (children := current._modules):  # as most
            continue
        for own, child in reversed(children.items()):
            if child is not None and (into is None or into(child)):
                stack.append((joined(name, own), child))


def named(
    module: nn.Module,
    entries: Callable[[nn.Module], Iterable[tuple[str, T]]],
    *,
    all_names: bool = False,
    into: Callable[[nn.Module], bool] | None = None,
) -> Iterator[tuple[str, Place, T]]:
    """Yields (clean name, place, value) for the `entries` of a module and of those below it.

    `entries` returns (name, value) of one module, as `params` does; the other arguments are those of `walk`.
    """
    for prefix, current in walk(module, all_names=all_names, into=into):
        for name, value in entries(current):
            yield clean_fqn(joined(prefix, name)), (current, name), value


def params(module: nn.Module) -> Iterable[tuple[str, nn.Parameter | None]]:
    """Returns the parameters of one module, and the names that have none."""
    return module._parameters.items()


def persistent(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the buffers of one module that are part of its state dict."""
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer


def saved_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yields the `params` of one module, and then its `persistent` buffers."""
    yield from params(module)
    yield from persistent(module)


def children_first(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[tuple[str, nn.Module]]:
    """Reorders modules from `own_modules` to children before parents."""
    waiting: list[tuple[str, nn.Module]] = []
    for name, module in modules:
        while waiting and waiting[-1][0] and not name.startswith(f"{waiting[-1][0]}."):
            yield waiting.pop()
        waiting.append((name, module))
    yield from reversed(waiting)


_MANAGED = "_is_fsdp_managed_module"

added_names: weakref.WeakKeyDictionary[nn.Module, set[str]] = weakref.WeakKeyDictionary()
"""By module of a unit, the names of parameters and modules that programs have registered since."""


class ParamPlaces:
    """Every place in the module tree that shows one original parameter.

    The unit's module is held weakly: it holds the unit, and so these places.
    """

    __slots__ = ("_owner", "_modules", "_names")

    def __init__(self, owner: nn.Module) -> None:
        self._owner = weakref.ref(owner)
        self._modules: tuple[nn.Module | None, ...] = ()  # None for the unit's
        self._names: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Place]:
        owner: Any = self._owner()
        return zip([owner if module is None else module for module in self._modules], self._names)

    def __deepcopy__(self, memo: dict[int, Any]) -> ParamPlaces:
        copied = ParamPlaces(copy.deepcopy(cast(nn.Module, self._owner()), memo))
        for module, name in self:
            copied.add(copy.deepcopy(module, memo), name)
        return copied

    def add(self, module: nn.Module, name: str) -> None:
        """Adds one more place."""
        self._modules += (None if module is self._owner() else module,)
        self._names += (name,)


class ModuleWriter:
    """Writes tensors into `__dict__` and `_parameters` of modules.

    One tensor may go to several places. A tensor that is no parameter becomes a plain attribute; in
    `_parameters` its name keeps its place, with None. `uncovers` deletes plain attributes before parameters
    are shown, which they would hide.
    """

    def __init__(
        self, places: Iterable[Iterable[Place]], tensors: Iterable[torch.Tensor], uncovers: bool = False
    ) -> None:
        self._places, self._tensors, self._uncovers = places, tensors, uncovers

    def show(self) -> None:
        """Makes the writes."""
        for several, tensor in zip(self._places, self._tensors):
            param = tensor if isinstance(tensor, nn.Parameter) else None
            for module, name in several:
                # RNNs look up tensors that are no leaves themselves.
                if sets_itself(module) and (param is None or param.is_leaf):
                    setattr(module, name, param)
                if param is not None and self._uncovers:
                    module.__dict__.pop(name, None)
                module._parameters[name] = param
                if param is None:
                    module.__dict__[name] = tensor


def sets_itself(module: nn.Module) -> bool:
    """Whether a module does more than others when it gets a parameter: RNNs have a second list of them."""
    return type(module).__setattr__ is not nn.Module.__setattr__


def set_weakly(module: weakref.ref[nn.Module], name: str, param: nn.Parameter | None) -> None:
    """Sets an attribute of a module, which must be alive."""
    setattr(module(), name, param)


@dataclass(frozen=True)
class ParamSlot:
    """One original parameter of a unit, and all places that show it.

    `fqn` is its name within the unit, without wrapper prefixes; of several, the first met.
    """

    fqn: str
    param: nn.Parameter
    places: ParamPlaces


def show_extra(module: nn.Module, name: str, param: nn.Parameter | None) -> None:
    """Registers a parameter that the original module does not have, or removes it with None."""
    if param is None:
        module._parameters.pop(name, None)
    else:
        module._parameters[name] = param


def own_modules(module: nn.Module, ignored: Collection[nn.Module] = ()) -> Iterator[tuple[str, nn.Module]]:
    """Yields (relative name, module) of one unit: `module` and below, but not other units or ignored modules.

    Parents come before children, each module once. Nothing is yielded where `module` itself is ignored.
    """

    def is_own(child: nn.Module) -> bool:
        return UNIT_ATTR not in child.__dict__ and child not in ignored

    return iter(()) if module in ignored else walk(module, into=is_own)


def original_class(module: nn.Module) -> type[nn.Module]:
    """Returns a module's class without the one that a front-end has mixed in."""
    mixed = UNIT_ATTR in module.__dict__ and WRAPPED_ATTR not in module._modules
    return type(module).__bases__[1] if mixed else type(module)  # (mixin, original)


def replace_tensor(module: nn.Module, name: str, tensor: torch.Tensor) -> None:
    """Replaces the parameter or buffer of a name."""
    if isinstance(tensor, nn.Parameter):
        ModuleWriter([[(module, name)]], [tensor]).show()
    else:
        module._buffers[name] = tensor


@dataclass(frozen=True)
class Ignored:
    """Modules (with all below them) and parameters that a unit leaves alone.

    `left` are tied parameters that a unit above owns, because it alone encloses all their uses.
    """

    modules: frozenset[nn.Module] = frozenset()
    params: frozenset[nn.Parameter] = frozenset()
    left: frozenset[nn.Parameter] = frozenset()


@dataclass(frozen=True)
class UnitContents:
    """The modules and parameters of a unit.

    `slots` are the parameters that it owns, in the order of `named_parameters`. `borrowed` are (name, place,
    parameter) where it uses a parameter of another unit.
    """

    ignored: Ignored
    modules: list[tuple[str, nn.Module]]
    slots: list[ParamSlot]
    borrowed: list[tuple[str, Place, nn.Parameter]]

    @classmethod
    def of(
        cls, module: nn.Module, ignored: Ignored, lent: Collection[nn.Parameter] = frozenset()
    ) -> UnitContents:
        """Finds the contents of a unit.

        `lent` are parameters that units below have left; they are collected with all their places.
        """
        modules = [*own_modules(module, ignored.modules)]
        own = {submodule for _, submodule in modules}
        slots: dict[nn.Parameter, ParamSlot] = {}
        borrowed = []
        for fqn, place, param in named(module, params):
            wanted = param in lent or (place[0] in own and param not in ignored.params)
            if param is None or not wanted or param in ignored.left:
                continue
            if is_owned(param):
                borrowed.append((fqn, place, param))
            else:
                slots.setdefault(param, ParamSlot(fqn, param, ParamPlaces(module))).places.add(*place)
        return cls(ignored, modules, [*slots.values()], borrowed)

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Returns (name, tensor) of its own parameters and then its buffers, each once."""
        fqns: dict[torch.Tensor, str] = {slot.param: slot.fqn for slot in self.slots}
        for prefix, module in self.modules:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    fqns.setdefault(buffer, joined(prefix, name))
        return [(fqn, tensor) for tensor, fqn in fqns.items()]


def is_owned(param: nn.Parameter) -> bool:
    """Whether a unit has taken the parameter."""
    return bool(getattr(param, "_fsdp_flattened", False))


def mark_owned(param: nn.Parameter) -> None:
    """Notes that a unit has taken the parameter (clients read this attribute, which is torch's)."""
    param._fsdp_flattened = True  # type: ignore[attr-defined]


_ignored = WeakIdKeyDictionary()


def note_ignored(ignored: Ignored) -> None:
    """Notes what users keep out of units: its gradients may differ between ranks."""
    for param in (*ignored.params, *(param for module in ignored.modules for param in module.parameters())):
        _ignored[param] = True


def is_ignored(param: torch.Tensor) -> bool:
    """Whether the user has kept the parameter out of units."""
    return param in _ignored


def mark_managed(module: nn.Module) -> None:
    """Marks a module as part of a unit, in attributes that transformers and torch's compiler read.

    The compiler then takes parameters as inputs of its graphs, not as constants or static addresses: leaves,
    which are original parameters to it, have memory only while their unit is unsharded.
    """
    module.__dict__[_MANAGED] = True
    module.__dict__["_fsdp_use_orig_params"] = True
    _watch_registrations()


@functools.cache
def _watch_registrations() -> None:
    """Keeps `added_names` up to date from now on."""
    hook = _open_to_compilers(_note_added)
    register_module_parameter_registration_hook(hook)
    register_module_module_registration_hook(hook)


def _open_to_compilers(hook: Any) -> Any:
    """Returns a function that torch's compiler traces, though it skips what lies in files of this package.

    Torch calls the hooks for the modules of all models: one that is skipped would break all their graphs.
    """
    code = hook.__code__.replace(co_filename=f"<{hook.__module__}.{hook.__name__}>")
    return FunctionType(code, hook.__globals__, hook.__name__)


def _note_added(module: nn.Module, name: str, added: object) -> None:
    if added is not None and _MANAGED in module.__dict__:
        _keep_name(module, name)


def _keep_name(module: nn.Module, name: str) -> None:
    added_names.setdefault(module, set()).add(name)


def added_params(module: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields (name, parameter) registered in a module after a unit took it, without those of any unit."""
    for name in sorted(added_names.get(module, ())):
        candidates: list[tuple[str, nn.Parameter | None]] = [(name, module._parameters.get(name))]
        child = module._modules.get(name)
        if child is not None and UNIT_ATTR not in child.__dict__:
            into = named(child, params, into=lambda submodule: UNIT_ATTR not in submodule.__dict__)
            candidates = [(joined(name, fqn), param) for fqn, _, param in into]
        for fqn, param in candidates:
            if param is not None and not is_owned(param):
                yield fqn, param


def announce_sharded(module: nn.Module) -> None:
    """Marks a module as sharded for torch's other composable APIs.

    Torch's `replicate()` averages the gradients of all parameters below its module that are not marked so:
    shards would be averaged with each other.
    """
    module.__dict__.setdefault(composable_registry, {})["fully_shard"] = None


def find_replicated(modules: Iterable[nn.Module]) -> frozenset[nn.Module]:
    """Returns the modules at and below those given that `replicate()` manages, with their submodules."""
    return frozenset(
        inner
        for module in modules
        for _, submodule in walk(module)
        if "replicate" in submodule.__dict__.get(composable_registry, ())
        for inner in submodule.modules()
    )
