"""Compression: gathers and reductions that send fewer bytes than the numbers they stand for.

Full parameters, state dicts and optimizers stay exact: they use the sharded parameters in master dtype.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter

import torch
from torch import nn

from fsdp_wrap._by_hand import require_idle
from fsdp_wrap._checks import refuse_unsharded
from fsdp_wrap._comm import Buffer, Pending, Then
from fsdp_wrap._compression.codecs import CODECS, Codec, ExactTail
from fsdp_wrap._core import is_castable
from fsdp_wrap._params import Buffers, holds_codes
from fsdp_wrap._runtime import buffers_of, units_in
from fsdp_wrap._state import compression

_FEWEST = 1024
"""The fewest elements of a shard for which the saved bytes pay for the kernels."""


@compression.fill
def compress(module: nn.Module, *, gathers: str | None, reductions: str | None) -> None:
    """Implements `comm_hooks.compress`."""
    gather_codec, reduction_codec = _codec("gathers", gathers), _codec("reductions", reductions)
    all_buffers = _buffers_in(module, reductions)
    for communicator in dict.fromkeys(buffers.communicator for buffers in all_buffers):
        communicator.agree("compress()", {"gathers": gathers, "reductions": reductions})
    for buffers in all_buffers:
        if gathers is reductions is None:
            if isinstance(buffers.transport, CompressedTransport):
                buffers.set_transport(attrgetter("communicator"))
        elif buffers.communicator.size > 1:
            codec = None if reduction_codec is None else _reducing(reduction_codec, buffers)
            buffers.set_transport(partial(CompressedTransport, gather_codec, codec))


def _codec(argument: str, name: str | None) -> Codec | None:
    if name is not None and name not in CODECS:
        raise ValueError(f"{argument} may be compressed as {', '.join(CODECS)} or None, not as {name!r}")
    return None if name is None else CODECS[name]


def _buffers_in(module: nn.Module, reductions: str | None) -> list[Buffers]:
    units = units_in(module).values()
    if not units:
        refuse_unsharded(module, "compress()")
    require_idle(units, "compress()")
    for unit in units if reductions is not None else ():
        if unit.buffers.gradients.has_own_reduction:
            raise RuntimeError(
                f"{unit.name} has a communication hook already, which reduces its gradients; compress the "
                "gathers only"
            )
    return buffers_of(units)


def _reducing(codec: Codec, buffers: Buffers) -> Codec:
    """Returns a codec that leaves the layouts' notes behind the gradients exact."""
    noted = max(segment.layout.noted_numel for segment in buffers.segments)
    return ExactTail(codec, noted) if noted else codec


class CompressedTransport:
    """A `Transport` that encodes a unit's parameters and gradients; without a codec they stay as they are.

    So do parameters that are codes, such as those of 4 bits: their dtype is not that of their numbers.
    """

    def __init__(self, gathers: Codec | None, reductions: Codec | None, buffers: Buffers) -> None:
        self._communicator, self.positions = buffers.communicator, buffers.communicator.positions
        self._gathers, self._reductions = gathers, reductions
        self._of_codes = [holds_codes(sharded.side_data) for sharded in buffers.params]
        self.keeps_notes = reductions is None or isinstance(reductions, ExactTail)
        self.compresses_reductions = reductions is not None

    def gather_into(self, buffers: list[Buffer], fill: Callable[[], object]) -> Pending:
        """Gathers encoded parts; a rank's own part becomes the decoded one too, so that all compute alike."""
        communicator, codec = self._communicator, self._gathers
        if codec is None:
            return communicator.gather_into(buffers, fill)
        for buffer in buffers:
            buffer.allocate()
        full = [buffer.data for buffer in buffers]
        sent = [
            numbers if of_codes else self._room(codec, numbers)
            for numbers, of_codes in zip(full, self._of_codes, strict=True)
        ]
        encodings = [(numbers, room) for numbers, room in zip(full, sent) if room is not numbers]

        def fill_encoded() -> None:
            fill()
            for numbers, room in encodings:
                codec.encode(communicator.own_part(numbers), communicator.own_part(room))

        def decode() -> None:
            for numbers, room in encodings:
                for part, encoded in zip(self._parts(numbers), self._parts(room)):
                    for target, values in codec.decoded(encoded, part):
                        target.copy_(values)

        return Then([communicator.all_gather(sent, fill_encoded)], [decode])

    def reduce_scatter(self, shards: list[torch.Tensor], full: list[torch.Tensor]) -> Pending:
        """Reduces by an exchange of encoded parts; each rank sums decoded ones, so that no sum is rounded."""
        codec = self._reductions
        if codec is None:
            return self._communicator.reduce_scatter(shards, full)
        works: list[Pending] = []
        plain: list[tuple[torch.Tensor, torch.Tensor]] = []
        for shard, numbers in zip(shards, full):
            room = self._room(codec, numbers)
            if room is numbers:
                plain.append((shard, numbers))
            else:
                works.append(self._exchange(codec, shard, numbers, room))
        if plain:
            works.append(self._communicator.reduce_scatter(*map(list, zip(*plain))))
        return Then(works)

    def _exchange(
        self, codec: Codec, shard: torch.Tensor, numbers: torch.Tensor, room: torch.Tensor
    ) -> Pending:
        """Sends every other rank its part of `numbers`, encoded, and sums what comes in `shard`."""
        own = self._communicator.rank
        for rank, (part, encoded) in enumerate(zip(self._parts(numbers), self._parts(room))):
            if rank == own:
                shard.copy_(part)
            else:
                codec.encode(part, encoded)
        received = self._communicator.empty(room.numel(), torch.uint8)

        def add() -> None:
            for rank, encoded in enumerate(self._parts(received)):
                for target, values in codec.decoded(encoded, shard) if rank != own else ():
                    target.add_(values)

        return Then([self._communicator.all_to_all(received, room)], [add])

    def _room(self, codec: Codec, numbers: torch.Tensor) -> torch.Tensor:
        """Returns memory for all ranks' encoded parts; `numbers` itself where encoding does not pay."""
        ranks = self._communicator.size
        numel, dtype = numbers.numel() // ranks, numbers.dtype
        if not is_castable(dtype) or numel < _FEWEST or codec.nbytes(numel, dtype) >= numel * dtype.itemsize:
            return numbers
        return self._communicator.empty(ranks * codec.nbytes(numel, dtype), torch.uint8)

    def _parts(self, tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tensor.chunk(self._communicator.size)
