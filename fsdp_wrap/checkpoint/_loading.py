"""Loading: everything is verified and checked, then read aside, and only then put in."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful

from fsdp_wrap._core.torch_private import load_state_dict, unflatten_state_dict
from fsdp_wrap.checkpoint import _folders as folders
from fsdp_wrap.checkpoint._manifest import (
    METADATA,
    DamagedCheckpoint,
    Fault,
    Manifest,
    Piece,
    concerned,
    read_metadata,
    verify,
)
from fsdp_wrap.checkpoint._saving import wait_for_pending
from fsdp_wrap.checkpoint._state import Optimizers, Subject, set_random_state
from fsdp_wrap.checkpoint._storage import KnownReader, ValuesPlanner, unpacked
from fsdp_wrap.checkpoint._team import Place, Team, errors_of_all_ranks

__all__ = ["Loaded", "load", "refuse_damaged", "refuse_damaged_metadata"]

_MOST_NAMES = 10


class Loaded(dict[str, Any]):
    """The extras of a checkpoint by name, and where they come from.

    Attributes:
        step: The number of the step.
        folder: Its folder.
    """

    def __init__(self, values: Mapping[str, Any], step: int, folder: Path) -> None:
        super().__init__(values)
        self.step, self.folder = step, folder


def load(
    dir: str | os.PathLike[str],
    model: nn.Module,
    optim: Optimizers = None,
    extra: Mapping[str, Any] | None = None,
    *,
    step: int | None = None,
    strict: bool = True,
    restore_random_state: bool = True,
    trusted: bool = False,
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
            see the same one there.
        model: Wrapped or plain.
        optim: One or several optimizers of it; None to leave their state.
        extra: By name; those with `load_state_dict` are loaded in place.
        step: The number of the step; None for the newest complete one.
        strict: Whether names must be the same; otherwise those that both have are loaded.
        restore_random_state: Whether random states of torch, Python, numpy and the CUDA device are set.
        trusted: Whether pickled values may be anything, and so run whatever the folder brings. Otherwise they
            are plain values, tensors, arrays, and what `torch.serialization.add_safe_globals` admits.
        process_group: The ranks that load; None for the default group, or this process alone without one.

    Returns:
        This rank's extras as they were saved, the objects from `extra` in place of their state; with the
        attributes `step` and `folder`.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If there is no such step, ranks do not see the same one, or names or shapes do not fit;
            nothing has changed then.
        DamagedCheckpoint: If a file is missing or has changed, on all ranks; it names the files, the
            parameters that lie there and an earlier step that is complete. Nothing has changed then.
        RuntimeError: If a rank could not read what was there, if it is more than plain values, or if a
            model or optimizer on some rank refuses it; nothing has changed then.
    """
    wait_for_pending(raise_error=False)
    team = Team.of(process_group, "checkpoint.load")
    subject = team.together(lambda: Subject(model, optim, extra))
    folder = _agreed_folder(team, Path(dir).absolute(), step)
    manifest = _verified(team, folder)
    reading = team.together(lambda: _Reading.planned(subject, folder, manifest, team, strict))
    with errors_of_all_ranks(team, f"reading {folder}"), team.collectives():
        load_state_dict(
            reading.flat,
            KnownReader(folder, reading.metadata),
            team.group,
            no_dist=team.group is None,
            planner=ValuesPlanner(trusted),
        )
    found = team.together(lambda: reading.found(trusted))
    subject.put_in(team, found["model"], found["optim"], strict)
    values = team.together(lambda: subject.put_in_extra(found["extra"]))
    if restore_random_state and found["random"] is not None:
        set_random_state(found["random"])
    return Loaded(values, manifest.step, folder)


def _agreed_folder(team: Team, dir: Path, step: int | None) -> Path:
    """Returns the step folder that the first rank has found, as this rank names it.

    Raises:
        ValueError: If there is none, or not all ranks see that one.
    """
    within = team.on_first(lambda: folders.find(dir, step).relative_to(dir))
    folder = dir / within
    sums = team.gather((Place.of(folder, folder.is_dir()), folders.sum_of_manifest(folder)))
    (first, expected), *_ = sums
    lost = [
        f"rank {rank} finds {'another one' if place.is_seen else 'none'} ({place})"
        for rank, (place, found) in enumerate(sums)
        if found != expected or place.is_seen != first.is_seen
    ]
    if lost:
        raise ValueError(
            f"all ranks must see the same checkpoint, but rank 0 finds one ({first}) and {'; '.join(lost)}. "
            "Nothing was loaded: name a folder on a file system that all share, or copy it to each host"
        )
    return folder


def _verified(team: Team, folder: Path) -> Manifest:
    """Has every byte read by some rank; returns the manifest or raises the same on all ranks."""
    manifest, faults = team.on_first(lambda: _read_manifest(folder))
    if manifest is not None:
        shared = manifest
        mine = team.together(lambda: _faults_of_share(team, folder, shared))
        faults = _of_all_ranks(team.gather((Place.of(folder, True), mine)))
    if faults or manifest is None:
        raise DamagedCheckpoint(team.on_first(lambda: _told(folder, faults)))
    return manifest


def _read_manifest(folder: Path) -> tuple[Manifest | None, list[Fault]]:
    try:
        return Manifest.read(folder), []
    except DamagedCheckpoint as error:
        file, _, lack = str(error).partition(" ")
        return None, [Fault(file, lack)]


def _of_all_ranks(told: Sequence[tuple[Place, list[Fault]]]) -> list[Fault]:
    """Returns all ranks' faults once; those of whole files that only some see, with where these look."""
    finders: dict[Fault, list[str]] = {}
    for rank, (place, faults) in enumerate(told):
        for fault in faults:
            finders.setdefault(fault, []).append(f"rank {rank} ({place})")
    return [
        fault
        if fault.stop is not None or len(ranks) == len(told)
        else replace(fault, lack=f"{fault.lack} where {', '.join(ranks)} looks for it")
        for fault, ranks in finders.items()
    ]


def _faults_of_share(team: Team, folder: Path, manifest: Manifest) -> list[Fault]:
    """Looks for all files, and reads this rank's share of their bytes."""
    missing = manifest.missing(folder)
    gone = {fault.file for fault in missing}
    there = (piece for piece in manifest.share(team.rank, team.size) if piece.file not in gone)
    return [*missing, *verify(folder, there)]


def refuse_damaged(folder: Path) -> None:
    """Verifies a step folder by this process alone."""
    _verified(Team(None, 0, 1), folder)


def refuse_damaged_metadata(folder: Path, manifest: Manifest) -> None:
    """Verifies a step folder's list of content, by this process alone."""
    pieces = (Piece(METADATA, *each) for each in manifest.files[METADATA])
    if faults := [*verify(folder, pieces)]:
        raise DamagedCheckpoint(_told(folder, faults))


def _told(folder: Path, faults: Iterable[Fault]) -> str:
    lines = [f"{folder} is damaged, and nothing was loaded:"]
    for fault, names in concerned(folder, faults):
        lines.append(f"  {fault.file} {fault.lack}" + (f" ({_listed(names)})" if names else ""))
    earlier = folders.complete_before(folder)
    if earlier is None:
        lines.append("  no earlier step beside it is complete")
    else:
        lines.append(f"  the step before is complete: load {earlier}")
    return "\n".join(lines)


@dataclass
class _Reading:
    """What one rank reads of a checkpoint, aside.

    Attributes:
        subject: What it is for.
        metadata: What `torch.distributed.checkpoint` knows of it.
        flat: Values by the names of the metadata: tensors to read into, None for what is pickled.
        rank: Whose extras and random states are read.
        is_same_size: Whether as many ranks load as saved.
    """

    subject: Subject
    metadata: Metadata
    rank: str
    is_same_size: bool
    flat: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def planned(
        cls, subject: Subject, folder: Path, manifest: Manifest, team: Team, strict: bool
    ) -> _Reading:
        """Compares names and shapes and allocates what is to be read."""
        same = manifest.world_size == team.size
        reading = cls(subject, read_metadata(folder), str(team.rank) if same else "0", same)
        model = subject.model_state()
        faults = [*reading._other_shapes(model)]
        if strict:
            faults += reading._other_names(model)
        if faults:
            raise ValueError(f"{folder} does not fit, and nothing was loaded: {'; '.join(faults)}")
        if not same and team.is_first:
            reading._warn_of_others(folder, manifest)
        reading._allocate(model)
        return reading

    def found(self, trusted: bool) -> dict[str, Any]:
        """Returns what was read: "model", "optim", "extra", "random"; None for what is not to be loaded."""
        state: dict[str, Any] = unflatten_state_dict(self.flat, self.metadata.planner_data)
        packed = state.get("extra", {}).get(self.rank, {})
        extra = {name: unpacked(data, f"extra['{name}']", trusted) for name, data in packed.items()}
        optim = {"state": {}, **state["optim"]} if "optim" in state else None
        data = self.flat.get(f"random.{self.rank}")
        random = None if data is None else unpacked(data, "the random state", trusted)
        return {"model": state.get("model", {}), "optim": optim, "extra": extra, "random": random}

    def _names(self, *part: str) -> dict[str, None]:
        """Returns the names below a part of the state, such as those of the model's entries."""
        paths = self.metadata.planner_data.values()
        return {
            path[len(part)]: None for path in paths if path[: len(part)] == part and len(path) > len(part)
        }

    def _other_names(self, model: Mapping[str, Any]) -> Iterable[str]:
        saved = self._names("model")
        if missing := [name for name in model if name not in saved]:
            yield f"the checkpoint lacks {_listed(missing)} of the model"
        if unexpected := [name for name in saved if name not in model]:
            yield f"the model lacks {_listed(unexpected)} of the checkpoint"
        if self.subject.optimizers and not self._names("optim"):
            yield "the checkpoint has no optimizer state: pass optim=None"
        extra = self._names("extra", self.rank)
        stateful = [name for name, each in self.subject.extra.items() if isinstance(each, Stateful)]
        if missing := [name for name in stateful if name not in extra]:
            yield f"the checkpoint lacks {_listed(missing)} of extra"

    def _other_shapes(self, model: Mapping[str, Any]) -> Iterable[str]:
        for name, value in model.items():
            entry = self.metadata.state_dict_metadata.get(f"model.{name}")
            if not isinstance(entry, TensorStorageMetadata) or not isinstance(value, torch.Tensor):
                continue
            if entry.size != value.shape:
                yield f"{name} has shape {tuple(entry.size)} there and {tuple(value.shape)} here"

    def _warn_of_others(self, folder: Path, manifest: Manifest) -> None:
        crcs = {(file, offset): crc for file, pieces in manifest.files.items() for offset, _, crc in pieces}
        sums: dict[str, set[int | None]] = {}
        counts: dict[str, int] = {}
        for index, place in self.metadata.storage_data.items():
            path = self.metadata.planner_data.get(index.fqn, ())
            if path[:1] == ("extra",):
                sums.setdefault(path[2], set()).add(crcs.get((place.relative_path, place.offset)))
                counts[path[2]] = counts.get(path[2], 0) + 1
        differing = [name for name in sums if len(sums[name]) > 1 or counts[name] < manifest.world_size]
        if differing:
            warnings.warn(
                f"{folder} was saved by {manifest.world_size} ranks, and {_listed(differing)} of extra "
                "differed between them: every rank gets the first rank's",
                stacklevel=2,
            )

    def _allocate(self, model: Mapping[str, Any]) -> None:
        own = {("random", self.rank)} if self.is_same_size else set()
        for key, path in self.metadata.planner_data.items():  # in the order of the state that was saved
            entry = self.metadata.state_dict_metadata[key]
            if path[0] == "model" and path[1] in model:
                self.flat[key] = _aside(entry, model[path[1]])
            elif path[0] == "optim" and self.subject.optimizers:
                self.flat[key] = _aside(entry, model.get(path[2]) if path[1] == "state" else None)
            elif path[:2] == ("extra", self.rank) or path in own:
                self.flat[key] = None


def _aside(entry: Any, like: Any) -> Any:
    """Returns memory to read a tensor into, cut like the parameter that it has the shape of."""
    if not isinstance(entry, TensorStorageMetadata):
        return None
    dtype = entry.properties.dtype
    if isinstance(like, torch.Tensor) and like.shape == entry.size and like.dim() > 0:
        return torch.empty_like(like, dtype=dtype, requires_grad=False)
    return torch.empty(entry.size, dtype=dtype)


def _listed(names: Iterable[str]) -> str:
    names = list(names)
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
