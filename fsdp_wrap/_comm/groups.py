"""Process groups, this rank's place in them, groups derived from others, and the groups of one unit."""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import socket
import time
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
from torch.utils.weak import WeakIdKeyDictionary

from fsdp_wrap._comm.device import check_present, device_type_for
from fsdp_wrap._core import ShardingStrategy, warn_caller
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
    def members(self) -> tuple[int, ...]:
        """Global ranks of the group, in one tuple for all units; a stand-in counts its own."""
        if not self.communicate:
            return tuple(range(self.size))
        return once_for(self.group, "members", lambda: tuple(dist.get_process_group_ranks(self.group)))


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
    group = known or _found(ranks)
    if group is not None and group in groups_alive().pg_map:
        return group
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


_HYBRID_STRATEGIES = (ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2)
"""Strategies that shard over some ranks and replicate over others."""


@dataclass(frozen=True)
class ShardMesh:
    """The ranks that hold one copy of a unit between them, and those that hold the same part of other copies.

    `shard` is None where every rank holds all parameters, `replicate` where there is one copy. `given` is the
    user's mesh. `copies` are the ranks of the copies where `shard` are those of all of them: they hold the
    state between them, and each copy computes by itself.
    """

    shard: Ranks | None
    replicate: Ranks | None
    given: DeviceMesh | None = None
    copies: ShardMesh | None = None

    @property
    def is_first(self) -> bool:
        """Whether all other ranks are synchronised with this one."""
        return all(ranks.rank == 0 for ranks in self.axes)

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The process groups in use; none for stand-ins."""
        return [ranks.group for ranks in self.axes if ranks.communicate]

    @property
    def axes(self) -> list[Ranks]:
        """The ranks over which parameters are sharded, and those over which they are replicated."""
        return [ranks for ranks in (self.shard, self.replicate) if ranks is not None]


def resolve_mesh(process_group: Any, device_mesh: Any, strategy: ShardingStrategy) -> ShardMesh:
    """Finds the groups that a strategy shards and replicates over.

    `process_group` is a `ProcessGroup` or a stand-in, a (shard, replicate) pair for hybrid strategies, or
    None for the default group. `device_mesh` has one dimension, or two (replicate, shard) for hybrid
    strategies. Raises a ValueError where both are given, nothing fits the strategy, ranks to shard over are
    in another order than their process group's, or this rank is not part of them; a TypeError for other
    types.
    """
    if process_group is not None and device_mesh is not None:
        raise ValueError("process_group and device_mesh exclude each other: pass one of them")
    several = isinstance(process_group, (tuple, list))
    groups: tuple[Any, ...] = tuple(process_group) if several else (process_group,)
    if device_mesh is not None:
        groups = _mesh_groups(device_mesh, strategy is not ShardingStrategy.NO_SHARD)
        check_present(torch.device(device_mesh.device_type), "device_mesh")
    if strategy in _HYBRID_STRATEGIES:
        groups = groups_by_host(default_group("FullyShardedDataParallel")) if groups == (None,) else groups
        if len(groups) != 2:
            raise ValueError(
                f"{strategy.name} takes a (shard, replicate) pair of process groups or a device_mesh of two "
                "dimensions (replicate, shard), or neither, in which case it shards within each host"
            )
        return ShardMesh(ranks_in(groups[0]), ranks_in(groups[1]), device_mesh)
    if len(groups) != 1:
        raise ValueError(
            f"{strategy.name} takes one process group or a one-dimensional device_mesh, but got "
            f"{len(groups)} groups or dimensions; HYBRID_SHARD takes two"
        )
    ranks = ranks_in(default_group("FullyShardedDataParallel") if groups[0] is None else groups[0])
    whole = strategy is ShardingStrategy.NO_SHARD
    return ShardMesh(None if whole else ranks, ranks if whole else None, device_mesh)


def ranks_of(mesh: DeviceMesh, shards: bool = True) -> ShardMesh:
    """Returns the ranks of a mesh of one dimension (shard) or two (replicate, shard).

    With `shards=False` its one dimension replicates. Raises a ValueError for more dimensions, for ranks in
    another order than their process group's, or if this rank is not part of it; a TypeError for anything
    else.
    """
    groups = _mesh_groups(mesh, shards)
    if len(groups) > 2:
        raise ValueError(
            f"the mesh to shard over has one dimension (shard) or two (replicate, shard), and {mesh} has "
            f"{mesh.ndim}: pass a part of it, such as mesh['dp']"
        )
    if not shards:
        return ShardMesh(None, ranks_in(groups[0]), mesh)
    return ShardMesh(ranks_in(groups[0]), ranks_in(groups[1]) if len(groups) == 2 else None, mesh)


def _mesh_groups(mesh: Any, shards: bool) -> tuple[dist.ProcessGroup, ...]:
    """Returns the mesh's groups, shard first; torch sorts the ranks of those, and not of the mesh."""
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"device_mesh must be a torch.distributed.DeviceMesh, not {type(mesh).__name__}")
    here = mesh.get_coordinate()
    if here is None:
        raise ValueError(f"rank {dist.get_rank()} is not part of device_mesh {mesh}: wrap only on its ranks")
    groups = tuple(mesh.get_group(dim) for dim in reversed(range(mesh.ndim)))
    if shards and mesh not in _in_order:
        _require_order(mesh, here, dist.get_process_group_ranks(groups[0]))
        _in_order[mesh] = True
    return groups


_in_order = WeakIdKeyDictionary()
"""The meshes that `_require_order` has seen: for 16,384 ranks it takes 1.6 ms, and each unit would ask."""


def _require_order(mesh: DeviceMesh, here: Sequence[int], members: list[int]) -> None:
    """Refuses a mesh whose ranks to shard over are in another order than their process group's."""
    row = mesh.mesh[tuple(here[:-1])].tolist()
    if row == members == sorted(row):  # or other ranks would raise alone
        rows = mesh.mesh.reshape(-1, len(row)).tolist()
        row = next((other for other in rows if other != sorted(other)), row)
        members = sorted(row)
    if row != members:
        raise ValueError(
            f"{mesh} has the ranks {row} to shard over, and its process group has them as {members}: parts "
            "would change places. Give them in ascending order"
        )


@atexit.register
def _let_gloo_finish() -> None:
    """Lets the threads of groups that outlive `destroy_process_group()` drop the tensors they hold.

    A group is kept alive by whoever still has it: torch's own caches keep the meshes of `DTensor`s, and so
    their groups. Its threads drop the tensors of a collective when that is over, which takes the GIL. Before
    Python 3.14 a thread that asks for it once the interpreter ends is ended itself, there inside C++ that
    forbids it, so the process would abort. Linux tells which threads still run.
    """
    calm = 0
    for _ in range(1000):  # a second at the most: others may hold up a thread for good
        states = _states_of_gloo()
        calm = calm + 1 if set(states) == {"S"} else 0
        if calm == 3 or not states:
            return
        time.sleep(0.001)  # without the GIL: a thread that sleeps because it waits for it runs now


def _states_of_gloo() -> list[str]:
    """Returns the state of each of gloo's threads that run collectives: S asleep, R running or about to."""
    states = []
    for thread in Path("/proc/self/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # it has ended since
            _, name, rest = re.split(r"[()]", thread.read_text(), maxsplit=2)
            if name == "pt_gloo_runloop":
                states.append(rest.split()[0])
    return states
