"""Chooses the communicator of a group; no other file does.

Two environment variables count, both for groups over gloo on the CPU, read when modules are wrapped, and the
same on all ranks. With FSDP_WRAP_SHARED_MEMORY=0 ranks that share a host do not communicate through its
memory. FSDP_WRAP_GLOO tells whether ranks that do not share memory exchange messages ("exchange"), call
gloo's own collectives ("plain"), or take the faster way for the size (not set): messages for large tensors,
and one all-to-all of gloo's for small ones.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from fsdp_wrap._comm.groups import PLANNED, Ranks
from fsdp_wrap._comm.messages import ExchangeCommunicator
from fsdp_wrap._comm.positions.group import positions_of
from fsdp_wrap._comm.process_group import Communicator, GroupCommunicator
from fsdp_wrap._core import Seam, __version__

_LEAST_EXCHANGED = 1 << 22
"""Bytes. Below, an all-to-all of gloo's takes as long as messages or half as long, at 2 to 4 ranks."""

_MOST_RANKS = 8
"""Beyond, gloo's ring of gathers crosses fewer links."""

_GLOO = "FSDP_WRAP_GLOO"
_SHARED_MEMORY = "FSDP_WRAP_SHARED_MEMORY"
_FOLDER = "fsdp_wrap._comm.shared_memory"  # of the add-on, which need not be there
_SAME_ENVIRONMENT = "Set it alike on all ranks before wrapping: it chooses the way of communicating"
SAME_SETTINGS = "Set variables and pass shared_memory alike on all ranks: they choose how to communicate"

_SAME_VERSIONS = "Install the same on all ranks: others communicate in ways of their own"

shared_memory_between: Seam[Callable[[Ranks, torch.device, float], GroupCommunicator]] = Seam(
    "shared memory", _FOLDER
)
"""Makes the communicator of ranks of which some may share a host, given as to `between_any`."""


def make_communicator(ranks: Ranks | None, device: torch.device, shared_memory: bool = True) -> Communicator:
    """Chooses the communicator for a group (None: this rank alone) and a device.

    `shared_memory` tells whether ranks that share a host may communicate through its memory. Raises a
    ValueError for an unknown value of an environment variable, a RuntimeError if another rank has another
    value or version.
    """
    if ranks is None or ranks.size == 1:
        return Communicator(0, 1, device)
    if not ranks.communicate:
        return AbsentCommunicator(ranks, device)
    agreement = positions_of(ranks.group).agreement
    agreement.require("versions", _versions(), _SAME_VERSIONS)
    backends = dist.get_backend_config(ranks.group).split(",")
    planned = f"cpu:{PLANNED}" in backends
    if device.type != "cpu" or not (planned or "cpu:gloo" in backends):
        return GroupCommunicator(ranks, device)
    least = _least_exchanged(ranks.size)
    shares = _setting(_SHARED_MEMORY, "0", "1") != "0" and shared_memory and not planned
    agreement.require("environment variables", _settings(), _SAME_ENVIRONMENT)
    settings = [*_settings(), f"shared_memory={shared_memory}"]
    make = shared_memory_between.filled if shares else None
    made = (make or between_any)(ranks, device, least)
    made.compare(settings, lambda: agreement.require("how they communicate", settings, SAME_SETTINGS))
    return made


def between_any(ranks: Ranks, device: torch.device, least: float) -> GroupCommunicator:
    """Returns a communicator for ranks wherever they run."""
    plain = least == math.inf
    return GroupCommunicator(ranks, device) if plain else ExchangeCommunicator(ranks, device, least)


def _least_exchanged(size: int) -> float:
    """Returns from how many bytes on ranks exchange a full tensor."""
    setting = _setting(_GLOO, "plain", "exchange")
    if setting == "exchange":
        return 1
    if setting == "plain" or size > _MOST_RANKS:
        return math.inf
    return _LEAST_EXCHANGED


def _settings() -> list[str]:
    """Formats the variables with their values; an unset one has its default."""
    settings = {_SHARED_MEMORY: os.environ.get(_SHARED_MEMORY, "1"), _GLOO: os.environ.get(_GLOO, "not set")}
    return [f"{name}={value}" for name, value in settings.items()]


@cache  # it looks for a folder, and each unit asks
def _versions() -> list[str]:
    """Formats the versions of this library, which reads other ranks' notes, and of torch but its patch."""
    major, minor, *_ = torch.__version__.split(".")
    own = __version__ if find_spec(_FOLDER) else f"{__version__} without shared memory"
    return [f"fsdp_wrap {own}", f"torch {major}.{minor}"]


def _setting(name: str, *known: str) -> str | None:
    value = os.environ.get(name)
    if value not in (None, *known):
        raise ValueError(f'{name} must be "{known[0]}" or "{known[1]}" or not be set, not {value!r}')
    return value


class AbsentCommunicator(Communicator):
    """A communicator of a stand-in group: it allocates buffers, and refuses to communicate.

    So a module can be wrapped as one rank of many would wrap it, without the others.
    """

    def __init__(self, ranks: Ranks, device: torch.device) -> None:
        super().__init__(ranks.rank, ranks.size, device)
        self._group = ranks.group

    def _identity(self) -> object:
        return self.device, id(self._group)

    @property
    def members(self) -> frozenset[int]:
        return frozenset(range(self.size))

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            f"this module was wrapped as rank {self.rank} of {self.size} with a "
            f"{type(self._group).__name__} as process_group, which tells a rank and a size and carries "
            "nothing: to run it, or to gather its parameters, wrap it with a torch.distributed.ProcessGroup"
        )

    all_gather = all_gather_parts = reduce_scatter = all_reduce = _refuse
    broadcast = gather = scatter = all_gather_object = broadcast_object = all_to_all = _refuse
