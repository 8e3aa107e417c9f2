"""Chooses the way of communicating for a group; no other file does.

Two environment variables have a say in it, both for groups over gloo, read when modules are wrapped, and to
be the same on all ranks. With FSDP_WRAP_SHARED_MEMORY=1 ranks that share a host communicate through memory.
FSDP_WRAP_GLOO tells whether the others exchange messages ("exchange"), call gloo's own collectives ("plain"),
or do what is faster for the size (not set).
"""

from __future__ import annotations

import math
import os

import torch
import torch.distributed as dist

from fsdp_wrap._collectives import Communicator, ExchangeCommunicator, GroupCommunicator, SoloCommunicator
from fsdp_wrap._host_communicator import HostCommunicator
from fsdp_wrap._mesh import Ranks

__all__ = ["make_communicator"]

_LEAST_EXCHANGED = 1 << 20
"""Bytes. By `benchmarks/collectives.py` messages win from here on, at 2 to 8 ranks. Two ranks gain below as
well if they come at the same time, but lose by looking out for each other if not (see `Watch`)."""

_MOST_RANKS = 8
"""Beyond, and between hosts with several ranks each, gloo's ring of gathers crosses fewer links."""

_GLOO = "FSDP_WRAP_GLOO"
_SHARED_MEMORY = "FSDP_WRAP_SHARED_MEMORY"


def make_communicator(ranks: Ranks | None, device: torch.device) -> Communicator:
    """Chooses the way of communicating for a group (None: this rank alone) and a device.

    Raises:
        ValueError: If the environment variable that chooses for gloo has a value that is unknown.
    """
    if ranks is None or ranks.size == 1:
        return SoloCommunicator(device)
    if device.type != "cpu" or "cpu:gloo" not in dist.get_backend_config(ranks.group).split(","):
        return GroupCommunicator(ranks, device)
    least = _least_exchanged(ranks.size)
    if os.environ.get(_SHARED_MEMORY) == "1":
        return HostCommunicator(ranks, device, least)
    if least == math.inf:
        return GroupCommunicator(ranks, device)
    return ExchangeCommunicator(ranks, device, least)


def _least_exchanged(size: int) -> float:
    """Returns from how many bytes on ranks exchange a full tensor."""
    setting = os.environ.get(_GLOO)
    if setting not in (None, "plain", "exchange"):
        raise ValueError(f'{_GLOO} must be "plain" or "exchange" or not be set, not {setting!r}')
    if setting == "exchange":
        return 1
    if setting == "plain" or size > _MOST_RANKS:
        return math.inf
    return _LEAST_EXCHANGED
