"""The ranks that save or load together: they agree, or fail alike. One process alone is a team as well."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from fsdp_wrap._by_hand import require_idle
from fsdp_wrap._comm import CARRY_NOTHING, Watch, Works, all_gather_object, calling, positions_of
from fsdp_wrap._core import listed
from fsdp_wrap._core.torch_private import object_device_of
from fsdp_wrap._runtime import step_of, units_in
from fsdp_wrap.checkpoint._manifest import DamagedCheckpoint

S = TypeVar("S")
T = TypeVar("T")

_background_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.ref[dist.ProcessGroup]]
_background_groups = weakref.WeakKeyDictionary()
"""For each group the one that background saves of its ranks talk over.

Torch holds a group until it is destroyed; one that we held would keep threads from ending.
"""


@dataclass(frozen=True)
class Team:
    """A process group, or this process alone."""

    group: dist.ProcessGroup | None = None
    rank: int = 0
    size: int = 1
    doing: str = ""
    watch: Watch | None = None

    @classmethod
    def of(cls, group: dist.ProcessGroup | None, doing: str, model: Any = None) -> Team:
        """Returns the team of a group, the default group's if None, that comes together for a model."""
        if not (dist.is_available() and dist.is_initialized()):
            return ALONE
        for unit in units_in(model).values() if isinstance(model, nn.Module) else ():
            if step_of(unit).plug_ins.align:  # not all ranks need come here
                require_idle([unit], f"{doing}()")
        group = group or dist.group.WORLD
        rank = dist.get_rank(group)
        if group is None or rank < 0:
            raise ValueError(
                f"rank {dist.get_rank()} is not part of process_group: call {doing} only on its ranks, or "
                "pass a group that has all"
            )
        watch = Watch(group, torch.device("cpu"), positions_of(group))
        team = cls(group, rank, dist.get_world_size(group), doing, watch)
        if group is not None and team.size > 1:
            team._meet(group, watch)
        return team

    def _meet(self, group: dist.ProcessGroup, watch: Watch) -> None:
        """Waits for all ranks, and names those that do not make the call.

        torch's own collectives, which follow, would wait for them until the group's time limit.
        """
        with self.collectives(), calling(f"{self.doing}()", [watch.positions]):
            is_on_host = torch.device(object_device_of(group)).type == "cpu"
            if is_on_host and dist.get_backend(group) not in CARRY_NOTHING:
                Works(watch, [dist.barrier(group, async_op=True)]).wait()

    @property
    def ranks(self) -> list[int]:
        """The ranks, as the default group counts them."""
        return [0] if self.group is None else dist.get_process_group_ranks(self.group)

    @property
    def is_first(self) -> bool:
        """Whether this rank names, renames and deletes for all."""
        return self.rank == 0

    def in_background(self) -> Team:
        """Returns the same ranks with a group that nobody else uses, whose messages lie in host memory."""
        if self.group is None:
            return self
        known = _background_groups.get(self.group)
        group = known() if known is not None else None
        if group is None:
            made = dist.new_group(self.ranks, backend="gloo", use_local_synchronization=True)
            group = cast(dist.ProcessGroup, made)  # this rank is one of them
            _background_groups[self.group] = weakref.ref(group)
        return replace(self, group=group)

    def first_died(self) -> bool:
        """Whether another rank is the first, and is known to have died."""
        return not self.is_first and self.watch is not None and self.ranks[0] in self.watch.dead()

    def gather(self, value: T) -> list[T]:
        """Returns every rank's value, in the order of ranks."""
        if self.group is None:
            return [value]
        with self.collectives():
            return all_gather_object(value, self.group)

    def on_first(self, decide: Callable[[], T]) -> T:
        """Lets the first rank decide; all get its result or raise its error."""
        return self.on(0, decide)

    def on(self, rank: int, decide: Callable[[], T]) -> T:
        """Lets one rank decide; all get its result or raise its error."""
        value, cause = _outcome(decide) if self.rank == rank else (None, None)
        answer: list[Any] = [value, None if cause is None else _portable(cause)]
        if self.group is not None:
            with self.collectives():
                dist.broadcast_object_list(answer, src=self.ranks[rank], group=self.group)
        if answer[1] is not None:
            raise answer[1] from cause
        return answer[0]  # type: ignore[no-any-return]

    def together(self, do: Callable[[], T]) -> T:
        """Calls a function on every rank and returns this rank's result; if any rank fails, all raise."""
        return self.agreed(lambda: (do(), None))[0]

    def agreed(self, do: Callable[[], tuple[T, S]]) -> tuple[T, list[S]]:
        """Calls a function as `together` does; also returns the second result of every rank."""
        values, cause = _outcome(do)
        told = values[1] if values is not None else None
        outcomes = self.gather((told, None if cause is None else _portable(cause)))
        failures = {rank: error for rank, (_, error) in enumerate(outcomes) if error is not None}
        if values is None or failures:
            raise _combined(failures, self.size) from cause
        return values[0], [cast(S, value) for value, _ in outcomes]

    @contextmanager
    def in_dcp(self, doing: str) -> Iterator[None]:
        """Turns what `torch.distributed.checkpoint` raises on all ranks into an ordinary error.

        Without gradients: some tensor subclasses cannot be taken out of a `DTensor` with them.
        """
        try:
            with self.collectives(), torch.no_grad():
                yield
        except CheckpointException as error:
            own, _ = error.failures.get(self.rank, (None, None))
            failures = {rank: _portable(exception) for rank, (exception, _) in error.failures.items()}
            raise RuntimeError(f"{doing} failed: {_combined(failures, int(self.group is None))}") from own

    @contextmanager
    def collectives(self) -> Iterator[None]:
        """Names the ranks that have died, if collectives fail for it, and where all stood."""
        try:
            yield
        except RuntimeError as error:
            if self.watch is None:
                raise
            failure = self.watch.failure(error)
            dead = ", ".join(f"rank {rank}" for rank in self.watch.dead())
            cause = f"{dead} died" if dead else "ranks could not communicate"
            raise RuntimeError(f"{self.doing} failed, since {cause}: {failure}") from error


ALONE = Team()
"""This process alone."""


def _outcome(do: Callable[[], T]) -> tuple[T | None, Exception | None]:
    try:
        return do(), None
    except Exception as error:
        return None, error


def _portable(error: BaseException) -> Exception:
    """Returns an error that says the same, and that other ranks can unpickle."""
    for kind in (DamagedCheckpoint, ValueError, TypeError, ImportError):
        if isinstance(error, kind):
            return kind(str(error))
    name = type(error).__name__
    return RuntimeError(str(error) if type(error) is RuntimeError else f"{name}: {error}")


def _combined(failures: Mapping[int, Exception], size: int) -> Exception:
    """Returns one error for all; texts that not all ranks have get their ranks' numbers."""
    ranks: dict[str, list[int]] = {}
    for rank, error in failures.items():
        ranks.setdefault(str(error), []).append(rank)
    lines = [
        text if len(of) == size else f"{'rank' if len(of) == 1 else 'ranks'} {listed(of)}: {text}"
        for text, of in ranks.items()
    ]
    kinds = {type(error) for error in failures.values()}
    return (kinds.pop() if len(kinds) == 1 else RuntimeError)("; ".join(lines))
