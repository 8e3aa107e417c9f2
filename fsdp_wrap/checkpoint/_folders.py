"""Step folders: their names, which are complete, and how one appears and goes without ever being half there.

A step is written into a hidden folder, which one rename makes visible. What is deleted or replaced is hidden
by a rename first. So a crash leaves hidden folders at most, and the next save removes them.
"""

from __future__ import annotations

import re
import shutil
import warnings
from pathlib import Path

from fsdp_wrap.checkpoint._manifest import MANIFEST, METADATA, DamagedCheckpoint, Manifest, sync

__all__ = ["begin", "complete_before", "find", "lack_of", "latest", "publish", "steps_in"]

_STEP = re.compile(r"step_(\d{8,})")
_HIDDEN = re.compile(r"\.(step_\d{8,})\.(partial|replaced|deleted)")


def steps_in(parent: Path) -> dict[int, Path]:
    """Returns the step folders in a folder by number, newest first, complete or not."""
    found: dict[int, Path] = {}
    for path in parent.iterdir() if parent.is_dir() else ():
        hidden, name = _HIDDEN.fullmatch(path.name), _STEP.fullmatch(path.name)
        if name and path.is_dir():
            found[int(name[1])] = path
        elif hidden and hidden[2] == "replaced":  # by a save that crashed before the new one was visible
            found.setdefault(int(hidden[1][5:]), path)
    return dict(sorted(found.items(), reverse=True))


def lack_of(folder: Path) -> str | None:
    """Returns what keeps a step folder from being complete, as far as names and sizes tell."""
    try:
        faults = Manifest.read(folder).missing(folder)
    except DamagedCheckpoint as error:
        return str(error)
    return f"{faults[0].file} {faults[0].lack}" if faults else None


def latest(dir: str | Path) -> Path | None:
    """Returns the folder of the newest complete step in `dir`, None if there is none.

    Complete means: the manifest is intact and all files have their sizes; `load` reads every byte.
    """
    return next((path for path in steps_in(Path(dir)).values() if lack_of(path) is None), None)


def find(path: Path, step: int | None) -> Path:
    """Returns the step folder to load: the path itself, the step asked for, or the newest complete one.

    Raises:
        ValueError: If there is no such step.
    """
    if any((path / name).exists() for name in (MANIFEST, METADATA)):
        if step is not None and steps_in(path.parent).get(step) != path:
            raise ValueError(f"step={step} does not fit {path}, which is a step folder itself")
        return path
    steps = steps_in(path)
    if step is not None:
        if step not in steps:
            raise ValueError(f"there is no step {step} in {path}; it holds {_listed(steps)}")
        return steps[step]
    passed: list[str] = []
    for folder in steps.values():
        lack = lack_of(folder)
        if lack is None:
            if passed:
                warnings.warn(f"passing over {'; '.join(passed)}", stacklevel=2)
            return folder
        passed.append(f"{folder}: {lack}")
    why = "; ".join(passed) or ("it holds no step folder" if path.is_dir() else "there is no such folder")
    raise ValueError(f"no complete checkpoint in {path}: {why}")


def complete_before(folder: Path) -> Path | None:
    """Returns the newest complete step folder beside another one and older."""
    name = _STEP.fullmatch(folder.name)
    steps = steps_in(folder.parent).items() if name else ()
    return next((path for n, path in steps if name and n < int(name[1]) and lack_of(path) is None), None)


def begin(parent: Path, step: int | None) -> int:
    """Clears up after crashed saves and makes the hidden folder of a step; returns the step.

    Raises:
        ValueError: If something that is no checkpoint is in the way.
    """
    parent.mkdir(parents=True, exist_ok=True)
    _clean_up(parent)
    if step is None:
        step = next(iter(steps_in(parent)), 0) + 1
    final = parent / _name(step)
    if final.exists() and not (final / MANIFEST).is_file():
        raise ValueError(f"{final} is in the way and no checkpoint of ours: remove it, or save another step")
    partial(parent, step).mkdir()
    return step


def partial(parent: Path, step: int) -> Path:
    """Returns the hidden folder in which a step is written."""
    return _hidden(parent, step, "partial")


def publish(parent: Path, step: int, keep_last: int | None) -> Path:
    """Makes a written step visible, then removes older complete steps but the last ones."""
    final, written = parent / _name(step), partial(parent, step)
    sync(written)
    replaced = _hidden(parent, step, "replaced")
    if final.exists():
        final.rename(replaced)
    written.rename(final)
    sync(parent)
    try:
        if replaced.exists():
            shutil.rmtree(replaced)
        if keep_last is not None:
            _remove_older(parent, step, keep_last - 1)
    except OSError as error:  # the new step is there all the same
        warnings.warn(f"an old checkpoint in {parent} could not be removed: {error}", stacklevel=2)
    return final


def _remove_older(parent: Path, step: int, kept: int) -> None:
    older = [number for number, path in steps_in(parent).items() if number < step and lack_of(path) is None]
    for number in older[kept:]:
        deleted = _hidden(parent, number, "deleted")
        (parent / _name(number)).rename(deleted)
        shutil.rmtree(deleted)


def _clean_up(parent: Path) -> None:
    for path in list(parent.iterdir()):
        hidden = _HIDDEN.fullmatch(path.name)
        if hidden and hidden[2] == "replaced" and not (parent / hidden[1]).exists():
            path.rename(parent / hidden[1])
        elif hidden:
            shutil.rmtree(path)


def _name(step: int) -> str:
    return f"step_{step:08d}"


def _hidden(parent: Path, step: int, kind: str) -> Path:
    return parent / f".{_name(step)}.{kind}"


def _listed(steps: dict[int, Path]) -> str:
    numbers = sorted(steps)
    if not numbers:
        return "no step folder"
    few = len(numbers) < 10
    return f"steps {', '.join(map(str, numbers)) if few else f'{numbers[0]} to {numbers[-1]}'}"
