"""Process groups, this rank's place in them, and groups derived from others."""

from __future__ import annotations

import os
import socket
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, partial
from inspect import signature
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from fsdp_wrap._comm.device import device_type_for
from fsdp_wrap._core import warn_caller
from fsdp_wrap._core.torch_private import FakeProcessGroup, HashStore, groups_alive

_Made = TypeVar("_Made")

PLANNED = "planned"
"""The backend of a planned group, which stands for the one that its device would have."""

_IN_ORDER: Any = {"sort_ranks": False} if "sort_ranks" in signature(dist.new_group).parameters else {}
_new_group: Any = partial(dist.new_group, use_local_synchronization=True, **_IN_ORDER)
"""Makes a group of ranks in the order given; torch before 2.12 sorts those of all groups."""

CARRY_NOTHING = ("fake", PLANNED)
"""The backends of groups that carry nothing."""


@dataclass
class PlannedRounds:
    """Rounds of `uneven` that one rank of a planned group leads, for another one that helps.

    They are planned one after the other, the helper last.

    Attributes:
        helper: The rank that helps.
        told: The numbers with which the leader comes to each agreement, and its orders until the next.
    """

    helper: int
    told: deque[tuple[Sequence[float], deque[Sequence[int]]]] = field(default_factory=deque)


planned_rounds: ContextVar[PlannedRounds | None] = ContextVar("planned_rounds", default=None)
"""The rounds of the rank that is planned now; None where no rank helps."""


@dataclass(frozen=True)
class Ranks:
    """A process group, or a stand-in for one, and this process's place in it."""

    group: dist.ProcessGroup
    rank: int
    size: int

    @property
    def communicate(self) -> bool:
        """Whether there is a process group; a stand-in knows a rank and a size, and carries nothing."""
        return isinstance(self.group, dist.ProcessGroup)

    @property
    def reference(self) -> Callable[[], dist.ProcessGroup | None]:
        """A function that returns the group as long as it lives, and does not keep it alive."""
        # A stand-in holds nothing that must go, and may have no other reference.
        return weakref.ref(self.group) if self.communicate else lambda: self.group

    @property
    def members(self) -> list[int]:
        """Global ranks of the group; a stand-in counts its own."""
        return dist.get_process_group_ranks(self.group) if self.communicate else [*range(self.size)]


def ranks_in(group: Any) -> Ranks:
    """Returns this process's place in a group, or in a stand-in with the methods `rank()` and `size()`.

    With a stand-in a module can be wrapped as one rank of many would, without the others. Raises a ValueError
    if this process is not in the group, a TypeError for anything else.
    """
    outside = group is dist.GroupMember.NON_GROUP_MEMBER
    if not outside and not isinstance(group, dist.ProcessGroup):
        rank, size = (getattr(group, name, None) for name in ("rank", "size"))
        if not (callable(rank) and callable(size)):
            raise TypeError(
                "process_group must be a torch.distributed.ProcessGroup, something with its methods rank() "
                f"and size(), or None, not {type(group).__name__}"
            )
        return Ranks(group, rank(), size())
    if outside or dist.get_rank(group) < 0:
        raise ValueError(
            f"rank {dist.get_rank()} is not part of the process_group that it was given: wrap only on the "
            "ranks of the group, or pass each rank the group that it belongs to"
        )
    return Ranks(group, dist.get_rank(group), dist.get_world_size(group))


def default_group(user: str) -> dist.ProcessGroup:
    """Returns the process group of all ranks; raises a ValueError that names `user` if there is none."""
    group = dist.group.WORLD if dist.is_available() else None
    if group is None:
        raise ValueError(
            f"{user} needs a process group, and there is none: call "
            "torch.distributed.init_process_group() before wrapping (torchrun sets what it reads)"
        )
    return group


def default_mesh(user: str, *names: str) -> DeviceMesh:
    """Returns the one-dimensional mesh of all ranks, on the accelerator if they can communicate from it.

    `names` is the name of its dimension, if any; `user` is for the error where there is no process group.
    """
    group = default_group(user)

    kind, size = device_type_for(group), (dist.get_world_size(),)
    make = partial(init_device_mesh, kind, size, mesh_dim_names=names or None)
    return _mesh_once(group, ("mesh", *names), make)


def mesh_over(group: dist.ProcessGroup, device_type: str, names: tuple[str, ...] | None = None) -> DeviceMesh:
    """Returns the one-dimensional mesh of a group's ranks, without communication."""

    make = partial(DeviceMesh.from_group, group, device_type, mesh_dim_names=names)
    return _mesh_once(group, ("mesh over", device_type, names), make)


def _mesh_once(group: dist.ProcessGroup, what: Hashable, make: Callable[[], DeviceMesh]) -> DeviceMesh:
    def made() -> DeviceMesh:
        mesh = make()
        # It finds groups by name as well. Torch keeps meshes in caches of its own, and groups must not stay.
        mesh._pg_registry.clear()
        return mesh

    return once_for(group, what, made)


def group_of(ranks: Sequence[int], known: dist.ProcessGroup | None = None) -> dist.ProcessGroup:
    """Returns the process group of these global ranks in this order, without making one.

    `known` is the one to take unless it was destroyed. Raises a RuntimeError if there is none.
    """
    found = known or _found(ranks)
    if found is not None and found in groups_alive().pg_map:
        return found
    raise RuntimeError(
        f"ranks {list(ranks)} hold this tensor between them, and this process has no process group of just "
        "them (any more): pass the group whose ranks have all of it, as full_tensor(group)"
    )


def group_over(ranks: Sequence[int], device: torch.device) -> dist.ProcessGroup:
    """Returns a process group of these global ranks; collective among them where it must be made."""
    return _found(ranks) or _new_group([*ranks], time_limit(dist.group.WORLD, device))


def _found(ranks: Sequence[int]) -> dist.ProcessGroup | None:
    """Returns a process group of these global ranks in this order, if there is one."""
    return next((one for one in groups_alive().pg_map if dist.get_process_group_ranks(one) == [*ranks]), None)


def host_group_over(ranks: Sequence[int]) -> dist.ProcessGroup:
    """Returns a group of these global ranks that sends from host memory and serves nothing else.

    Collective at first. Where the default group carries nothing, that is returned.
    """
    world = default_group("this")
    if dist.get_backend(world) in CARRY_NOTHING:
        return world

    def make() -> Any:
        limit = dist.constants.default_pg_timeout
        return _new_group([*ranks], limit, "gloo", group_desc="fsdp_wrap agreements")

    return ranks_in(once_for(world, ("agreements", *ranks), make)).group


def time_limit(group: dist.ProcessGroup | None, device: torch.device) -> timedelta:
    """Returns how long collectives of a group may take."""
    try:
        limit: timedelta = group._get_backend(device).options._timeout  # type: ignore[union-attr]
    except (AttributeError, RuntimeError):  # not every backend tells, and the group may be gone
        return dist.constants.default_pg_timeout
    return limit


def _made_within(group: Any, what: Hashable, ranks: Sequence[int], purpose: str | None = None) -> Any:
    """Returns a group of some ranks of another one, with its time limit; collective among them at first."""

    def make() -> Any:
        limit = time_limit(group, torch.device(device_type_for(group)))
        return _new_group([*ranks], limit, group_desc=purpose)

    return once_for(group, what, make)


def neighbours(ranks: Ranks, size: int) -> Ranks:
    """Returns the group of `size` consecutive ranks that this one is in; collective among them.

    Raises a ValueError if the group cannot be cut so.
    """
    if not 1 < size < ranks.size or ranks.size % size:
        raise ValueError(
            f"reshard_after_forward={size} must divide the number of ranks to shard over, {ranks.size}: "
            "choose a divisor of it, True or False"
        )
    first = ranks.rank // size * size
    return ranks_in(_made_within(ranks.group, ("neighbours", size), ranks.members[first : first + size]))


def twin_of(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Returns a second group of the same ranks, one for all callers; collective among them at first."""
    members = dist.get_process_group_ranks(group)
    return ranks_in(_made_within(group, "twin", members, "fsdp_wrap reductions")).group


def host_id() -> str:
    """Names this host with its process ids and network: ranks that share all three get the same name."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        pids, network = (os.stat(f"/proc/self/ns/{kind}").st_ino for kind in ("pid", "net"))
    except OSError:  # not Linux
        return socket.gethostname()
    return f"{boot} {pids} {network}"


def groups_by_host(world: dist.ProcessGroup) -> tuple[Any, Any]:
    """Returns the groups (within this rank's host, across hosts) by LOCAL_WORLD_SIZE; collective.

    Raises a ValueError if hosts cannot have that many ranks each.
    """
    size = dist.get_world_size(world)
    local = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if local < 1 or size % local:
        raise ValueError(
            f"cannot shard within hosts: LOCAL_WORLD_SIZE={local} does not divide the {size} ranks; "
            "pass a (shard, replicate) pair as process_group or a device_mesh of two dimensions"
        )
    return once_for(world, ("hosts", local), lambda: _make_groups_by_host(size, local))


def _make_groups_by_host(size: int, local: int) -> tuple[Any, Any]:
    rank = dist.get_rank()
    if rank == 0:
        warn_caller(
            f"no groups were given: sharding within each host ({local} ranks by LOCAL_WORLD_SIZE) and "
            f"replicating across {size // local}"
        )
    within = [dist.new_group(range(start, start + local)) for start in range(0, size, local)]
    across = [dist.new_group(range(place, size, local)) for place in range(local)]
    return within[rank // local], across[rank % local]


_made: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[Hashable, Any]] = weakref.WeakKeyDictionary()


def once_for(group: dist.ProcessGroup, what: Hashable, make: Callable[[], _Made]) -> _Made:
    """Makes something for a group once, for all units, and keeps it as long as the group lives.

    It must not refer to the group, which would live for ever.
    """
    made = _made.setdefault(group, {})
    if what not in made:
        made[what] = make()
    result: _Made = made[what]
    return result


@cache
def listening(rank: int, size: int) -> dist.ProcessGroup:
    """Returns a group of the same ranks that carries nothing, to call where dispatch modes count collectives.

    `CommDebugMode` and the like count c10d's operators, which not every collective here calls, and may spoil
    what they are given.
    """
    group = dist.ProcessGroup(HashStore(), rank, size)
    backend = FakeProcessGroup._create_internal(rank, size)
    group._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.CUSTOM, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    return group
