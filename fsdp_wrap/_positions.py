"""Where each rank stands, kept where the ranks of its host can read it even after it died.

The ranks of a group must issue the same collectives in the same order. So every rank numbers the collectives
of units that it issues in a group and notes them, with unit, phase and iteration, in a small memory-mapped
file. Entries of equal number that differ are a mix-up, which nothing else would show: gathers of equal size
from different units complete, with wrong parameters.

The files' names follow from a word that the ranks of a job agree on through the store. A rank whose file is
not found runs on another host and is left out. An owner keeps its file locked, and the lock ends with the
process in whatever way that ends; so a lock that can be had tells of a dead rank, or of a file to remove.
A rank that ends leaves its files to those that live, who may not have looked yet. The last one to end removes
all, those of killed ranks as well.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import secrets
import struct
import tempfile
import threading
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable
from multiprocessing.util import Finalize, is_exiting
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from fsdp_wrap._agreement import Agreement
from fsdp_wrap._events import Phase
from fsdp_wrap._torch_private import default_store

__all__ = ["GroupPositions", "Note", "Tree", "UnitPositions", "positions_of"]

_NUMBER, _NOTE, _WHEN = (struct.Struct("<" + parts) for parts in ("Q", "8s235p", "IB"))
_ENTRY = struct.Struct("<Q8s235pIB")  # as `_Entry`: the three above
_NUMBER_BYTES = _NUMBER.size
_NO_NUMBER = bytes(_NUMBER_BYTES)
_COMPARED = _NUMBER_BYTES + 8  # number and digest
_RING = 32  # the latest collectives of a group
_SLOT = _ENTRY.size
_SIZE = _SLOT * (1 + _RING)
_PREFIX, _SEPARATOR = "fsdp_wrap-", "."  # the latter stands behind the job's word
_LEFT_OVER_AFTER = 60.0  # seconds in which the survivors of a killed rank may still want its file
_MOST_NAMED = 8  # ranks of which nothing is known
_PHASES = list(Phase)


class _Entry(NamedTuple):
    """One thing that a rank did.

    Attributes:
        number: Which collective of the group it is, from 1 on; 0 where nothing was noted.
        digest: Of the whole text.
        text: What it did, as far as there is room.
        iteration: Which outermost forward it belongs to.
        phase: Index of the phase.
    """

    number: int
    digest: bytes
    text: bytes
    iteration: int
    phase: int

    def __str__(self) -> str:
        what = self.text.decode(errors="replace")
        return f"{what} ({_PHASES[self.phase].value} of iteration {self.iteration})"


class Note:
    """What an entry says, encoded once."""

    def __init__(self, text: str) -> None:
        encoded = text.encode()
        self.digest = hashlib.blake2b(encoded, digest_size=8).digest()
        self.text = encoded if len(encoded) < 235 else encoded[:30] + b"..." + encoded[-200:]
        self.packed = _NOTE.pack(self.digest, self.text)


class _File:
    """One rank's entries for one group: the unit it entered last, then a ring of its collectives."""

    def __init__(self, memory: mmap.mmap, path: Path | None = None) -> None:
        self.memory = memory
        self._path = path

    @classmethod
    def create(cls, path: Path) -> _File:
        """Makes this rank's own file; it goes with its last user, or when all ranks of the host have ended.

        Raises:
            OSError: If that is not possible.
        """
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.posix_fallocate(descriptor, 0, _SIZE)  # without space an error here, not a signal later
            file = cls(mmap.mmap(descriptor, _SIZE), path)
        except (OSError, ValueError) as error:
            path.unlink(missing_ok=True)
            os.close(descriptor)
            raise OSError(f"cannot write {path}: {error}") from error
        # Unlike atexit it also runs in the children of multiprocessing, and in no copy made by a fork.
        Finalize(file, _give_up, args=(path, descriptor), exitpriority=0)
        return file

    @classmethod
    def find(cls, path: Path) -> _File | None:
        """Maps a peer's file if it is on this host."""
        try:
            with path.open("rb") as file:
                return cls(mmap.mmap(file.fileno(), _SIZE, access=mmap.ACCESS_READ), path)
        except (OSError, ValueError):  # the latter: it is not complete yet
            return None

    @classmethod
    def unseen(cls) -> _File:
        """Makes one that only this process has."""
        return cls(mmap.mmap(-1, _SIZE))

    def write(self, slot: int, number: int, note: Note, phase: Phase, iteration: int) -> None:
        """Puts an entry into a slot; it has no number while it is incomplete, however long that takes."""
        memory, rest = self.memory, slot + _NUMBER_BYTES
        memory[slot:rest] = _NO_NUMBER
        memory[rest : slot + _SLOT] = note.packed + _WHEN.pack(iteration, phase.index)
        memory[slot:rest] = _NUMBER.pack(number)

    def read(self, slot: int) -> _Entry:
        """Returns the entry in a slot."""
        return _Entry._make(_ENTRY.unpack_from(self.memory, slot))

    def number(self, slot: int) -> int:
        """Returns the number of the entry in a slot."""
        number: int = _NUMBER.unpack_from(self.memory, slot)[0]
        return number

    def last_collective(self) -> _Entry:
        """Returns the entry of the highest number."""
        return max(self.read(_slot(number)) for number in range(_RING))

    def owner_lives(self) -> bool:
        """Whether the owner of a peer's file lives, and is not about to end."""
        return self._path is not None and not _abandoned(self._path)


_ENTERED = 0  # the slot of the unit entered last


def _slot(number: int) -> int:
    return _SLOT * (1 + number % _RING)


def _abandoned(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return _can_lock(file.fileno())
    except FileNotFoundError:
        return True


def _can_lock(descriptor: int) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _give_up(path: Path, descriptor: int) -> None:
    if not is_exiting():
        path.unlink(missing_ok=True)
    os.close(descriptor)  # and with it the lock
    if is_exiting():
        _remove_if_all_ended(path.parent, path.name.partition(_SEPARATOR)[0])


def _remove_if_all_ended(directory: Path, job: str) -> None:
    """Removes the files of a job if none of its ranks on this host lives."""
    files = list(directory.glob(f"{job}{_SEPARATOR}*"))
    if all(map(_abandoned, files)):
        for file in files:
            file.unlink(missing_ok=True)


class _Job:
    """The names of all ranks' files, for the life of one default process group.

    Args:
        thread: Which has initialised it; where ranks are threads, each has one of its own.
    """

    def __init__(self, thread: int) -> None:
        self.thread = thread
        self._directory = _directory()
        self._word = secrets.token_hex(8)
        # There are no other ranks to show anything, or they are threads, which share what a process locks.
        self._enabled = dist.get_backend() not in ("fake", "threaded")
        self._groups: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupPositions]
        self._groups = weakref.WeakKeyDictionary()
        self._names: Counter[str] = Counter()
        try:
            if self._enabled:
                self._word = _agree(self._word)
                _remove_left_overs(self._directory)
        except (OSError, RuntimeError) as error:
            self._disable(error)

    def positions_of(self, group: dist.ProcessGroup, world: dist.ProcessGroup) -> GroupPositions:
        """Returns the positions of a group, the same to all who ask."""
        if group not in self._groups:
            whole = None if group is world else self.positions_of(world, world)
            self._names[group.group_name] += 1
            self._groups[group] = GroupPositions(self, group, whole)
        return self._groups[group]

    @property
    def groups(self) -> Iterable[GroupPositions]:
        """The positions in all groups that units of this rank use."""
        return self._groups.values()

    def path(self, group: dist.ProcessGroup, rank: int) -> Path:
        """Returns where a rank's file is, if it has one; another group of the name may have been before."""
        name = f"{group.group_name} {self._names[group.group_name]}"
        name = hashlib.blake2b(name.encode(), digest_size=6).hexdigest()
        return self._directory / f"{_PREFIX}{self._word}{_SEPARATOR}{name}-{rank}"

    def create(self, path: Path) -> _File:
        """Makes a file of this rank's own; memory that nobody sees where that is not possible."""
        if self._enabled:
            try:
                return _File.create(path)
            except OSError as error:
                self._disable(error)
        return _File.unseen()

    def _disable(self, error: Exception) -> None:
        self._enabled = False
        warnings.warn(
            f"ranks cannot show each other where they stand ({error}): units that are mixed up between ranks "
            "will not be noticed, and a failure will not be reported with the positions of all ranks",
            stacklevel=2,
        )


def _directory() -> Path:
    shared = Path("/dev/shm")  # in memory: writing never waits for a disk
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def _agree(proposal: str) -> str:
    """Returns the same word on all ranks, and another one after torch.distributed was initialised anew."""
    store = default_store()
    if store is None:
        raise RuntimeError("the default process group has no store")
    turn = store.add(f"fsdp_wrap/turn/{dist.get_rank()}", 1)  # a store may outlive its group
    return store.compare_set(f"fsdp_wrap/word/{turn}", "", proposal).decode()


def _remove_left_overs(directory: Path) -> None:
    """Removes files of killed ranks."""
    for path in directory.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or removed meanwhile
            if time.time() - path.stat().st_mtime > _LEFT_OVER_AFTER and _abandoned(path):
                path.unlink()


_jobs: weakref.WeakKeyDictionary[dist.ProcessGroup, _Job] = weakref.WeakKeyDictionary()


def positions_of(group: dist.ProcessGroup) -> GroupPositions:
    """Returns the positions of a group's ranks."""
    world = dist.group.WORLD
    assert world is not None
    job = _jobs.get(world)
    if job is None:
        thread = threading.get_ident()  # it has one default group at a time, and destroyed ones may live on
        for ended in [other for other, its in _jobs.items() if its.thread == thread]:
            del _jobs[ended]
        job = _jobs[world] = _Job(thread)
    return job.positions_of(group, world)


class GroupPositions:
    """Where the ranks of one group stand, as far as they run on this host.

    Args:
        job: What names the files.
        group: The process group.
        world: The positions of all ranks of the job, by which they tell what they entered; None if the group
            is the default one.

    Attributes:
        agreement: On what its ranks must have alike.
        trees: How many trees of units have communicated in the group.
        issued: The number of the last collective that this rank has noted.
    """

    def __init__(self, job: _Job, group: dist.ProcessGroup, world: GroupPositions | None) -> None:
        self._job = job
        self._rank = dist.get_rank()
        self.agreement = Agreement(group)
        self._world = self if world is None else world
        self._own = job.create(job.path(group, self._rank))
        self._missing = {rank: job.path(group, rank) for rank in dist.get_process_group_ranks(group)}
        del self._missing[self._rank]
        self._peers: dict[int, _File] = {}
        self._searches = _RING  # whom the first collectives do not show is on another host
        self.issued = 0
        self.trees = 0

    @property
    def world(self) -> GroupPositions:
        """The positions of all ranks of the job."""
        return self._world

    def enter(self, note: Note, phase: Phase, iteration: int) -> None:
        """Notes which unit this rank, of all of the job, enters."""
        if self._searches:
            self._search()
        self._own.write(_ENTERED, 1, note, phase, iteration)

    def issue(self, note: Note, phase: Phase, iteration: int) -> int:
        """Notes a collective that this rank is about to issue; returns its number.

        Raises:
            RuntimeError: If a peer has issued another one in its place.
        """
        if self._searches:
            self._search()
        self.issued = number = self.issued + 1
        self._own.write(_slot(number), number, note, phase, iteration)
        if self._peers:
            self.compare(number)
        return number

    def compare(self, number: int, all_came: bool = False) -> None:
        """Compares a collective with what the peers have issued in its place.

        Args:
            number: Which one.
            all_came: Whether it has completed, so that every peer must have issued it.

        Raises:
            RuntimeError: If a peer has issued another one.
        """
        begin = _slot(number)
        end = begin + _COMPARED
        own = self._own.memory[begin:end]
        for peer in self._peers.values():
            theirs = peer.memory[begin:end]
            # One that has not come as far yet is the usual case, and tells nothing unless all came.
            if theirs != own and (all_came or theirs[:_NUMBER_BYTES] == own[:_NUMBER_BYTES]):
                self._refuse_mix_up(number, all_came)
                return

    def compare_all(self) -> None:
        """Compares all collectives that this rank has noted lately, in whatever group.

        A peer that does not come may have found a mix-up in a group that it shares with others.

        Raises:
            RuntimeError: If a peer has issued another one in the place of one of them, or found a difference
                in what ranks must have alike.
        """
        for group in self._job.groups:
            group.agreement.look()
            group._search()
            for number in range(max(1, group.issued - _RING // 2), group.issued + 1):
                group.compare(number)

    def reached(self, number: int) -> bool:
        """Whether all peers have come as far as to this collective.

        Raises:
            RuntimeError: If one has issued another one.
        """
        if not self._peers:
            return True
        self.compare(number)
        slot = _slot(number)
        return all(peer.number(slot) >= number for peer in self._peers.values())

    def knows(self, rank: int) -> bool:
        """Whether a rank of the job has been seen on this host."""
        return rank in self._peers

    def lives(self, rank: int) -> bool:
        """Whether a rank of the job lives; of other hosts' that is assumed."""
        return rank not in self._peers or self._peers[rank].owner_lives()

    def dead_before(self, number: int) -> list[int]:
        """Returns the peers that died and had not come as far as to this collective."""
        slot = _slot(number)
        behind = {rank: peer for rank, peer in self._peers.items() if peer.number(slot) < number}
        return [rank for rank, peer in behind.items() if not peer.owner_lives()]

    def table(self) -> str:
        """Tells where the ranks of this host stand, dead ones included."""
        self._search()
        world, files = self._world, self._files()
        world._search()
        lines = ["Where the ranks stand:"]
        for rank, file in world._files().items():
            entered = file.read(_ENTERED)
            line = f"in or after {entered}" if entered.number else "in no unit yet"
            last = files[rank].last_collective() if rank in files else None
            if last and last.number:
                line += f"; last collective, number {last.number} of the group: {last}"
            lines.append(f"  rank {rank} ({world._state(rank)}): {line}")
        if world._missing:
            lines.append(f"  not begun, or not on this host: {_listed(world._missing)}")
        return "\n".join(lines)

    def _refuse_mix_up(self, number: int, all_came: bool) -> None:
        if not self._mixed_up(number, all_came):
            return
        time.sleep(0.001)  # an entry may have been read while it was being written
        mixed_up = self._mixed_up(number, all_came)
        if mixed_up:
            raise RuntimeError(
                f"ranks communicate for different units: {' while '.join(mixed_up)}. All ranks of a group "
                f"must run the same units in the same order.\n{self.table()}"
            )

    def _mixed_up(self, number: int, all_came: bool) -> list[str]:
        """Tells what each rank has issued as this collective of the group, if that differs."""
        entries = {rank: file.read(_slot(number)) for rank, file in self._files().items()}
        digests = {entry.digest for entry in entries.values() if entry.number == number}
        behind = [rank for rank, entry in entries.items() if all_came and entry.number < number]
        if len(digests) == 1 and not behind:
            return []
        did = [f"rank {rank} {entry}" for rank, entry in entries.items() if entry.number == number]
        return did + [f"rank {rank} has communicated for no unit" for rank in behind]

    def _state(self, rank: int) -> str:
        if rank == self._rank:
            return "this one"
        return "alive" if self._peers[rank].owner_lives() else "dead"

    def _files(self) -> dict[int, _File]:
        return dict(sorted({**self._peers, self._rank: self._own}.items()))

    def _search(self) -> None:
        self._searches -= 1 if self._searches else 0
        for rank, path in list(self._missing.items()):
            file = _File.find(path)
            if file is not None:
                self._peers[rank] = file
                del self._missing[rank]


def _listed(ranks: Iterable[int]) -> str:
    """Names ranks, of many the first."""
    named = [f"rank {rank}" for rank in ranks]
    rest = [f"{len(named) - _MOST_NAMED} more"] if len(named) > _MOST_NAMED else []
    return ", ".join(named[:_MOST_NAMED] + rest)


class Tree:
    """Stands for one tree of units, to tell apart units of equal names in several trees."""

    def __init__(self) -> None:
        self._numbers: dict[GroupPositions, int] = {}

    def number_in(self, group: GroupPositions) -> int:
        """Returns which tree of the group this is.

        The first collectives decide: their order must be the same on all ranks, that of wrapping need not.
        """
        if group not in self._numbers:
            group.trees += 1
            self._numbers[group] = group.trees
        return self._numbers[group]


Agree = Callable[[Agreement, str], None]


class UnitPositions:
    """Notes what one unit does.

    Args:
        name: The unit as messages name it.
        tree: To which it belongs.
        gathering: The positions of the groups in which it gathers parameters, all alike on every rank.
        reducing: Of those in which it reduces gradients.
        keeping: Of those that keep its parameters between forward and backward.
        waits: Whether waiting for a collective means that it has completed.
        agree: Called with each group's agreement and the unit's name there, before its first collective.
    """

    def __init__(
        self,
        name: str,
        tree: Tree,
        gathering: Iterable[GroupPositions],
        reducing: Iterable[GroupPositions],
        keeping: Iterable[GroupPositions],
        waits: bool,
        agree: Agree,
    ) -> None:
        self.gather = CollectivePositions(f"gathers {name}", tree, gathering, waits, agree)
        kept = f"gathers {name} from neighbours"
        self.gather_kept = CollectivePositions(kept, tree, keeping, waits, agree)
        self.reduction = CollectivePositions(f"reduces {name}", tree, reducing, waits, agree)
        in_copy = f"reduces {name} in a copy"
        self.reduction_in_copy = CollectivePositions(in_copy, tree, gathering, waits, agree)
        self._note = Note(name)
        self._world = next((group.world for group in reducing), None)

    def enter(self, phase: Phase, iteration: int) -> None:
        """Notes that this rank enters the unit."""
        if self._world is not None:
            self._world.enter(self._note, phase, iteration)

    def gathered(self) -> None:
        """Checks, once a gather was waited for, that every peer has issued the same.

        Raises:
            RuntimeError: If a peer has issued another one.
        """
        for gather in (self.gather, self.gather_kept):
            if gather.issued:
                gather.completed()

    def reduced(self) -> None:
        """The same for a reduction."""
        for reduction in (self.reduction, self.reduction_in_copy):
            if reduction.issued:
                reduction.completed()


class CollectivePositions:
    """Notes one kind of collective of one unit, in every group concerned.

    Attributes:
        issued: The groups and numbers of what has not completed yet.
    """

    def __init__(
        self, text: str, tree: Tree, groups: Iterable[GroupPositions], waits: bool, agree: Agree
    ) -> None:
        self._text, self._agree = text, agree
        self._tree = tree
        self._waits = waits
        self._groups = tuple(dict.fromkeys(groups))
        self.issued: list[tuple[GroupPositions, int]] = []
        self._notes: dict[GroupPositions, Note] = {}

    def issue(self, phase: Phase, iteration: int) -> None:
        """Notes that the collective is about to be issued; peers look as soon as it is.

        Raises:
            RuntimeError: If a peer has issued another one in its place.
        """
        self.issued = []
        for group in self._groups:
            number = group.issue(self._notes.get(group) or self._make_note(group), phase, iteration)
            self.issued.append((group, number))

    def completed(self) -> None:
        """Checks, once it was waited for, that every peer has issued the same.

        Raises:
            RuntimeError: If a peer has issued another one.
        """
        issued, self.issued = self.issued, []
        for group, number in issued:
            if group._peers:
                group.compare(number, all_came=self._waits)

    def _make_note(self, group: GroupPositions) -> Note:
        number = self._tree.number_in(group)
        text = self._text if number == 1 else f"{self._text} of root number {number}"
        self._agree(group.agreement, text.partition(" ")[2])
        self._notes[group] = Note(text)
        return self._notes[group]
