"""Targets of the values in a model's state dict, to check it before loading, and to load it at once.

Every rank takes its part of full tensors, one by one and without communication. With a state dict that reads
from a file when asked (`torch.load(..., mmap=True)`, or a mapping that reads on access), no rank ever holds
more than its shard and one value. Modules that load in ways of their own are left to torch's walk.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.overrides import is_tensor_like

from fsdp_wrap._by_hand import note_change
from fsdp_wrap._core import (
    UNIT_ATTR,
    WRAPPED_ATTR,
    Place,
    StateDictType,
    clean_fqn,
    joined,
    named,
    original_class,
    saved_tensors,
    walk,
)
from fsdp_wrap._core.torch_private import NormBase, pytree
from fsdp_wrap._params import (
    FlatParameter,
    Interval,
    IntervalTensor,
    LocalPart,
    ShardedParams,
    SideData,
    boxes_of,
)
from fsdp_wrap._runtime import Unit, buffers_of, units_in
from fsdp_wrap._state.full_params import original_buffers, sharded_buffers
from fsdp_wrap._state.full_values import shape_of
from fsdp_wrap._state.misfits import quoted, shown, tell_prefix
from fsdp_wrap._state.originals import Original, owned_places, used_by
from fsdp_wrap._state.side_data import misfits

_PLAIN_LOADS = (
    nn.Module._load_from_state_dict,
    NormBase._load_from_state_dict,  # adds a count that old versions lack
)
_EXTRA = "_extra_state"
_AT_ONCE = 2**26
"""Bytes that are read at a time."""


class ReadsOnAccess(ABC):
    """A tensor in a file, say, of which parts can be read; torch functions read all of it."""

    shape: torch.Size
    dtype: torch.dtype

    @abstractmethod
    def read(self, start: int, stop: int) -> torch.Tensor:
        """Returns elements of the flattened tensor, 1-D."""

    def whole(self) -> torch.Tensor:
        """Returns the whole tensor."""
        return self.read(0, self.shape.numel()).view(self.shape)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*pytree.tree_map_only(ReadsOnAccess, ReadsOnAccess.whole, args), **(kwargs or {}))


def _matches(interval: Interval, piece: IntervalTensor) -> bool:
    return (piece.start, piece.stop, piece.part) == (interval.start, interval.stop, interval.part)


def _takes(interval: Interval, value: Any, pieces: bool) -> bool:
    """Whether a value can be copied to an interval at once."""
    if isinstance(value, IntervalTensor):
        fits = pieces and _matches(interval, value)
    elif isinstance(value, torch.Tensor):
        plain = type(value) in (torch.Tensor, nn.Parameter) and value.layout is torch.strided
        fits = plain and not value.is_meta
    else:  # no tensor, but one in any torch function, as those of Lightning
        fits = is_tensor_like(value)  # type: ignore[no-untyped-call]
    return fits and value.shape == interval.shape and not interval.data.is_meta


def _load(interval: Interval, value: Any, at_once: int) -> None:
    if isinstance(value, ReadsOnAccess) and not isinstance(interval.data, DTensor):
        return _read_into(interval, value, max(1, at_once // value.dtype.itemsize))
    if isinstance(value, IntervalTensor):
        part = value.piece
    else:
        part = interval.own(value.whole() if isinstance(value, ReadsOnAccess) else torch.detach(value))
    values = part.view(interval.data.shape)
    if isinstance(interval.data, DTensor):  # outside of all units; each rank has the full tensor, and cuts it
        mesh, placements = interval.data.device_mesh, interval.data.placements
        values = distribute_tensor(values, mesh, placements, src_data_rank=None)
    interval.data.copy_(values)


def _read_into(interval: Interval, value: ReadsOnAccess, at_once: int) -> None:
    """Reads what an interval holds, so many elements at a time."""
    part, data = interval.part, interval.data
    if not data.is_contiguous() or (part is not None and not part.is_box):
        data.copy_(interval.own(value.whole()).view(data.shape))
        return
    elements = data.view(-1)
    for first in range(0, len(elements), at_once):
        into = elements[first : first + at_once]
        start, stop = interval.start + first, interval.start + first + len(into)
        into.copy_(value.read(start, stop) if part is None else _read_part(value, part, start, stop))


def _read_part(value: ReadsOnAccess, part: LocalPart, start: int, stop: int) -> torch.Tensor:
    """Returns elements of the flattened part of a tensor, of which no more than their rows are read."""
    elements = torch.empty(stop - start, dtype=value.dtype, device="cpu")
    row = value.shape[1:].numel()
    begins, sizes = part.box
    for box in boxes_of(sizes, start, stop):
        first, *others = map(sum, zip(begins, box.offsets))
        rows = value.read(first * row, (first + box.sizes[0]) * row).view(-1, *value.shape[1:])
        columns = [slice(begin, begin + size) for begin, size in zip(others, box.sizes[1:])]
        elements[box.first - start :][: box.numel].view(box.sizes).copy_(rows[(slice(None), *columns)])
    return elements


def _problems(key: str, target: Original, value: Any) -> Iterator[str]:
    """Yields errors of a value that does not fit."""
    interval, shape, side = target.interval, target.shape, target.side_data
    wanted = target.wanted if side is None else side.describe()
    if wanted is not None and shape_of(value) != shape:
        yield f"kind mismatch for {key}: the checkpoint has {_kind_of(value)}, the model {wanted}."
        return
    if not is_tensor_like(value):  # type: ignore[no-untyped-call]
        yield f"While copying the parameter named {key}, expected a tensor, found {type(value).__name__}."
    saved_shape = shape_of(value, shape)
    scalar_as_vector = (shape, saved_shape) == (torch.Size([]), torch.Size([1]))  # as torch 0.3 saved them
    if saved_shape != shape and not scalar_as_vector:
        yield f"size mismatch for {key}: the checkpoint has shape {saved_shape}, the model {shape}."
    elif isinstance(value, IntervalTensor) and not _matches(interval, value):
        yield (
            f"elements {value.start} to {value.stop} of {key} were saved by this rank, which now holds "
            f"{interval.start} to {interval.stop}; torch.distributed.checkpoint fits them to other wrappings."
        )


class Targets:
    """The targets of a module's state dict by clean names; its units must be idle.

    Modules that load in ways of their own (hooks, `_load_from_state_dict`), and all below them, have none.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module, self._units = module, list(units_in(module).values())
        all_buffers = buffers_of(used_by(self._units))
        ready = len(sharded_buffers(self._units)) == len(all_buffers)
        modules = [
            (clean_fqn(f"{name}.").lstrip("."), submodule) for name, submodule in walk(module, all_names=True)
        ]
        self._own_way = tuple({prefix for prefix, submodule in modules if not copies_values(submodule)})
        with original_buffers(self._units):
            targets = [*_all_targets(module, owned_places(self._units))]
        self._by_name = {key: target for key, target in targets if not key.startswith(self._own_way)}
        counts = (
            f"{prefix}num_batches_tracked" for prefix, submodule in modules if isinstance(submodule, NormBase)
        )
        self._may_lack = self._by_name.keys() & counts
        self._is_plain = ready and not self._own_way and None not in self._by_name.values()

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The targets of all tensors on this rank."""
        return {key: target.interval.data for key, target in self._by_name.items() if target is not None}

    def other_names(self, given: Iterable[str]) -> tuple[list[str], list[str]]:
        """Returns the names that are missing among the given ones, and those that are unexpected."""
        given, known = dict.fromkeys(given), self._by_name
        missing = [key for key in known if key not in given]
        return missing, [key for key in given if key not in known and not key.startswith(self._own_way)]

    def load(
        self,
        state_dict: Mapping[str, Any],
        *,
        strict: bool = True,
        pieces: bool = False,
        at_once: int = _AT_ONCE,
        progress: Callable[[int], object] = lambda _: None,
    ) -> bool:
        """Loads full tensors, on every rank the same, without communication.

        Args:
            state_dict: By clean names.
            strict: Whether names must match; otherwise those are loaded that do.
            pieces: Also loads pieces that this rank saved of a sharded state dict.
            at_once: Bytes to read at a time of what is read on access.
            progress: Called with the bytes of each target that is loaded.

        Returns:
            Whether it did. Otherwise nothing has changed: a name is missing or unexpected, a value is no
            plain tensor of the right shape, a module loads in a way of its own or has extra state, or the
            user holds full parameters.
        """
        if not self._is_plain or (strict and self._by_name.keys() != set(state_dict)):
            return False
        pairs = [(target, key) for key, target in self._by_name.items() if target and key in state_dict]
        if not all(
            _takes(target.interval, target.taken_apart(state_dict[key]), pieces) for target, key in pairs
        ):
            return False
        if any(target.owned for target, _ in pairs):
            note_change(self._units, "load", pairs)
        with original_buffers(self._units), torch.no_grad():
            for target, key in pairs:
                _load(target.interval, target.taken_apart(state_dict[key]), at_once)
                progress(target.interval.data.nbytes)
        return True

    def check(self, state_dict: Mapping[str, Any], strict: bool, kind: StateDictType, cure: str = "") -> bool:
        """Refuses a state dict that does not fit, before anything is loaded.

        Args:
            state_dict: The values.
            strict: Whether names must match.
            kind: The type of state dict that is loaded.
            cure: What to do if names are missing.

        Returns:
            Whether it is sure to fit.
        """
        given = {clean_fqn(key): value for key, value in state_dict.items()}
        known = ((key, target) for key, target in self._by_name.items() if target and key in given)
        problems = shown(
            problem
            for key, target in known
            for problem in _problems(key, target, target.taken_apart(given[key]))
        )
        for key, target in self._by_name.items():
            if target and target.side_data is not None and key in given:
                problems += misfits(key, target.side_data, given)
        pieces = [key for key, value in given.items() if isinstance(value, IntervalTensor)]
        if pieces and kind is StateDictType.FULL_STATE_DICT:
            problems.append(
                f"{quoted(pieces)} are pieces of a sharded state dict: load it under "
                "FSDP.state_dict_type(model, StateDictType.SHARDED_STATE_DICT)."
            )
        missing, unexpected = self.other_names(given)
        lacking = [key for key in missing if key not in self._may_lack]
        if strict and unexpected:
            problems += tell_prefix(lacking, unexpected)
            problems.append(f"Unexpected key(s) in state_dict: {quoted(unexpected)}.")
        if strict and lacking:
            problems += filter(None, [f"Missing key(s) in state_dict: {quoted(lacking)}.", cure])
        self.refuse(problems)
        return not self._own_way and self._may_lack.isdisjoint(missing)

    def refuse(self, problems: Iterable[str]) -> None:
        """Refuses what is to be loaded."""
        details = "\n\t".join(problems)
        if details:
            raise RuntimeError(
                f"Error(s) in loading state_dict for {type(self._module).__name__} (nothing was loaded):"
                f"\n\t{details}"
            )


def note_load(unit: Unit, module: nn.Module, names: Collection[str], prefix: str, call: object) -> None:
    """Notes that a part of a load changes a unit's parameters, which all ranks must load.

    Args:
        unit: The unit.
        module: Its module, which shows sharded parameters. Modules of nested units tell of theirs.
        names: The names in the state dict.
        prefix: The prefix there of names below the module.
        call: An object of the whole load.
    """
    for key, _, _ in _shown_in(unit, module, prefix):
        if key in names:
            return note_change([unit], "load", call)


def sides_in(unit: Unit, module: nn.Module, prefix: str) -> Iterator[tuple[str, SideData]]:
    """Yields the side data of a unit's parameters, by names in a state dict; arguments as for `note_load`."""
    for key, sharded, index in _shown_in(unit, module, prefix):
        side = sharded.side_data[index]
        if side is not None:
            yield key, side


def _shown_in(unit: Unit, module: nn.Module, prefix: str) -> Iterator[tuple[str, ShardedParams, int]]:
    """Yields the parameters of a unit that a module shows, by names in a state dict."""
    owned = {
        id(param): (sharded, index) for sharded in unit.params for index, param in enumerate(sharded.sources)
    }
    for path, current in walk(module, into=lambda below: UNIT_ATTR not in below.__dict__):
        for name, param in current._parameters.items():
            if id(param) in owned:
                yield prefix + joined(path, name), *owned[id(param)]


def _kind_of(value: Any) -> str:
    return f"a {type(value).__name__} of shape {tuple(getattr(value, 'shape', ()))}"


def copies_values(module: nn.Module) -> bool:
    """Whether a module, those below it aside, copies values as they are; not where users' hooks run."""
    wrapper = WRAPPED_ATTR in module._modules
    hooks = [*module._load_state_dict_pre_hooks, *module._load_state_dict_post_hooks]
    own_way = original_class(module)._load_from_state_dict not in _PLAIN_LOADS and not wrapper
    return not own_way and len(hooks) == int(wrapper)  # a wrapper has one of its own


def _all_targets(module: nn.Module, owned: Mapping[Place, Original]) -> Iterator[tuple[str, Original | None]]:
    """Yields where every value goes, in the order of `state_dict`; None for extra state and side data."""
    for fqn, place, tensor in named(module, _entries, all_names=True):
        if place in owned:
            yield fqn, owned[place]
            side = owned[place].side_data
            yield from ((f"{fqn}.{name}", None) for name in (() if side is None else side.saved()))
        elif place[1] == _EXTRA:
            yield fqn, None
        elif tensor is not None and not isinstance(tensor, FlatParameter):
            source = cast(nn.Parameter, tensor)
            yield fqn, Original(fqn, Interval(fqn, tensor.shape, 0, tensor.detach(), source, 0))


def _entries(module: nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
    yield from saved_tensors(module)
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        yield _EXTRA, None
