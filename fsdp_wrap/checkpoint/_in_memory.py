"""Checkpoints in the memory of hosts: the pieces of each rank lie on its own host and on the next one.

A folder in a host's memory (`/dev/shm`) outlives the processes that wrote it, and goes with the host. It
holds step folders as on disk, in which each host has the files of its own ranks and of the host before it. So
every file is on some host, whichever one of them is lost.
"""

from __future__ import annotations

import io
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from fsdp_wrap._core import listed, refuse_others, warn_caller
from fsdp_wrap.checkpoint._hosts import Hosts, Move, carry_out
from fsdp_wrap.checkpoint._manifest import (
    DRAFT,
    METADATA,
    DamagedCheckpoint,
    Fault,
    Manifest,
    format_faults,
    metadata_in,
    verify,
)
from fsdp_wrap.checkpoint._places.folder import Folder
from fsdp_wrap.checkpoint._places.place import where_is
from fsdp_wrap.checkpoint._places.steps import disk_path, sum_of_manifest
from fsdp_wrap.checkpoint._storage import KnownReader, Save, rank_of
from fsdp_wrap.checkpoint._team import Team

_EVERYWHERE = (METADATA, DRAFT)


class InMemory:
    """A place for checkpoints in the memory of the hosts, for `save`, `async_save` and `load`.

    Each rank's pieces are kept on its own host and on the next one, so that what is lost with one host can be
    loaded from its neighbour: no file system is shared, and no disk is written to. Ranks that see the same
    folder are on one host. On a single host there is no neighbour, and a save warns.

    A host holds two shards for each of its ranks, twice as much while a step is saved. The memory is used
    until `clear` is called or the host restarts: it outlives the processes.

    The folder is made for this user alone (mode 0700). One that another user has made, or may write to, and a
    link, are refused by a ValueError wherever the place is used: others could lead what is written elsewhere.

    Attributes:
        folder: In this host's memory.

    Args:
        folder: A folder in memory, such as `/dev/shm/lm`, of this run alone. Hosts may name different ones.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = disk_path(folder, "InMemory")

    def __repr__(self) -> str:
        return f"InMemory({str(self.folder)!r})"

    def latest(self, process_group: dist.ProcessGroup | None = None) -> int | None:
        """Returns the newest step of which some host has every file; collective.

        Args:
            process_group: The ranks that look; None for the default group, or this process alone without one.

        Returns:
            The number of the step, None if there is none. Only names and sizes are checked, as for folders.
        """
        team = Team.of(process_group, "InMemory.latest")
        hosts = Hosts.of(team, self.folder)
        return next((step.number for step in _steps_of(hosts, self.folder) if not step.lacking), None)

    def clear(self) -> None:
        """Frees the memory on this rank's host: removes all steps there.

        One rank of each host calls it, when no rank saves or loads any more.

        Raises:
            RuntimeError: If a save is going on there.
            ValueError: If others may write there.
        """
        if self.folder.is_dir():
            refuse_others(self.folder, alone=True)
            Folder(self.folder).clear()

    def find(self, team: Team, step: int | None) -> tuple[Path, Manifest, Callable[[], KnownReader]]:
        """Finds a step whose files are all on some host, and has its bytes verified; collective.

        A file that is damaged on one host is taken from another one.

        Args:
            team: The ranks that load.
            step: Its number; None for the newest.

        Returns:
            The step folder on this rank's host, the manifest, and what opens it.

        Raises:
            ValueError: If there is none, on all ranks.
            DamagedCheckpoint: If a file is intact on no host, on all ranks.
        """
        team = team.in_background()
        hosts = Hosts.of(team, self.folder)
        chosen = _chosen(_steps_of(hosts, self.folder), step, where_is(self.folder))
        folder = Folder(self.folder).step_folder(chosen.number)
        chosen = _intact(hosts, folder, chosen)
        source = min(chosen.files)
        manifest, index = team.on(source, lambda: (Manifest.read(folder), (folder / METADATA).read_bytes()))
        files = chosen.files
        return (
            folder,
            manifest,
            lambda: _HostsReader(folder, metadata_in(index, folder), manifest, hosts, files),
        )


class _HeldStep(NamedTuple):
    """A step in the memory of hosts."""

    number: int
    total: int  # the CRC-32 of its manifest: the same step may have been saved twice
    names: frozenset[str]
    files: dict[int, frozenset[str]]  # those that are there, by the head of their host

    @property
    def lacking(self) -> list[str]:
        """The files that no host has."""
        return sorted(self.names.difference(*self.files.values()))


def _steps_of(hosts: Hosts, folder: Path) -> list[_HeldStep]:
    """Returns the steps of which any host has files, newest first; collective."""
    steps: dict[tuple[int, int], _HeldStep] = {}
    by_rank = hosts.team.gather(hosts.team.together(lambda: _held(folder) if hosts.is_first else []))
    for rank, held in enumerate(by_rank):
        for number, total, names, files in held:
            step = steps.setdefault((number, total), _HeldStep(number, total, names, {}))
            step.files[rank] = files
    return sorted(steps.values(), reverse=True, key=lambda step: (step.number, not step.lacking, step.total))


def _held(folder: Path) -> list[tuple[int, int, frozenset[str], frozenset[str]]]:
    """Returns the steps on this host: number, CRC-32 of the manifest, all files, and those that are there."""
    held = []
    for number, path in Folder(folder).steps().items():
        try:
            manifest, total = Manifest.read(path), sum_of_manifest(path)
        except DamagedCheckpoint:
            continue
        names = frozenset(manifest.files)
        gone = {fault.file for fault in manifest.missing(path)}
        if isinstance(total, int) and METADATA not in gone:
            held.append((number, total, names, names - gone))
    return held


def _chosen(steps: Sequence[_HeldStep], number: int | None, place: str) -> _HeldStep:
    """Returns the newest complete step, or the one asked for."""
    asked = [step for step in steps if number in (None, step.number)]
    for step in asked:
        if not step.lacking:
            return step
    what = "no complete checkpoint" if number is None else f"no complete step {number}"
    lacks = [f"of step {step.number} no host has {listed(step.lacking)}" for step in asked]
    why = "; ".join(lacks) or "no host holds any"
    raise ValueError(f"there is {what} in the memory of the hosts (rank 0 looked {place}): {why}")


def _intact(hosts: Hosts, folder: Path, step: _HeldStep) -> _HeldStep:
    """Returns the step without files damaged in a host's memory; each byte is read once on each host."""
    team, ranks = hosts.team, hosts.ranks_of(hosts.first)

    def faults() -> list[Fault]:
        there = step.files.get(hosts.first, frozenset())
        if not there:
            return []
        share = Manifest.read(folder).share(ranks.index(team.rank), len(ranks))
        return list(verify(folder, (piece for piece in share if piece.file in there)))

    by_rank = team.gather(team.together(faults))
    damaged = {rank: {fault.file for fault in of_rank} for rank, of_rank in enumerate(by_rank)}
    left = {
        head: files.difference(*(damaged[rank] for rank in hosts.ranks_of(head)))
        for head, files in step.files.items()
    }
    step = step._replace(files={head: files for head, files in left.items() if METADATA in files})
    if step.lacking:
        lines = [
            line
            for of_rank in by_rank
            for line in format_faults(folder, [f for f in of_rank if f.file in step.lacking])
        ]
        damage = f"step {step.number} in the memory of the hosts is damaged, and nothing was loaded:"
        raise DamagedCheckpoint("\n  ".join([damage, *lines]))
    return step


# saving


@dataclass(frozen=True, kw_only=True)
class MemorySave(Save):
    """A save into the memory of the hosts."""

    folder: Path

    def write(self) -> Path:
        """Writes the step on all hosts; once every file is on two, publishes it and removes older steps."""
        team = self.team.in_background()
        hosts = Hosts.of(team, self.folder)
        if len(hosts.heads) == 1 and team.is_first:
            warn_caller(
                f"all ranks keep their checkpoint in the memory of one host ({where_is(self.folder)}): it is "
                "lost with that host. Run on several hosts, or save to disk as well"
            )
        step = self.step
        if step is None:
            step = max((earlier.number for earlier in _steps_of(hosts, self.folder)), default=0) + 1
        doing = f"saving step {step} in the memory of {len(hosts.heads)} hosts (other steps are as they were)"
        with ExitStack() as held:
            place = Folder(self.folder)
            name = hosts.on_first(lambda: held.enter_context(place.begun(step))[1])
            written = self.folder / name
            with team.in_dcp(doing):
                bar = self.progress and team.is_first
                self.writer(written, step, team.size, bar).save(self.state, team)
            self._spread(hosts, written)
            hosts.on_first(lambda: place.publish(name, step, None))  # on all hosts, before anything goes
            hosts.on_first(lambda: place.keep_newest(self.keep_last or 1))
        return place.step_folder(step)

    def _spread(self, hosts: Hosts, written: Path) -> None:
        """Copies the index to all hosts, and each rank's files to its neighbour."""
        team = hosts.team
        index = team.on_first(lambda: [(written / name).read_bytes() for name in _EVERYWHERE])

        def write_index() -> None:
            if hosts.is_first and not team.is_first:
                for name, data in zip(_EVERYWHERE, index):
                    with open(written / name, "xb") as file:
                        file.write(data)

        team.together(write_index)
        manifest = team.together(lambda: Manifest.read(written, DRAFT))
        takers = {rank: hosts.neighbour(rank) for rank in range(team.size)}
        moves = [
            Move(writer, taker, name, 0, manifest.size_of(name))
            for name in manifest.files
            if name != METADATA
            for writer in [rank_of(name)]
            for taker in [takers[writer]]
            if taker is not None
        ]

        def keep(move: Move, chunks: Iterator[torch.Tensor]) -> None:
            with open(written / move.file, "xb") as file:
                for chunk in chunks:
                    file.write(chunk.numpy().data)

        team.together(lambda: carry_out(team, moves, written, keep))
        expected = {METADATA} | {
            name for name in manifest.files if team.rank in (rank_of(name), takers[rank_of(name)])
        }
        team.together(lambda: _refuse_lacking(manifest, written, expected))


def _refuse_lacking(manifest: Manifest, written: Path, expected: Iterable[str]) -> None:
    lacks = [f"{fault.file} {fault.lack}" for fault in manifest.missing(written) if fault.file in expected]
    if lacks:
        raise RuntimeError(f"what was written {where_is(written)} is not there: {'; '.join(lacks)}")


# loading


class _HostsReader(KnownReader):
    """Reads a step in the memory of several hosts: files that this one lacks come from another one."""

    is_collective = True

    def __init__(
        self,
        folder: Path,
        metadata: Metadata,
        manifest: Manifest,
        hosts: Hosts,
        files: Mapping[int, frozenset[str]],
    ) -> None:
        super().__init__(folder, metadata)
        self._hosts, self._files = hosts, files
        self._sums = {(piece.file, piece.offset): piece.crc for piece in manifest.pieces()}

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Takes the pieces that this host lacks from others, then reads its own; collective."""
        local = self._files.get(self._hosts.first, frozenset())
        near: list[ReadItem] = []
        far: dict[tuple[str, int, int], list[ReadItem]] = {}
        for item in plan.items:
            place = self.storage_data[item.storage_index]
            if place.relative_path in local:
                near.append(item)
            else:
                key = (place.relative_path, place.offset, place.length)
                far.setdefault(key, []).append(item)
        needs = self._hosts.team.gather(sorted(far))

        def take(move: Move, chunks: Iterator[torch.Tensor]) -> None:
            data = b"".join(chunk.numpy().tobytes() for chunk in chunks)
            if zlib.crc32(data) != self._sums[move.file, move.offset]:
                raise DamagedCheckpoint(f"{move.file} came from rank {move.giver} with changed bytes")
            self.put(far[move.file, move.offset, move.length], io.BytesIO(data), len(data), planner)

        moves = self._moves(needs)
        carry_out(self._hosts.team, moves, self.folder, take)
        return super().read_data(replace(plan, items=near), planner)

    def _moves(self, needs: Sequence[Sequence[tuple[str, int, int]]]) -> list[Move]:
        """Returns the moves that meet all needs; ranks of a host take turns in giving."""
        givers: dict[str, list[int]] = {}
        for head in sorted(self._files):
            for name in self._files[head]:
                givers.setdefault(name, self._hosts.ranks_of(head))
        return [
            Move(givers[file][taker % len(givers[file])], taker, file, offset, length)
            for taker, needed in enumerate(needs)
            for file, offset, length in needed
        ]
