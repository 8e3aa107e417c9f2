"""What the optimizer and the user see of a flat layout while it is sharded."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from operator import attrgetter
from typing import Any, Protocol

import torch
from torch import nn

from fsdp_wrap._modules import Display, ParamPlaces, ParamSlot
from fsdp_wrap._shown import Shown

__all__ = ["FlatFront", "Front", "SliceFront"]


class _Layout(Protocol):
    """What a front needs of its layout."""

    places: Sequence[ParamPlaces]
    shard_numel: int

    @property
    def flat_param(self) -> nn.Parameter: ...

    @property
    def fqns(self) -> Sequence[str]: ...

    def pieces(self, shard: torch.Tensor) -> list[torch.Tensor]: ...

    def show(self, params: Sequence[torch.Tensor]) -> None: ...

    def register_flat_param(self, param: nn.Parameter | None) -> None: ...


class Front(Protocol):
    """What the optimizer and the user see of a layout while it is sharded.

    Attributes:
        sources: For each original parameter, the sharded parameter that stands for it.
        holders: The sharded parameters, each once.
        plain: Whether the modules show plain tensors.
        shown: What `show_sharded` shows.
    """

    shown: Shown
    sources: Sequence[nn.Parameter]
    holders: Sequence[nn.Parameter]
    plain: bool

    def cut(self, shard: torch.Tensor) -> Sequence[torch.Tensor]:
        """Cuts something of the shard's size into one piece per holder."""
        ...

    def used(self, used: Sequence[bool]) -> Sequence[bool]:
        """From whether each original parameter was used to whether each holder was."""
        ...

    def gradients(self) -> list[torch.Tensor | None]: ...

    def gradient_blocks(self) -> list[torch.Tensor]: ...

    def joint_gradient(self, moves: bool) -> torch.Tensor | None:
        """The gradient shard; where the holders' gradients are no views of one, a copy.

        Args:
            moves: Whether they become views of the copy.
        """
        ...

    def follow_places(self) -> None:
        """Goes over to where the layout's places are now."""
        ...

    def add(self, reduced: torch.Tensor, used: Sequence[bool]) -> None:
        """Adds a reduced gradient shard to the holders' gradients; see `ShardedGradients.add_reduced`."""
        ...

    def show_sharded(self) -> None: ...

    def show_full(self, params: Sequence[nn.Parameter], copies: bool) -> None: ...

    def hide_full(self) -> None: ...

    def replaced(self, shard: torch.Tensor) -> torch.Tensor:
        """Returns a shard with the data that the user has put in the place of its pieces; if none, itself."""
        ...

    def move_to(self, shard: torch.Tensor) -> None:
        """Goes over to the memory of another shard, perhaps of another dtype."""
        ...

    def copied(self, layout: _Layout, memo: dict[int, Any]) -> Front:
        """Returns the same for the layout's copy; what it shows stands in `memo` for what this one does."""
        ...


class FlatFront:
    """The `FlatParameter` alone; under the original names stand plain slices of it."""

    plain = True

    def __init__(self, layout: _Layout) -> None:
        self._layout = layout
        self.sources: Sequence[nn.Parameter] = [layout.flat_param] * len(layout.places)
        self.holders: Sequence[nn.Parameter] = [layout.flat_param]
        self._pieces = layout.pieces(layout.flat_param.data)
        self.follow_places()

    def replaced(self, shard: torch.Tensor) -> torch.Tensor:
        return shard

    def move_to(self, shard: torch.Tensor) -> None:
        self._pieces = self._layout.pieces(shard)
        _cast_gradient(self._layout.flat_param)
        self.follow_places()
        self.show_sharded()

    def copied(self, layout: _Layout, memo: dict[int, Any]) -> FlatFront:
        new = FlatFront(layout)
        memo.update((id(old), piece) for old, piece in zip(self._pieces, new._pieces))
        return new

    def cut(self, shard: torch.Tensor) -> Sequence[torch.Tensor]:
        return [shard]

    def used(self, used: Sequence[bool]) -> Sequence[bool]:
        return [any(used)]

    def gradients(self) -> list[torch.Tensor | None]:
        grad = self._layout.flat_param.grad
        return [None] * len(self.sources) if grad is None else [*self._layout.pieces(grad)]

    def gradient_blocks(self) -> list[torch.Tensor]:
        grad = self._layout.flat_param.grad
        return [] if grad is None else [grad]

    def joint_gradient(self, moves: bool) -> torch.Tensor | None:
        return self._layout.flat_param.grad

    def follow_places(self) -> None:
        self.show_sharded = Display(self._layout.places, self._pieces).show
        self.shown = Shown(self._layout.places, self._pieces)

    def add(self, reduced: torch.Tensor, used: Sequence[bool]) -> None:
        _add_gradient(self._layout.flat_param, reduced, any(used))

    def show_full(self, params: Sequence[nn.Parameter], copies: bool) -> None:
        self._layout.register_flat_param(None)
        self._layout.show(params)

    def hide_full(self) -> None:
        self._layout.register_flat_param(self._layout.flat_param)
        self.show_sharded()


class SliceFront:
    """The user's own Parameter objects, each holding its slice of the shard.

    Their `.data` is a slice while sharded and the full parameter while shown in full, so whoever holds
    such an object (an optimizer made meanwhile, say) holds the right one.
    """

    plain = False

    def __init__(self, layout: _Layout, slots: Sequence[ParamSlot]) -> None:
        self._layout = layout
        self.sources: Sequence[nn.Parameter] = [slot.param for slot in slots]
        self.holders: Sequence[nn.Parameter] = self.sources
        self._adopt(layout.flat_param.data)
        self._grads: list[torch.Tensor | None] | None = None
        self.follow_places()

    def _adopt(self, shard: torch.Tensor) -> None:
        self._pieces = self._layout.pieces(shard)
        self._memory = _memory(self._pieces)
        first, pieces = int(shard.storage_offset()), enumerate(self._pieces)
        self._held = [
            (index, int(piece.storage_offset()) - first) for index, piece in pieces if piece.numel()
        ]

    def replaced(self, shard: torch.Tensor) -> torch.Tensor:
        memory = _memory(self.sources)
        if memory == self._memory or memory == _memory(self._pieces):  # the latter: all have moved as one
            return shard
        self._check_replaced()
        result = shard.to(self.sources[0].dtype, copy=True)
        for param, piece, new in zip(self.sources, self._pieces, self.cut(result)):
            if _lies_elsewhere(param, piece):
                new.copy_(param.data)
        return result

    def _check_replaced(self) -> None:
        for fqn, param, piece in zip(self._layout.fqns, self.sources, self._pieces):
            if param.shape != piece.shape or param.dtype != self.sources[0].dtype:
                raise ValueError(
                    f"the data of the sharded parameter '{fqn}' were replaced by a tensor of shape "
                    f"{tuple(param.shape)} and dtype {param.dtype}; they must keep {tuple(piece.shape)}, and "
                    f"the dtype of '{self._layout.fqns[0]}', {self.sources[0].dtype}"
                )

    def move_to(self, shard: torch.Tensor) -> None:
        self._adopt(shard)
        for param, piece in zip(self.sources, self._pieces):
            param.data = piece
            _cast_gradient(param)

    def copied(self, layout: _Layout, memo: dict[int, Any]) -> SliceFront:
        new = copy.copy(self)
        new._layout = layout
        new._adopt(layout.flat_param.data)
        new.sources = new.holders = [
            nn.Parameter(piece, param.requires_grad) for param, piece in zip(self.sources, new._pieces)
        ]
        for old, param in zip(self.sources, new.sources):
            param.__dict__.update(old.__dict__)
            memo[id(old)] = param
        return new

    def cut(self, shard: torch.Tensor) -> Sequence[torch.Tensor]:
        return self._layout.pieces(shard)

    def used(self, used: Sequence[bool]) -> Sequence[bool]:
        return used

    def gradients(self) -> list[torch.Tensor | None]:
        return [param.grad for param in self.sources]

    def gradient_blocks(self) -> list[torch.Tensor]:
        held = [(self.sources[index].grad, start) for index, start in self._held]
        present = [(grad, start) for grad, start in held if grad is not None]
        shard = self._shard_around(present) if len(present) == len(held) else None
        return [grad for grad, _ in present] if shard is None else [shard]

    def _shard_around(self, grads: Sequence[tuple[torch.Tensor, int]]) -> torch.Tensor | None:
        """Returns the shard of which all given gradients are views, each at its place, if there is one."""
        shard = grads[0][0]._base if grads else None
        if shard is None or shard.numel() != self._layout.shard_numel:
            return None
        begin, size = shard.data_ptr(), shard.element_size()
        return shard if all(grad.data_ptr() == begin + start * size for grad, start in grads) else None

    def joint_gradient(self, moves: bool) -> torch.Tensor | None:
        shown_in_full = self._grads is not None
        grads = self._grads or [param.grad for param in self.sources]
        found = [(grads[index], index, start) for index, start in self._held]
        present = [(grad, start) for grad, _, start in found if grad is not None]
        if not present:
            return None
        around = self._shard_around(present)
        joint = present[0][0].new_zeros(self._layout.shard_numel) if around is None else around
        pieces = self._layout.pieces(joint)
        for grad, index, _ in found:
            if grad is None:
                pieces[index].zero_()
            elif around is None:
                pieces[index].copy_(grad)
                if moves and not shown_in_full:
                    self.sources[index].grad = pieces[index]
        return joint

    def follow_places(self) -> None:
        self.show_sharded = Display(self._layout.places, self.sources).show
        self.shown = Shown(self._layout.places, self.sources)

    def add(self, reduced: torch.Tensor, used: Sequence[bool]) -> None:
        pieces = self._layout.pieces(reduced)
        for index, _ in self._held:  # an empty slice has nothing to update
            _add_gradient(self.sources[index], pieces[index], used[index])

    def show_full(self, params: Sequence[nn.Parameter], copies: bool) -> None:
        if copies:
            self._layout.show(params)
            return
        self._grads = [param.grad for param in self.sources]  # their shape is that of the slices
        for source, param in zip(self.sources, params):
            source.grad = None
            source.data = param.data
        self.show_sharded()

    def hide_full(self) -> None:
        for param, piece in zip(self.sources, self._pieces):
            param.data = piece
        self.show_sharded()
        if self._grads is not None:
            for param, grad in zip(self.sources, self._grads):
                param.grad = grad
            self._grads = None


def _lies_elsewhere(param: torch.Tensor, piece: torch.Tensor) -> bool:
    return param.data_ptr() != piece.data_ptr() or param.numel() != piece.numel()


def _memory(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[int], list[torch.dtype]]:
    """Says where tensors lie, how many elements they have, and of which dtype."""
    return [*map(_DATA_PTR, tensors)], [*map(_NUMEL, tensors)], [*map(_DTYPE, tensors)]


_DATA_PTR, _NUMEL, _DTYPE = torch.Tensor.data_ptr, torch.Tensor.numel, attrgetter("dtype")


def _add_gradient(param: nn.Parameter, piece: torch.Tensor, used: bool) -> None:
    if not (used and param.requires_grad):
        return
    if param.grad is None:
        param.grad = piece
    else:
        param.grad.add_(piece)


def _cast_gradient(param: nn.Parameter) -> None:
    if param.grad is not None:
        grad, param.grad = param.grad, None
        param.grad = grad.to(param)
