"""Chooses the way of communicating for a group; no other file does.

Two environment variables have a say in it, both for groups over gloo on the CPU, read when modules are
wrapped, and to be the same on all ranks. With FSDP_WRAP_SHARED_MEMORY=0 ranks that share a host do not
communicate through its memory. FSDP_WRAP_GLOO tells whether ranks that do not share memory exchange messages
("exchange"), call gloo's own collectives ("plain"), or do what is faster for the size (not set).
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from fsdp_wrap._absent_communicator import AbsentCommunicator
from fsdp_wrap._collectives import Communicator, ExchangeCommunicator, GroupCommunicator, SoloCommunicator
from fsdp_wrap._connections import Connections
from fsdp_wrap._device import Pending
from fsdp_wrap._groups import neighbours
from fsdp_wrap._host_communicator import HostCommunicator
from fsdp_wrap._mesh import Ranks
from fsdp_wrap._positions import positions_of
from fsdp_wrap._rendezvous import Exchange, can_share, find_hosts, open_channel
from fsdp_wrap._resizable import Buffer
from fsdp_wrap._shared_memory import SharedBuffer, own_memory
from fsdp_wrap._two_level import TwoLevelCommunicator
from fsdp_wrap._version import __version__

__all__ = ["SAME_SETTINGS", "make_communicator"]

_LEAST_EXCHANGED = 1 << 20
"""Bytes. By `benchmarks/collectives.py` messages win from here on, at 2 to 8 ranks. Two ranks gain below as
well if they come at the same time, but lose by looking out for each other if not (see `Watch`)."""

_MOST_RANKS = 8
"""Beyond, gloo's ring of gathers crosses fewer links."""

_LEAST_POOLED = 1 << 16
"""Bytes: less comes from the C library as fast, and is copied as fast as it is noted where it lies."""

_GLOO = "FSDP_WRAP_GLOO"
_SHARED_MEMORY = "FSDP_WRAP_SHARED_MEMORY"
_SAME_ENVIRONMENT = "Set it alike on all ranks before wrapping: it chooses the way of communicating"
SAME_SETTINGS = "Set variables and pass shared_memory alike on all ranks: they choose how to communicate"

_SAME_VERSIONS = "Install the same on all ranks: others communicate in ways of their own"


def make_communicator(ranks: Ranks | None, device: torch.device, shared_memory: bool = True) -> Communicator:
    """Chooses the way of communicating for a group (None: this rank alone) and a device.

    Args:
        ranks: The group.
        device: Where the buffers live.
        shared_memory: Whether ranks that share a host may communicate through its memory.

    Raises:
        ValueError: If an environment variable that has a say has a value that is unknown.
        RuntimeError: If it has another one on another rank, or that runs another version.
    """
    if ranks is None or ranks.size == 1:
        return SoloCommunicator(device)
    if not ranks.communicate:
        return AbsentCommunicator(ranks, device)
    agreement = positions_of(ranks.group).agreement
    agreement.require("versions", _versions(), _SAME_VERSIONS)
    if device.type != "cpu" or "cpu:gloo" not in dist.get_backend_config(ranks.group).split(","):
        return GroupCommunicator(ranks, device)
    least = _least_exchanged(ranks.size)
    shares = _setting(_SHARED_MEMORY, "0", "1") != "0"
    agreement.require("environment variables", _settings(), _SAME_ENVIRONMENT)
    settings = [*_settings(), f"shared_memory={shared_memory}"]
    shares = shares and shared_memory
    made = AutomaticCommunicator(ranks, device, least) if shares else _between_any(ranks, device, least)
    made.compare(settings, lambda: agreement.require("how they communicate", settings, SAME_SETTINGS))
    return made


def _between_any(ranks: Ranks, device: torch.device, least: float) -> GroupCommunicator:
    """Returns what does not ask where ranks run."""
    if least == math.inf:
        return GroupCommunicator(ranks, device)
    return ExchangeCommunicator(ranks, device, least)


def _least_exchanged(size: int) -> float:
    """Returns from how many bytes on ranks exchange a full tensor."""
    setting = _setting(_GLOO, "plain", "exchange")
    if setting == "exchange":
        return 1
    if setting == "plain" or size > _MOST_RANKS:
        return math.inf
    return _LEAST_EXCHANGED


def _settings() -> list[str]:
    """Names the variables with their values, of which the default is that of one not set."""
    settings = {_SHARED_MEMORY: os.environ.get(_SHARED_MEMORY, "1"), _GLOO: os.environ.get(_GLOO, "not set")}
    return [f"{name}={value}" for name, value in settings.items()]


def _versions() -> list[str]:
    """Names this library, by whose version ranks read notes of each other, and torch but for its patches."""
    major, minor, *_ = torch.__version__.split(".")
    return [f"fsdp_wrap {__version__}", f"torch {major}.{minor}"]


def _setting(name: str, *known: str) -> str | None:
    value = os.environ.get(name)
    if value not in (None, *known):
        raise ValueError(f'{name} must be "{known[0]}" or "{known[1]}" or not be set, not {value!r}')
    return value


class AutomaticCommunicator(GroupCommunicator):
    """What fits where the ranks run, which they tell each other at the first collective.

    They cannot before, since they may wrap their modules in any order. All of a host: shared memory. As many
    on each of several hosts, side by side: two levels. Otherwise, or where a host does not allow it, what
    does not ask.

    Args:
        ranks: The group, over gloo.
        device: The CPU.
        least: From how many bytes on ranks without shared memory exchange a full tensor.
    """

    def __init__(self, ranks: Ranks, device: torch.device, least: float) -> None:
        super().__init__(ranks, device)
        self._least = least

    @property
    def way(self) -> str:
        group = self._reference()
        chosen = None if group is None else _chosen.get(group)
        return "shared memory where ranks share a host" if chosen is None else chosen.way

    @property
    def _best(self) -> Communicator:
        group = self._group
        chosen = _chosen.get(group)
        if chosen is None:
            chosen = _chosen[group] = self._choose(Ranks(group, self.rank, self.size))
        return chosen

    def _choose(self, ranks: Ranks) -> Communicator:
        hosts = find_hosts(ranks, self._tell_all)
        if hosts is not None and hosts.number == 1 and (ways := self._within(ranks, 1)):
            return ways[0]
        if hosts is not None and hosts.number > 1 and hosts.are_blocks:
            ways = self._within(neighbours(ranks, hosts.ranks_each), 2)
            if ways:
                return TwoLevelCommunicator(ranks, self.device, self._least, *ways)
        return _between_any(ranks, self.device, self._least)

    def _within(self, local: Ranks, number: int) -> list[HostCommunicator]:
        """Opens so many ways between the ranks of this host; none if it is not allowed on each host."""
        first = self.rank - local.rank

        def tell_local(value: Any) -> list[Any]:
            return self._tell_all(value)[first : first + local.size]

        ways: list[HostCommunicator] = []
        for _ in range(number):
            channel = open_channel(local, tell_local)
            if not all(self._tell_all(channel is not None)):
                return []
            assert channel is not None
            ways.append(HostCommunicator(local, self.device, channel))
        return ways

    def _tell_all(self, value: Any) -> list[Any]:
        ranks = Ranks(self._group, self.rank, self.size)
        exchange = Exchange(ranks, value, Connections(ranks.group, self._watch.positions).has_ended)
        self._issue(self._gather_lane, lambda _: [exchange]).wait()
        return exchange.values()

    def buffer(self, numel: int, dtype: torch.dtype) -> Buffer:
        if numel * dtype.itemsize < _LEAST_POOLED or not can_share():
            return super().buffer(numel, dtype)
        return SharedBuffer(numel, dtype, own_memory())

    def gather_into(self, buffers: list[Buffer], fill: Callable[[], object]) -> Pending:
        return self._best.gather_into(buffers, fill)

    def all_gather(self, full: list[torch.Tensor], fill: Callable[[], object]) -> Pending:
        return self._best.all_gather(full, fill)

    def all_gather_parts(
        self, full: torch.Tensor, lengths: Sequence[int], fill: Callable[[torch.Tensor], object]
    ) -> Pending:
        return self._best.all_gather_parts(full, lengths, fill)

    def reduce_scatter(self, shards: list[torch.Tensor], full: list[torch.Tensor]) -> Pending:
        return self._best.reduce_scatter(shards, full)

    def all_reduce(
        self, tensors: list[torch.Tensor], op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM
    ) -> Pending:
        return self._best.all_reduce(tensors, op)

    def broadcast(self, tensor: torch.Tensor) -> None:
        self._best.broadcast(tensor)

    def gather(self, own: torch.Tensor, full: torch.Tensor | None) -> None:
        self._best.gather(own, full)

    def scatter(self, own: torch.Tensor, full: torch.Tensor | None) -> None:
        self._best.scatter(own, full)

    def all_gather_object(self, value: Any) -> list[Any]:
        return self._best.all_gather_object(value)

    def broadcast_object(self, value: Any) -> Any:
        return self._best.broadcast_object(value)

    def all_to_all(self, received: torch.Tensor, sent: torch.Tensor) -> Pending:
        return self._best.all_to_all(received, sent)


_chosen: weakref.WeakKeyDictionary[dist.ProcessGroup, Communicator] = weakref.WeakKeyDictionary()
