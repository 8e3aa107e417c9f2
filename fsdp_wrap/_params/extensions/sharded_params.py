"""`ExtensionParams`: parameters whose tensors are subclasses with their own all-gather inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import nn

from fsdp_wrap._comm import Communicator
from fsdp_wrap._core import MixedPrecisionPolicy, ParamSlot, ShardAlignment
from fsdp_wrap._core.torch_private import is_traceable_wrapper_subclass
from fsdp_wrap._params.dtensor import DTensorParams
from fsdp_wrap._params.extensions.inner import InnerTensors, copied
from fsdp_wrap._params.extensions.methods import Whole, plain, says_nothing
from fsdp_wrap._params.parallel import DataMesh, to_local
from fsdp_wrap._params.sharded_params import Written

_MARK = "_is_param"  # torch's mark on parameters of other classes than its own


class ExtensionParams(DTensorParams):
    """Parameters, each cut along its first dimension; the parts stay tensors of the subclass.

    Gradients are plain tensors, as in any `DTensorParams`. An empty tensor of the same dtype and device
    stands for the flat shard.

    Args:
        mp_policy: Dtypes, for the subclasses' methods; the others as in `DTensorParams`.
    """

    extended = True

    def __init__(
        self,
        slots: Sequence[ParamSlot],
        communicator: Communicator,
        *,
        mesh: DataMesh,
        name: str,
        mp_policy: MixedPrecisionPolicy,
        offload: bool,
        pin: bool,
        alignment: ShardAlignment | None = None,
    ) -> None:
        self._offload, self._pin = offload, pin
        options: dict[str, Any] = {"offload": offload, "pin": pin, "alignment": alignment}
        super().__init__(slots, communicator, mesh=mesh, dims=[0] * len(slots), name=name, **options)
        names = mesh.mesh.mesh_dim_names
        shards = mesh.mesh if mesh.mesh.ndim == 1 or names is None else mesh.mesh[names[-1]]
        self.wholes = [
            Whole(cut.fqn, shards, cut.shape, mp_policy, cut.chunk, self.layout.ranks, inner)
            for cut, inner in zip(self.layout.extents, self._inners)
        ]

    @property
    def locals(self) -> Sequence[torch.Tensor]:
        """This rank's parts, which are subclasses."""
        return self._pieces

    @property
    def modules(self) -> list[nn.Module]:
        """A module of each parameter."""
        return [next(iter(places))[0] for places in self.display.places]

    def _take_over(self, slots: Sequence[ParamSlot]) -> None:
        params = [slot.param for slot in slots]
        self._attributes = (*map(users_attributes, params),)
        cuts = [self._cut_out(index, to_local(param)) for index, param in enumerate(params)]
        self._inners = [inner for inner, _ in cuts]
        self._adopt_all([part for _, part in cuts])
        self._stand_for(params)
        self._show_in([slot.places for slot in slots])
        self.hide_full()

    def _cut_out(self, index: int, param: torch.Tensor) -> tuple[InnerTensors | None, torch.Tensor]:
        """Returns a copy of this rank's part, and how it was cut if the subclass has no methods.

        With methods, only operations are used that subclasses implement for torch's `fully_shard`.
        """
        cut, full = self.layout.extents[index], param.detach()
        rows = cut.rows(self.layout.rank)
        if says_nothing(param):
            inner, own = InnerTensors.cut(cut.fqn, full, (cut.first_row(self.layout.rank), rows))
            return inner, self._placed_own(own)
        chunks = torch.chunk(full, self.layout.ranks, dim=0)
        own = full.new_zeros(chunks[0].size())
        if rows:
            own.narrow(0, 0, rows).copy_(chunks[self.layout.rank])
        return None, self._placed_own(own).narrow(0, 0, rows)

    def _placed_own(self, own: torch.Tensor) -> torch.Tensor:
        """Moves a part to the host if it is offloaded."""
        if self._offload and not own.is_meta:
            own = own.cpu()
            if self._pin and self._accelerator is not None:
                own = own.pin_memory()
        return own

    def _adopt_all(self, parts: Sequence[torch.Tensor]) -> None:
        first = parts[0]
        self._pieces = [*parts]
        self._shard = torch.empty(0, dtype=first.dtype, device="meta" if first.is_meta else first.device)
        self.dtype, self.flat_param = first.dtype, nn.Parameter(self._shard, requires_grad=False)
        self._inner = [
            part.__tensor_flatten__()[0] if is_traceable_wrapper_subclass(part) else () for part in parts
        ]
        self._specs = self._all_specs.in_dtype(self.dtype)

    def _adopt_copies(self) -> None:
        self._adopt_all([*map(_copied, self._inners, map(_detached, self.locals))])

    def _take_values(self, params: Sequence[nn.Parameter]) -> None:
        self._adopt_all([*map(to_local, params)])

    # contents

    def written(self) -> Written:
        versions, places = [], []
        for source, piece, names in zip(self.sources, self._pieces, self._inner):
            inner = [tensor for tensor in map(piece.__dict__.get, names) if tensor is not None] or [piece]
            versions.append(source._version + piece._version + sum(tensor._version for tensor in inner))
            places.append(hash((id(piece), *(tensor.data_ptr() for tensor in inner))))
        return (*versions,), (*places,)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(
            f"parameter '{self.layout.fqns[0]}' is a {type(self.locals[0]).__name__}, whose values are no "
            "plain numbers that could be shown or saved piece by piece: use the DTensor that state_dict() of "
            "its module has"
        )

    intervals = write_shard = read_shard = _refuse

    def plain_gradient(self, grad: torch.Tensor) -> torch.Tensor:
        return plain(super().plain_gradient(grad))

    # leaves

    def make_leaves(self, buffer: torch.Tensor) -> list[nn.Parameter]:
        """Makes placeholders for the leaves until the first values are gathered; see `become`."""
        # The memory of subclasses is their own affair.
        self.memory = [torch.empty(cut.shape, dtype=self.dtype, device="meta") for cut in self.layout.extents]
        self.leaves = [*map(self._leaf, range(len(self.layout.extents)), self.memory)]
        self._display_leaves()
        return self.leaves

    def _leaf(self, index: int, unsharded: torch.Tensor) -> nn.Parameter:
        part = self._parts[index]
        leaf = nn.Parameter(unsharded, requires_grad=False) if part is None else part.parameter(unsharded)
        leaf.__dict__.update(self._attributes[index])
        return leaf

    def become(self, unsharded: Sequence[torch.Tensor]) -> None:
        """Makes the leaves from full tensors of the subclasses; `requires_grad` is the placeholders'."""
        for index, (tensor, cut) in enumerate(zip(unsharded, self.layout.extents)):
            if tensor.size() != cut.shape:  # it has padding
                tensor = torch.as_strided(tensor, cut.shape, self.wholes[index].stride, 0)
            leaf = self._leaf(index, tensor)
            leaf.requires_grad_(self.leaves[index].requires_grad)
            self.leaves[index] = leaf
        self._display_leaves()


_detached = torch.Tensor.detach


def _copied(inner: InnerTensors | None, piece: torch.Tensor) -> torch.Tensor:
    return piece.new_zeros(piece.size()).copy_(piece) if inner is None else copied(piece)


def users_attributes(param: nn.Parameter) -> dict[str, Any]:
    """Returns attributes that users have set on a parameter, not those of its class."""
    own = param.detach().__dict__
    return {name: value for name, value in param.__dict__.items() if name not in own and name != _MARK}
