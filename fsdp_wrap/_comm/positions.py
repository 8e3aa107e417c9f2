"""The collectives that each rank has issued, readable by other ranks of its host even after it died.

The ranks of a group must issue the same collectives in the same order. So every rank numbers the collectives
of units that it issues in a group and logs them, with unit, phase and iteration, in a small memory-mapped
file of the host. Different entries of equal number are a mix-up. No other error shows it: gathers of equal
size from different units complete, with wrong parameters.

A step that raises on one rank alone, and is caught there, may have issued nothing: then this rank's next step
would pair with the others' last one. So entries also count the forwards since the last backward, and tell
that one has raised. Ranks that skip a step together have begun equally many. Without an error the numbers may
differ: ranks need not evaluate alike. A word also has the number of optimizer steps, which must be equal.

What a rank has to tell at an optimizer step goes into *remarks*, beside the collectives. The number of
collectives before a remark says to which step it belongs. Peers read it after their next collective.

File names contain a random word that the ranks of a job agree on through the store. A rank that is not in
its group's file runs on another host and is left out. Each rank locks a byte of the file until its process
ends, however it ends: a free lock means a dead rank, or a file to remove. A rank that ends leaves the files
to the living ranks, which may still read them. The last rank to end removes them.

Settings must be alike as well. They are compared through the store, and nobody waits: the first rank to come
writes its own, and each other rank compares. A rank that finds a difference leaves an error for the others,
which look for it when a collective takes long or fails (`Agreement`).
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import mmap
import os
import re
import secrets
import struct
import tempfile
import threading
import time
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from multiprocessing.util import Finalize, is_exiting
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from fsdp_wrap._comm.groups import CARRY_NOTHING
from fsdp_wrap._core import Phase, listed, open_own, warn_caller
from fsdp_wrap._core.torch_private import default_store

_ENTRY = struct.Struct("<QB235pIB")  # fields of `LogEntry`
_write = _ENTRY.pack_into
_RING = 32  # number of a group's latest collectives that are kept
_REMARKS_KEPT = 8  # number of a rank's latest remarks that are kept
_ENTERED, _FIRST = 0, 1  # rows: the unit entered last, and the first collective of the ring
_REMARKS = _FIRST + _RING  # row of the first remark of their ring
_ROWS = _REMARKS + _REMARKS_KEPT
_LOW = 0xFFFFFFFF
_DIGEST_NBYTES, _MARK_BITS = 3, 8  # what the lower half of a word consists of
_MARK = 2**_MARK_BITS - 1
_MOST_TRIES = 254
_STEPS = 2 ** (_MARK_BITS - 1)  # numbers of steps are compared modulo this
_RAISED = ", after a step that raised"
_BEHIND = " optimizer step behind"
_PREFIX, _SEPARATOR = "fsdp_wrap-", "."  # the separator follows the job's word
_LEFT_OVER_AFTER = 60.0  # seconds in which survivors may still read a killed rank's file
_PHASES = list(Phase)
_CALL = re.compile(r"rank \d+ calls (\S+)")

CHANGED = ", after "
"""Begins the part of a note that tells of changes, which all ranks must have made."""
_CALLS = "calls "
"""Begins the note of a call that all ranks must make."""


class LogEntry(NamedTuple):
    """A logged collective, or the last entered unit, of a rank.

    `number` counts the group's collectives from 1; 0 means an empty entry. `tries` are those of a `Tree`.
    `phase` is an index.
    """

    number: int
    tries: int
    text: bytes
    iteration: int
    phase: int

    def __str__(self) -> str:
        what = self.text.decode(errors="replace")
        phase = _PHASES[self.phase]
        when = f"{phase.value} of iteration {self.iteration}"
        if phase is Phase.IDLE:
            when = f"after iteration {self.iteration}" if self.iteration else "before the first iteration"
        return f"{what} ({when}{_RAISED if self.tries & 1 else ''})"


class Noted(NamedTuple):
    """A logged collective, for ranks of other hosts: `digest` is the lower half of its word."""

    number: int
    digest: int
    tries: int
    text: str


def alike(noted: Iterable[tuple[int, int]]) -> bool:
    """Whether the (digest, tries) of some ranks are those of one collective, after equally many steps.

    Ranks that have begun different numbers of forwards fit together as long as none of these has raised.
    """
    digests, tries = zip(*noted)
    raised = any(number & 1 for number in tries)
    same = len({digest >> _MARK_BITS for digest in digests}) == 1
    return same and not (raised and len({number >> 1 for number in tries}) > 1) and not any(behind(digests))


def behind(digests: Sequence[int]) -> list[str]:
    """Returns for the digest of each rank how many optimizer steps it is behind the first; "" for none.

    Nothing is known of the steps of a rank on which a forward or backward has raised, nor are they compared
    where the collectives differ.
    """
    marks = [digest & _MARK for digest in digests]
    known = [mark >> 1 for mark in marks if not mark & 1]
    if len(set(known)) < 2 or len({digest >> _MARK_BITS for digest in digests}) > 1:
        return [""] * len(marks)
    ahead = [(steps - known[0] + _STEPS // 2) % _STEPS for steps in known]  # of each other, by less than half
    missing = {steps: max(ahead) - place for steps, place in zip(known, ahead)}
    counts = [0 if mark & 1 else missing[mark >> 1] for mark in marks]
    return [
        f", {count}{_BEHIND if count == 1 else _BEHIND.replace('step', 'steps')}" if count else ""
        for count in counts
    ]


class Note:
    """The text of a log entry, encoded once and cut to fit, with a digest of the whole text.

    The lowest bits of the digest are free for a `Tree`'s mark.
    """

    def __init__(self, text: str) -> None:
        encoded = text.encode()
        digest = hashlib.blake2b(encoded, digest_size=_DIGEST_NBYTES).digest()
        self.digest = int.from_bytes(digest, "little") << _MARK_BITS
        self.text = encoded if len(encoded) < 235 else encoded[:30] + b"..." + encoded[-200:]


class Agreement:
    """Comparisons among the ranks of one group.

    `store` is None where there are no other ranks. `name` is the same on all ranks of the group, and no other
    group's.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        # Where there are no other ranks to agree with there may be no store either.
        self.store = None if dist.get_backend(group) in CARRY_NOTHING else default_store()
        self._rank = dist.get_rank()
        self._offered: set[str] = set()
        self._heard = True
        self.name = ""
        if self.store is not None:
            name = f"fsdp_wrap/agreement/{group.group_name}"
            turn = self.store.add(f"{name}/{self._rank}", 1)  # it may have seen another group of the name
            self.name = f"{name}/turn/{turn}"
            self._word = f"{self.name}/word"

    def require(self, what: str, lines: list[str], rule: str) -> None:
        """Compares this rank's lines with those of the first rank that came here.

        Names of parameters in front of a line are for messages: ranks may call them otherwise. Raises a
        RuntimeError, which ends with `rule`, if lines differ.
        """
        rank, other = self.first(what, lines)
        if other != lines and [*map(_compared, other)] != [*map(_compared, lines)]:
            error = f"ranks differ in {what}: {_difference(rank, other, self._rank, lines)}. {rule}"
            assert self.store is not None
            self.store.set(self._word, error)
            raise RuntimeError(error)

    def tell(self, error: str) -> None:
        """Leaves an error for all ranks, unless another rank has: `look` raises it."""
        if self.store is not None:
            self.store.compare_set(self._word, "", error)

    def withdraw(self) -> None:
        """Takes back the error of `tell`, which all ranks have read."""
        if self.store is not None:
            self.store.delete_key(self._word)

    def first(self, what: str, lines: list[str]) -> tuple[int, list[str]]:
        """Offers this rank's lines, once; returns the rank that came here first, with its lines.

        This rank's own are returned if it is the first or has been here before.
        """
        if self.store is None or what in self._offered:
            return self._rank, lines
        self._offered.add(what)
        key, own = f"{self.name}/of/{what}", "\n".join([str(self._rank), *lines])
        rank, *other = self.store.compare_set(key, "", own).decode().split("\n")
        return int(rank), other

    @contextmanager
    def unheard(self) -> Iterator[None]:
        """Lets `look` raise nothing while the context is open: all ranks come, also those with an error."""
        before, self._heard = self._heard, False
        try:
            yield
        finally:
            self._heard = before

    def look(self) -> None:
        """Raises a RuntimeError if another rank has found a difference, or has left an error."""
        if self._heard and self.store is not None and self.store.check([self._word]):
            raise RuntimeError(self.store.get(self._word).decode())


def _compared(line: str) -> str:
    return line.partition("' of ")[2] or line


def _difference(rank: int, lines: list[str], other: int, others: list[str]) -> str:
    """Describes the first line in which two ranks differ."""
    length = max(len(lines), len(others))
    padded = [[*each, *["nothing more"] * (length - len(each))] for each in (lines, others)]
    one, two = next(pair for pair in zip(*padded) if _compared(pair[0]) != _compared(pair[1]))
    return f"rank {rank} has {one} where rank {other} has {two}"


class _Sheet:
    """Shared log of the ranks of a group on one host, in a memory-mapped file.

    Layout: `_ROWS` rows of one 64-bit word per rank, then `_ROWS` entries per rank. Words of row 0 are 1 for
    present ranks. The other rows are a ring over the latest collectives: number (high 32 bits) and digest.
    A word is written atomically, and after its entry. Each living rank holds the lock of the byte at its
    rank's offset.
    """

    def __init__(self, memory: mmap.mmap, ranks: int, descriptor: int = -1) -> None:
        self.memory = memory
        self.ranks = ranks
        self.words = memoryview(memory)[: 8 * _ROWS * ranks].cast("Q")
        self._descriptor = descriptor

    @classmethod
    def nbytes(cls, ranks: int) -> int:
        """Returns the size of a sheet in bytes."""
        return (8 + _ENTRY.size) * _ROWS * ranks

    @classmethod
    def open(cls, path: Path, rank: int, ranks: int) -> _Sheet:
        """Opens a host's file, which its last user removes; raises an OSError if that fails."""
        try:
            descriptor = open_own(path, os.O_RDWR | os.O_CREAT, private=True)
        except ValueError as error:
            raise OSError(str(error)) from error
        try:
            fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
            # Lack of space raises here, not as SIGBUS later. Each rank allocates its own entries.
            os.posix_fallocate(descriptor, 0, 8 * _ROWS * ranks)
            os.posix_fallocate(descriptor, cls.entries(rank, ranks), _ROWS * _ENTRY.size)
            os.posix_fallocate(descriptor, cls.nbytes(ranks) - 1, 1)
            sheet = cls(mmap.mmap(descriptor, cls.nbytes(ranks)), ranks, descriptor)
        except (OSError, ValueError) as error:
            os.close(descriptor)
            _remove_if_abandoned(path)
            raise OSError(f"cannot write {path}: {error}") from error
        sheet.words[rank] = 1
        # Unlike atexit, also runs in children of multiprocessing, and not in forks.
        Finalize(sheet, _give_up, args=(path, descriptor), exitpriority=0)
        return sheet

    @classmethod
    def unseen(cls, rank: int, ranks: int) -> _Sheet:
        """Makes a private sheet, without a file."""
        sheet = cls(mmap.mmap(-1, cls.nbytes(ranks)), ranks)
        sheet.words[rank] = 1
        return sheet

    @staticmethod
    def entries(rank: int, ranks: int) -> int:
        """Returns the offset of a rank's entries in bytes."""
        return (8 * ranks + rank * _ENTRY.size) * _ROWS

    def read(self, rank: int, row: int) -> LogEntry:
        """Returns a rank's entry in a row."""
        begin = self.entries(rank, self.ranks) + row * _ENTRY.size
        return LogEntry._make(_ENTRY.unpack_from(self.memory, begin))

    def lives(self, rank: int) -> bool:
        """Whether another rank, once present, still holds its lock."""
        try:
            fcntl.lockf(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return True
        fcntl.lockf(self._descriptor, fcntl.LOCK_UN, 1, rank)
        return False


def _word_of(issued: int, about: int, text: bytes) -> int:
    """Returns the word of a remark, never 0: the number of collectives before it, and a checksum."""
    return (issued & _LOW) << 32 | zlib.crc32(text, about) | 1


def _row(number: int) -> int:
    return _FIRST + number % _RING


def _abandoned(path: Path) -> bool:
    """Whether no other process holds a lock of a file."""
    try:
        file = open_own(path, os.O_RDONLY)
    except FileNotFoundError:
        return True
    except (OSError, ValueError):
        return False
    try:
        fcntl.lockf(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(file)
    return True


def _remove_if_abandoned(*files: Path) -> None:
    """Removes files if all of them are abandoned."""
    if all(map(_abandoned, files)):
        for file in files:
            file.unlink(missing_ok=True)


def _give_up(path: Path, descriptor: int) -> None:
    os.close(descriptor)  # releases the lock
    if is_exiting():  # other ranks of the job may still read it
        _remove_if_abandoned(*path.parent.glob(f"{path.name.partition(_SEPARATOR)[0]}{_SEPARATOR}*"))
    else:
        _remove_if_abandoned(path)


class _Job:
    """Positions in all groups, and file names, for the life of one default process group.

    If ranks are threads, each thread has a job of its own.
    """

    def __init__(self, thread: int) -> None:
        self.thread = thread
        self._directory = _directory()
        self._word = secrets.token_hex(8)
        # Off without other ranks, and for ranks in threads, which share the locks of their process.
        self._enabled = dist.get_backend() not in (*CARRY_NOTHING, "threaded")
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
        """Returns the positions of a group; one object per group."""
        if group not in self._groups:
            whole = None if group is world else self.positions_of(world, world)
            self._names[group.group_name] += 1
            self._groups[group] = GroupPositions(self, group, whole)
        return self._groups[group]

    @property
    def groups(self) -> Iterable[GroupPositions]:
        """The positions of all groups that units of this rank use."""
        # `keyrefs` makes a list at once: another thread may add a group meanwhile.
        return [self._groups[group] for key in self._groups.keyrefs() if (group := key()) is not None]

    def sheet(self, group: dist.ProcessGroup, rank: int, ranks: int) -> _Sheet:
        """Opens a group's sheet; falls back to a private one."""
        if self._enabled:
            # An earlier group may have had the same name.
            name = f"{group.group_name} {self._names[group.group_name]}"
            name = hashlib.blake2b(name.encode(), digest_size=6).hexdigest()
            try:
                path = self._directory / f"{_PREFIX}{self._word}{_SEPARATOR}{name}"
                return _Sheet.open(path, rank, ranks)
            except OSError as error:
                self._disable(error)
        return _Sheet.unseen(rank, ranks)

    def _disable(self, error: Exception) -> None:
        self._enabled = False
        warn_caller(
            f"ranks cannot show each other where they stand ({error}): units that are mixed up between ranks "
            "will not be noticed, and a failure will not be reported with the positions of all ranks"
        )


def _directory() -> Path:
    shared = Path("/dev/shm")  # in memory: writes never wait for a disk
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


def _agree(proposal: str) -> str:
    """Agrees on a word across ranks; another one after torch.distributed was initialised anew."""
    store = default_store()
    if store is None:
        raise RuntimeError("the default process group has no store")
    turn = store.add(f"fsdp_wrap/turn/{dist.get_rank()}", 1)  # a store may outlive its group
    return store.compare_set(f"fsdp_wrap/word/{turn}", "", proposal).decode()


def _remove_left_overs(directory: Path) -> None:
    """Removes files of killed ranks."""
    for path in directory.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or removed meanwhile
            found = path.lstat()
            is_own_and_old = found.st_uid == os.geteuid() and time.time() - found.st_mtime > _LEFT_OVER_AFTER
            if is_own_and_old and _abandoned(path):
                path.unlink()


_jobs: weakref.WeakKeyDictionary[dist.ProcessGroup, _Job] = weakref.WeakKeyDictionary()
_jobs_lock = threading.Lock()  # ranks may be threads


def positions_of(group: dist.ProcessGroup) -> GroupPositions:
    """Returns the positions of a group's ranks."""
    world = dist.group.WORLD
    assert world is not None
    job = _jobs.get(world)
    if job is None:
        thread = threading.get_ident()  # has one default group at a time; destroyed ones may live on
        with _jobs_lock:
            for ended in [other for other, its in _jobs.items() if its.thread == thread]:
                del _jobs[ended]
        job = _Job(thread)
        with _jobs_lock:
            _jobs[world] = job
    return job.positions_of(group, world)


def describe_here() -> str:
    """Describes the unit that this process is in, and its latest collectives in each group, newest first."""
    lines = list[str]()
    for group in (group for job in [*_jobs.values()] for group in job.groups):
        entered = group._sheet.read(group._rank, _ENTERED)
        if entered.number:
            lines.insert(0, f"in or after {entered}")
        ranks = list_ranks(group._members)
        lines += [f"  number {noted.number} of {ranks}: {noted.text}" for noted in reversed(group.history())]
    return "\n".join(lines) or "in no unit yet"


class GroupPositions:
    """The log of collectives of one group's ranks on this host.

    `world` is the log of the default group, which also holds the last entered unit. `verdict` is the reason,
    once found, why no collective of the group can complete any more.
    """

    def __init__(self, job: _Job, group: dist.ProcessGroup, world: GroupPositions | None) -> None:
        self._job = job
        self._members = dist.get_process_group_ranks(group)
        self._rank, self._size = self._members.index(dist.get_rank()), len(self._members)
        self.agreement = Agreement(group)
        self.world = self if world is None else world
        self._sheet = job.sheet(group, self._rank, self._size)
        self._memory, self._words = self._sheet.memory, self._sheet.words
        self._entries = _Sheet.entries(self._rank, self._size)
        # The range of present ranks; absent ones within it are on other hosts.
        self._there, self._begin, self._end = [self._rank], self._rank, self._rank + 1
        self._searches = _RING  # ranks not seen during the first collectives are on other hosts
        self.issued = self._remarked = 0
        self.trees = 0
        self.verdict: str | None = None

    @property
    def member(self) -> int:
        """This rank's global rank."""
        return self._members[self._rank]

    @property
    def elsewhere(self) -> list[int]:
        """The global ranks of the group's members on other hosts."""
        return [member for rank, member in enumerate(self._members) if rank not in self._there]

    def latest(self) -> LogEntry:
        """Returns this rank's last entry."""
        return self._sheet.read(self._rank, _row(self.issued))

    def history(self) -> list[Noted]:
        """Returns this rank's latest collectives, oldest first."""
        found = []
        for number in range(max(1, self.issued - _RING + 2), self.issued + 1):  # one may be being written
            entry = self._sheet.read(self._rank, _row(number))
            word = self._words[_row(number) * self._size + self._rank]
            if entry.number == number and word >> 32 == number & _LOW:
                found.append(Noted(number, word & _LOW, entry.tries, str(entry)))
        return found

    def issue(self, note: Note, phase: Phase, iteration: int) -> None:
        """Logs a collective that belongs to no unit; see `Collective.issue`."""
        Collective([(self, note)]).issue(phase, iteration)

    def call(self, name: str) -> None:
        """Logs a call that all ranks of the group must make; raises if a peer has issued something else."""
        world = self.world
        iteration = world._sheet.read(world._rank, _ENTERED).iteration
        self.issue(Note(f"{_CALLS}{name}"), Phase.IDLE, iteration)

    def absent_from(self, number: int) -> list[int]:
        """Returns the global ranks on this host that have not issued a collective."""
        self._search()
        noted = self._noted(number).items()
        return [self._members[rank] for rank, word in noted if word >> 32 < number & _LOW]

    def compare(self, number: int, all_came: bool = False) -> None:
        """Raises a RuntimeError if a peer has issued another collective under a number.

        Set `all_came` if the collective has completed: every peer must have issued it then.
        """
        if not self._mixed_up(number, all_came):
            return
        time.sleep(0.001)  # an entry may have been overwritten after its word was read
        if mixed_up := self._mixed_up(number, all_came):
            raise self.mixed_up(" while ".join(mixed_up))

    def mixed_up(self, told: str) -> RuntimeError:
        """Makes the error for different collectives, with the positions of all ranks."""
        if _RAISED in told:
            return RuntimeError(
                f"ranks communicate for different units or steps: {told}. A step that raises on one rank "
                "must end on all: let the error end the program, or let all ranks agree to skip the step, "
                f"before any of them runs its backward.\n{self.table()}"
            )
        if call := _CALL.search(told):
            name = call[1]
            return RuntimeError(f"not all ranks call {name}: {told}. {all_must(name)}\n{self.table()}")
        if CHANGED in told:
            error = (
                f"ranks have loaded or edited apart: {told}. A rank changes its own part of the parameters "
                "(or of an optimizer's state) alone, so all ranks load and edit alike, or none does. A state "
                "dict that one rank alone has goes to all ranks by set_model_state_dict with full_state_dict "
                "and broadcast_from_rank0"
            )
            return self.told(error)
        if _BEHIND in told.replace("steps", "step"):
            return self.told(
                f"ranks have taken different numbers of optimizer steps: {told}. One rank has taken a step "
                "that another has skipped, so their parts of the parameters do not belong together. If a "
                "torch.amp.GradScaler found infinite or NaN gradients in the part of one rank alone, use "
                "fsdp_wrap.sharded_grad_scaler.ShardedGradScaler, whose ranks skip together. Let any other "
                "condition of a step be the same on all ranks. Load a checkpoint from before the step"
            )
        return RuntimeError(
            f"ranks communicate for different units: {told}. All ranks of a group must run the same units in "
            f"the same order.\n{self.table()}"
        )

    def told(self, error: str) -> RuntimeError:
        """Makes an error, and leaves it for ranks of other groups, which wait for those of this one."""
        self.world.agreement.tell(error)
        return RuntimeError(f"{error}\n{self.table()}")

    def remark(self, about: int, text: bytes) -> tuple[int, int]:
        """Writes what this rank has to tell at an optimizer step; returns by what to find peers' remarks.

        Args:
            about: The subject: a number that is the same on all ranks.
            text: At most 234 bytes.
        """
        row = _REMARKS + self._remarked % _REMARKS_KEPT
        self._remarked += 1
        _write(self._memory, self._entries + row * _ENTRY.size, self.issued, 0, text, about, 0)
        self._words[row * self._size + self._rank] = _word_of(self.issued, about, text)
        return self.issued, about

    def remarks(self, issued: int, about: int) -> dict[int, bytes]:
        """Returns the remarks that present ranks have written at the same place, by rank in the group."""
        texts = dict[int, bytes]()
        for rank, row in product(self._there, range(_REMARKS, _ROWS)):
            word = self._words[row * self._size + rank]
            if word and word >> 32 == issued & _LOW:
                text = self._sheet.read(rank, row).text
                if word == _word_of(issued, about, text):  # else it is of another subject, or being written
                    texts[rank] = text
        return texts

    @property
    def present(self) -> int:
        """Number of the group's ranks that have been seen on this host."""
        return len(self._there)

    @property
    def members(self) -> Sequence[int]:
        """The global ranks of the group."""
        return self._members

    def _mixed_up(self, number: int, all_came: bool) -> list[str]:
        """Describes each rank's collective of a number, if they differ."""
        words = self._noted(number)
        here = [rank for rank, word in words.items() if word >> 32 == number & _LOW]
        absent = [rank for rank, word in words.items() if all_came and word >> 32 < number & _LOW]
        if len({words[rank] for rank in here}) == 1 and not absent:
            return []
        entries = [self._sheet.read(rank, _row(number)) for rank in here]
        noted = [(words[rank] & _LOW, entry.tries) for rank, entry in zip(here, entries)]
        if here and alike(noted) and not absent:
            return []
        late = behind([digest for digest, _ in noted])
        did = [
            f"rank {self._members[rank]} {entry}{steps}" for rank, entry, steps in zip(here, entries, late)
        ]
        return did + [f"rank {self._members[rank]} has communicated for no unit" for rank in absent]

    def _noted(self, number: int) -> dict[int, int]:
        """Returns the words for a collective by present rank."""
        row = _row(number) * self._size
        return {rank: self._words[row + rank] for rank in self._there}

    def compare_all(self) -> None:
        """Compares the latest collectives and the settings in all groups; raises a RuntimeError."""
        for group in self._job.groups:
            group.agreement.look()
            group._search()
            for number in range(max(1, group.issued - _RING // 2), group.issued + 1):
                group.compare(number)

    def reached(self, number: int) -> bool:
        """Whether all peers have issued a collective; raises a RuntimeError if one has issued another."""
        if len(self._there) == 1:
            return True
        all_came = all(word >> 32 >= number & _LOW for word in self._noted(number).values())
        self.compare(number)  # after the words were read
        return all_came

    def knows(self, rank: int) -> bool:
        """Whether a global rank of the group has been seen on this host."""
        return rank in self._members and bool(self._words[self._members.index(rank)])

    def lives(self, rank: int) -> bool:
        """Whether a global rank lives; True for ranks on other hosts."""
        return not self.knows(rank) or self._lives(self._members.index(rank))

    def _lives(self, rank: int) -> bool:
        return rank == self._rank or self._sheet.lives(rank)

    def dead_before(self, number: int) -> list[int]:
        """Returns the peers that died before they issued a collective."""
        behind = [rank for rank, word in self._noted(number).items() if word >> 32 < number]
        return [self._members[rank] for rank in behind if not self._lives(rank)]

    def table(self) -> str:
        """Describes the positions of this host's ranks, including dead ones, a line each."""
        self._search()
        self.world._search()
        lines = ["Where the ranks stand:", *map(self._line, self.world._there)]
        there = {self.world._members[rank] for rank in self.world._there}
        missing = [rank for rank in self.world._members if rank not in there]
        if missing:
            lines.append(f"  not begun, or not on this host: {list_ranks(missing)}")
        return "\n".join(lines)

    def _line(self, rank: int) -> str:
        """Describes the position of one rank of the job."""
        world, named = self.world, self.world._members[rank]
        entered = world._sheet.read(rank, _ENTERED)
        line = f"in or after {entered}" if entered.number else "in no unit yet"
        if self.knows(named):
            read = partial(self._sheet.read, self._members.index(named))
            last = max(map(read, range(_FIRST, _REMARKS)))
            line += f"; last collective, number {last.number} of the group: {last}" if last.number else ""
        state = "this one" if rank == world._rank else "alive" if world._lives(rank) else "dead"
        return f"  rank {named} ({state}): {line}"

    def _search(self) -> None:
        """Updates the present ranks."""
        self._searches -= 1 if self._searches else 0
        self._there = [rank for rank, word in enumerate(self._words[: self._size]) if word]
        self._begin, self._end = self._there[0], self._there[-1] + 1


def list_ranks(ranks: Iterable[int]) -> str:
    """Formats a list of ranks, cut after the first few."""
    return listed((f"rank {rank}" for rank in ranks), 8)


def all_must(name: str) -> str:
    """Returns the rule for a call that all ranks must make."""
    saves = ", and save what it returns on one of them" if "state_dict" in name else ""
    return f"It communicates: call it on all ranks, outside of `if rank == 0:`{saves}."


class Tree:
    """A tree of units: its identity, as units of several trees may have equal names, and what it has tried.

    Attributes:
        tries: Twice the number of forwards since the last backward with a reduction; odd once one of these
            forwards, or a backward, has raised.
        steps: Number of optimizer steps that have been taken on its units, modulo `_STEPS`.
        mark: The same as `tries` if that is odd, else `steps` in the higher bits.
        changes: The changes of its values that all ranks must have made before the next collective, as the
            end of each note; "" before the first one.
    """

    def __init__(self) -> None:
        self._numbers: dict[GroupPositions, int] = {}
        self._collectives: weakref.WeakSet[UnitCollective] = weakref.WeakSet()
        self.changes = ""
        self.tries = self.steps = self.mark = 0

    def add(self, collective: UnitCollective) -> None:
        """Adds a collective of its units, whose notes follow `changes`."""
        self._collectives.add(collective)

    def change(self, changes: str) -> None:
        """Sets `changes`: from now on this rank's notes differ from those of a rank without them."""
        self.changes = f"{CHANGED}{changes}" if changes else ""
        for collective in self._collectives:
            collective.rewrite()

    def begin_forward(self) -> None:
        """Counts a forward whose backward would reduce."""
        raised = self.tries & 1
        self.tries = min(self.tries + 2, _MOST_TRIES + raised)
        self.mark = self.tries if raised else self.steps << 1

    def fail(self) -> None:
        """Notes that a forward or backward has raised on this rank."""
        self.tries = self.mark = self.tries | 1

    def end_backward(self) -> None:
        """Begins to count anew: a backward has issued its reductions."""
        self.tries, self.mark = 0, self.steps << 1

    @property
    def issued(self) -> int:
        """Number of collectives that this rank has issued in the tree's groups."""
        return sum([group.issued for group in self._numbers])

    def take_step(self) -> None:
        """Counts an optimizer step, which all ranks must take before the next collective."""
        self.steps = (self.steps + 1) % _STEPS
        if not self.tries & 1:
            self.mark = self.steps << 1

    def number_in(self, group: GroupPositions) -> int:
        """Returns the tree's number in the group, by the order of first collectives.

        The order of wrapping need not be the same on all ranks; the order of collectives must be.
        """
        if group not in self._numbers:
            group.trees += 1
            self._numbers[group] = group.trees
        return self._numbers[group]


_Issued = tuple[GroupPositions, int, int]  # group, collective's number, word
Agree = Callable[[Agreement, str], None]


Places = Sequence[tuple[GroupPositions, Note]]
_NO_TREE = Tree()


class Collective:
    """Logs one kind of collective in its groups; `issued` collects them to compare after the wait."""

    def __init__(self, places: Places, issued: list[_Issued] | None = None, tree: Tree = _NO_TREE) -> None:
        self._places, self._tree = places, tree
        self._issued: list[_Issued] = [] if issued is None else issued

    def _find_places(self) -> Places:
        """Returns the groups and notes, if these are only known at the first collective."""
        return self._places

    def issue(self, phase: Phase, iteration: int) -> None:
        """Logs the collective before it is issued; raises a RuntimeError if a peer has issued another one.

        Compares all peers at once: the cost does not depend on the number of ranks on the host.
        """
        issued, tree = self._issued, self._tree
        issued.clear()  # collectives that were never waited for
        for group, note in self._places or self._find_places():
            if group._searches:
                group._search()
            group.issued = number = group.issued + 1
            row = _FIRST + number % _RING
            place = group._entries + row * _ENTRY.size
            _write(group._memory, place, number, tree.tries, note.text, iteration, phase.index)
            words, first = group._words, row * group._size
            own = first + group._rank
            before = words[own]
            words[own] = word = (number & _LOW) << 32 | note.digest | tree.mark
            if len(group._there) > 1:
                peers = words[first + group._begin : first + group._end]
                # A rank that is behind has 0 here, or the word of the ring's last round.
                if not {word, before, 0}.issuperset(peers):
                    group.compare(number)
                issued.append((group, number, word))


class UnitCollective(Collective):
    """A collective of units; before the first, `agree` compares the unit across each group's ranks."""

    def __init__(
        self,
        texts: Sequence[str],
        tree: Tree,
        groups: Iterable[GroupPositions],
        issued: list[_Issued],
        agree: Agree | None = None,
    ) -> None:
        super().__init__([], issued, tree)
        self._texts, self._agree = texts, agree
        self._groups = tuple(dict.fromkeys(groups))
        self._is_known = not self._groups
        tree.add(self)

    @property
    def is_known(self) -> bool:
        """Whether the ranks have compared the unit."""
        return self._is_known

    def rewrite(self) -> None:
        """Writes the notes anew at the next collective."""
        self._places = []

    def with_others(self, others: Iterable[UnitCollective]) -> UnitCollective:
        """Returns the batched collective of known units of one tree in the same groups."""
        # "gathers a" and "gathers b" make "gathers a and b"
        texts = [*self._texts, *(text.partition(" ")[2] for each in others for text in each._texts)]
        return UnitCollective(texts, self._tree, self._groups, self._issued)

    def _find_places(self) -> Places:
        places = []
        for group in self._groups:
            number = self._tree.number_in(group)
            root = "" if number == 1 else f" of root number {number}"
            text = " and ".join(f"{each}{root}" for each in self._texts)
            if self._agree is not None and not self._is_known:
                self._agree(group.agreement, text.partition(" ")[2])
            places.append((group, Note(text + self._tree.changes)))
        self._places, self._is_known = places, True
        return places


class UnitPositions:
    """Logs the collectives of one unit, and that it is entered.

    Args:
        name: The unit's name in messages.
        tree: The unit's tree.
        gathering: Groups in which it gathers parameters; the same on every rank.
        reducing: Groups in which it reduces gradients.
        keeping: Groups that share its full parameters between forward and backward.
        waits: Whether waiting for a collective means that it has completed.
        agree: Called with each group's agreement and the unit's name there, before its first collective.

    Attributes:
        enter: Logs, given the iteration and the phase's index, that this rank enters the unit.
        gather: The gather of parameters.
        gather_kept: The gather from the ranks in `keeping`.
        reduction: The reduction of gradients.
        reduction_in_copy: The reduction of gradients within one copy.
        gathers: Gathers to compare once they were waited for.
        gathered: Compares `gathers` with the peers' collectives.
        reductions: Reductions to compare once they were waited for.
        reduced: Compares `reductions` with the peers' collectives.
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
        self.gathers = gathers = list[_Issued]()
        self.reductions = reductions = list[_Issued]()
        in_copy = [f"reduces {name} in a copy"]
        self.gather = UnitCollective([f"gathers {name}"], tree, gathering, gathers, agree)
        self.gather_kept = UnitCollective([f"gathers {name} from neighbours"], tree, keeping, gathers, agree)
        self.reduction = UnitCollective([f"reduces {name}"], tree, reducing, reductions, agree)
        self.reduction_in_copy = UnitCollective(in_copy, tree, gathering, reductions, agree)
        self.gathered = partial(_check_alike, gathers, waits)
        self.reduced = partial(_check_alike, reductions, waits)
        world = next((group.world for group in reducing), None)
        self.enter: Callable[[int, int], object] = lambda iteration, phase: None
        if world is not None:
            self.enter = partial(_write, world._memory, world._entries, 1, 0, Note(name).text)


def _check_alike(issued: list[_Issued], waits: bool) -> None:
    """Raises a RuntimeError if a peer has issued another collective than one that was waited for."""
    for group, number, word in issued:
        if len(group._there) > 1:
            first = (_FIRST + number % _RING) * group._size
            if not {word}.issuperset(group._words[first + group._begin : first + group._end]):
                group.compare(number, waits)
    issued.clear()
