"""`Gathered`: the all-gather inputs and outputs of one parameter's subclass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from fsdp_wrap._comm import Buffer, tell_resized
from fsdp_wrap._params.extensions.methods import Whole


class Gathered:
    """The all-gather inputs and outputs of one parameter's subclass, which computes in `dtype`.

    Attributes:
        inputs: Tensors of this rank's part to be gathered.
        kinds: Shape and dtype of each input.
        buffers: For each input, the bytes of all ranks.
    """

    def __init__(self, whole: Whole, dtype: torch.dtype) -> None:
        self._whole, self._dtype = whole, dtype
        self._metadata: Any = None
        self._outputs: tuple[torch.Tensor, ...] = ()
        self._besides: list[tuple[torch.UntypedStorage, int]] = []
        self.inputs: Sequence[torch.Tensor] = ()
        self.kinds: list[tuple[torch.Size, torch.dtype]] = []
        self.buffers: Sequence[Buffer] = ()

    def ask(self, local: torch.Tensor, module: nn.Module) -> bool:
        """Asks a part for its inputs; returns whether they are known for the first time."""
        self.inputs, self._metadata = self._whole.inputs_of(local, module)
        before, kinds = self.kinds, [(tensor.shape, tensor.dtype) for tensor in self.inputs]
        if before and before != kinds:
            raise RuntimeError(
                f"the {type(local).__name__} in parameter '{self._whole.fqn}' gave tensors of (shape, dtype) "
                f"{kinds} to be gathered, and {before} before; they must stay the same"
            )
        self.kinds = kinds
        return not before

    @property
    def nbytes(self) -> list[int]:
        """Bytes of each input."""
        return [shape.numel() * dtype.itemsize for shape, dtype in self.kinds]

    def lie_in(self, buffers: Sequence[Buffer]) -> None:
        """Moves to allocated buffers, one for each input."""
        self.buffers = buffers
        pairs = zip(buffers, self.inputs)
        self._outputs = tuple(self._whole.joined(buffer.tensor.data, like) for buffer, like in pairs)

    def first(self, local: torch.Tensor) -> torch.Tensor:
        """Lets the subclass make the full tensor from the gathered outputs."""
        unsharded, inner = self._whole.made_of(self._outputs, self._metadata, self._dtype, local)
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in inner}
        for buffer in self.buffers:
            storages.pop(buffer.tensor.untyped_storage()._cdata, None)
        self._besides = [(storage, storage.nbytes()) for storage in storages.values()]
        return unsharded  # type: ignore[no-any-return]

    def again(self, local: torch.Tensor, leaf: nn.Parameter) -> None:
        """Lets the subclass fill a leaf that was made before."""
        for storage, nbytes in self._besides:
            if storage.nbytes() != nbytes:
                storage.resize_(nbytes)
                tell_resized(storage)
        self._whole.made_of(self._outputs, self._metadata, self._dtype, local, out=leaf)

    def free(self) -> None:
        """Frees the buffers, and memory that the subclass has beside them."""
        if all([buffer.free() for buffer in self.buffers]):
            for storage, _ in self._besides:
                storage.resize_(0)
                tell_resized(storage)


class Several(Buffer):
    """Buffers that are allocated and freed together."""

    def __init__(self, buffers: Sequence[Buffer]) -> None:
        self._buffers = buffers
        self.nbytes = sum(buffer.nbytes for buffer in buffers)
        self.storages = set[int]().union(*(buffer.storages for buffer in buffers))

    @property
    def allocated(self) -> bool:
        return all(buffer.allocated for buffer in self._buffers)

    @property
    def resizable(self) -> bool:
        return all(buffer.resizable for buffer in self._buffers)

    def allocate(self) -> None:
        for buffer in self._buffers:
            buffer.allocate()

    def free(self) -> bool:
        return all([buffer.free() for buffer in self._buffers])
