"""`ShardGradients`: the reduced gradients of one segment, on its sharded parameters."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from itertools import repeat
from operator import itemgetter
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from fsdp_wrap._comm import Accelerator, ToHost, await_arrivals
from fsdp_wrap._core import HOOKS_OF, run_gradient_hooks, warn_caller
from fsdp_wrap._core.torch_private import DTensorSpec
from fsdp_wrap._params.layout import Layout
from fsdp_wrap._params.parallel import dtensor_of, to_local

Allocate = Callable[[int, torch.dtype], torch.Tensor]


class ShardGradients:
    """The reduced gradients of one segment, on its sharded parameters.

    Args:
        layout: Cuts shards of gradients.
        accelerator: The device of the computation; None for the CPU.
        allocate: Allocates memory beside the shard.

    Attributes:
        arriving: Gradients on their way to the host, each with the parameters that any rank has used.
    """

    arriving: Sequence[tuple[ToHost, Sequence[bool]]] = ()
    _sources: Sequence[nn.Parameter]
    _params: Sequence[nn.Parameter]
    _shard: torch.Tensor
    _specs: Iterable[DTensorSpec | None] = repeat(None)  # of gradients that are `DTensor`s
    _marks: GradientMarks | None = None  # once unreduced gradients wait

    def __init__(self, layout: Layout, accelerator: Accelerator | None, allocate: Allocate) -> None:
        self._layout, self._accelerator, self._allocate = layout, accelerator, allocate

    def follow(
        self, sources: Sequence[nn.Parameter], params: Sequence[nn.Parameter], shard: torch.Tensor
    ) -> None:
        """Moves to other sharded parameters, or another shard.

        Args:
            sources: For each leaf, the sharded parameter that stands for it.
            params: The sharded parameters, each once.
            shard: The memory in which they lie.
        """
        self._sources, self._params, self._shard = sources, params, shard

    def copied(self) -> ShardGradients:
        """Returns the same for a copy of the parameters, which has no gradients yet."""
        new = copy(self)
        new.arriving, new._marks = (), None
        return new

    # sums

    def add(self, reduced: torch.Tensor, used: Sequence[bool]) -> None:
        """Adds a reduced gradient shard to the sharded parameters' gradients.

        Args:
            reduced: The shard, 1-D, in the gradients' dtype.
            used: For each original parameter, whether any rank contributed to its gradient. Without a
                contribution it gets none, so that optimizers pass over it as they do on a plain module.
        """
        if self._marks:
            self._marks.take_away()
        if self._accelerator is not None:
            reduced = self._accelerator.beside(reduced, self._shard)
        layout = self._layout
        pieces, updated = layout.cut(reduced), layout.updated_by(used) if False in used else layout.updated
        for param, piece, spec, by_any in zip(self._params, pieces, self._specs, updated):
            if by_any:
                if param.grad is None:
                    param.grad = piece if spec is None else dtensor_of(piece, spec)
                else:
                    to_local(param.grad).add_(piece)
        if any(map(HOOKS_OF, self._params)):
            run_gradient_hooks(self._params, updated)

    @property
    def has_hooks(self) -> bool:
        """Whether sharded parameters have hooks of users on their gradients."""
        return any(map(HOOKS_OF, self._params))

    def send_to_host(self, reduced: torch.Tensor, used: Sequence[bool]) -> None:
        """Begins to copy a reduced shard to the host, for `take_arriving`."""
        accelerator = self._accelerator
        if accelerator is not None and accelerator.is_on_host(self._shard):
            self.arriving = (*self.arriving, (ToHost(accelerator, reduced, self._allocate), used))
        else:  # a user has moved the shard
            self.add(reduced, used)

    def release_arriving(self) -> None:
        """Frees the device's memory of gradients that are on their way to the host."""
        for to_host, _ in self.arriving:
            to_host.release()

    def take_arriving(self) -> Callable[[], None]:
        """Hands over the gradients on their way to the host; returns what adds them, once they have come."""
        arriving, self.arriving = self.arriving, ()
        return functools.partial(self._add_arrived, arriving)

    def _add_arrived(self, arrived: Sequence[tuple[ToHost, Sequence[bool]]]) -> None:
        for to_host, used in arrived:
            self.add(to_host.values, used)

    # marks, by which zeroing is seen while unreduced gradients wait

    def mark_unsynced(self) -> None:
        """Marks the sharded parameters' gradients, for `zeroed`."""
        if self.arriving and self._accelerator is not None:  # to add them later would take the marks away
            await_arrivals(self._accelerator)
            self.take_arriving()()
        self._mark(self._params)

    def follow_replaced(self, before: Sequence[nn.Parameter], now: Sequence[nn.Parameter]) -> None:
        """Moves marks to parameters that take the place of others; without a gradient they are zeroed."""
        if self._marks:
            for old, new in zip(before, now):
                if old is not new:
                    self._marks.move(old, new)

    def zeroed(self) -> list[bool]:
        """Returns for each leaf whether its gradient was zeroed since `mark_unsynced`."""
        return self._zeroed(self._sources, self._layout.fqns)

    def mark_partial(self) -> None:
        """Marks the gradient of the smallest parameter, for `zeroed_partial`.

        A missing gradient gets zeros: a mark for each would take as much memory as the sums that are kept.
        """
        self._mark(param for param, _ in self._smallest_trained())

    def zeroed_partial(self) -> bool:
        """Whether the gradient that `mark_partial` has marked was zeroed since."""
        smallest = self._smallest_trained()
        return any(self._zeroed([param for param, _ in smallest], [fqn for _, fqn in smallest]))

    def _smallest_trained(self) -> Sequence[tuple[nn.Parameter, str]]:
        """Returns the smallest trained parameter and its name, if there is one."""
        pairs = zip(self._sources, self._layout.extents)  # sizes of slices differ between ranks
        trained = [
            (extent.shape.numel(), param, extent.fqn) for param, extent in pairs if param.requires_grad
        ]
        return [min(trained, key=itemgetter(0))[1:]] if trained else []

    def _mark(self, params: Iterable[nn.Parameter]) -> None:
        if self._marks is None:
            self._marks = GradientMarks()
        self._marks.put(params)

    def _zeroed(self, params: Sequence[nn.Parameter], fqns: Sequence[str]) -> list[bool]:
        return self._marks.zeroed(params, fqns) if self._marks else [False] * len(params)

    # for users

    def take_dtype(self, dtype: torch.dtype) -> None:
        """Sets the dtype of the sharded parameters' gradients, other than their own."""
        for param in self._params:
            param.grad_dtype = None

    def pieces(self) -> list[torch.Tensor | None]:
        """Returns this rank's piece of each original parameter's gradient; None without a gradient."""
        return [None if param.grad is None else to_local(param.grad) for param in self._sources]

    def write_to(self, out: torch.Tensor) -> None:
        """Copies this rank's shard of the gradient to `out`, with zeros where there is none."""
        out.zero_()
        for param, piece in zip(self._params, self._layout.cut(out)):
            if param.grad is not None:
                piece.copy_(to_local(param.grad))

    def replace(self, own: torch.Tensor | None, present: Sequence[bool]) -> None:
        """Replaces the sharded parameters' gradients.

        Args:
            own: This rank's part of the unsharded gradient; None where no parameter has one.
            present: For each original parameter, whether it has one. Gradients that would not change are
                left untouched, so that `zeroed` does not take a write for the user's.
        """
        pieces = [None] * len(self._params) if own is None else self._layout.cut(own)
        for param, piece, wanted in zip(self._params, pieces, self._layout.updated_by(present)):
            if piece is None or not wanted:
                param.grad = None
                continue
            if param.grad is None:
                param.grad = torch.zeros_like(param, dtype=param.grad_dtype or piece.dtype)
            held = to_local(param.grad)
            if not torch.equal(held, piece.to(held)):
                held.copy_(piece)


class _Mark(NamedTuple):
    """A sharded parameter's gradient at the time when unreduced ones were left behind."""

    grad: torch.Tensor
    held: torch.Tensor  # its local part
    version: int  # grows with writes to either
    own: bool  # whether the gradient is the mark's, since the parameter had none

    def is_left(self, grad: torch.Tensor) -> bool:
        """Whether a parameter's present gradient is another one, or was written to since."""
        return grad is not self.grad or grad._version + self.held._version != self.version


class GradientMarks(dict[nn.Parameter, _Mark]):
    """Marks of sharded parameters while unreduced gradients wait.

    A parameter without a gradient gets one of negative zeros, so that `zero_grad` of either kind leaves a
    trace: it makes them positive. What scales gradients, such as clipping, does not.
    """

    def put(self, params: Iterable[nn.Parameter]) -> None:
        """Marks, perhaps again, the parameters that need a gradient."""
        for param in params:
            if not param.requires_grad:
                continue
            mark, grad = self.get(param), param.grad
            own = grad is None or (mark is not None and mark.own and grad is mark.grad)
            if grad is None:
                grad = param.grad = torch.zeros_like(param, dtype=param.grad_dtype)
                to_local(grad).neg_()
            held = mark.held if mark is not None and grad is mark.grad else to_local(grad)
            self[param] = _Mark(grad, held, grad._version + held._version, own)

    def move(self, before: nn.Parameter, now: nn.Parameter) -> None:
        """Moves a mark to a parameter that takes another one's place, and the gradient it brings."""
        mark, grad = self.pop(before, None), now.grad
        if mark is not None and grad is not None:
            held = to_local(grad)
            mark = _Mark(grad, held, grad._version + held._version, mark.own)
        if mark is not None:
            self[now] = mark

    def zeroed(self, params: Sequence[nn.Parameter], fqns: Sequence[str] = ()) -> list[bool]:
        """Returns for each parameter whether it was marked and its gradient zeroed since.

        Warns of the first of `fqns` whose mark was written to otherwise: that has no effect.
        """
        marked = [(param.grad, self.get(param)) for param in params]
        told = [mark is not None and (grad is None or mark.is_left(grad)) for grad, mark in marked]
        written = [grad for (grad, _), left in zip(marked, told) if left and grad is not None]
        if written:  # with zeros or with other values: the host waits once to see all
            remaining = torch.stack([_any_marked(to_local(grad)) for grad in written]).tolist()
            scaled, seen = any(remaining), iter(remaining)  # what is empty here was scaled if another one was
            zeroed = [
                left and (grad is None or not (next(seen) or (scaled and not to_local(grad).numel())))
                for (grad, _), left in zip(marked, told)
            ]
            for fqn, (_, mark), left, zero in zip(fqns, marked, told, zeroed):
                if left and not zero and mark is not None and mark.own:
                    _warn_of_edit(fqn)
                    break
            return zeroed
        return told

    def take_away(self) -> None:
        """Drops all marks, and removes the gradients that they have made."""
        for param, mark in self.items():
            if mark.own and param.grad is mark.grad:
                param.grad = None
        self.clear()


def _any_marked(grad: torch.Tensor) -> torch.Tensor:
    """Whether any element is not a positive zero."""
    parts = torch.view_as_real(grad) if grad.is_complex() else grad
    return (parts.signbit() | (parts != 0)).any()


def _warn_of_edit(fqn: str) -> None:
    rank = dist.get_rank() if dist.is_initialized() else 0
    warn_caller(
        f"the gradient of '{fqn}' was scaled or written to on rank {rank} while gradients that "
        "no_sync() or set_requires_gradient_sync(False) accumulates wait for their sum. Until then .grad is "
        "zeros, so this has no effect: clip, unscale or log after the backward that reduces"
    )
