"""Agreement of the ranks of a group on their settings, through the store.

Nobody waits: the first rank to come writes its own settings, and each other rank compares. A rank that finds
a difference leaves an error for the others, which look for it when a collective takes long or fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from fsdp_wrap._comm.groups import CARRY_NOTHING
from fsdp_wrap._core.torch_private import default_store


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
    """Returns what is compared of a line: all but a parameter's name in front of it."""
    return line.partition("' of ")[2] or line


def _difference(rank: int, lines: list[str], other: int, others: list[str]) -> str:
    """Describes the first line in which two ranks differ."""
    length = max(len(lines), len(others))
    padded = [[*own, *["nothing more"] * (length - len(own))] for own in (lines, others)]
    one, two = next(pair for pair in zip(*padded) if _compared(pair[0]) != _compared(pair[1]))
    return f"rank {rank} has {one} where rank {other} has {two}"
