"""The interface of a place: where the steps of a run lie, and how one appears there and goes."""

from __future__ import annotations

import re
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from fsdp_wrap._core import warn_caller
from fsdp_wrap.checkpoint._manifest import DRAFT, DamagedCheckpoint, Fault, Manifest

LOOKS, _PAUSE = 3, 0.1  # what another host has made is there, unless the file system is slow to show it


class StepPlace(ABC):
    """Where the steps of one run lie.

    A step is written below a name that no reader takes for a step, or takes for one that lacks its manifest.
    `publish` makes it whole by one change. Only the first rank begins, publishes and removes.
    """

    is_of_process = False
    """Whether other processes see something else there."""
    names: re.Pattern[str]
    """Names of steps, with the number as the first group."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @abstractmethod
    def refuse_unusable(self) -> None:
        """Raises a ValueError if nothing can be written there; leaves nothing there."""

    @abstractmethod
    def steps(self) -> Mapping[int, Path]:
        """Returns the steps by number, newest first, complete or not."""

    @abstractmethod
    def begun(self, step: int | None) -> AbstractContextManager[tuple[int, str]]:
        """Clears up after crashed saves, begins a step, and yields its number and the name to write below.

        Only one run may do so at a time; another one gets a RuntimeError. In the end what was not published
        is removed, and others may save.

        Args:
            step: The number; None for one after the newest.
        """

    @abstractmethod
    def shows(self, name: str) -> bool:
        """Whether this rank sees what the first one has begun under a name."""

    @abstractmethod
    def show(self, name: str, step: int) -> Path:
        """Makes a written step appear in place of an earlier save of it; returns where it is."""

    @abstractmethod
    def remove_replaced(self, folder: Path, step: int) -> None:
        """Removes earlier saves of a step that is there."""

    @abstractmethod
    def remove(self, folder: Any) -> None:
        """Removes a step, which is whole or not there at any moment."""

    @abstractmethod
    def clean_up(self) -> None:
        """Does what the first rank would have done after a failure, if that is possible when it has died."""

    def publish(self, name: str, step: int, keep_last: int | None) -> Path:
        """Makes a written step appear, removes older complete ones but the last; returns where it is."""
        folder = self.show(name, step)
        try:
            self.remove_replaced(folder, step)
            if keep_last is not None:
                for older in [*self.complete(step)][keep_last - 1 :]:
                    self.remove(older)
        except OSError as error:  # the new step is there all the same
            warn_caller(f"an old checkpoint in {self.path} could not be removed: {error}")
        return folder

    def unseen(self, name: str) -> list[Fault]:
        """Returns the faults of a written step, as this rank sees it."""
        folder, faults = self.path / name, list[Fault]()
        for _ in looks():
            faults = Manifest.read(folder, DRAFT).missing(folder)
            if not faults:
                break
        return faults

    def number_in(self, name: str) -> int | None:
        """Returns the number in a step's name, None if it is no such name."""
        match = self.names.fullmatch(name)
        return int(match[1]) if match else None

    def complete(self, before: float) -> Iterator[Path]:
        """Yields the complete steps, newest first, that are older than one."""
        steps = self.steps().items()
        return (folder for step, folder in steps if step < before and lack_of(folder) is None)


def lack_of(folder: Path) -> str | None:
    """Returns the first fault of a step folder by names and sizes, None if it is complete."""
    try:
        faults = Manifest.read(folder).missing(folder)
    except DamagedCheckpoint as error:
        return str(error)
    return f"{faults[0].file} {faults[0].lack}" if faults else None


def where_is(path: Path) -> str:
    """Returns this rank's path and host of a folder, for messages."""
    return f"in {path.absolute()} on host {socket.gethostname()}"


def looks() -> Iterator[int]:
    """Counts looks, with pauses, at a folder that another host or rank is about to change."""
    for look in range(LOOKS):
        time.sleep(_PAUSE * bool(look))
        yield look
