"""`Gathering`: what tensor subclasses give to be gathered for one use, and the buffers for it."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Flag, auto
from typing import Any

import torch
from torch import nn

from fsdp_wrap._comm import Buffer, Communicator, tell_resized
from fsdp_wrap._core import round_up
from fsdp_wrap._params.extensions.methods import RELEASES, Whole
from fsdp_wrap._params.layout import ALIGNMENT_BYTES


class Use(Flag):
    """What full parameters are gathered for: to compute a forward, a backward, or both."""

    FORWARD = auto()
    BACKWARD = auto()
    BOTH = FORWARD | BACKWARD

    def __str__(self) -> str:
        """Says it in a message."""
        return "forward and backward" if self is Use.BOTH else str(self.name).lower()


Kinds = list[tuple[torch.Size, torch.dtype]]
"""Shape and dtype of each tensor that one part gives."""


class Given:
    """What one part has given to be gathered.

    Attributes:
        inputs: The tensors; none once they are written to the buffer.
        metadata: What the subclass gets back beside the gathered tensors.
    """

    def __init__(self, whole: Whole, local: torch.Tensor, module: nn.Module) -> None:
        self.inputs: Sequence[torch.Tensor]
        self.inputs, self.metadata = whole.inputs_of(local, module)
        self.kinds: Kinds = [(tensor.shape, tensor.dtype) for tensor in self.inputs]


class Made:
    """What one parameter's subclass has made of gathered tensors: the leaf, and memory beside the buffers."""

    def __init__(self, whole: Whole, dtype: torch.dtype) -> None:
        self._whole, self._dtype = whole, dtype
        self._beside: list[tuple[torch.UntypedStorage, int]] = []

    def first(
        self, outputs: Sequence[torch.Tensor], buffers: Sequence[Buffer], metadata: Any, local: torch.Tensor
    ) -> torch.Tensor:
        """Lets the subclass make the full tensor from the gathered ones, which lie in `buffers`."""
        unsharded, inner = self._whole.made_of(outputs, metadata, self._dtype, local)
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in inner}
        gathered = {buffer.data.untyped_storage()._cdata for buffer in buffers}
        if self._whole.releases(local) and gathered & {*storages}:
            raise RuntimeError(
                f"{RELEASES} of the {type(local).__name__} in parameter '{self._whole.fqn}' says that the "
                "gathered tensors are not needed any more, and fsdp_post_all_gather has returned them among "
                "its tensors: return copies, or let it return False"
            )
        beside = (storage for key, storage in storages.items() if key not in gathered)
        self._beside = [(storage, storage.nbytes()) for storage in beside]
        return unsharded  # type: ignore[no-any-return]

    def again(
        self, outputs: Sequence[torch.Tensor], metadata: Any, local: torch.Tensor, leaf: nn.Parameter
    ) -> None:
        """Lets the subclass fill a leaf that was made before."""
        for storage, nbytes in self._beside:
            if storage.nbytes() != nbytes:
                storage.resize_(nbytes)
                tell_resized(storage)
        self._whole.made_of(outputs, metadata, self._dtype, local, out=leaf)

    def free(self) -> None:
        """Frees the memory beside the buffers."""
        for storage, _ in self._beside:
            storage.resize_(0)
            tell_resized(storage)


class Gathering:
    """The buffers of a segment for one use: those of a single tensor, or of several that travel together.

    Attributes:
        kinds: For each parameter, what its part gives.
        full: The memory of the gathered tensors.
        gathered: The buffer in which all of them travel.
        copies: The places in `full` and in `gathered` between which they are copied.
        buffers: For each parameter, the buffers of its tensors.
        outputs: For each parameter, the gathered tensors.
    """

    def __init__(self, wholes: Sequence[Whole], kinds: Sequence[Kinds], communicator: Communicator) -> None:
        self.kinds = kinds
        ranks = communicator.size
        sizes = [shape.numel() * dtype.itemsize for given in kinds for shape, dtype in given]
        self.copies: tuple[list[torch.Tensor], list[torch.Tensor]] = [], []
        self.full: Buffer
        if len(sizes) == 1:
            self.full = self.gathered = communicator.buffer(ranks * sizes[0], torch.uint8)
            rows, apart = [self.gathered.data.view(ranks, -1)], [self.full]
        else:
            steps = [round_up(size, ALIGNMENT_BYTES) for size in sizes]
            self.gathered = communicator.buffer(ranks * sum(steps), torch.uint8)
            wide = torch.split_with_sizes(self.gathered.data.view(ranks, -1), steps, dim=1)
            rows = [row[:, :size] for row, size in zip(wide, sizes)]
            # Each has memory of its own, since subclasses read storage offsets.
            apart = [Buffer(ranks * size, torch.uint8, communicator.device) for size in sizes]
            self.full = Several(apart)
            self.copies = [buffer.data.view(ranks, -1) for buffer in apart], rows
        self._own_rows = [row[communicator.rank] for row in rows]
        following = iter(apart)
        self.buffers = [[next(following) for _ in given] for given in kinds]
        self.outputs = [
            [whole.joined(buffer.data.data, *kind) for buffer, kind in zip(buffers, given)]
            for whole, buffers, given in zip(wholes, self.buffers, kinds)
        ]
        self.full.free()
        self.gathered.free()

    def write(self, given: Sequence[Given]) -> None:
        """Copies what the parts have given to this rank's part of the buffer."""
        inputs = [tensor for part in given for tensor in part.inputs]
        for row, tensor in zip(self._own_rows, inputs):
            row.copy_(tensor.reshape(-1).view(torch.uint8), non_blocking=True)
        for part in given:
            part.inputs = ()


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
