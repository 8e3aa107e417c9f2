"""Calls that all ranks must make, such as `state_dict()`.

A call is logged like a collective when it begins. So a rank that trains on meanwhile is told apart at once,
and a wait in vain names the call and the ranks that do not make it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from fsdp_wrap._comm.positions.group import GroupPositions, list_ranks
from fsdp_wrap._comm.positions.notes import all_must

_current: ContextVar[str] = ContextVar("fsdp_wrap_call", default="")


@contextmanager
def calling(name: str, groups: Iterable[GroupPositions | None] = ()) -> Iterator[None]:
    """Logs a call in the groups of the ranks that must make it, and names it in errors inside.

    Args:
        name: The function, with parentheses. An enclosing call, which is the user's, keeps its own name.
        groups: The positions of the groups in which the call communicates.
    """
    token = None if _current.get() else _current.set(name)
    try:
        for positions in dict.fromkeys(groups):
            if positions is not None:
                positions.call(_current.get())
        yield
    finally:
        if token is not None:
            _current.reset(token)


def tell_call(positions: GroupPositions) -> str:
    """Returns the beginning of an error inside a call, with the ranks that do not make it; else ""."""
    name = _current.get()
    if not name:
        return ""
    absent = positions.absent_from(positions.issued)
    if not absent or not all(map(positions.lives, absent)):
        return f"in {name}, which all ranks must call: "
    return f"{name} is called on rank {positions.member} and not on {list_ranks(absent)}. {all_must(name)}\n"
