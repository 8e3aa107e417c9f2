"""Saving, at once or in the background."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from threading import Thread
from typing import Any, cast

import torch.distributed as dist
from torch import nn

from fsdp_wrap.checkpoint._state import Optimizers, Subject, staged
from fsdp_wrap.checkpoint._step import Save
from fsdp_wrap.checkpoint._team import Team

__all__ = ["PendingSave", "async_save", "save", "wait_for_pending"]

_log = logging.getLogger(__name__)


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
        dir: Of all steps; it may hold other files. All ranks must see the same file system there.
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
        ValueError: If an argument makes no sense, ranks name different steps, or something that is no
            checkpoint has the step folder's name.
        RuntimeError: On every rank if one could not write; it names the rank, and nothing appears. Also if
            an earlier background save failed and nobody has asked for its result.
    """
    team, to_do, state = _agreed(
        "checkpoint.save",
        lambda team: (_to_do(dir, step, keep_last, progress), Subject(model, optim, extra).taken(team)),
        process_group,
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
        lambda team: (
            _to_do(dir, step, keep_last, progress),
            staged(Subject(model, optim, extra).taken(team)),
        ),
        process_group,
    )
    pending = PendingSave(to_do, state, _in_background(team))
    _pending.append(pending)
    return pending


def _to_do(dir: str | os.PathLike[str], step: int | None, keep_last: int | None, progress: bool) -> Save:
    return Save(Path(dir).absolute(), step, keep_last, progress)  # the process may go elsewhere meanwhile


def _agreed(
    doing: str, plan: Callable[[Team], tuple[Save, dict[str, Any]]], process_group: dist.ProcessGroup | None
) -> tuple[Team, Save, dict[str, Any]]:
    """Waits for an earlier save and plans one, by `plan(team)` on each rank; returns who writes what."""
    wait_for_pending()
    team = Team.of(process_group, doing)
    to_do, state = team.together(lambda: plan(team))
    to_do.agreed(team)
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
    return team.over(group)
