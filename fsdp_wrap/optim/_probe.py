"""Whether an optimizer updates each element by itself, or computes with whole parameters.

Torch's own optimizers are known. One of another class is tried on small tensors: an optimizer of that class
steps whole tensors, and others step the pieces, each by itself, as ranks do. Where the pieces become
something else, or keep state that is not cut as they are, the optimizer computes with whole parameters.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from weakref import WeakSet

import torch
from torch import nn, optim

from fsdp_wrap._core import OptimizerPiece, sees_wholes
from fsdp_wrap._core.torch_private import pytree
from fsdp_wrap.optim._host_adamw import HostAdamW

_SHAPE = (6, 4, 2, 2, 2)
"""Shape of the tensors; one of fewer dimensions takes the beginning."""

_STEPS, _LR, _NEAR = 10, 0.05, 1e-3

Tensors = list[torch.Tensor]
Cut = Callable[[Sequence[torch.Tensor]], list[Tensors]]
"""Takes whole tensors; returns the part of each rank."""

_ELEMENTWISE: frozenset[type[optim.Optimizer]] = frozenset(
    (
        *(optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax, optim.AdamW, optim.ASGD, optim.NAdam),
        *(optim.RAdam, optim.RMSprop, optim.Rprop, optim.SGD, optim.SparseAdam, HostAdamW),
    )
)
_TENSOR_BY_TENSOR: frozenset[type[optim.Optimizer]] = frozenset((optim.Adafactor, optim.Muon))
_OVER_ALL_TENSORS: frozenset[type[optim.Optimizer]] = frozenset((optim.LBFGS,))

_know_shards: WeakSet[torch.optim.Optimizer] = WeakSet()


def note_knows_shards(optimizer: torch.optim.Optimizer) -> None:
    """Exempts an optimizer, which computes with whole parameters but is made for pieces of them."""
    _know_shards.add(optimizer)


def knows_its_shards(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer is exempt."""
    return optimizer in _know_shards


def by_rows(wholes: Sequence[torch.Tensor]) -> list[Tensors]:
    """Gives two ranks rows of every tensor."""
    return [[whole[: len(whole) // 3] for whole in wholes], [whole[len(whole) // 3 :] for whole in wholes]]


def in_pieces(wholes: Sequence[torch.Tensor]) -> list[Tensors]:
    """Gives two ranks parts of the tensors, flattened and concatenated."""
    flat = torch.cat([whole.reshape(-1) for whole in wholes])
    first = len(wholes[0]) // 3 * wholes[0][0].numel()
    return [[flat[:first]], [flat[first:]]]


def flattened(wholes: Sequence[torch.Tensor]) -> list[Tensors]:
    """Gives one rank all tensors, each flattened."""
    return [[whole.reshape(-1) for whole in wholes]]


def joined(wholes: Sequence[torch.Tensor]) -> list[Tensors]:
    """Gives one rank all tensors, flattened and concatenated."""
    return [[torch.cat([whole.reshape(-1) for whole in wholes])]]


@dataclass(frozen=True)
class TrialGroup:
    """A parameter group of an optimizer, as the trial sees it.

    `dims` are the numbers of dimensions of the whole parameters; `several` tells whether one tensor holds
    several of them.
    """

    options: Mapping[str, Any]
    dims: frozenset[int]
    several: bool = False
    device: torch.device = torch.device("cpu")

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the tensors of the trial."""
        shapes = [_SHAPE[: max(dim, 1)] for dim in sorted(self.dims, reverse=True)]
        return shapes * 2 if self.several else shapes


def computes_with_wholes(optimizer: torch.optim.Optimizer, group: TrialGroup, cut: Cut) -> bool:
    """Whether pieces of parameters, as `cut` makes them, would train otherwise than the whole ones.

    False also where a trial does not tell.
    """
    kind = type(optimizer)
    if optimizer in _know_shards or not group.dims or kind in _ELEMENTWISE:
        return False
    if kind in _TENSOR_BY_TENSOR:
        return cut is not flattened or group.dims != {1}
    if kind in _OVER_ALL_TENSORS:
        return cut not in (flattened, joined)
    return trial_differs(optimizer, group, cut)


@sees_wholes.fill
def _sees_wholes(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], pieces: Sequence[OptimizerPiece]
) -> bool:
    """Whether an optimizer computes with whole parameters, some of which are pieces in one of its groups."""
    options = {name: value for name, value in group.items() if name != "params"}
    dims = frozenset(itertools.chain.from_iterable(piece.dims for piece in pieces))
    several = any(len(piece.dims) > 1 for piece in pieces)
    seen = TrialGroup(options, dims, several, group["params"][0].device)
    if any(piece.cut for piece in pieces):
        return computes_with_wholes(optimizer, seen, in_pieces)
    return computes_with_wholes(optimizer, seen, joined if several else flattened)


def trial_differs(optimizer: torch.optim.Optimizer, group: TrialGroup, cut: Cut) -> bool:
    """Tries another optimizer of the class, with its defaults, on whole tensors and on pieces.

    Nothing of the user's changes. False also where it cannot be found out: no other can be made or stepped,
    or it draws random numbers.
    """
    for dtype in (torch.float64, torch.float32):  # some know only the latter
        try:
            with torch.no_grad(), _without_warnings(), _undisturbed():
                return _differs(optimizer, group, cut, dtype)
        except Exception:  # whatever a foreign step raises
            continue
    return False


def _differs(optimizer: torch.optim.Optimizer, group: TrialGroup, cut: Cut, dtype: torch.dtype) -> bool:
    data = _TrialData(group, dtype)
    whole = _TrialRun(optimizer, group, data, _uncut)
    pieces = _TrialRun(optimizer, group, data, cut)
    if whole.state != pieces.state or (cut is by_rows and not whole.elementwise):
        return True
    # What draws random numbers draws others this time.
    draws_numbers = not whole.is_near(_TrialRun(optimizer, group, data, _uncut))
    return not draws_numbers and not whole.is_near(pieces)


def _uncut(wholes: Sequence[torch.Tensor]) -> list[Tensors]:
    return [[*wholes]]


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Keeps Python's generator and those of all devices as they are, and compiles nothing."""
    accelerator = torch.accelerator.current_accelerator()
    kind = "cuda" if accelerator is None else accelerator.type
    module = torch.get_device_module(kind)
    in_use = accelerator is not None and getattr(module, "is_initialized", lambda: True)()
    devices, of_python = range(module.device_count()) if in_use else (), random.getstate()
    with torch.random.fork_rng(devices, device_type=kind), torch.compiler.set_stance("force_eager"):
        try:
            yield
        finally:
            random.setstate(of_python)


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Drops warnings. Unlike after `catch_warnings`, what was shown once before is not shown again."""
    filters: Any = warnings.filters
    ignoring = ("ignore", None, Warning, None, 0)
    filters.insert(0, ignoring)
    try:
        yield
    finally:
        filters.remove(ignoring)


class _TrialData:
    """Values and gradients of whole tensors, which differ much from one element to another."""

    def __init__(self, group: TrialGroup, dtype: torch.dtype) -> None:
        generator = torch.Generator().manual_seed(0)

        def drawn(mean: float = 0.0) -> Tensors:
            made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in group.shapes]
            spread = [
                torch.linspace(0.2, 3, tensor.numel(), dtype=tensor.dtype).view_as(tensor) for tensor in made
            ]
            return [((one + mean) * other).to(group.device, dtype) for one, other in zip(made, spread)]

        self.values, self.slopes = drawn(), [slope.abs() for slope in drawn()]
        self.offsets = [drawn(mean=2.0) for _ in range(_STEPS)]
        ends = itertools.accumulate((value.numel() for value in self.values), initial=0)
        self.places = [torch.arange(at, at + v.numel()).view_as(v) for at, v in zip(ends, self.values)]


class _TrialRun:
    """Steps of optimizers, one for each rank, on parts of tensors.

    `updates` are the changes of each whole tensor. `state` counts for each name of state the elements
    on all ranks; 0 for mere numbers. `elementwise` tells whether each tensor of state is a number or of its
    parameter's shape.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, group: TrialGroup, data: _TrialData, cut: Cut
    ) -> None:
        offsets = zip(*map(cut, data.offsets))
        ranks = [
            _train(optimizer, group, *inputs) for inputs in zip(cut(data.values), cut(data.slopes), offsets)
        ]
        order = torch.cat([place.reshape(-1) for of_rank in cut(data.places) for place in of_rank])
        updates = torch.cat([changes for changes, _ in ranks]).cpu().double()[order.argsort()]
        self.updates = torch.split(updates, [value.numel() for value in data.values])
        kept = [entry for _, of_rank in ranks for entry in of_rank]
        self.elementwise = all(size.numel() <= 1 or size == shape for shape, _, size in kept)
        sizes: dict[str, list[int]] = {}
        for _, name, size in kept:
            sizes.setdefault(name, []).append(size.numel())
        self.state = {name: sum(counts) if max(counts) > 1 else 0 for name, counts in sizes.items()}

    def is_near(self, other: _TrialRun) -> bool:
        """Whether the updates of each tensor in another run are the same."""
        pairs = zip(self.updates, other.updates)
        return all((one - same).abs().max() <= _NEAR * one.abs().max() for one, same in pairs)


def _train(
    optimizer: torch.optim.Optimizer,
    group: TrialGroup,
    values: Tensors,
    slopes: Tensors,
    offsets: Sequence[Tensors],
) -> tuple[torch.Tensor, list[tuple[torch.Size, str, torch.Size]]]:
    """Steps an optimizer made like `optimizer`, with the gradient `slope * param + offset`.

    Returns the changes of all elements, 1-D, and for each tensor of state (parameter shape, name, shape).
    """
    params = [nn.Parameter(value.clone()) for value in values]
    made = _made_like(optimizer, group, params)
    step = inspect.unwrap(type(made).step)  # without hooks, which look at real parameters
    closure = inspect.signature(step).parameters.get("closure")
    needs_closure = closure is not None and closure.default is closure.empty
    for step_offsets in offsets:
        loss = partial(_loss, params, slopes, step_offsets)
        loss()
        step(made, *([loss] if needs_closure else []))
    changes = [(param.detach() - value).reshape(-1) for param, value in zip(params, values)]
    kept = [
        (param.shape, name, leaf.shape)
        for param in params
        for name, value in made.state.get(param, {}).items()
        for leaf in pytree.tree_leaves(value)
        if isinstance(leaf, torch.Tensor)
    ]
    return torch.cat(changes), kept


@torch.no_grad()
def _loss(params: Sequence[nn.Parameter], slopes: Tensors, offsets: Tensors) -> torch.Tensor:
    """Returns a sum over all elements, and sets its gradients."""
    total = torch.zeros(())
    for param, slope, offset in zip(params, slopes, offsets):
        param.grad = slope * param + offset
        total = total + (slope * param * param / 2 + offset * param).sum().cpu()
    return total


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
