"""Weights from a trainer to one other process, over a gloo process group of the two.

    pair = Pair("trainer-0:29700", receives=False) if dist.get_rank() == 0 else None
    sender = WeightSender(pair)
    sender.send(weight_source(model))        # on every rank
    sender.send_changes(changes.collect())   # on every rank
    sender.close()

    for message in received(Pair("trainer-0:29700", receives=True)):  # in the other process
        message.apply(model.state_dict())

Inference engines speak ways of their own (see `vllm_wire.py`), or read `fsdp_wrap.weights.WeightFolder`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from fsdp_wrap.weights import Change, Changes, WeightMeta, WeightSource, apply_changes


class PeerLost(RuntimeError):
    """The other process has ended, or did not answer in time."""


@contextmanager
def peer_lost() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise PeerLost(f"the other process has ended, or did not answer in time: {error}") from error


class Pair:
    """A process group of a sender and a receiver, beside all other groups of the two.

    Args:
        address: "host:port", where the sender listens.
        receives: Whether this is the receiver.
        timeout: Seconds to wait for the other process at most.
    """

    def __init__(self, address: str, *, receives: bool, timeout: float = 60.0) -> None:
        host, _, port = address.rpartition(":")
        self._other, self._limit = int(not receives), timedelta(seconds=timeout)
        with peer_lost():
            store = dist.TCPStore(host, int(port), 2, not receives, self._limit, wait_for_workers=False)
            self._group = dist.ProcessGroupGloo(store, int(receives), 2, self._limit)

    def put(self, tensor: torch.Tensor) -> None:
        data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        if len(data):
            with peer_lost():
                self._group.send([data], self._other, 0).wait(self._limit)

    def take(self, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        tensor = torch.empty(torch.Size(shape), dtype=dtype)
        if tensor.numel():
            with peer_lost():
                self._group.recv([tensor.view(-1).view(torch.uint8)], self._other, 0).wait(self._limit)
        return tensor


class WeightSender:
    """Sends a model's weights, all of them or what changed; every rank makes one and calls its methods.

    Args:
        pair: To the receiver, on the first rank; None on all others.
    """

    def __init__(self, pair: Pair | None) -> None:
        self._pair, self.version = pair, 0

    def send(self, source: WeightSource) -> None:
        """Sends all tensors; raises `PeerLost` on every rank, once all have taken part in the gathers."""
        self.version += 1
        failure: PeerLost | None = None
        try:
            self._announce("full", source.metadata())
        except PeerLost as error:
            failure = error
        for _, tensor in source:
            if self._pair is not None and failure is None:
                try:
                    self._pair.put(tensor)
                except PeerLost as error:
                    failure = error
        told = [None if failure is None else str(failure)]
        dist.broadcast_object_list(told)
        if told[0] is not None:
            raise PeerLost(told[0]) from failure

    def send_changes(self, changes: Changes) -> None:
        """Sends what `WeightChanges.collect` has found; raises `PeerLost` on the first rank."""
        self.version += 1
        metadata = [WeightMeta(change.name, change.value.dtype, (len(change.index),)) for change in changes]
        self._announce("changes", metadata, changes.checksums)
        for change in changes if self._pair is not None else ():
            self._pair.put(change.index)
            self._pair.put(change.value)

    def close(self) -> None:
        with suppress(PeerLost):
            self._announce("end", [])

    def _announce(
        self, kind: str, metadata: Sequence[WeightMeta], checksums: Mapping[str, int] | None = None
    ) -> None:
        if self._pair is None:
            return
        tensors = [(name, str(dtype).removeprefix("torch."), shape) for name, dtype, shape in metadata]
        header = {"version": self.version, "kind": kind, "tensors": tensors, "checksums": checksums or {}}
        text = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
        self._pair.put(torch.tensor([len(text)]))
        self._pair.put(text)


@dataclass(frozen=True)
class Message:
    """What one call of the sender has sent, apart from the tensors, which `apply` takes."""

    version: int
    whole: bool
    metadata: list[WeightMeta]
    checksums: dict[str, int]
    pair: Pair

    def apply(self, state: Mapping[str, torch.Tensor]) -> None:
        """Writes the tensors, or what changed of them, into those of a state dict; to be called once."""
        if self.whole:
            for name, dtype, shape in self.metadata:
                state[name].detach().copy_(self.pair.take(dtype, shape))
            return
        changes = [
            Change(name, self.pair.take(torch.int64, shape), self.pair.take(dtype, shape))
            for name, dtype, shape in self.metadata
        ]
        apply_changes(state, Changes(changes, self.checksums))


def received(pair: Pair) -> Iterator[Message]:
    """Yields what a `WeightSender` sends until it closes; each must be applied before the next."""
    while True:
        size = int(pair.take(torch.int64, (1,)))
        header = json.loads(bytes(pair.take(torch.uint8, (size,)).tolist()))
        if header["kind"] == "end":
            return
        metadata = [
            WeightMeta(name, getattr(torch, dtype), tuple(shape)) for name, dtype, shape in header["tensors"]
        ]
        yield Message(header["version"], header["kind"] == "full", metadata, header["checksums"], pair)
