"""`FlatParameter`, and parameters that are concatenated and cut into even shards.

`JointParams` shows optimizers a `FlatParameter`, `SliceParams` the user's own Parameter objects.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Sequence
from itertools import chain
from operator import attrgetter
from typing import Any, ClassVar, final

import torch
from torch import nn

from fsdp_wrap._comm import Communicator
from fsdp_wrap._core import ParamSlot, ShardAlignment, show_extra
from fsdp_wrap._core.torch_private import make_subclass
from fsdp_wrap._params.layout import EvenCut, Extent, FlatLayout, JointLayout, alignment_of, shared
from fsdp_wrap._params.shard_gradients import ShardGradients
from fsdp_wrap._params.sharded_params import Interval, ShardedParams, named_shapes


class FlatParameter(nn.Parameter):
    """This rank's shard of the concatenated parameters of one segment, which an optimizer updates.

    It takes no part in autograd: modules compute with leaves, and `.grad` is filled by the reduction.

    Attributes:
        _fqns: Names of the original parameters within the unit, in order.
        _shapes: Their shapes.
        _numels: Their element counts.
        _of_params: Reference to the parameters whose shard it is, if any; `compat/internals.py` uses it.
        shard_alias: Another tensor of the same data, once it was asked for.
    """

    _fqns: tuple[str, ...]
    _shapes: tuple[torch.Size, ...]
    _numels: tuple[int, ...]
    _of_params: ParamsRef | None = None
    shard_alias: torch.Tensor | None = None
    _fsdp_flattened = True  # marks sharded parameters for clients
    _is_flat_param = True  # marks flat parameters for torch

    def __new__(cls, data: torch.Tensor, requires_grad: bool, extents: Sequence[Extent]) -> FlatParameter:
        """Makes one around a shard.

        Args:
            data: This rank's shard, 1-D.
            requires_grad: Whether it is trained.
            extents: Names, shapes and places of the original parameters.
        """
        self: FlatParameter = make_subclass(cls, data, requires_grad)
        self._fqns = tuple(extent.fqn for extent in extents)
        self._shapes = tuple(extent.shape for extent in extents)
        self._numels = tuple(extent.shape.numel() for extent in extents)
        return self

    def register_hook(self, hook: Any) -> Any:
        """Refuses hooks on the gradient before it is accumulated: autograd would never call them.

        Args:
            hook: Ignored.

        Raises:
            ValueError: Always.
        """
        raise ValueError(
            f"register_hook on the FlatParameter of '{self._fqns[0]}' and others would never be called, "
            "since gradients come from a reduction: use register_post_accumulate_grad_hook, or hook the "
            "module's parameters inside its forward"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> FlatParameter:
        extents = [Extent(fqn, shape, 0) for fqn, shape in zip(self._fqns, self._shapes)]
        copied = FlatParameter(self.detach().clone(), self.requires_grad, extents)
        memo[id(self)] = copied
        return copied


class FlatPiece(nn.Parameter):
    """One original parameter's piece of a `FlatParameter`, for an optimizer to hold by itself.

    Memory and gradient are views into the `FlatParameter`'s.

    Attributes:
        start: Index of the first element in the `FlatParameter`.
        updated: Whether there is anything to update: not for an empty piece of a parameter with elements.
    """

    flat: FlatParameter
    fqn: str
    start: int
    updated: bool

    def __new__(cls, flat: FlatParameter, interval: Interval) -> FlatPiece:
        self: FlatPiece = make_subclass(cls, interval.data, flat.requires_grad)
        self.flat, self.fqn, self.start = flat, interval.fqn, interval.offset
        self.updated = self.numel() > 0 or not interval.shape.numel()
        return self

    def __init__(self, flat: FlatParameter, interval: Interval) -> None:
        """Does nothing: `__new__` has done all."""

    @property
    def grad(self) -> torch.Tensor | None:
        """The view into the `FlatParameter`'s gradient; None without one, or for an empty piece."""
        grad = self.flat.grad
        return grad.narrow(0, self.start, self.numel()) if grad is not None and self.updated else None

    @grad.setter
    def grad(self, grad: torch.Tensor | None) -> None:
        if grad is None:
            self.flat.grad = None
        elif self.numel() > 0:
            if self.flat.grad is None:
                self.flat.grad = torch.zeros_like(self.flat)
            self.flat.grad.narrow(0, self.start, self.numel()).copy_(grad)

    def follow(self) -> None:
        """Moves to the memory that the `FlatParameter` has now."""
        memory = self.flat.data.narrow(0, self.start, self.numel())
        if (memory.data_ptr(), memory.dtype) != (self.data_ptr(), self.dtype):
            self.data = memory


def held_params(optimizer: torch.optim.Optimizer) -> set[nn.Parameter]:
    """Returns an optimizer's parameters, of which it may hold pieces: `FlatParameter`s by themselves."""
    params = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    return {param.flat if isinstance(param, FlatPiece) else param for param in params}


class ParamsRef(weakref.ref["FlatParams"]):
    """A weak reference from a `FlatParameter` to the owner of its shard; pickled as None."""

    def __reduce__(self) -> Any:
        return type(None), ()


class HiddenFlatParameter(FlatParameter):
    """A `FlatParameter` that no optimizer sees; its gradient consists of its slices' gradients."""

    def _gradients(self) -> JointGradients | SliceGradients | None:
        params: Any = None if self._of_params is None else self._of_params()
        return None if params is None else params.gradients

    @property
    def grad(self) -> torch.Tensor | None:
        """The gradient of the shard, with the slices' gradients as views; zeros for missing ones."""
        gradients = self._gradients()
        return None if gradients is None else gradients.joint()

    @grad.setter
    def grad(self, grad: torch.Tensor | None) -> None:
        gradients = self._gradients()
        if gradients is not None:
            gradients.replace(grad, [grad is not None] * len(self._fqns))


class JointGradients(ShardGradients):
    """The gradient of a `FlatParameter`: one for all original parameters."""

    def pieces(self) -> list[torch.Tensor | None]:
        grad = self._params[0].grad
        return [None] * len(self._sources) if grad is None else [*self._layout.pieces(grad)]

    def joint(self) -> torch.Tensor | None:
        """Returns the gradient shard; None without one."""
        return self._params[0].grad


class SliceGradients(ShardGradients):
    """The gradients of slices of a shard."""

    _layout: FlatLayout
    _aside: Sequence[torch.Tensor | None] | None = None  # while full parameters are shown

    def set_aside(self) -> None:
        """Takes the gradients away while the sharded parameters have the data of full ones."""
        self._aside = [param.grad for param in self._params]  # in the shapes of the slices
        for param in self._params:
            param.grad = None

    def take_back(self) -> None:
        """Undoes `set_aside`, if it was called."""
        for param, grad in zip(self._params, self._aside or ()):
            param.grad = grad
        self._aside = None

    def joint(self) -> torch.Tensor | None:
        """Returns the gradient shard with the sharded parameters' gradients as views; None without any.

        It may be a copy while gradients wait for a reduction, or parameters are shown in full.
        """
        grads = self._aside or self.pieces()
        present = self._present(grads)
        if not present:
            return None
        around = self._shard_around(present)
        joint = present[0][0].new_zeros(self._layout.shard_numel) if around is None else around
        for param, grad, piece in zip(self._params, grads, self._layout.pieces(joint)):
            if grad is None:
                piece.zero_()
            elif around is None:
                piece.copy_(grad)
                if not self._marks and self._aside is None:
                    param.grad = piece
        return joint

    def _present(self, grads: Sequence[torch.Tensor | None]) -> list[tuple[torch.Tensor, int]]:
        """Returns the gradients of non-empty slices, each with its first element in the shard."""
        pairs = zip(grads, self._layout.even.bounds)
        return [(grad, start) for grad, (start, stop) in pairs if grad is not None and stop > start]

    def _shard_around(self, grads: Sequence[tuple[torch.Tensor, int]]) -> torch.Tensor | None:
        """Returns the shard that all given gradients are views of, each at its place; None without one."""
        shard = grads[0][0]._base if grads else None
        if shard is None or shard.numel() != self._layout.shard_numel:
            return None
        begin, size = shard.data_ptr(), shard.element_size()
        return shard if all(grad.data_ptr() == begin + start * size for grad, start in grads) else None


class FlatParams(ShardedParams):
    """Parameters of one dtype side by side in one buffer, cut into one even shard per rank.

    Args:
        slots: The original parameters; their data are copied and then given up.
        communicator: Allocates the shard and knows the rank.
        name: Name of the `FlatParameter` in the unit's module.
        module: The unit's module.
        sharded: Whether the buffer is cut; otherwise every rank's shard is the whole.
        offload: Whether the shard lives in host memory.
        alignment: Positions in parameters at which shards may begin, at the cost of padding.
    """

    layout: FlatLayout
    flat_param: FlatParameter
    _kind = FlatParameter
    _layout_kind: ClassVar[type[FlatLayout]] = FlatLayout

    def __init__(
        self,
        slots: Sequence[ParamSlot],
        communicator: Communicator,
        *,
        name: str,
        module: nn.Module,
        sharded: bool,
        offload: bool,
        alignment: ShardAlignment | None = None,
    ) -> None:
        places = (*self._shapes_of(slots),), alignment_of(slots)
        cut = shared(EvenCut, *places, communicator.size, communicator.rank, alignment)
        layout = self._layout_kind(cut, sharded)  # of this unit: it will have tensors
        super().__init__(name, layout, slots, communicator, offload)
        self.module = module
        self._resides = not sharded and not self.offloaded
        self._take_over(slots)

    def _shapes_of(self, slots: Sequence[ParamSlot]) -> list[tuple[str, torch.Size]]:
        """Returns names and shapes of the tensors that lie in the buffer."""
        return named_shapes(slots)

    def _adopt(self, shard: torch.Tensor) -> None:
        self.flat_param = self._kind(shard, False, self.layout.extents)
        self.flat_param._of_params, self.flat_param.shard_alias = ParamsRef(self), None
        self._lie_in(shard)

    def _lie_in(self, shard: torch.Tensor) -> None:
        self._shard, self.dtype, self._pieces = shard, shard.dtype, self.layout.pieces(shard)
        self.resident = shard.data if self._resides else None

    def _stand_for(self, originals: Sequence[nn.Parameter]) -> None:
        self.flat_param.requires_grad_(originals[0].requires_grad)

    def intervals(self) -> list[Interval]:
        result = []
        # Replicated parameters may be cut differently on each TP rank, beside parts of other sizes.
        beside = next((part for part in self._parts if part is not None), None)
        parts = [
            part if part is not None or beside is None else beside.replicated(extent.shape)
            for part, extent in zip(self._parts, self.layout.extents)
        ]
        for extent, first, source, (start, stop), part in zip(
            self.layout.extents, self.layout.even.begins, self.sources, self.layout.even.bounds, parts
        ):
            offset = start if source is self.flat_param else 0
            data, shape = self.flat_param.detach()[start:stop], extent.shape if part is None else part.shape
            result.append(Interval(extent.fqn, shape, first, data, source, offset, extent.start, part))
        return result

    # changes from outside

    def follow_replaced(self) -> bool:
        if self.flat_param.data_ptr() == self._shard.data_ptr():
            return False
        self._go_to(self.flat_param.data)
        return True

    def _go_to(self, shard: torch.Tensor) -> None:
        """Moves to the memory of another shard, perhaps of another dtype."""
        if shard.shape != self._shard.shape:
            raise ValueError(
                f"the data of the FlatParameter of '{self.layout.fqns[0]}' and others were replaced by a "
                f"tensor of shape {tuple(shard.shape)}; they must keep {tuple(self._shard.shape)}"
            )
        self.flat_param.data = shard
        self._lie_in(shard)
        self.gradients.follow(self.sources, self.sharded_params, shard)
        for param, data in zip(self.sharded_params, self.layout.cut(shard)):
            param.data = data
            if param.grad is not None:
                grad, param.grad = param.grad, None
                param.grad = grad.to(param)

    def follow_modules(self, memo: dict[int, Any]) -> None:
        self.module = copy.deepcopy(self.module, memo)
        super().follow_modules(memo)


@final
class JointParams(FlatParams):
    """The optimizer sees the `FlatParameter` alone; under the original names stand plain slices of it."""

    _layout_kind = JointLayout
    _gradients_kind = JointGradients

    def _stand_for(self, originals: Sequence[nn.Parameter]) -> None:
        super()._stand_for(originals)
        self.sources, self.sharded_params = [self.flat_param] * len(originals), [self.flat_param]
        self.gradients.follow(self.sources, self.sharded_params, self._shard)

    def _stand_ins(self) -> Sequence[torch.Tensor]:
        return self._pieces

    def _display_leaves(self) -> None:
        super()._display_leaves()
        if self.memory and self.memory[0].data_ptr() == self._shard.data_ptr():
            self.display.cover_while_sharded()

    def show_full(self, params: Sequence[nn.Parameter], copies: bool) -> None:
        show_extra(self.module, self.name, None)
        super().show_full(params, copies)

    def hide_full(self) -> None:
        show_extra(self.module, self.name, self.flat_param)
        super().hide_full()

    def _go_to(self, shard: torch.Tensor) -> None:
        super()._go_to(shard)
        self._show_in(self.display.places)
        self.display.show_sharded()


_DATA_PTR, _NUMEL, _DTYPE = torch.Tensor.data_ptr, torch.Tensor.numel, attrgetter("dtype")


class SliceParams(FlatParams):
    """The optimizer sees the user's own Parameter objects, each holding its slice of the shard.

    Their `.data` is a slice while sharded, and the full parameter while shown in full. So an optimizer that
    is made meanwhile holds the right objects.
    """

    gradients: SliceGradients
    _kind = HiddenFlatParameter
    _gradients_kind = SliceGradients

    def _stand_for(self, originals: Sequence[nn.Parameter]) -> None:
        super()._stand_for(originals)
        self.sources = self.sharded_params = originals
        self.gradients.follow(originals, originals, self._shard)

    def _lie_in(self, shard: torch.Tensor) -> None:
        super()._lie_in(shard)
        self._memory = _memory(self._pieces)

    # module attributes

    def show_full(self, params: Sequence[nn.Parameter], copies: bool) -> None:
        if copies:
            self.display.show_others(params)
            return
        self.gradients.set_aside()
        shown: list[nn.Parameter] = []
        for source, param, part in zip(self.sources, params, self._parts):
            if part is None:
                source.data = param.data
            shown.append(source if part is None else param)  # a plain parameter cannot hold a `DTensor`
        self.display.show_others(shown)

    def hide_full(self) -> None:
        for param, piece in zip(self.sources, self._pieces):
            param.data = piece
        self.display.show_sharded()
        self.gradients.take_back()

    # changes from outside

    def follow_replaced(self) -> bool:
        if self.flat_param.data_ptr() != self._shard.data_ptr():
            return super().follow_replaced()
        memory = _memory(self.sources)
        if memory == self._memory or memory == _memory(self._pieces):  # the latter: all moved together
            return False
        self._check_replaced()
        shard = self._shard.to(self.sources[0].dtype, copy=True)
        for param, piece, new in zip(self.sources, self._pieces, self.layout.cut(shard)):
            if param.data_ptr() != piece.data_ptr() or param.numel() != piece.numel():
                new.copy_(param.data)
        self._go_to(shard)
        return True

    def _check_replaced(self) -> None:
        dtype = self.sources[0].dtype
        for fqn, param, piece in zip(self.layout.fqns, self.sources, self._pieces):
            if param.shape != piece.shape or param.dtype != dtype:
                raise ValueError(
                    f"the data of the sharded parameter '{fqn}' were replaced by a tensor of shape "
                    f"{tuple(param.shape)} and dtype {param.dtype}; they must keep {tuple(piece.shape)}, and "
                    f"the dtype of '{self.layout.fqns[0]}', {dtype}"
                )


def _memory(tensors: Sequence[torch.Tensor]) -> tuple[list[int], list[int], list[torch.dtype]]:
    """Returns addresses, sizes and dtypes."""
    return [*map(_DATA_PTR, tensors)], [*map(_NUMEL, tensors)], [*map(_DTYPE, tensors)]
