"""Loading: verifies and checks everything, reads it into other memory, and only then changes the model."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful

from fsdp_wrap._core import listed, tells_keywords, warn_caller
from fsdp_wrap.checkpoint._in_memory import InMemory
from fsdp_wrap.checkpoint._manifest import (
    DamagedCheckpoint,
    Fault,
    Manifest,
    Shown,
    entries_of,
    format_faults,
    read_metadata,
)
from fsdp_wrap.checkpoint._places import steps
from fsdp_wrap.checkpoint._places.cache import CachedFiles, OpenFiles, StoredFiles
from fsdp_wrap.checkpoint._places.place import where_is
from fsdp_wrap.checkpoint._places.reader import StoreReader
from fsdp_wrap.checkpoint._places.remote import RemotePath
from fsdp_wrap.checkpoint._saving import wait_for_pending
from fsdp_wrap.checkpoint._state import Optimizers, Subject, set_random_state
from fsdp_wrap.checkpoint._storage import KnownReader, allocated, read, unpacked
from fsdp_wrap.checkpoint._team import ALONE, Team
from fsdp_wrap.checkpoint._torch_private import unflatten_state_dict


class Loaded(dict[str, Any]):
    """The extras of a checkpoint by name, and where they come from.

    Attributes:
        step: The number of the step.
        folder: Its folder.
    """

    def __init__(self, values: Mapping[str, Any], step: int, folder: Path) -> None:
        super().__init__(values)
        self.step, self.folder = step, folder


@tells_keywords({"optimizer": "pass it as optim", "optimizers": "pass them as optim"})
def load(
    dir: str | os.PathLike[str] | InMemory,
    model: nn.Module,
    optim: Optimizers = None,
    extra: Mapping[str, Any] | None = None,
    *,
    step: int | None = None,
    strict: bool = True,
    restore_random_state: bool = True,
    trusted: bool = False,
    cache: str | os.PathLike[str] | None = None,
    process_group: dist.ProcessGroup | None = None,
) -> Loaded:
    """Loads a step folder into model, optimizers and extras, here or elsewhere; collective.

    The number of ranks, strategy, wrapping and `use_orig_params` may be others than when it was saved. Before
    anything changes, every byte is read once by some rank and compared with its checksum, and names and
    shapes are compared.

    Extras and random states belong to ranks. With another number of ranks, each gets the first rank's extras,
    with a warning that names those that differed, and random states stay as they are.

    Args:
        dir: Where steps were saved, for the newest complete one or `step`; or a step folder. All ranks must
            see the same one there. A path, or a URL as for `save`.
        model: Wrapped or plain.
        optim: One or several optimizers of it; None to leave their state.
        extra: By name; those with `load_state_dict` are loaded in place.
        step: The number of the step; None for the newest complete one.
        strict: Whether names must be the same; otherwise those that both have are loaded.
        restore_random_state: Whether random states of torch, Python, numpy and the CUDA device are set.
        trusted: Whether pickled values may be anything, and so run whatever the folder brings. Otherwise they
            are plain values, tensors, arrays, and what `torch.serialization.add_safe_globals` admits.
        cache: A folder on each host's own disk, where files of a store are kept for its other ranks and for
            later loads. They are verified like those in the store, and one step of each URL stays. For steps
            on disk or in memory it changes nothing.
        process_group: The ranks that load; None for the default group, or this process alone without one.

    Returns:
        This rank's extras as they were saved, the objects from `extra` in place of their state; with the
        attributes `step` and `folder`.

    Raises:
        ImportError: If the package for a URL's kind of store is not installed; nothing has changed then.
        TypeError: If an argument has the wrong type.
        ValueError: If there is no such step, ranks do not see the same one, names or shapes do not fit, or
            `cache` is a folder that others could write to, or that takes no locks; nothing has changed then.
        DamagedCheckpoint: If a file is missing or has changed, on all ranks; it names the files, the
            parameters that lie there and an earlier step that is complete. Nothing has changed then.
        RuntimeError: If a rank could not read what was there, if it is more than plain values, or if a
            model or optimizer on some rank refuses it; nothing has changed then.
    """
    wait_for_pending(raise_error=False)
    team = Team.of(process_group, "checkpoint.load", model)
    subject = team.together(lambda: Subject(model, optim, extra))
    folder, manifest, opened = _find_step(dir, team, step, cache)

    def begun() -> tuple[tuple[KnownReader, _Reading], list[str]]:
        reader = opened()
        reading = _Reading(subject, folder, manifest, reader.metadata, team)
        return (reader, reading), reading.lacking

    (reader, reading), lacked = team.agreed(begun)  # each rank may have another pipeline stage
    with reader:
        team.together(lambda: reading.prepare(strict, set.intersection(*map(set, lacked))))
        read(reader, reading.flat, team, lambda: None, trusted=trusted)
        _refuse_damage(team, folder, reader.faults(team))
    saved = team.together(lambda: reading.values(trusted))
    subject.put_in(team, saved["model"], saved["optim"], strict)
    values = team.together(lambda: subject.put_in_extra(saved["extra"]))
    if restore_random_state and saved["random"] is not None:
        set_random_state(saved["random"])
    return Loaded(values, steps.number_of(folder, manifest.step), folder)


def _find_step(
    dir: str | os.PathLike[str] | InMemory,
    team: Team,
    step: int | None,
    cache: str | os.PathLike[str] | None,
) -> tuple[Path, Manifest, Callable[[], KnownReader]]:
    """Returns a step folder in this rank's path, its manifest, and what opens it.

    All is verified before on disk, where the second reading costs little; in a store while it is read.
    """
    copies = team.together(lambda: None if cache is None else steps.disk_path(cache, "cache="))
    if isinstance(dir, InMemory):
        return dir.find(team, step)
    folder = _agreed_folder(team, dir, step)
    if not isinstance(folder, RemotePath):
        manifest = verified(team, folder)
        return folder, manifest, lambda: KnownReader(folder, read_metadata(folder))
    manifest = team.on_first(lambda: _read_manifest(folder))
    _, by_rank = team.agreed(lambda: (None, (where_is(folder), manifest.missing(folder))))
    _refuse_damage(team, folder, by_rank)

    def opened() -> KnownReader:
        files = StoredFiles(folder) if copies is None else CachedFiles(folder, manifest, copies)
        return _in_store(files, manifest, team)

    return folder, manifest, opened


def opened_in_store(folder: RemotePath) -> StoreReader:
    """Opens a step in a store for one process: what it reads is verified then, once, and no more is read."""
    manifest = _read_manifest(folder)
    if faults := manifest.missing(folder):
        refuse(folder, format_faults(folder, faults))
    return _in_store(OpenFiles(folder), manifest, ALONE)


def _in_store(files: StoredFiles, manifest: Manifest, team: Team) -> StoreReader:
    folder = files.folder
    return StoreReader(files, manifest, lambda faults: refuse(folder, format_faults(folder, faults)), team)


def _agreed_folder(team: Team, dir: str | os.PathLike[str], step: int | None) -> Path:
    """Returns the step folder that the first rank has found, as this rank names it."""
    parent = team.together(lambda: steps.path_at(dir))
    name = team.on_first(lambda: "" if (chosen := steps.find(parent, step)) == parent else chosen.name)
    folder = parent / name
    by_rank = team.gather((where_is(folder), folder.is_dir(), steps.sum_of_manifest(folder)))
    first, *expected = by_rank[0]
    lost = [
        f"rank {rank} {_lacking(is_there, manifest)} ({place})"
        for rank, (place, is_there, manifest) in enumerate(by_rank)
        if [is_there, manifest] != expected
    ]
    if lost:
        raise ValueError(
            f"all ranks must see the same checkpoint, but rank 0 finds one ({first}) and {'; '.join(lost)}. "
            "Nothing was loaded: name a folder on a file system that all share, or copy it to each host"
        )
    return folder


def _lacking(is_there: bool, manifest: int | str | None) -> str:
    if isinstance(manifest, str):
        return f"cannot read it: {manifest}"
    return "finds another one" if is_there else "finds none"


def verified(team: Team, folder: Path, shown: Shown = iter) -> Manifest:
    """Verifies every byte on some rank; returns the manifest, or raises the same on all ranks."""
    manifest = team.on_first(lambda: _read_manifest(folder))
    _, by_rank = team.agreed(
        lambda: (None, (where_is(folder), manifest.faults(folder, team.rank, team.size, shown)))
    )
    _refuse_damage(team, folder, by_rank)
    return manifest


def _refuse_damage(team: Team, folder: Path, by_rank: Sequence[tuple[str, list[Fault]]]) -> None:
    """Raises a `DamagedCheckpoint` on all ranks if one has found a fault; collective."""
    if faults := _of_all_ranks(by_rank):
        team.on_first(lambda: refuse(folder, format_faults(folder, faults)))


def refuse(folder: Path, lacks: list[str]) -> NoReturn:
    """Raises a `DamagedCheckpoint` that names the faults, and the step before that is complete."""
    earlier = steps.complete_before(folder)
    hint = "no earlier step beside it is complete"
    if earlier is not None:
        hint = f"the step before is complete: load {earlier}"
    raise DamagedCheckpoint("\n  ".join([f"{folder} is damaged, and nothing was loaded:", *lacks, hint]))


def _read_manifest(folder: Path) -> Manifest:
    try:
        return Manifest.read(folder)
    except DamagedCheckpoint as error:
        refuse(folder, [str(error)])


def _of_all_ranks(by_rank: Sequence[tuple[str, list[Fault]]]) -> list[Fault]:
    """Merges all ranks' faults; where only some ranks lack a whole file, the fault says where they look."""
    finders: dict[Fault, list[str]] = {}
    for rank, (place, faults) in enumerate(by_rank):
        for fault in faults:
            finders.setdefault(fault, []).append(f"rank {rank} ({place})")
    return [
        fault
        if fault.span is not None or len(ranks) == len(by_rank)
        else replace(fault, lack=f"{fault.lack} where {', '.join(ranks)} looks for it")
        for fault, ranks in finders.items()
    ]


class _Reading:
    """One rank's reads of a checkpoint, into memory of their own."""

    def __init__(
        self, subject: Subject, folder: Path, manifest: Manifest, metadata: Metadata, team: Team
    ) -> None:
        self._subject, self._folder, self._manifest, self._metadata = subject, folder, manifest, metadata
        self._model = subject.model_state()
        self._saved = list(dict.fromkeys(path[1] for path in entries_of(metadata, "model").values()))
        self.lacking = [name for name in self._saved if name not in self._model]
        self._warns = team.is_first
        self._is_same_size = manifest.world_size == team.size
        self._rank = str(team.rank) if self._is_same_size else "0"  # whose extras and random state are read
        self.flat: dict[str, Any] = {}

    def prepare(self, strict: bool, unexpected: Collection[str]) -> None:
        """Refuses names and shapes that do not fit; allocates `flat`, with None for pickled values."""
        model = self._model
        misfits = [*self._other_shapes(model), *(self._other_names(model, unexpected) if strict else ())]
        if misfits:
            raise ValueError(f"{self._folder} does not fit, and nothing was loaded: {'; '.join(misfits)}")
        if not self._is_same_size and self._warns:
            self._warn_of_others(self._folder, self._manifest)
        self.flat = dict(self._allocated(model))

    def values(self, trusted: bool) -> dict[str, Any]:
        """Returns the values read: "model", "optim", "extra", "random"; None for parts not to be loaded."""
        state: dict[str, Any] = unflatten_state_dict(self.flat, self._metadata.planner_data)
        packed = state.get("extra", {}).get(self._rank, {})
        extra = {name: unpacked(data, f"extra['{name}']", trusted) for name, data in packed.items()}
        optim = {"state": {}, **self._own_groups(state["optim"])} if "optim" in state else None
        data = self.flat.get(f"random.{self._rank}")
        random = None if data is None else unpacked(data, "the random state", trusted)
        return {"model": state.get("model", {}), "optim": optim, "extra": extra, "random": random}

    def _own_groups(self, optim: Mapping[str, Any]) -> dict[str, Any]:
        """Drops names that this rank's model lacks from the groups of parameters."""
        if not self.lacking or "param_groups" not in optim:
            return dict(optim)
        lacking = set(self.lacking)
        cut = (
            {**group, "params": [name for name in group["params"] if name not in lacking]}
            for group in optim["param_groups"]
        )
        return {**optim, "param_groups": [group for group in cut if group["params"]]}

    def _other_shapes(self, model: Mapping[str, Any]) -> Iterator[str]:
        for name, value in model.items():
            entry = self._metadata.state_dict_metadata.get(f"model.{name}")
            if not isinstance(entry, TensorStorageMetadata) or not isinstance(value, torch.Tensor):
                continue
            if entry.size != value.shape:
                yield f"{name} has shape {tuple(entry.size)} there and {tuple(value.shape)} here"
            dtype = entry.properties.dtype
            if (dtype.is_floating_point or dtype.is_complex) and not torch.can_cast(dtype, value.dtype):
                yield f"{name} is {dtype} there and {value.dtype} here, which cannot hold it"

    def _other_names(self, model: Mapping[str, Any], unexpected: Collection[str]) -> Iterator[str]:
        saved = set(self._saved)
        extra = [path[2] for path in entries_of(self._metadata, "extra", self._rank).values()]
        if missing := [name for name in model if name not in saved]:
            yield f"the checkpoint lacks {listed(missing)} of the model"
        if foreign := [name for name in self.lacking if name in unexpected]:
            yield f"the model lacks {listed(foreign)} of the checkpoint"
        if self._subject.optimizers and not entries_of(self._metadata, "optim"):
            yield "the checkpoint has no optimizer state: pass optim=None"
        stateful = [name for name, value in self._subject.extra.items() if isinstance(value, Stateful)]
        if missing := [name for name in stateful if name not in extra]:
            yield f"the checkpoint lacks {listed(missing)} of extra"

    def _warn_of_others(self, folder: Path, manifest: Manifest) -> None:
        """Warns of extras that differed between the ranks that saved them."""
        crcs = {(piece.file, piece.offset): piece.crc for piece in manifest.pieces()}
        sums: dict[str, list[int | None]] = {}
        paths = entries_of(self._metadata, "extra")
        for index, place in self._metadata.storage_data.items():
            if index.fqn in paths:
                checksums = sums.setdefault(paths[index.fqn][2], [])
                checksums.append(crcs.get((place.relative_path, place.offset)))
        size = manifest.world_size
        differing = [
            name for name, checksums in sums.items() if len(checksums) < size or len(set(checksums)) > 1
        ]
        if differing:
            warn_caller(
                f"{folder} was saved by {size} ranks, and {listed(differing)} of extra differed between "
                "them: every rank gets the first rank's"
            )

    def _allocated(self, model: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        own = {("extra", self._rank), *([("random", self._rank)] if self._is_same_size else [])}
        others = {("state", name) for name in self.lacking}  # whose states are not its own
        for key, path in self._metadata.planner_data.items():  # in the order of the state that was saved
            entry = self._metadata.state_dict_metadata[key]
            if path[0] == "model" and path[1] in model:
                yield key, allocated(entry, model[path[1]])
            elif path[0] == "optim" and self._subject.optimizers and path[1:3] not in others:
                yield key, allocated(entry, model.get(path[2]) if path[1] == "state" else None)
            elif path[:2] in own:
                yield key, None
