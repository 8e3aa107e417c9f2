"""Saving, at once or in the background.

All ranks agree on a step folder, write it, see to it that all of it is there, and publish it.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from threading import Thread
from typing import Any, cast

import torch.distributed as dist
from torch import nn

from fsdp_wrap._core.torch_private import save_state_dict
from fsdp_wrap.checkpoint import _folders as folders
from fsdp_wrap.checkpoint._folders import Begun, Claim
from fsdp_wrap.checkpoint._state import Optimizers, Subject, staged
from fsdp_wrap.checkpoint._storage import CheckedWriter, rank_of
from fsdp_wrap.checkpoint._team import Place, Team, errors_of_all_ranks

__all__ = ["PendingSave", "Save", "async_save", "save", "wait_for_pending"]

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Save:
    """What is to be written where.

    Attributes:
        parent: The folder of step folders.
        step: Its number; None for one after the newest.
        keep_last: How many complete steps stay, this one included; None for all.
        progress: Whether the first rank shows a bar.
    """

    parent: Path
    step: int | None = None
    keep_last: int | None = None
    progress: bool = False

    def __post_init__(self) -> None:
        for name, least in (("step", 0), ("keep_last", 1)):
            value = getattr(self, name)
            if value is None:
                continue
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"{name} must be a whole number or None, not {type(value).__name__}")
            if value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")

    def write(self, state: dict[str, Any], team: Team) -> Path:
        """Writes the step folder, on every rank; it appears once all have succeeded, or not at all."""
        try:
            with ExitStack() as held:
                begun = team.on_first(lambda: self._begin(held))
                places = self._agreed_places(begun, team)
                self._write(begun, state, team)
                team.on_first(lambda: self._publish(begun, places, held))
        except BaseException:
            self._clean_up_for_dead(team)
            raise
        return folders.step_folder(self.parent, begun.step)

    def _begin(self, held: ExitStack) -> Begun:
        """Makes the hidden folder, on the first rank; it goes with what is held, unless it was published."""
        self.parent.mkdir(parents=True, exist_ok=True)
        held.callback(Claim.take(self.parent).release)
        begun = folders.begin(self.parent, self.step)
        held.callback(_remove_what_is_left, begun.folder(self.parent))
        return begun

    def _agreed_places(self, begun: Begun, team: Team) -> list[Place]:
        """Returns where the ranks find the hidden folder; refuses if one does not, before it writes."""
        own = begun.folder(self.parent)
        places = team.gather(Place.of(self.parent, folders.shows(self.parent, own)))
        lost = [f"rank {rank} ({place})" for rank, place in enumerate(places) if not place.is_seen]
        if lost:
            raise ValueError(
                f"all ranks must save in one folder, but what rank 0 ({places[0]}) makes there is not seen "
                f"by {', '.join(lost)}. Nothing was written: name a folder on a file system that all share"
            )
        return places

    def _write(self, begun: Begun, state: dict[str, Any], team: Team) -> None:
        writer = CheckedWriter(
            begun.folder(self.parent), begun.step, team.size, self.progress and team.is_first
        )
        with errors_of_all_ranks(team, self._doing(begun)), team.collectives():
            save_state_dict(state, writer, team.group, no_dist=team.group is None)

    def _publish(self, begun: Begun, places: Sequence[Place], held: ExitStack) -> None:
        """Shows the step, on the first rank, if all that the manifest names has arrived there."""
        lacks = folders.unseen_in(begun.folder(self.parent))
        if lacks:
            writers = [rank_of(lack.partition(" ")[0]) for lack in lacks]
            told = "; ".join(
                f"{lack}, written by rank {rank} ({places[rank]})" for lack, rank in zip(lacks, writers)
            )
            raise RuntimeError(f"{self._doing(begun)} failed: rank 0 ({places[0]}) sees that {told}")
        folders.publish(self.parent, begun, self.keep_last)
        held.close()  # before the others know: one of them may be the first of the next save

    def _doing(self, begun: Begun) -> str:
        return (
            f"saving step {begun.step} in {self.parent} (nothing of it is left, other steps are as they were)"
        )

    def _clean_up_for_dead(self, team: Team) -> None:
        """Removes what a first rank that has died was writing; of several survivors one does."""
        if team.is_first or not team.first_died():
            return
        with suppress(RuntimeError, OSError), ExitStack() as held:  # another one does, or the next save will
            held.callback(Claim.take(self.parent).release)
            folders.clean_up(self.parent)


def _remove_what_is_left(folder: Path) -> None:
    with suppress(OSError):  # then the next save removes it
        folders.remove(folder)


class PendingSave:
    """A save that goes on in the background."""

    def __init__(self, to_do: Save, state: dict[str, Any], team: Team) -> None:
        self._future: Future[Path] = Future()
        self._told = False
        # No daemon: a program that ends waits for it.
        Thread(target=self._run, args=(to_do, state, team), name="fsdp_wrap.checkpoint").start()

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> Path:
        """Waits for its end and returns the step folder.

        Raises:
            RuntimeError: If it failed; on all ranks.
            TimeoutError: If it goes on for longer than `timeout` seconds.
        """
        error = self._future.exception(timeout)
        self._told = error is not None
        return self._future.result()

    def raise_untold(self) -> None:
        """Waits for its end and raises its error, unless `result` has."""
        self._future.exception()
        if not self._told:
            self.result()

    def _run(self, to_do: Save, state: dict[str, Any], team: Team) -> None:
        try:
            self._future.set_result(to_do.write(state, team))
        except BaseException as error:
            _log.error("a checkpoint could not be saved in the background: %s", error)
            self._future.set_exception(error)


_pending: list[PendingSave] = []
"""The save in the background, if there was any since the last look; one at most."""

_background_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.ref[dist.ProcessGroup]]
_background_groups = weakref.WeakKeyDictionary()
"""For each group the one that background saves of its ranks talk over.

Torch holds a group until it is destroyed; one that we held would keep threads from ending.
"""


def wait_for_pending(raise_error: bool = True) -> None:
    """Waits for the save in the background, and may raise its error, if nobody has seen it."""
    while _pending:
        try:
            _pending[0].raise_untold()
        except Exception:
            if raise_error:
                _pending.clear()
                raise
            return
        _pending.clear()


def save(
    dir: str | os.PathLike[str],
    model: nn.Module,
    optim: Optimizers = None,
    extra: Mapping[str, Any] | None = None,
    *,
    step: int | None = None,
    keep_last: int | None = None,
    progress: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> Path:
    """Saves model, optimizers, extras and random states as a step folder in `dir`; collective.

    The folder appears when every rank has written its part and all of it lies on disk, with checksums; a
    crash before leaves what was there. A step that is there already is replaced. What crashed saves left is
    removed.

    Args:
        dir: Of all steps; it may hold other files. All ranks must see the same folder there.
        model: Wrapped or plain. Sharded parameters are written by the ranks that hold them, without
            communication beyond metadata.
        optim: One or several optimizers of the model's parameters.
        extra: By name: objects with `state_dict` and `load_state_dict` (schedulers, scalers, samplers, data
            loaders), or values that pickle. Each rank saves its own.
        step: The number of the step; None for one after the newest in `dir`.
        keep_last: Older complete steps than the last so many are removed once this one is there.
        progress: Show a bar of the bytes that the first rank writes.
        process_group: The ranks that save; None for the default group, or this process alone without one.

    Returns:
        The step folder.

    Raises:
        TypeError: If an argument has the wrong type, or an extra does not pickle.
        ValueError: If an argument makes no sense, ranks name different steps or do not see the same folder,
            other ranks hold parts of the model, or something that is no checkpoint has the step folder's
            name; nothing was written then.
        RuntimeError: On every rank if one could not write; it names the rank, and nothing appears. If another
            run is saving there. Also if an earlier background save failed and nobody has asked for its
            result.
    """
    team, to_do, state = _agreed(
        "checkpoint.save",
        process_group,
        lambda: Save(Path(dir).absolute(), step, keep_last, progress),
        lambda team: Subject(model, optim, extra).taken(team),
    )
    return to_do.write(state, team)


def async_save(
    dir: str | os.PathLike[str],
    model: nn.Module,
    optim: Optimizers = None,
    extra: Mapping[str, Any] | None = None,
    *,
    step: int | None = None,
    keep_last: int | None = None,
    progress: bool = False,
    process_group: dist.ProcessGroup | None = None,
) -> PendingSave:
    """Does what `save` does, in the background, of a copy in host memory; collective.

    It returns when the copy is made, and training may go on. A second save, of either kind, and `load` wait
    for the first. The background has a process group of its own; ask for the last save's result before
    `destroy_process_group()`.

    Args:
        dir: As in `save`, like all others.
        model: As in `save`.
        optim: As in `save`.
        extra: As in `save`.
        step: As in `save`.
        keep_last: As in `save`.
        progress: As in `save`.
        process_group: As in `save`.

    Returns:
        What tells whether it is done, and its result or error.

    Raises:
        TypeError: As `save`.
        ValueError: As `save`; what is found out later is raised by the result.
        RuntimeError: If an earlier background save failed and nobody has asked for its result.
    """
    team, to_do, state = _agreed(
        "checkpoint.async_save",
        process_group,
        lambda: Save(Path(dir).absolute(), step, keep_last, progress),  # the process may go elsewhere
        lambda team: staged(Subject(model, optim, extra).taken(team)),
    )
    pending = PendingSave(to_do, state, _in_background(team))
    _pending.append(pending)
    return pending


def _agreed(
    doing: str,
    process_group: dist.ProcessGroup | None,
    save: Callable[[], Save],
    take: Callable[[Team], dict[str, Any]],
) -> tuple[Team, Save, dict[str, Any]]:
    """Waits for an earlier save and plans one, of one step on all ranks; returns who writes what."""
    wait_for_pending()
    team = Team.of(process_group, doing)
    to_do, state = team.together(lambda: (save(), take(team)))
    steps = team.gather(to_do.step)
    if len(set(steps)) > 1:
        told = ", ".join(f"{step} on rank {rank}" for rank, step in enumerate(steps))
        raise ValueError(f"all ranks must save the same step; step is {told}")
    return team, to_do, state


def _in_background(team: Team) -> Team:
    """Returns the same ranks with a group that nobody else uses."""
    if team.group is None:
        return team
    known = _background_groups.get(team.group)
    group = known() if known is not None else None
    if group is None:
        ranks = dist.get_process_group_ranks(team.group)
        made = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
        group = cast(dist.ProcessGroup, made)  # this rank is one of them
        _background_groups[team.group] = weakref.ref(group)
    return replace(team, group=group)
