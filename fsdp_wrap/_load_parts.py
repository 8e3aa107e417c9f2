"""Loading of full tensors of which every rank takes its part, one by one and without communication.

With a state dict that reads from a file when asked (`torch.load(..., mmap=True)`, or a mapping that reads on
access), no rank ever holds more than its shard and one value. What needs the modules' own ways of loading, or
torch's messages about what does not fit, is left to torch's walk over the modules.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import is_tensor_like

from fsdp_wrap._handle import ParamHandle
from fsdp_wrap._layout import Layout
from fsdp_wrap._modules import WRAPPED_ATTR, Place, clean_fqn, original_class
from fsdp_wrap._torch_private import NormBase, pytree
from fsdp_wrap._unit import units_in
from fsdp_wrap._walks import walk
from fsdp_wrap.flat_param import FlatParameter
from fsdp_wrap.full_params import original_buffers

__all__ = ["ReadsOnAccess", "copies_values", "load_parts", "loads_plainly"]

_PLAIN_LOADS = (
    nn.Module._load_from_state_dict,
    NormBase._load_from_state_dict,  # adds an entry that old versions lack; here none is missing
)


class ReadsOnAccess(ABC):
    """A tensor that is elsewhere, in a file say, of which parts can be read; whole in any torch function.

    Attributes:
        shape: Of the tensor.
        dtype: Of the tensor.
    """

    shape: torch.Size
    dtype: torch.dtype

    @abstractmethod
    def read(self, start: int, stop: int) -> torch.Tensor:
        """Returns elements of the flattened tensor, 1-D."""

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        def whole(value: ReadsOnAccess) -> torch.Tensor:
            return value.read(0, value.shape.numel()).view(value.shape)

        return func(*pytree.tree_map_only(ReadsOnAccess, whole, args), **(kwargs or {}))


@dataclass(frozen=True)
class _Target:
    """What this rank keeps of one value: elements of a full tensor from `start` on."""

    shape: torch.Size
    start: int
    data: torch.Tensor

    def takes(self, value: Any) -> bool:
        plain = type(value) in (torch.Tensor, nn.Parameter) and value.layout is torch.strided
        has_values = (plain and not value.is_meta) or _reads_when_asked(value)
        return has_values and value.shape == self.shape and not self.data.is_meta

    def load(self, value: Any) -> None:
        stop = self.start + self.data.numel()
        if isinstance(value, ReadsOnAccess):
            part = value.read(self.start, stop)
        else:
            part = torch.detach(value).reshape(-1)[self.start : stop]
        self.data.copy_(part.view_as(self.data))


def _reads_when_asked(value: Any) -> bool:
    """Whether a value is no tensor, but becomes one in any torch function, as those of Lightning do."""
    return not isinstance(value, torch.Tensor) and is_tensor_like(value)  # type: ignore[no-untyped-call]


def load_parts(module: nn.Module, state_dict: Mapping[str, Any], *, strict: bool = True) -> bool:
    """Loads full tensors, on every rank the same, into the units and the modules around them.

    Args:
        module: A module whose units are idle.
        state_dict: By clean names.
        strict: Whether names must match; otherwise those are loaded that do.

    Returns:
        Whether it did. Otherwise nothing has changed: a name is missing or unexpected, a value is no plain
        tensor of the right shape, a module has load hooks or loads in a way of its own, or the user holds
        full parameters.
    """
    with original_buffers(units_in(module).values()), torch.no_grad():
        targets = _targets(module)
        if targets is None:
            return False
        if not strict:
            targets = {key: target for key, target in targets.items() if key in state_dict}
        elif len(state_dict) != len(targets) or any(key not in targets for key in state_dict):
            return False
        if not all(target.takes(state_dict[key]) for key, target in targets.items()):
            return False
        for key, target in targets.items():
            target.load(state_dict[key])
    return True


def _targets(module: nn.Module) -> dict[str, _Target] | None:
    """Returns where every value goes, in the order of `state_dict`; None if torch's walk is to decide."""
    sharded: dict[Place, _Target] = {}
    for handle in _handles(module):
        if not handle.settle():
            return None
        for segment in handle.segments:
            sharded.update(_sharded_targets(segment.layout))
    targets: dict[str, _Target] = {}
    for name, child in walk(module, all_names=True):
        if not loads_plainly(child):
            return None
        for key, target in _own_targets(child, sharded):
            targets[clean_fqn(f"{name}.{key}" if name else key)] = target
    return targets


def _handles(module: nn.Module) -> Iterator[ParamHandle]:
    for unit in units_in(module).values():
        for each in (*unit.lenders, unit):
            if each.handle is not None:
                yield each.handle


def loads_plainly(module: nn.Module) -> bool:
    """Whether a module, those below it aside, only copies values into its parameters and buffers."""
    return copies_values(module) and type(module).get_extra_state is nn.Module.get_extra_state


def copies_values(module: nn.Module) -> bool:
    """Whether a module, those below it aside, copies values as they are; not where users' hooks run."""
    wrapper = WRAPPED_ATTR in module._modules
    hooks = [*module._load_state_dict_pre_hooks, *module._load_state_dict_post_hooks]
    own_way = original_class(module)._load_from_state_dict not in _PLAIN_LOADS and not wrapper
    return not own_way and len(hooks) == int(wrapper)  # a wrapper has one of its own


def _sharded_targets(layout: Layout) -> Iterator[tuple[Place, _Target]]:
    intervals = {interval.fqn: interval for interval in layout.intervals()}
    shapes = layout.shapes()
    for fqn, places in zip(layout.fqns, layout.places):
        interval = intervals.get(fqn)
        start, data = (
            (0, torch.empty(0, device="cpu")) if interval is None else (interval.start, interval.data)
        )
        for place in places:
            yield place, _Target(shapes[place], start, data)


def _own_targets(module: nn.Module, sharded: Mapping[Place, _Target]) -> Iterator[tuple[str, _Target]]:
    for name, param in module._parameters.items():
        if (module, name) in sharded:
            yield name, sharded[module, name]
        elif param is not None and not isinstance(param, FlatParameter):
            yield name, _Target(param.shape, 0, param.detach())
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, _Target(buffer.shape, 0, buffer.detach())
