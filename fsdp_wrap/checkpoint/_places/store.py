"""Steps in an object store, where nothing can be renamed or locked.

A step lies below a name with a word of its own, and exists once its manifest does: one request, the last
one, which shows all or nothing. A removal begins with the manifest. So a crash leaves names without a
manifest at most, and the next save removes them. One run at a time saves at a place: it renews an object
there, and others watch whether somebody does.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Event, Lock, Thread

from fsdp_wrap.checkpoint._manifest import DRAFT, MANIFEST
from fsdp_wrap.checkpoint._places.place import StepPlace, looks
from fsdp_wrap.checkpoint._places.remote import RemotePath

_CLAIM, _PROBE = ".saving", ".probe"
_BEAT, _PATIENCE = 4.0, 20.0  # seconds: between renewals of a claim, until one that nobody renews is taken


class Store(StepPlace):
    """A prefix in an object store."""

    names = re.compile(r"step_(\d{8,})(?:\.[0-9a-f]{10})?")  # without a word: copied there from a disk
    path: RemotePath

    def __init__(self, path: RemotePath) -> None:
        super().__init__(path)
        self.is_of_process = path.kind == "memory"
        self._claim: _Claim | None = None  # of the save that goes on

    def refuse_unusable(self) -> None:
        probe = self.path / _PROBE
        try:
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise ValueError(
                f"{self.path} cannot be written to ({error}): name a bucket that is there and where these "
                "credentials may write"
            ) from error

    def steps(self) -> dict[int, RemotePath]:
        return self._whole(self._below())

    def _whole(self, folders: list[RemotePath]) -> dict[int, RemotePath]:
        """Returns the folders with a manifest by step number, newest first; the latest save of each step."""
        by_number = {self._number(folder): folder for folder in folders if (folder / MANIFEST).is_file()}
        return dict(sorted(by_number.items(), reverse=True))

    def _number(self, folder: RemotePath) -> int:
        return int(folder.name[5:].partition(".")[0])

    def _below(self) -> list[RemotePath]:
        """Returns the folders named like steps, the latest save of a step last."""
        try:
            there = [*self.path.iterdir()]
        except FileNotFoundError:
            return []
        return sorted((path for path in there if self.names.fullmatch(path.name)), key=lambda path: path.name)

    @contextmanager
    def begun(self, step: int | None) -> Iterator[tuple[int, str]]:
        with _claimed(self.path) as self._claim:
            self.path.drop_uploads("step_")
            there = self._below()
            whole = self._whole(there)
            for leftover in set(there) - set(whole.values()):
                if "." in leftover.name:  # what others have put there has no word
                    self.remove(leftover)
            if step is None:
                step = next(iter(whole), 0) + 1
            folder = self.path / _new_name(step, [folder.name for folder in there])
            self._claim.tell(folder.name)
            try:
                yield step, folder.name
            finally:
                with suppress(OSError):  # then the next save removes it
                    if not (folder / MANIFEST).is_file():
                        folder.remove()

    def shows(self, name: str) -> bool:
        return any(name in _text_of(self.path / _CLAIM) for _ in looks())

    def show(self, name: str, step: int) -> RemotePath:
        folder = self.path / name
        assert self._claim is not None
        self._claim.confirm()
        try:
            (folder / DRAFT).rename(folder / MANIFEST)
        except OSError:
            if not (folder / MANIFEST).is_file():  # else it was written, and the answer did not come
                raise
        return folder

    def remove_replaced(self, folder: Path, step: int) -> None:
        for earlier in self._below():
            is_other = self._number(earlier) == step and earlier != folder
            if is_other and (earlier / MANIFEST).is_file():
                self.remove(earlier)

    def remove(self, folder: RemotePath) -> None:
        (folder / MANIFEST).unlink()
        folder.remove()

    def clean_up(self) -> None:
        """Leaves it to the next save, since the claim of the first rank looks as if somebody renewed it."""


def _new_name(step: int, there: Sequence[str]) -> str:
    """Returns a name for a step that no save has had: a rank of an earlier one may write there yet.

    It sorts after those of earlier saves of the step.
    """
    begin = f"step_{step:08d}"
    words = [word for number, _, word in (name.partition(".") for name in there) if number == begin]
    last = max((int("0" + word[:4], 16) for word in words), default=0)
    return f"{begin}.{last + 1:04x}{secrets.token_hex(3)}"


# who


@contextmanager
def _claimed(path: RemotePath) -> Iterator[_Claim]:
    """Claims a place for saving; refuses if another run renews its claim."""
    _refuse_living(path)
    claim = _Claim(path)
    try:
        yield claim
    finally:
        claim.end()


def _refuse_living(path: RemotePath) -> None:
    """Watches a claim, if there is one, until it is known whether anybody renews it."""
    first = _text_of(path / _CLAIM)
    end = time.monotonic() + _PATIENCE
    while first and time.monotonic() < end:
        time.sleep(_BEAT / 8)
        text = _text_of(path / _CLAIM)
        if not text:
            return
        if text != first:
            raise _refusal(path, text)


class _Claim:
    """An object that is renewed in a thread of its own while a save goes on."""

    def __init__(self, path: RemotePath) -> None:
        self._path, self._word = path, secrets.token_hex(8)
        self._owner = f"process {os.getpid()} on host {socket.gethostname()}"
        self._text, self._count = "", 0
        self._ended, self._lock = Event(), Lock()
        self.tell("")
        self._thread = Thread(target=self._renew, name="fsdp_wrap.checkpoint.claims", daemon=True)
        self._thread.start()

    def tell(self, name: str) -> None:
        """Lets all ranks see the name of the step that is written."""
        self._text = name
        self._write()

    def _write(self) -> None:
        with self._lock:
            self._count += 1
            text = "\n".join([self._owner, self._word, self._text, str(self._count)])
            (self._path / _CLAIM).write_bytes(text.encode())

    def confirm(self) -> None:
        """Raises a RuntimeError if another run has taken the place."""
        text = _text_of(self._path / _CLAIM)
        if self._word not in text:
            raise _refusal(self._path, text)

    def _renew(self) -> None:
        while not self._ended.wait(_BEAT):
            with suppress(OSError):
                if self._word not in _text_of(self._path / _CLAIM):
                    return
                self._write()

    def end(self) -> None:
        """Lets others save."""
        self._ended.set()
        self._thread.join()
        with suppress(OSError):
            if self._word in _text_of(self._path / _CLAIM):
                (self._path / _CLAIM).unlink()


def _text_of(claim: RemotePath) -> str:
    try:
        return claim.read_bytes().decode(errors="replace")
    except FileNotFoundError:
        return ""


def _refusal(path: RemotePath, text: str) -> RuntimeError:
    owner = text.partition("\n")[0] or "a run that has ended meanwhile"
    return RuntimeError(
        f"another save is going on in {path}, by {owner}, and this one was given up: let one run at a time "
        "save in a place, each run in its own"
    )
