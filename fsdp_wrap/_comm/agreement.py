"""What the ranks of a group must have alike, compared without waiting for anybody.

The first rank to come tells what it has, in the store, and each other one compares. Who finds a difference
leaves word for the others, who are told when they look why a collective takes so long, or failed.
"""

from __future__ import annotations

import torch.distributed as dist

from fsdp_wrap._comm.groups import CARRY_NOTHING
from fsdp_wrap._core.torch_private import default_store


class Agreement:
    """What the ranks of one group must have alike.

    Args:
        group: The process group.

    Attributes:
        store: Where they tell; None where there is nobody to agree with.
        name: Of the group there, the same on all its ranks and of no other group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        # Where there are no other ranks to agree with there may be no store either.
        self.store = None if dist.get_backend(group) in CARRY_NOTHING else default_store()
        self._rank = dist.get_rank()
        self._told: set[str] = set()
        self.name = ""
        if self.store is not None:
            name = f"fsdp_wrap/agreement/{group.group_name}"
            turn = self.store.add(f"{name}/{self._rank}", 1)  # it may have seen another group of the name
            self.name = f"{name}/turn/{turn}"
            self._word = f"{self.name}/word"

    def require(self, what: str, lines: list[str], rule: str) -> None:
        """Compares once what this rank has with what the first rank had that came here.

        Args:
            what: Names what is compared.
            lines: What this rank has. Names of parameters in front only tell: ranks may call them otherwise.
            rule: What to do about a difference.

        Raises:
            RuntimeError: If it is not the same.
        """
        rank, other = self.first(what, lines)
        if [*map(_compared, other)] != [*map(_compared, lines)]:
            error = f"ranks differ in {what}: {_difference(rank, other, self._rank, lines)}. {rule}"
            assert self.store is not None
            self.store.set(self._word, error)
            raise RuntimeError(error)

    @property
    def compares(self) -> bool:
        """Whether there is anybody to agree with."""
        return self.store is not None

    def first(self, what: str, lines: list[str]) -> tuple[int, list[str]]:
        """Tells, once, what this rank has.

        Args:
            what: Names what it is.
            lines: What this rank has.

        Returns:
            The first rank that came here, with what that had; this one if it is, or has been here before.
        """
        if self.store is None or what in self._told:
            return self._rank, lines
        self._told.add(what)
        key, own = f"{self.name}/of/{what}", "\n".join([str(self._rank), *lines])
        rank, *other = self.store.compare_set(key, "", own).decode().split("\n")
        return int(rank), other

    def look(self) -> None:
        """Raises a RuntimeError if another rank has found a difference."""
        if self.store is not None and self.store.check([self._word]):
            raise RuntimeError(self.store.get(self._word).decode())


def _compared(line: str) -> str:
    return line.partition("' of ")[2] or line


def _difference(rank: int, lines: list[str], other: int, others: list[str]) -> str:
    """Tells of the first line in which two ranks differ."""
    length = max(len(lines), len(others))
    padded = [[*each, *["nothing more"] * (length - len(each))] for each in (lines, others)]
    one, two = next(pair for pair in zip(*padded) if _compared(pair[0]) != _compared(pair[1]))
    return f"rank {rank} has {one} where rank {other} has {two}"
