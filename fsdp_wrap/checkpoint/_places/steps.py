"""Looking for steps, wherever they lie: by a path, or by a URL."""

from __future__ import annotations

import math
import os
import re
import zlib
from pathlib import Path

from fsdp_wrap._core import listed, warn_caller
from fsdp_wrap.checkpoint._manifest import MANIFEST, METADATA
from fsdp_wrap.checkpoint._places.folder import Folder
from fsdp_wrap.checkpoint._places.place import StepPlace, lack_of
from fsdp_wrap.checkpoint._places.remote import RemotePath
from fsdp_wrap.checkpoint._places.store import Store

_URL = re.compile(r"([a-zA-Z][\w+.:-]*):(//?)(.*)", re.DOTALL)
_ON_DISK = ("file", "local")


def path_at(dir: str | os.PathLike[str]) -> Path:
    """Returns the absolute path, or the place in a store, that a user names.

    `file://` and `local://` are other ways to write a path.
    """
    if isinstance(dir, RemotePath):
        return dir
    text = os.fspath(dir)
    match = _URL.match(text)
    if match is None or (match[2] == "/" and not _is_protocol(match[1])):
        return Path(text).absolute()
    kind, slashes, rest = match.groups()
    if slashes == "/":
        raise ValueError(
            f"{text} has one slash of a URL, which Path leaves of two: pass the str {kind}://{rest}"
        )
    if "::" in kind:
        raise ValueError(
            f"{text} chains file systems, which may show what another rank has replaced: name the last one, "
            f"{kind.rpartition('::')[2]}://{rest}"
        )
    return Path(rest).absolute() if kind in _ON_DISK else RemotePath(text)


def disk_path(dir: str | os.PathLike[str], doing: str) -> Path:
    """Returns the absolute path of a folder on disk; raises a ValueError for a URL of a store."""
    path = path_at(dir)
    if isinstance(path, RemotePath):
        raise ValueError(
            f"{doing} takes folders on disk, and {path} is in a store: name a folder, and copy it from "
            "there or to there"
        )
    return path


def place_at(dir: str | os.PathLike[str]) -> StepPlace:
    """Returns the place that a user names."""
    path = path_at(dir)
    return Store(path) if isinstance(path, RemotePath) else Folder(path)


def latest(dir: str | os.PathLike[str]) -> Path | None:
    """Returns the folder of the newest complete step in `dir`, None if there is none.

    Complete means: the manifest is intact and all files have their sizes; `load` reads every byte.

    Args:
        dir: The folder with the step folders, or the URL of one in a store, as for `save`.

    Raises:
        ImportError: If the package for a URL's kind of store is not installed.
        ValueError: If no such kind of store is known.
    """
    return next(place_at(dir).complete(math.inf), None)


def find(path: Path, step: int | None) -> Path:
    """Returns the step folder to load: the path itself, the step asked for, or the newest complete one."""
    if any((path / name).is_file() for name in (MANIFEST, METADATA)):
        if step is not None and place_at(path.parent).steps().get(step) != path:
            raise ValueError(f"step={step} does not fit {path}, which is a step folder itself")
        return path
    steps = place_at(path).steps()
    if step is not None:
        if step not in steps:
            held = f"steps {listed(steps)}" if steps else "no step folder"
            raise ValueError(f"there is no step {step} in {path}; it holds {held}")
        return steps[step]
    passed: list[str] = []
    for folder in steps.values():
        lack = lack_of(folder)
        if lack is None:
            if passed:
                warn_caller(f"passing over {'; '.join(passed)}")
            return folder
        passed.append(f"{folder}: {lack}")
    lacks = "it holds no step folder" if path.is_dir() else "there is no such folder"
    if path.is_file():
        lacks = "it is a file; name the folder that save was given (torch.load reads the files of torch.save)"
    why = "; ".join(passed) or lacks
    raise ValueError(f"no complete checkpoint in {path}: {why}")


def number_of(folder: Path, written: int) -> int:
    """Returns the step number in a folder's name, or else in its manifest."""
    number = place_at(folder.parent).number_in(folder.name)
    return written if number is None else number


def complete_before(folder: Path) -> Path | None:
    """Returns the newest complete step folder beside another one and older."""
    place = place_at(folder.parent)
    number = place.number_in(folder.name)
    return None if number is None else next(place.complete(number), None)


def sum_of_manifest(folder: Path) -> int | str | None:
    """Returns the CRC-32 of a step folder's manifest, None without one, or the error of reading it."""
    try:
        return zlib.crc32((folder / MANIFEST).read_bytes())
    except FileNotFoundError:
        return None
    except OSError as error:
        return str(error)


def _is_protocol(name: str) -> bool:
    import fsspec  # type: ignore[import-untyped]

    return name in fsspec.available_protocols()
