"""The log of one group: the collectives of its ranks, whether these are alike, and where the ranks stand.

Ranks compare when they issue a collective, and again when they have waited for it (`Collective`). What a rank
has to tell at an optimizer step goes into *remarks*, beside the collectives. The number of collectives before
a remark says to which step it belongs. Peers read it after their next collective.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterable, Sequence

import torch.distributed as dist

from fsdp_wrap._comm.positions.agreement import Agreement
from fsdp_wrap._comm.positions.host_log import ENTERED, ENTRY, FIRST, LOW, RING, LogEntry, write_entry
from fsdp_wrap._comm.positions.log_files import LogFiles
from fsdp_wrap._comm.positions.notes import CALLS, Note, Noted, StepCounts, alike, behind, explained
from fsdp_wrap._core import Phase, listed


class _Job:
    """Positions in all groups, and their files, for the life of one default process group.

    If ranks are threads, each thread has a job of its own.
    """

    def __init__(self, thread: int) -> None:
        self.thread = thread
        self.files = LogFiles()
        self._groups: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupPositions]
        self._groups = weakref.WeakKeyDictionary()
        self._names: Counter[str] = Counter()

    def positions_of(self, group: dist.ProcessGroup, world: dist.ProcessGroup) -> GroupPositions:
        """Returns the positions of a group; one object per group."""
        if group not in self._groups:
            of_world = None if group is world else self.positions_of(world, world)
            self._names[group.group_name] += 1  # an earlier group may have had the same name
            name = f"{group.group_name} {self._names[group.group_name]}"
            self._groups[group] = GroupPositions(self, group, name, of_world)
        return self._groups[group]

    @property
    def groups(self) -> Iterable[GroupPositions]:
        """The positions of all groups that units of this rank use."""
        # `keyrefs` makes a list at once: another thread may add a group meanwhile.
        return [self._groups[group] for key in self._groups.keyrefs() if (group := key()) is not None]


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
        entered = group.log.read(group.log.rank, ENTERED)
        if entered.number:
            lines.insert(0, f"in or after {entered}")
        ranks = list_ranks(group.members)
        lines += [f"  number {noted.number} of {ranks}: {noted.text}" for noted in reversed(group.history())]
    return "\n".join(lines) or "in no unit yet"


class GroupPositions:
    """The log of collectives of one group's ranks on this host.

    Attributes:
        members: The global ranks of the group.
        agreement: Comparisons of settings among them.
        log: What they have logged; it counts ranks in the group.
        world: The positions of the default group, whose log also has the last entered unit.
        issued: Number of collectives that this rank has logged.
        trees: Number of trees of units that have communicated in the group.
        verdict: The reason, once found, why no collective of the group can complete any more.
    """

    def __init__(self, job: _Job, group: dist.ProcessGroup, name: str, world: GroupPositions | None) -> None:
        self._job = job
        self.members: Sequence[int] = dist.get_process_group_ranks(group)
        self.agreement = Agreement(group)
        self.world = self if world is None else world
        self.log = job.files.open(name, self.members.index(dist.get_rank()), len(self.members))
        self.issued = self.trees = 0
        self.verdict: str | None = None

    # What this rank issues.

    @property
    def member(self) -> int:
        """This rank's global rank."""
        return self.members[self.log.rank]

    def latest(self) -> LogEntry:
        """Returns this rank's last entry."""
        return self.log.collective(self.log.rank, self.issued)

    def history(self) -> list[Noted]:
        """Returns this rank's latest collectives, oldest first."""
        log, noted = self.log, []
        for number in range(max(1, self.issued - RING + 2), self.issued + 1):  # one may be being written
            entry = log.collective(log.rank, number)
            word = log.words[log.row_of(number) * log.ranks + log.rank]
            if entry.number == number and word >> 32 == number & LOW:
                noted.append(Noted(number, word & LOW, entry.tries, str(entry)))
        return noted

    def issue(self, note: Note, phase: Phase, iteration: int) -> None:
        """Logs a collective that belongs to no unit; see `Collective.issue`."""
        Collective([(self, note)]).issue(phase, iteration)

    def call(self, name: str) -> None:
        """Logs a call that all ranks of the group must make; raises if a peer has issued something else."""
        world = self.world.log
        self.issue(Note(f"{CALLS}{name}"), Phase.IDLE, world.read(world.rank, ENTERED).iteration)

    def remark(self, about: int, text: bytes) -> tuple[int, int]:
        """Writes what this rank has to tell at an optimizer step; returns by what to find peers' remarks.

        Args:
            about: The subject: a number that is the same on all ranks.
            text: At most 234 bytes.
        """
        self.log.write_remark(self.issued, about, text)
        return self.issued, about

    def remarks(self, issued: int, about: int) -> dict[int, bytes]:
        """Returns the remarks that present ranks have written at the same place, by rank in the group."""
        return self.log.remarks(issued, about)

    # Which ranks are there, and have come.

    @property
    def present(self) -> int:
        """Number of the group's ranks that have been seen on this host."""
        return len(self.log.present)

    @property
    def elsewhere(self) -> list[int]:
        """The global ranks of the group's members on other hosts."""
        return [member for rank, member in enumerate(self.members) if rank not in self.log.present]

    def absent_from(self, number: int) -> list[int]:
        """Returns the global ranks on this host that have not issued a collective."""
        self.log.search()
        return [self.members[rank] for rank in self._before(number)]

    def dead_before(self, number: int) -> list[int]:
        """Returns the peers that died before they issued a collective."""
        return [self.members[rank] for rank in self._before(number) if not self.log.lives(rank)]

    def _before(self, number: int) -> list[int]:
        """Returns the present ranks that have not issued a collective yet."""
        return [rank for rank, word in self.log.words_of(number).items() if word >> 32 < number & LOW]

    def reached(self, number: int) -> bool:
        """Whether all peers have issued a collective; raises a RuntimeError if one has issued another."""
        if len(self.log.present) == 1:
            return True
        all_came = not self._before(number)
        self.compare(number)  # after the words were read
        return all_came

    def knows(self, rank: int) -> bool:
        """Whether a global rank of the group has been seen on this host."""
        return rank in self.members and bool(self.log.words[self.members.index(rank)])

    def lives(self, rank: int) -> bool:
        """Whether a global rank lives; True for ranks on other hosts."""
        return not self.knows(rank) or self.log.lives(self.members.index(rank))

    # Whether all have issued the same.

    def compare_all(self) -> None:
        """Compares the latest collectives and the settings in all groups; raises a RuntimeError."""
        for group in self._job.groups:
            group.agreement.look()
            group.log.search()
            for number in range(max(1, group.issued - RING // 2), group.issued + 1):
                group.compare(number)

    def compare(self, number: int, all_came: bool = False) -> None:
        """Raises a RuntimeError if a peer has issued another collective under a number.

        Set `all_came` if the collective has completed: every peer must have issued it then.
        """
        if not self._differences(number, all_came):
            return
        time.sleep(0.001)  # an entry may have been overwritten after its word was read
        if differences := self._differences(number, all_came):
            raise self.mixed_up(" while ".join(differences))

    def _differences(self, number: int, all_came: bool) -> list[str]:
        """Describes each rank's collective of a number, if they differ."""
        log, words = self.log, self.log.words_of(number)
        came = [rank for rank, word in words.items() if word >> 32 == number & LOW]
        absent = [rank for rank, word in words.items() if all_came and word >> 32 < number & LOW]
        if len({words[rank] for rank in came}) == 1 and not absent:
            return []
        entries = [log.collective(rank, number) for rank in came]
        noted = [(words[rank] & LOW, entry.tries) for rank, entry in zip(came, entries)]
        if came and alike(noted) and not absent:
            return []
        late = behind([digest for digest, _ in noted])
        did = [f"rank {self.members[rank]} {entry}{steps}" for rank, entry, steps in zip(came, entries, late)]
        return did + [f"rank {self.members[rank]} has communicated for no unit" for rank in absent]

    def mixed_up(self, told: str) -> RuntimeError:
        """Makes the error for different collectives, with the positions of all ranks."""
        error, concerns_others = explained(told)
        return self.told(error) if concerns_others else RuntimeError(f"{error}\n{self.table()}")

    def told(self, error: str) -> RuntimeError:
        """Makes an error, and leaves it for ranks of other groups, which wait for those of this one."""
        self.world.agreement.tell(error)
        return RuntimeError(f"{error}\n{self.table()}")

    # Where the ranks stand.

    def table(self) -> str:
        """Describes the positions of this host's ranks, including dead ones, a line each."""
        world = self.world
        self.log.search()
        world.log.search()
        lines = ["Where the ranks stand:", *map(self._line, world.log.present)]
        if world.elsewhere:
            lines.append(f"  not begun, or not on this host: {list_ranks(world.elsewhere)}")
        return "\n".join(lines)

    def _line(self, rank: int) -> str:
        """Describes the position of one rank of the job."""
        world = self.world.log
        member = self.world.members[rank]
        entered = world.read(rank, ENTERED)
        line = f"in or after {entered}" if entered.number else "in no unit yet"
        if self.knows(member):
            last = self.log.last_collective(self.members.index(member))
            line += f"; last collective, number {last.number} of the group: {last}" if last.number else ""
        state = "this one" if rank == world.rank else "alive" if world.lives(rank) else "dead"
        return f"  rank {member} ({state}): {line}"


def list_ranks(ranks: Iterable[int]) -> str:
    """Formats a list of ranks, cut after the first few."""
    return listed((f"rank {rank}" for rank in ranks), 8)


Issued = tuple[GroupPositions, int, int]
"""A logged collective: its group, its number, its word."""
Places = Sequence[tuple[GroupPositions, Note]]
"""Where a collective is logged: its groups, with the note for each."""
_NO_STEPS = StepCounts()


class Collective:
    """Logs one kind of collective in its groups, before it is issued.

    Args:
        places: Its groups, and notes.
        issued: Collects what was logged, for `compare_waited`.
        counts: Counts the steps to which the collective belongs.
    """

    def __init__(
        self, places: Places, issued: list[Issued] | None = None, counts: StepCounts = _NO_STEPS
    ) -> None:
        self._places, self._counts = places, counts
        self._issued: list[Issued] = [] if issued is None else issued

    def _find_places(self) -> Places:
        """Returns the groups and notes, if these are only known at the first collective."""
        return self._places

    def issue(self, phase: Phase, iteration: int) -> None:
        """Logs the collective before it is issued; raises a RuntimeError if a peer has issued another one.

        Compares all peers at once: the cost does not depend on the number of ranks on the host.
        """
        issued, counts = self._issued, self._counts
        issued.clear()  # collectives that were never waited for
        for group, note in self._places or self._find_places():
            log = group.log
            if log.searches:
                log.search()
            group.issued = number = group.issued + 1
            row = FIRST + number % RING
            place = log.entries + row * ENTRY.size
            write_entry(log.memory, place, number, counts.tries, note.text, iteration, phase.index)
            words, first = log.words, row * log.ranks
            own = first + log.rank
            before = words[own]
            words[own] = word = (number & LOW) << 32 | note.digest | counts.mark
            if len(log.present) > 1:
                peers = words[first + log.begin : first + log.end]
                # A rank that is behind has 0 here, or the word of the ring's last round.
                if not {word, before, 0}.issuperset(peers):
                    group.compare(number)
                issued.append((group, number, word))


def compare_waited(issued: list[Issued], completed: bool) -> None:
    """Raises a RuntimeError if a peer has issued another collective than one that was waited for.

    `completed` tells whether waiting means that it has completed: then every peer must have issued it.
    """
    for group, number, word in issued:
        log = group.log
        if len(log.present) > 1:
            first = (FIRST + number % RING) * log.ranks
            if not {word}.issuperset(log.words[first + log.begin : first + log.end]):
                group.compare(number, completed)
    issued.clear()
