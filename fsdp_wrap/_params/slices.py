"""`SliceLayout`: the flat layout that shows optimizers the user's own Parameter objects."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from operator import attrgetter

import torch
from torch import nn

from fsdp_wrap._params.flat import FlatLayout, HiddenFlatParameter

_DATA_PTR, _NUMEL, _DTYPE = torch.Tensor.data_ptr, torch.Tensor.numel, attrgetter("dtype")


class SliceLayout(FlatLayout):
    """The optimizer sees the user's own Parameter objects, each holding its slice of the shard.

    Their `.data` is a slice while sharded, and the full parameter while shown in full. So an optimizer that
    is made meanwhile holds the right objects.
    """

    _kind = HiddenFlatParameter
    cut = _cut_gradients = FlatLayout.pieces

    def _stand_for(self, originals: Sequence[nn.Parameter]) -> None:
        super()._stand_for(originals)
        self.sources = self.sharded_params = originals
        self._filled = [stop > start for start, stop in self._bounds]
        self._updated = [
            filled or not extent.shape.numel() for filled, extent in zip(self._filled, self.extents)
        ]
        self._grads: list[torch.Tensor | None] | None = None  # while `sources` are shown in full

    def _lie_in(self, shard: torch.Tensor) -> None:
        super()._lie_in(shard)
        self._memory = _memory(self._pieces)

    # module attributes

    def show_full(self, params: Sequence[nn.Parameter], copies: bool) -> None:
        if copies:
            self.show(params)
            return
        self._grads = [param.grad for param in self.sources]  # in the shapes of the slices
        shown: list[nn.Parameter] = []
        for source, param, part in zip(self.sources, params, self._parts):
            source.grad = None
            if part is None:
                source.data = param.data
            shown.append(source if part is None else param)  # a plain parameter cannot hold a `DTensor`
        self.show(shown)

    def hide_full(self) -> None:
        for param, piece in zip(self.sources, self._pieces):
            param.data = piece
        self.display.show_sharded()
        if self._grads is not None:
            for param, grad in zip(self.sources, self._grads):
                param.grad = grad
            self._grads = None

    # gradients

    def _having_gradients(self, used: Sequence[bool]) -> Sequence[bool]:
        # An empty slice has nothing to update, but plain optimizers keep state of an empty parameter.
        return [*map(operator.and_, used, self._updated)]

    def joint_gradient(self) -> torch.Tensor | None:
        grads = self._grads or self.gradients()
        present = self._present(grads)
        if not present:
            return None
        around = self._shard_around(present)
        joint = present[0][0].new_zeros(self.shard_numel) if around is None else around
        for source, grad, piece in zip(self.sources, grads, self.pieces(joint)):
            if grad is None:
                piece.zero_()
            elif around is None:
                piece.copy_(grad)
                if not self._marks and self._grads is None:
                    source.grad = piece
        return joint

    def _present(self, grads: Sequence[torch.Tensor | None]) -> list[tuple[torch.Tensor, int]]:
        """Returns the gradients of non-empty slices, each with its first element in the shard."""
        pairs = zip(grads, self._bounds)
        return [(grad, start) for grad, (start, stop) in pairs if grad is not None and stop > start]

    def _shard_around(self, grads: Sequence[tuple[torch.Tensor, int]]) -> torch.Tensor | None:
        """Returns the shard that all given gradients are views of, each at its place; None without one."""
        shard = grads[0][0]._base if grads else None
        if shard is None or shard.numel() != self.shard_numel:
            return None
        begin, size = shard.data_ptr(), shard.element_size()
        return shard if all(grad.data_ptr() == begin + start * size for grad, start in grads) else None

    # changes from outside

    def follow_replaced(self) -> bool:
        if self.flat_param.data_ptr() != self._shard.data_ptr():
            return super().follow_replaced()
        memory = _memory(self.sources)
        if memory == self._memory or memory == _memory(self._pieces):  # the latter: all moved together
            return False
        self._check_replaced()
        shard = self._shard.to(self.sources[0].dtype, copy=True)
        for param, piece, new in zip(self.sources, self._pieces, self.cut(shard)):
            if param.data_ptr() != piece.data_ptr() or param.numel() != piece.numel():
                new.copy_(param.data)
        self._go_to(shard)
        return True

    def _check_replaced(self) -> None:
        dtype = self.sources[0].dtype
        for fqn, param, piece in zip(self.fqns, self.sources, self._pieces):
            if param.shape != piece.shape or param.dtype != dtype:
                raise ValueError(
                    f"the data of the sharded parameter '{fqn}' were replaced by a tensor of shape "
                    f"{tuple(param.shape)} and dtype {param.dtype}; they must keep {tuple(piece.shape)}, and "
                    f"the dtype of '{self.fqns[0]}', {dtype}"
                )


def _memory(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[int], list[torch.dtype]]:
    """Returns addresses, sizes and dtypes."""
    return [*map(_DATA_PTR, tensors)], [*map(_NUMEL, tensors)], [*map(_DTYPE, tensors)]
