"""`copy.deepcopy` of wrapped modules: a second model with shards of its own, without communication."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import Any, TypeVar

from torch import nn

from fsdp_wrap._building import REGISTRY, refuse_pieces
from fsdp_wrap._by_hand import require_idle
from fsdp_wrap._core import is_owned
from fsdp_wrap._params import ShardedParams
from fsdp_wrap._runtime import Unit, units_in
from fsdp_wrap._state.full_params import refuse_summoned

Wrapper = TypeVar("Wrapper", bound=nn.Module)

_COMPILED = "_compiled_call_impl"  # it calls the old module; copies of plain modules are not compiled either


def deepcopy_wrapper(wrapper: Wrapper, unit: Unit, memo: dict[int, Any]) -> Wrapper:
    """Copies a wrapper with all units in it; the copies use the same process groups.

    Gradients are not copied, like those of plain parameters.

    Args:
        wrapper: The wrapper.
        unit: Its unit.
        memo: The memo of `copy.deepcopy`.
    """
    if id(unit) in memo:  # its unit is made by the copying of a wrapper that encloses or uses this one
        return _copy_module(wrapper, memo)
    units = [old for old in _with_lenders(units_in(wrapper).values()) if id(old) not in memo]
    for old in units:
        require_idle([old], "copy.deepcopy()")
        refuse_summoned([old], "copying the wrapped module")
        old.buffers.shown.show_sharded()
    params: dict[Unit, list[ShardedParams]] = {}
    for old in units:
        memo[id(old)] = Unit.__new__(Unit)  # an empty one, to which the copied modules can refer
        params[old] = [sharded.copied(memo) for sharded in old.params]
    copied = _copy_module(wrapper, memo)
    for old in units:
        _make_unit(old, params[old], memo)
    for old in units:
        memo[id(old)].tie([memo[id(below)] for below in old.tied])
    for old in reversed(units):  # so that the outermost names them last
        for fqn, below in units_in(memo[id(old)].module).items():
            if below not in memo[id(old)].over_all_meshes:
                below.nest(fqn)
    return copied


def _with_lenders(units: Iterable[Unit]) -> list[Unit]:
    known = dict.fromkeys(units)
    for unit in list(known):
        known.update(dict.fromkeys(_with_lenders(unit.lenders)))
    return list(known)


def _copy_module(wrapper: Wrapper, memo: dict[int, Any]) -> Wrapper:
    new = object.__new__(wrapper.__class__)
    memo[id(wrapper)] = new
    for name, value in wrapper.__dict__.items():
        if name != _COMPILED:
            new.__dict__[name] = copy.deepcopy(value, memo)
    return new


def _make_unit(old: Unit, params: list[ShardedParams], memo: dict[int, Any]) -> None:
    new: Unit = memo[id(old)]
    module = copy.deepcopy(old.module, memo)
    for sharded in params:
        sharded.follow_modules(memo)
    Unit.__init__(
        new,
        module,
        old.buffers.with_params(params),
        old.options.copied(memo),
        left=frozenset(copy.deepcopy(param, memo) for param in old.left if not is_owned(param)),
        lenders=[memo[id(lender)] for lender in old.lenders],
        buffer_casts=copy.deepcopy(old.buffer_casts, memo),
        parts=[copy.deepcopy(part, memo) for part in old.parts],
        mesh_label=old.mesh_label,
    )
    if old.kept_module is not None:
        new.lend()
    taken = (submodule for submodule in old.module.modules() if submodule in REGISTRY.taken)
    REGISTRY.take([memo[id(submodule)] for submodule in taken if id(submodule) in memo])
    REGISTRY.note(new, [sharded.sources for sharded in params])
    refuse_pieces(new)
