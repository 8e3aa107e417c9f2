"""Text as bytes: a corpus, its held-out part, and batches that depend only on their key."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, TypeAlias

import torch

Batch: TypeAlias = tuple[torch.Tensor, torch.Tensor]

# One file in HELD_OUT_SHARE is held out.
HELD_OUT_SHARE = 20
NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests"}


class DataError(ValueError):
    """A corpus that cannot be trained on."""


class Source(Protocol):
    """What batches come from."""

    def batch(self, key: str, size: int, context: int, taken: slice = slice(None)) -> Batch: ...


@dataclass(frozen=True)
class Corpus:
    """Text to train on and text to judge by, as bytes."""

    train: torch.Tensor
    held_out: torch.Tensor
    digest: str

    @classmethod
    def load(cls, folder: Path | None, context: int) -> Corpus:
        """Read the text files of `folder`, or the interpreter's standard library when it is None."""
        where = folder or Path(sysconfig.get_paths()["stdlib"])
        if not where.is_dir():
            raise DataError(f"data folder {where} does not exist or is not a folder")
        paths = _files(where, library=folder is None)
        texts = [text for text in (path.read_bytes() for path in paths) if text and b"\0" not in text]
        train, held_out = _split(texts, context)
        if min(len(train), len(held_out)) <= context:
            raise DataError(
                f"data folder {where} holds {len(train)} bytes of text to train on and {len(held_out)} held "
                f"out; each must be more than the context of {context} bytes"
            )
        digest = hashlib.blake2b(train + b"\0" + held_out, digest_size=8).hexdigest()
        return cls(_as_tensor(train), _as_tensor(held_out), digest)

    def batch(self, key: str, size: int, context: int, taken: slice = slice(None)) -> Batch:
        """Windows of training text and their next bytes; the same `key` always draws the same `size` windows.

        Only those that are `taken` are made.
        """
        seed = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=7).digest(), "big")
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(self.train) - context, (size,), generator=generator)
        return _windows(self.train, starts[taken], context)

    def held_out_windows(self, index: torch.Tensor, of: int, context: int) -> Batch:
        """The windows `index` out of `of` windows spread evenly over the held-out text."""
        last = len(self.held_out) - context - 1
        return _windows(self.held_out, index * last // max(of - 1, 1), context)


@dataclass(frozen=True)
class Share:
    """What one rank takes of the windows of each step, which are the same ones for any number of ranks."""

    rank: int
    ranks: int
    global_batch: int
    batch: int

    @property
    def forwards(self) -> int:
        """How many each rank runs in a step; no more than `batch` windows in one."""
        return -(-self._most // self.batch)

    @property
    def scale(self) -> float:
        """Factor of a rank's sum of losses, such that the mean over ranks is the mean over all windows."""
        return self.ranks / self.global_batch

    def windows(self, corpus: Source, key: str, context: int) -> Iterator[tuple[Batch, int]]:
        """The windows of each forward, and how many of them count.

        Ranks run in lockstep: where one has no window left, it computes on another's, which does not count.
        """
        first, last = (rank * self.global_batch // self.ranks for rank in (self.rank, self.rank + 1))
        for part in range(self.forwards):
            start = first + part * self.batch
            count = max(0, min(self.batch, last - start))
            taken = slice(start, start + count) if count else slice(0, 1)
            yield corpus.batch(key, self.global_batch, context, taken), count

    def micro_batch(self, corpus: Source, key: str, context: int, index: int) -> Batch:
        """The windows of one micro-batch, whatever the number of ranks."""
        start = index * self.batch
        return corpus.batch(key, self.global_batch, context, slice(start, start + self.batch))

    @property
    def _most(self) -> int:
        return -(-self.global_batch // self.ranks)


def _files(folder: Path, *, library: bool) -> Iterator[Path]:
    """Files in an order that depends only on their names; of a library, its own sources alone."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        if library:
            folders[:] = [name for name in folders if name not in NOT_LIBRARY]
        for name in sorted(names):
            path = Path(parent, name)
            if path.is_file() and not name.startswith(".") and (not library or path.suffix == ".py"):
                yield path


def _split(texts: list[bytes], context: int) -> tuple[bytes, bytes]:
    """Hold out whole files, chosen by content so that copies stay on one side; of too few files, the end."""
    sides: tuple[list[bytes], list[bytes]] = ([], [])
    for text in texts:
        chosen = int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")
        sides[chosen % HELD_OUT_SHARE == 0].append(text)
    train, held_out = (b"\n".join(side) for side in sides)
    if min(len(train), len(held_out)) > context:
        return train, held_out
    whole = b"\n".join(texts)
    cut = len(whole) - len(whole) // HELD_OUT_SHARE
    return whole[:cut], whole[cut:]


def _windows(text: torch.Tensor, starts: torch.Tensor, context: int) -> Batch:
    windows = text[starts[:, None] + torch.arange(context + 1)].long()
    return windows[:, :-1], windows[:, 1:]


def _as_tensor(text: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
