"""The seam between the front-ends and the runtime: how original parameters lie in 1-D buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from fsdp_wrap._buffers import Buffers
from fsdp_wrap._interval import Interval
from fsdp_wrap._modules import Place
from fsdp_wrap._sharded_gradients import ShardedGradients
from fsdp_wrap._shown import Observed

__all__ = ["Layout"]


class Layout(Buffers, ShardedGradients, Observed, Protocol):
    """The parameters of one segment: how they lie in buffers, what is shown of them, their gradients.

    Attributes:
        name: Name of the segment within its unit.
        dtype: Master dtype.
        resident: The unsharded buffer, where it is the shard itself and always in memory; else None.
        sources: For each leaf, the sharded parameter that stands for it.
        flat_param: The parameter whose data are this rank's shard, whether or not the optimizer sees it.
        average_hook: Called with this rank's part of each reduction once it is averaged, if there is one.
    """

    dtype: torch.dtype
    average_hook: Callable[[torch.Tensor], None] | None

    @property
    def flat_param(self) -> nn.Parameter: ...

    @property
    def name(self) -> str: ...

    @property
    def resident(self) -> torch.Tensor | None: ...

    @property
    def sources(self) -> Sequence[nn.Parameter]: ...

    @property
    def trains(self) -> list[bool]:
        """For each leaf, whether it needs a gradient: as its sharded parameter does."""
        ...

    @property
    def fqns(self) -> Sequence[str]: ...

    @property
    def places(self) -> Sequence[Iterable[Place]]:
        """For each original parameter, every place that shows it."""
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

    def show(self, params: Sequence[torch.Tensor]) -> None:
        """Shows one tensor per original parameter in the modules."""
        ...

    def show_leaves(self) -> None:
        """Shows the leaves that were made last in the modules."""
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
