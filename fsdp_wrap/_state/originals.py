"""Original parameters by name, and their place in the sharded parameters of an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from fsdp_wrap._core import Place, clean_fqn, named, params
from fsdp_wrap._core.torch_private import pytree
from fsdp_wrap._params import (
    Buffers,
    FlatParameter,
    FlatPiece,
    Interval,
    IntervalTensor,
    ShardedParams,
    SideData,
    Spread,
    by_rows,
    to_local,
)
from fsdp_wrap._runtime import Unit, buffers_of, units_in


def used_by(units: Iterable[Unit]) -> list[Unit]:
    """Returns units, each after its lenders."""
    return list(dict.fromkeys(used for unit in units for used in (*unit.lenders, unit)))


@dataclass(frozen=True)
class Original:
    """One parameter of the unwrapped module.

    Attributes:
        fqn: Its first name in the unwrapped module, or in its unit where only units were asked.
        interval: This rank's part of it.
        buffers: Owners of its storage; None where no unit owns it.
        sharded: The sharded parameters of its segment.
        index: Its position among them.
        order: Position among the unwrapped module's parameters, where that was asked.
    """

    fqn: str
    interval: Interval
    buffers: Buffers | None = None
    sharded: ShardedParams | None = None
    index: int = 0
    order: int = 0

    @property
    def owned(self) -> bool:
        """Whether a unit owns it."""
        return self.sharded is not None

    @property
    def key(self) -> object:
        """Its identity, whatever its name."""
        return id(self.source) if self.sharded is None else (self.sharded, self.index)

    @property
    def places(self) -> Iterable[Place]:
        """The (module, name) pairs that show it, where a unit owns it."""
        return () if self.sharded is None else self.sharded.display.places[self.index]

    @property
    def shape(self) -> torch.Size:
        """Shape of the full parameter."""
        return self.interval.shape

    @property
    def source(self) -> nn.Parameter:
        """The parameter that the optimizer holds for it."""
        return self.interval.source

    @property
    def uncut(self) -> bool:
        """Whether the optimizer of every rank holds it alone, whole and in its shape."""
        return self.source.shape == self.shape and (self.sharded is None or not self.sharded.layout.sharded)

    @property
    def left_out(self) -> bool:
        """Whether this rank's optimizer has an empty slice of it, whose state it does not keep up."""
        return self.source.numel() == 0 and self.interval.held_shape.numel() > 0

    @property
    def on_all_ranks(self) -> bool:
        """Whether every rank's optimizer has state of it, if any has."""
        numel = self.interval.held_shape.numel()
        if self._spread is None or isinstance(self.source, FlatParameter) or not numel:
            return True
        return all(start < stop for start, stop in self._spread.bounds(numel))

    @property
    def _spread(self) -> Spread | None:
        if self.buffers is None or self.sharded is None:
            return None
        return Spread(self.buffers.held_by, self.interval.at, self.sharded.layout.shard_numel)

    def piece(self, held: torch.Tensor) -> IntervalTensor:
        """Wraps this rank's elements of a tensor of the parameter's shape."""
        start, part = self.interval.start, self.interval.part
        return IntervalTensor(self.shape, start, held.reshape(-1), spread=self._spread, part=part)

    @property
    def rows(self) -> tuple[int, int] | None:
        """Which rows (start, stop) this rank holds; None where ranks need not hold whole ones.

        So it is without `shard_alignment`, and for a `FlatParameter` of several parameters.
        """
        shape, interval = self.shape, self.interval
        row, alignment = shape[1:].numel(), None if self.sharded is None else self.sharded.layout.alignment
        if len(shape) < 2 or not row or alignment is None or alignment.grain(shape) % row:
            return None
        if interval.part is not None or self.source.numel() != interval.data.numel():
            return None
        return interval.start // row, interval.stop // row

    def bounds_in(self, shape: torch.Size) -> tuple[int, int] | None:
        """Returns this rank's interval of some flattened full state; None if it cannot be cut likewise."""
        if shape == self.shape:
            return self.interval.start, self.interval.stop
        rows = self.rows
        if rows is None or not shape or shape[0] != self.shape[0]:
            return None
        return rows[0] * shape[1:].numel(), rows[1] * shape[1:].numel()

    def piece_by_rows(self, held: torch.Tensor) -> IntervalTensor | None:
        """Returns state that has one entry for each row that this rank holds; None if it has not."""
        rows = self.rows
        if rows is None or held.shape[0] != rows[1] - rows[0]:
            return None
        others = held.shape[1:]
        shape = torch.Size([self.shape[0], *others])
        return IntervalTensor(shape, rows[0] * others.numel(), held.reshape(-1))

    def rows_of(self, full: torch.Tensor) -> DTensor:
        """Cuts this rank's rows out of something full, over the ranks that hold the parameter."""
        assert self._spread is not None
        held_by = self._spread.held_by
        return by_rows(full, held_by.mesh, replicated=held_by.replicated)

    def piece_of(self, full: torch.Tensor) -> IntervalTensor:
        """Cuts this rank's piece, in memory of its own, out of something of the parameter's shape."""
        return self.piece(self.interval.own(full).to(self.source.device, copy=True))

    def taken_apart(self, value: Any) -> Any:
        """Returns the tensor of a full value that ranks cut; returns values that do not fit unchanged."""
        return value if self.sharded is None else self.sharded.taken_apart(self.index, value)

    @property
    def wanted(self) -> str | None:
        """A description of a valid full value, where shape and dtype do not tell."""
        return None if self.sharded is None else self.sharded.wanted(self.index)

    @property
    def side_data(self) -> SideData | None:
        """What it keeps beside its tensor, if anything."""
        return None if self.sharded is None else self.sharded.side_data[self.index]

    def refuse_cut(self, key: str, value: Any) -> None:
        """Refuses optimizer state that cannot be cut like the parameter."""
        for leaf in pytree.tree_leaves(value):
            if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
                raise ValueError(
                    f"optimizer state '{key}' of parameter '{self.fqn}' has shape {tuple(leaf.shape)}, the "
                    f"parameter {tuple(self.shape)} and what the optimizer has of it here "
                    f"{tuple(self.source.shape)}: only state that is elementwise or without dimensions can "
                    "be sharded, and state with an entry for each row where all rows are whole "
                    "(shard_alignment='rows' with use_orig_params=True); use another optimizer, or NO_SHARD "
                    "with use_orig_params=True"
                )


class Originals:
    """The parameters of the unwrapped module, in its order, whichever way the module is wrapped.

    With `as_dtensors` each stands for itself: `DTensor`s need not lie in intervals.
    """

    def __init__(self, module: nn.Module, as_dtensors: bool = False) -> None:
        self._module = module
        shown = module.named_parameters() if as_dtensors else ()
        originals = (uncut(uncompiled_fqn(clean_fqn(name)), param) for name, param in shown)
        self.by_name = {original.fqn: original for original in (originals if as_dtensors else _walk(module))}
        self._by_source: dict[int, list[Original]] = {}
        for original in self.by_name.values():
            self._by_source.setdefault(id(original.source), []).append(original)

    def of(self, param: torch.Tensor) -> list[Original]:
        """Returns what a parameter of an optimizer stands for."""
        originals = self._by_source.get(id(param)) or self._of_piece(param)
        if not originals:
            raise foreign_to_model(param)
        return originals

    def as_held_by(self, optim: torch.optim.Optimizer) -> Originals:
        """Adds the pieces of `FlatParameter`s that an optimizer holds; returns itself."""
        for param in chain.from_iterable(group["params"] for group in optim.param_groups):
            self.by_name.update((original.fqn, original) for original in self._of_piece(param))
        return self

    def _of_piece(self, param: torch.Tensor) -> list[Original]:
        if not isinstance(param, FlatPiece):
            return []
        originals = self._by_source.get(id(param.flat), ())
        return [
            replace(original, interval=replace(original.interval, source=param, offset=0))
            for original in originals
            if original.interval.fqn == param.fqn
        ]

    @cached_property
    def holders(self) -> dict[str, torch.Tensor]:
        """Parameters of optimizers by clean names, both the wrapped module's and the unwrapped one's."""
        shown = {clean_fqn(name): param for name, param in self._module.named_parameters()}
        return {**shown, **{fqn: original.source for fqn, original in self.by_name.items()}}

    def largest_unit_nbytes(self) -> int:
        """Returns the bytes, in full, of the largest unit's parameters, or parameter outside of units."""
        sizes: dict[object, int] = {}
        for fqn, original in self.by_name.items():
            key = original.buffers or fqn
            sizes[key] = sizes.get(key, 0) + original.shape.numel() * original.source.element_size()
        return max(sizes.values(), default=0)

    def describe(self, param: torch.Tensor) -> str:
        """Names a parameter of an optimizer for messages."""
        fqns = [original.fqn for original in self._by_source.get(id(param), ())]
        others = f" (and {len(fqns) - 1} others of its FlatParameter)" if len(fqns) > 1 else ""
        return f"parameter '{fqns[0]}'{others}" if fqns else f"a parameter of shape {tuple(param.shape)}"


def uncompiled_fqn(name: str) -> str:
    """Returns a name as it is without `torch.compile`, as torch's functions for state dicts have it."""
    return name.replace("_orig_mod.", "")


def _walk(module: nn.Module) -> Iterator[Original]:
    owned = owned_places(units_in(module).values())
    sources = {id(original.source) for original in owned.values()}
    seen: set[object] = set()
    for fqn, place, param in named(module, params):
        original = owned.get(place)
        if original is None and param is not None and id(param) not in sources:
            original = uncut(fqn, param)  # else it is a `FlatParameter`
        if original is not None and original.key not in seen:
            where = original.interval, original.buffers, original.sharded, original.index
            yield Original(uncompiled_fqn(fqn), *where, order=len(seen))  # faster than `replace`
            seen.add(original.key)


def uncut(fqn: str, tensor: torch.Tensor) -> Original:
    """Returns a parameter or buffer that no unit owns."""
    whole = to_local(tensor) is tensor  # else only how large it is
    flat = (
        tensor.detach().reshape(-1)
        if whole
        else torch.empty(tensor.numel(), dtype=tensor.dtype, device="meta")
    )
    return Original(fqn, Interval(fqn, tensor.shape, 0, flat, cast(nn.Parameter, tensor), 0))


def originals_in(buffers: Buffers) -> list[Original]:
    """Returns what a unit's buffers own, in the order of their layouts."""
    return [
        Original(interval.fqn, interval, buffers, sharded, index)
        for sharded in buffers.params
        for index, interval in enumerate(sharded.intervals())
    ]


def owned_places(units: Iterable[Unit]) -> dict[Place, Original]:
    """Returns the parameters that units use, own and borrowed ones, by all places that show them."""
    return {
        place: original
        for buffers in buffers_of(used_by(units))
        for original in originals_in(buffers)
        for place in original.places
    }


def owned_names(
    module: nn.Module, units: Iterable[Unit], into: Callable[[nn.Module], bool] | None = None
) -> Iterator[tuple[str, Original]]:
    """Yields every clean name, below a module, of the parameters that units use; `into` as for `walk`."""
    owned = owned_places(units)
    for fqn, place, _ in named(module, params, all_names=True, into=into):
        if place in owned:
            yield fqn, owned[place]


def foreign_to_model(param: torch.Tensor) -> ValueError:
    """Returns the error of an optimizer that holds a parameter of something else."""
    return ValueError(
        f"the optimizer holds a parameter of shape {tuple(param.shape)} that is not one of the model's: make "
        "it of the model's parameters() after wrapping or sharding, and pass that model"
    )
