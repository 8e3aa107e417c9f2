"""A trial of optimizers: whether each element is updated by itself, found out by some steps on small tensors.

An optimizer like the given one steps whole tensors, and others like it step the pieces, each by itself, as
ranks do. Where the pieces become something else, or keep state that is not cut as they are, the optimizer
computes with whole parameters.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from fsdp_wrap._core.torch_private import pytree

_SHAPE = (6, 4, 2, 2, 2)
"""Of a tensor of so many dimensions, its beginning."""

_STEPS, _LR, _NEAR = 10, 0.05, 1e-3

Tensors = list[torch.Tensor]
Cut = Callable[[Sequence[torch.Tensor]], list[Tensors]]
"""Takes whole tensors; returns what each rank has of them."""

_know_shards: WeakSet[torch.optim.Optimizer] = WeakSet()


def note_knows_shards(optimizer: torch.optim.Optimizer) -> None:
    """Notes that an optimizer, though it computes with whole parameters, is made for pieces of them."""
    _know_shards.add(optimizer)


def knows_its_shards(optimizer: torch.optim.Optimizer) -> bool:
    """Whether that was noted."""
    return optimizer in _know_shards


def by_rows(wholes: Sequence[torch.Tensor]) -> list[Tensors]:
    """Gives two ranks rows of every tensor."""
    return [[each[: len(each) // 3] for each in wholes], [each[len(each) // 3 :] for each in wholes]]


def in_pieces(wholes: Sequence[torch.Tensor]) -> list[Tensors]:
    """Gives two ranks parts of all tensors, flattened one behind the other."""
    flat = torch.cat([each.reshape(-1) for each in wholes])
    first = len(wholes[0]) // 3 * wholes[0][0].numel()
    return [[flat[:first]], [flat[first:]]]


def flattened(wholes: Sequence[torch.Tensor]) -> list[Tensors]:
    """Gives one rank all tensors, each flattened."""
    return [[each.reshape(-1) for each in wholes]]


def joined(wholes: Sequence[torch.Tensor]) -> list[Tensors]:
    """Gives one rank all tensors as one, flattened one behind the other."""
    return [[torch.cat([each.reshape(-1) for each in wholes])]]


@dataclass(frozen=True)
class TrialGroup:
    """A parameter group of an optimizer, as the trial sees it.

    Attributes:
        options: What it has beside its parameters.
        dims: How many dimensions the whole parameters have of which it has pieces.
        several: Whether one tensor stands for several parameters.
        device: Where the parameters are.
    """

    options: Mapping[str, Any]
    dims: frozenset[int]
    several: bool = False
    device: torch.device = torch.device("cpu")

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Those of the tensors on which it is tried."""
        shapes = [_SHAPE[: max(dim, 1)] for dim in sorted(self.dims, reverse=True)]
        return shapes * 2 if self.several else shapes


def computes_with_wholes(optimizer: torch.optim.Optimizer, group: TrialGroup, cut: Cut) -> bool:
    """Whether pieces of parameters would train otherwise than the whole ones; nothing of the user's changes.

    Args:
        optimizer: Others are made of its class, with its defaults.
        group: One of its groups.
        cut: What ranks have of whole parameters.

    Returns:
        False also where that cannot be found out: no other can be made or stepped, or it draws numbers.
    """
    if optimizer in _know_shards or not group.dims:
        return False
    for dtype in (torch.float64, torch.float32):  # of the latter are those that know only that
        try:
            with torch.no_grad(), warnings.catch_warnings(), _undisturbed(group.device):
                warnings.simplefilter("ignore")
                return _differs(optimizer, group, cut, dtype)
        except Exception:  # whatever a foreign step raises
            continue
    return False


def _differs(optimizer: torch.optim.Optimizer, group: TrialGroup, cut: Cut, dtype: torch.dtype) -> bool:
    course = _TrialData(group, dtype)
    whole = _TrialRun(optimizer, group, course, _uncut)
    pieces = _TrialRun(optimizer, group, course, cut)
    if whole.state != pieces.state or (cut is by_rows and not whole.elementwise):
        return True
    torch.manual_seed(1)
    draws_numbers = not whole.is_near(_TrialRun(optimizer, group, course, _uncut))
    return not draws_numbers and not whole.is_near(pieces)


def _uncut(wholes: Sequence[torch.Tensor]) -> list[Tensors]:
    return [[*wholes]]


@contextmanager
def _undisturbed(device: torch.device) -> Iterator[None]:
    """Keeps the generators as they are, and compiles nothing."""
    devices = [] if device.type == "cpu" else [device]
    kind = device.type if devices else "cuda"
    with torch.random.fork_rng(devices, device_type=kind), torch.compiler.set_stance("force_eager"):
        yield


class _TrialData:
    """Values and gradients of whole tensors, which differ much from one element to another."""

    def __init__(self, group: TrialGroup, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)

        def drawn(mean: float = 0.0) -> Tensors:
            made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in group.shapes]
            spread = [torch.linspace(0.2, 3, each.numel(), dtype=each.dtype).view_as(each) for each in made]
            return [((one + mean) * other).to(group.device, dtype) for one, other in zip(made, spread)]

        self.values, self.slopes = drawn(), [each.abs() for each in drawn()]
        self.offsets = [drawn(mean=2.0) for _ in range(_STEPS)]
        ends = itertools.accumulate((each.numel() for each in self.values), initial=0)
        self.places = [torch.arange(at, at + v.numel()).view_as(v) for at, v in zip(ends, self.values)]


class _TrialRun:
    """What optimizers, one for each rank, make of tensors.

    Attributes:
        updates: By how much the elements of each whole tensor have changed.
        state: By the names of state, how many elements it has on all ranks; 0 for mere numbers.
        elementwise: Whether each tensor of it is a number or of its parameter's shape.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, group: TrialGroup, course: _TrialData, cut: Cut
    ) -> None:
        values, slopes = cut(course.values), cut(course.slopes)
        offsets = [*zip(*(cut(each) for each in course.offsets))]
        ranks = [_TrialRank(optimizer, group, *each) for each in zip(values, slopes, offsets)]
        order = torch.cat([each.reshape(-1) for of_rank in cut(course.places) for each in of_rank])
        updates = torch.cat([rank.updates() for rank in ranks]).cpu().double()[order.argsort()]
        self.updates = torch.split(updates, [each.numel() for each in course.values])
        kept = [each for rank in ranks for each in rank.kept()]
        self.elementwise = all(size.numel() <= 1 or size == shape for shape, _, size in kept)
        sizes: dict[str, list[int]] = {}
        for _, name, size in kept:
            sizes.setdefault(name, []).append(size.numel())
        self.state = {name: sum(each) if max(each) > 1 else 0 for name, each in sizes.items()}

    def is_near(self, other: _TrialRun) -> bool:
        """Whether the updates of each tensor in another run are the same."""
        pairs = zip(self.updates, other.updates)
        return all((one - same).abs().max() <= _NEAR * one.abs().max() for one, same in pairs)


class _TrialRank:
    """An optimizer like another, and its steps on some tensors.

    Args:
        optimizer: The other.
        group: A group of it.
        values: What the tensors are at first.
        slopes: How their gradients change with them.
        offsets: For each step what is added to that.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        group: TrialGroup,
        values: Tensors,
        slopes: Tensors,
        offsets: Sequence[Tensors],
    ) -> None:
        self._values, self._slopes = values, slopes
        self._params = [nn.Parameter(value.clone()) for value in values]
        self._optimizer = _made_like(optimizer, group, self._params)
        step = inspect.unwrap(type(self._optimizer).step)  # without hooks, which look at real parameters
        closure = inspect.signature(step).parameters.get("closure")
        needs_closure = closure is not None and closure.default is closure.empty
        for each in offsets:

            def loss(offset: Tensors = each) -> torch.Tensor:
                return self._loss(offset)

            loss()
            step(self._optimizer, *([loss] if needs_closure else []))

    @torch.no_grad()
    def _loss(self, offsets: Tensors) -> torch.Tensor:
        """Sets the gradients of a sum over all elements, and returns that."""
        total = torch.zeros(())
        for param, slope, offset in zip(self._params, self._slopes, offsets):
            param.grad = slope * param + offset
            total = total + (slope * param * param / 2 + offset * param).sum().cpu()
        return total

    def updates(self) -> torch.Tensor:
        """Returns by how much the elements have changed, 1-D."""
        pairs = zip(self._params, self._values)
        return torch.cat([(param.detach() - value).reshape(-1) for param, value in pairs])

    def kept(self) -> Iterator[tuple[torch.Size, str, torch.Size]]:
        """Yields the shape of a parameter, and name and shape of a tensor in its state."""
        for param in self._params:
            for name, value in self._optimizer.state.get(param, {}).items():
                leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
                yield from ((param.shape, name, leaf.shape) for leaf in leaves)


def _made_like(
    optimizer: torch.optim.Optimizer, group: TrialGroup, params: Sequence[nn.Parameter]
) -> torch.optim.Optimizer:
    kind = type(optimizer)
    known = {**vars(optimizer), **optimizer.defaults}
    names = [*inspect.signature(kind).parameters][1:]
    own = {name: _setting(name, known[name]) for name in names if isinstance(known.get(name), _SETTINGS)}
    options = {name: _setting(name, value) for name, value in group.options.items()}
    return kind([{**options, "params": [*params]}], **own)


_SETTINGS = (bool, int, float, str, tuple, list, torch.dtype, torch.Tensor)


def _setting(name: str, value: Any) -> Any:
    """Returns a copy of an option; a learning rate is large enough for something to be seen."""
    if name == "lr" and isinstance(value, torch.Tensor):
        return value.detach().clamp_min(_LR)
    if name == "lr" and isinstance(value, (int, float)):
        return max(value, _LR)
    return copy.deepcopy(value)
