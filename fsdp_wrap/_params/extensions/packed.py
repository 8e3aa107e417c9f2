"""`PackedParams`: frozen tensor subclasses of the wrapper in a flat parameter of bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, final

import torch
from torch import nn

from fsdp_wrap._comm import Communicator
from fsdp_wrap._core import ParamPlaces, ParamSlot, mark_owned
from fsdp_wrap._params.extensions.packing import Packing
from fsdp_wrap._params.extensions.sharded_params import users_attributes
from fsdp_wrap._params.flat import SliceParams
from fsdp_wrap._params.sharded_params import ShardedParams
from fsdp_wrap._params.showing import SegmentDisplay


class PackedDisplay(SegmentDisplay):
    """The places of packed parameters: bytes that are all of a subclass are shown as the subclass.

    Args:
        packings: Of each parameter.
        attributes: Attributes of each, which the subclasses get; the others as in `SegmentDisplay`.
    """

    def __init__(self, *args: Any, packings: Sequence[Packing], attributes: Sequence[dict[str, Any]]) -> None:
        super().__init__(*args)
        self._packings, self._attributes = packings, attributes

    def show_others(self, params: Sequence[torch.Tensor]) -> None:
        super().show_others([*map(self._as_shown, self._packings, self._attributes, params)])

    @staticmethod
    def _as_shown(packing: Packing, attributes: dict[str, Any], param: torch.Tensor) -> torch.Tensor:
        """Makes the subclass from all bytes of it; other tensors are shown as they are."""
        if type(param) not in (torch.Tensor, nn.Parameter) or param.shape != (packing.nbytes,):
            return param
        shown = nn.Parameter(packing.made_of(param.detach()), requires_grad=False)
        shown.__dict__.update(attributes)
        return shown

    def shown(self) -> list[nn.Parameter | None]:
        values = map(Packing.taken_apart, self._packings, super().shown())
        return [
            value
            if value is None or isinstance(value, nn.Parameter)
            else nn.Parameter(value, requires_grad=False)
            for value in values
        ]


@final
class PackedParams(SliceParams):
    """The inner tensors of frozen subclasses, one after the other as bytes.

    While sharded, 1-D slices of bytes stand under the parameters' names, whether or not the wrapper uses the
    original parameters. Full parameters are subclasses over the bytes.
    """

    def __init__(self, slots: Sequence[ParamSlot], communicator: Communicator, **options: Any) -> None:
        self._packings = [Packing(slot.param.detach()) for slot in slots]
        super().__init__(slots, communicator, **options)

    def _shapes_of(self, slots: Sequence[ParamSlot]) -> list[tuple[str, torch.Size]]:
        # They are multiples of the alignment.
        return [(slot.fqn, torch.Size([packing.nbytes])) for slot, packing in zip(slots, self._packings)]

    def _take_over(self, slots: Sequence[ParamSlot]) -> None:
        params = [slot.param for slot in slots]
        self._attributes = (*map(users_attributes, params),)
        self._adopt(self._new_shard(torch.empty(0, dtype=torch.uint8)))
        for index, (param, packing) in enumerate(zip(params, self._packings)):
            self._pieces[index].copy_(self.layout.own_part(index, packing.packed(param.detach())))
        self._stand_for([nn.Parameter(piece, requires_grad=False) for piece in self._pieces])
        self._show_in([slot.places for slot in slots])
        self.hide_full()

    def _stand_for(self, originals: Sequence[nn.Parameter]) -> None:
        super()._stand_for(originals)
        for param, attributes in zip(originals, self._attributes):
            param.__dict__.update(attributes)
            mark_owned(param)

    # leaves

    def make_leaves(self, buffer: torch.Tensor) -> list[nn.Parameter]:
        self.memory = [view.data for view in self.layout.views(buffer)]
        if buffer.is_meta:
            self.leaves = [nn.Parameter(tensor, requires_grad=False) for tensor in self.memory]
        else:
            made = map(Packing.made_of, self._packings, self.memory)
            self.leaves = [nn.Parameter(tensor, requires_grad=False) for tensor in made]
        for leaf, attributes in zip(self.leaves, self._attributes):
            leaf.__dict__.update(attributes)
        self._display_leaves()
        return self.leaves

    def lie_in(self, views: Iterable[tuple[int, torch.Tensor]]) -> None:
        views = [*views]
        super().lie_in(views)
        for index, view in views:
            self._packings[index].move(self.leaves[index], view)

    # full values for users

    def whole(self, index: int, full: torch.Tensor) -> torch.Tensor:
        return self._packings[index].made_of(full)

    def taken_apart(self, index: int, value: Any) -> Any:
        return self._packings[index].taken_apart(value)

    def wanted(self, index: int) -> str | None:
        return self._packings[index].describe()

    show_full = ShardedParams.show_full

    def _display_in(self, places: Sequence[ParamPlaces]) -> PackedDisplay:
        return PackedDisplay(
            *(self.layout.fqns, places, self._stand_ins()),
            packings=self._packings,
            attributes=self._attributes,
        )
