"""The seam between the front-ends and the runtime: how original parameters lie in 1-D buffers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from fsdp_wrap._modules import Place

__all__ = ["Interval", "Layout", "pack", "same_elements", "unpack"]


@dataclass(frozen=True)
class Interval:
    """The contiguous piece of one flattened original parameter that a rank holds.

    Attributes:
        fqn: Name of the original parameter within its unit.
        shape: Its shape.
        start: Index of the piece's first element in the flattened parameter.
        data: The piece, 1-D, in master dtype; writing into it changes the sharded parameter.
        source: The sharded parameter that holds it.
        offset: Index of the piece's first element in the flattened `source`.
    """

    fqn: str
    shape: torch.Size
    start: int
    data: torch.Tensor
    source: nn.Parameter
    offset: int

    @property
    def stop(self) -> int:
        """Index after the piece's last element in the flattened parameter."""
        return self.start + self.data.numel()

    def within(self, like_source: torch.Tensor) -> torch.Tensor:
        """Returns the part of something of `source`'s shape (optimizer state, say) that belongs here."""
        return like_source.reshape(-1).narrow(0, self.offset, self.data.numel())


class Layout(Protocol):
    """How the parameters of one segment lie in 1-D buffers, and what is shown of them.

    The shards of all ranks, one after the other, are the buffer that travels. The leaves alias the unsharded
    buffer, which is the same where that is possible; else parameters are copied from one to the other.

    Attributes:
        name: Name of the segment within its unit.
        dtype: Master dtype.
        numel: Elements of the buffer that travels, padding included: `shard_numel` x ranks.
        full_numel: Elements of the unsharded buffer, padding included: a multiple of the ranks.
        in_place: Whether the buffer that travels is the unsharded one.
        shard_numel: Elements of this rank's part.
        sharded: Whether each rank has a part of its own; otherwise its part is the whole.
        resident: The unsharded buffer, where it is the shard itself and always in memory; else None.
        sources: For each leaf, the sharded parameter that stands for it: it says whether the leaf
            needs a gradient.
        flat_param: The parameter whose data are this rank's shard, whether or not the optimizer sees it.
    """

    dtype: torch.dtype
    numel: int
    full_numel: int
    in_place: bool
    shard_numel: int
    sharded: bool

    @property
    def flat_param(self) -> nn.Parameter: ...

    @property
    def name(self) -> str: ...

    @property
    def resident(self) -> torch.Tensor | None: ...

    @property
    def sources(self) -> Sequence[nn.Parameter]: ...

    @property
    def fqns(self) -> Sequence[str]: ...

    @property
    def places(self) -> Sequence[Iterable[Place]]:
        """For each original parameter, every place that shows it."""
        ...

    def views(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Views of an unsharded buffer, one per original parameter, in its shape."""
        ...

    def parts(self, travelling: torch.Tensor) -> list[list[torch.Tensor]]:
        """Views of a buffer that travels: for each original parameter the boxes in which it lies."""
        ...

    def split(self, index: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Views of a tensor of one original parameter's shape that have the shapes of its `parts`."""
        ...

    def padding(self, travelling: torch.Tensor) -> list[torch.Tensor]:
        """Views of those parts of a buffer that travels that belong to no parameter."""
        ...

    def note_used(self, travelling: torch.Tensor, used: Sequence[bool]) -> None:
        """Notes in a buffer that will be reduced, where other ranks must know it, what this rank used.

        Args:
            travelling: The buffer.
            used: For each original parameter, whether this rank has contributed to its gradient.
        """
        ...

    @property
    def without_values(self) -> Sequence[str]:
        """Names of the parameters that are on the meta device still."""
        ...

    @property
    def version(self) -> int:
        """Grows whenever the sharded parameters are written to in place."""
        ...

    def make_leaves(self, buffer: torch.Tensor) -> list[nn.Parameter]:
        """Makes the leaves: parameters that alias the unsharded buffer and need no gradient yet."""
        ...

    def write_shard(self, out: torch.Tensor) -> None:
        """Copies this rank's shard to where it travels from, cast to that dtype."""
        ...

    def read_shard(self, own: torch.Tensor) -> None:
        """Copies this rank's part of an unsharded buffer back into the shard."""
        ...

    def show(self, params: Sequence[nn.Parameter]) -> None:
        """Shows one tensor per original parameter in the modules."""
        ...

    def show_sharded(self) -> None:
        """Shows the sharded parameters in the modules."""
        ...

    def show_full(self, params: Sequence[nn.Parameter], copies: bool) -> None:
        """Shows full parameters to the user, who may edit them in place.

        Args:
            params: One per original parameter.
            copies: Whether they are the user's to keep. Otherwise the user's own Parameter objects, where
                those are the sharded parameters, stand for them.
        """
        ...

    def hide_full(self) -> None:
        """Undoes `show_full`: the modules show the sharded parameters again."""
        ...

    def shown(self) -> list[nn.Parameter | None]:
        """What the modules show now, one per original parameter."""
        ...

    def add_place(self, index: int, place: Place) -> None:
        """Lets one more place show an original parameter, which is sharded now."""
        ...

    def shapes(self) -> dict[Place, torch.Size]:
        """Every (module, name) that shows an original parameter, with its shape."""
        ...

    def add_reduced(self, reduced: torch.Tensor, used: Sequence[bool]) -> None:
        """Adds a reduced gradient shard to the sharded parameters' gradients.

        Args:
            reduced: The shard, 1-D, in the gradients' dtype.
            used: For each original parameter, whether this rank contributed to its gradient. One that no
                rank used gets none, so that optimizers pass over it as they do on a plain module.
        """
        ...

    def allow_gradients_of_any_dtype(self) -> None:
        """Lets the sharded parameters take gradients of another dtype than their own."""
        ...

    def mark_unsynced(self) -> None:
        """Makes the sharded parameters' gradients tell later whether they were zeroed meanwhile."""
        ...

    def zeroed(self) -> list[bool]:
        """For each leaf, whether its gradient was zeroed since `mark_unsynced`."""
        ...

    def write_gradient(self, out: torch.Tensor) -> None:
        """Copies this rank's shard of the gradient to where it travels from: zeros where there is none."""
        ...

    def read_gradient(self, own: torch.Tensor | None, present: Sequence[bool]) -> None:
        """Replaces the sharded parameters' gradients.

        Args:
            own: This rank's part of the unsharded gradient; None where no parameter has one.
            present: For each original parameter, whether it has one. Gradients that would not change are
                left untouched, so that `zeroed` does not take them for the user's doing.
        """
        ...

    def gradients(self) -> list[torch.Tensor | None]:
        """For each original parameter, this rank's piece of its gradient; None without a gradient."""
        ...

    def gradient_blocks(self) -> list[torch.Tensor]:
        """This rank's gradients in as few tensors as possible, none empty; zero padding may be among them."""
        ...

    def follow_replaced(self) -> bool:
        """Takes over what the user has put, by `param.data = ...`, in the place of sharded parameters' data.

        Where all of it has another dtype, that becomes the master dtype.

        Returns:
            Whether the shard lies elsewhere now.

        Raises:
            ValueError: If it does not have the shape of the shard, or not one dtype.
        """
        ...

    def copied(self, memo: dict[int, Any]) -> Layout:
        """Returns a layout with sharded parameters of its own, of the same values, for the same modules.

        Args:
            memo: Of `copy.deepcopy`; the old sharded parameters stand for the new ones in it afterwards.
        """
        ...

    def follow_modules(self, memo: dict[int, Any]) -> None:
        """Goes over to the copies of its modules, and shows the sharded parameters there."""
        ...

    def intervals(self) -> list[Interval]:
        """What this rank holds of each original parameter, perhaps nothing, for all that saves."""
        ...

    def held_by_rank(self) -> list[list[int]]:
        """For each original parameter, how many of its elements each rank holds; these lie in rank order."""
        ...

    def pieces(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """Cuts something of the shard's size into this rank's pieces of the original parameters, as views."""
        ...


def same_elements(
    layout: Layout, travelling: torch.Tensor, full: torch.Tensor
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs views of the two buffers of a layout that must hold the same; none where they are one."""
    if layout.in_place:
        return []
    return [
        pair
        for index, (view, parts) in enumerate(zip(layout.views(full), layout.parts(travelling)))
        for pair in zip(parts, layout.split(index, view))
    ]


def unpack(layout: Layout, travelling: torch.Tensor) -> torch.Tensor:
    """Returns an unsharded buffer with what has travelled: the same tensor where that is possible."""
    if layout.in_place:
        return travelling
    full = travelling.new_empty(layout.full_numel)
    for source, target in same_elements(layout, travelling, full):
        target.copy_(source)
    return full


def pack(layout: Layout, full: torch.Tensor) -> torch.Tensor:
    """Undoes `unpack`."""
    if layout.in_place:
        return full
    travelling = full.new_zeros(layout.numel)
    for target, source in same_elements(layout, travelling, full):
        target.copy_(source)
    return travelling
