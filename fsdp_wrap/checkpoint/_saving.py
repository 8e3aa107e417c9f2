"""Saving, at once or in the background.

All ranks agree on a step folder, write it, see to it that all of it is there, and publish it.
"""

from __future__ import annotations

import logging
import os
import zlib
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from fsdp_wrap._core import tells_keywords
from fsdp_wrap.checkpoint._in_memory import InMemory, MemorySave
from fsdp_wrap.checkpoint._places.place import StepPlace, where_is
from fsdp_wrap.checkpoint._places.steps import place_at
from fsdp_wrap.checkpoint._planning import uncollected
from fsdp_wrap.checkpoint._state import Optimizers, Subject, staged
from fsdp_wrap.checkpoint._storage import CheckedWriter, Save, in_process, rank_of
from fsdp_wrap.checkpoint._team import Team

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class SharedSave(Save):
    """A save into a place that all ranks see; the bar is shown after `patience` seconds."""

    place: StepPlace
    patience: float = 0.0

    def write(self) -> Path:
        """Writes the step folder, on every rank; it appears once all have succeeded, or not at all."""
        try:
            with ExitStack() as held:
                step, name = self.team.on_first(lambda: held.enter_context(self.place.begun(self.step)))
                fate = "nothing of it is left, other steps are as they were"
                doing = f"saving step {step} in {self.place.path} ({fate})"
                places = self._agreed_places(name)
                bar = self.progress and self.team.is_first
                with self.team.in_dcp(doing):
                    written = self.place.path / name
                    self.writer(written, step, self.team.size, bar, self.patience).save(self.state, self.team)
                final = self.team.on_first(lambda: self._publish(name, step, places, doing, held))
        except BaseException:
            if self.team.first_died():  # of several survivors one does what it would have done
                self.place.clean_up()
            raise
        return self.place.path / final

    def _agreed_places(self, name: str) -> list[str]:
        """Returns where the ranks find the step; refuses if one does not, before it writes."""
        looks = self.team.gather((where_is(self.place.path), self.place.shows(name)))
        places = [place for place, _ in looks]
        lost = [f"rank {rank} ({place})" for rank, (place, is_seen) in enumerate(looks) if not is_seen]
        if lost:
            raise ValueError(
                f"all ranks must save in one folder, but what rank 0 ({places[0]}) makes there is not seen "
                f"by {', '.join(lost)}. Nothing was written: name a folder on a file system that all share, "
                "or one in a bucket"
            )
        return places

    def _publish(self, name: str, step: int, places: Sequence[str], doing: str, held: ExitStack) -> str:
        """Shows the step, on the first rank, if all that the manifest names has arrived; returns its name."""
        lacks = [
            f"{fault.file} {fault.lack}, written by rank {writer} ({places[writer]})"
            for fault in self.place.unseen(name)
            for writer in [rank_of(fault.file)]
        ]
        if lacks:
            raise RuntimeError(f"{doing} failed: rank 0 ({places[0]}) sees that {'; '.join(lacks)}")
        final = self.place.publish(name, step, self.keep_last)
        held.close()  # before the others know: one of them may be the first of the next save
        return final.name


class PendingSave:
    """A save that goes on in the background."""

    def __init__(self, to_do: Save) -> None:
        # A program that ends waits for the thread.
        self._future = ThreadPoolExecutor(1, "fsdp_wrap.checkpoint").submit(_logged, to_do)
        self._seen = False

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._future.done()

    def result(self, timeout: float | None = None) -> Path:
        """Waits for its end and returns the step folder.

        Args:
            timeout: Seconds; None for no limit.

        Raises:
            RuntimeError: If it failed; on all ranks.
            TimeoutError: If it goes on for longer than `timeout` seconds.
        """
        try:
            return self._future.result(timeout)
        finally:
            self._seen = self._future.done()

    def wait(self, raise_untold: bool = False) -> None:
        """Waits for its end, and may raise its error, unless `result` has.

        Args:
            raise_untold: Raise the error if `result` has not.
        """
        self._future.exception()
        if raise_untold and not self._seen:
            self.result()


def _logged(to_do: Save) -> Path:
    try:
        return to_do.write()
    except BaseException as error:
        _log.error("a checkpoint could not be saved in the background: %s", error)
        raise


_pending: list[PendingSave] = []
"""The save in the background, if there was any since the last look; one at most."""


def wait_for_pending(raise_error: bool = True) -> None:
    """Waits for the save in the background, and may raise its error, if nobody has seen it."""
    for pending in tuple(_pending):
        if raise_error:
            _pending.clear()
        pending.wait(raise_error)


_INSTEAD = {"optimizer": "pass it as optim", "optimizers": "pass them as optim"}
"""What stands for arguments that others call so."""


@tells_keywords(_INSTEAD)
def save(
    dir: str | os.PathLike[str] | InMemory,
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
    crash before leaves what was there. A step that is there already is replaced. Leftovers of crashed saves
    are removed.

    Args:
        dir: The folder of all steps; it may hold other files. All ranks must see the same folder there. Or
            the URL of one in an object store, such as `s3://bucket/run`, where a step exists once its
            manifest does. Or a place in the hosts' memory, `InMemory`.
        model: Wrapped or plain. Sharded parameters are written by the ranks that hold them, without
            communication beyond metadata.
        optim: One or several optimizers of the model's parameters.
        extra: By name: objects with `state_dict` and `load_state_dict` (schedulers, scalers, samplers, data
            loaders), or values that pickle. Each rank saves its own.
        step: The number of the step; None for one after the newest in `dir`.
        keep_last: Older complete steps than the last so many are removed once this one is there; in memory
            all but the newest if None.
        progress: Show a bar of the bytes that the first rank writes.
        process_group: The ranks that save; None for the default group, or this process alone without one.

    Returns:
        The step folder; of a URL a place that reads as a `Path` does, and whose `str` is its URL.

    Raises:
        ImportError: If the package for a URL's kind of store is not installed; nothing was written then.
        TypeError: If an argument has the wrong type, or an extra does not pickle.
        ValueError: If an argument makes no sense, ranks name different steps or do not see the same folder,
            other ranks hold parts of the model, or something that is no checkpoint has the step folder's
            name; nothing was written then.
        RuntimeError: On every rank if one could not write; it names the rank, and nothing appears. If another
            run is saving there. Also if an earlier background save failed and nobody has asked for its
            result.
    """
    given = "checkpoint.save", dir, model, optim, extra, process_group, False
    return _planned(*given, step=step, keep_last=keep_last, progress=progress).write()


@tells_keywords(_INSTEAD)
def async_save(
    dir: str | os.PathLike[str] | InMemory,
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
        dir: See `save`, also for all others.
        model: See `save`.
        optim: See `save`.
        extra: See `save`.
        step: See `save`.
        keep_last: See `save`.
        progress: See `save`.
        process_group: See `save`.

    Returns:
        A handle that tells whether the save is done, and its result or error.

    Raises:
        ImportError: See `save`.
        TypeError: See `save`.
        ValueError: See `save`; the result raises what is found out later.
        RuntimeError: If an earlier background save failed and nobody has asked for its result.
    """
    given = "checkpoint.async_save", dir, model, optim, extra, process_group, True
    to_do = _planned(*given, step=step, keep_last=keep_last, progress=progress)
    pending = PendingSave(replace(to_do, team=to_do.team.in_background()))
    _pending.append(pending)
    return pending


class RegularSaves:
    """Saves in the background so often that little is lost whenever ranks or hosts go.

    When the training stops after any step, a save of it or of one of the `lose_at_most` steps before it is
    complete, or fewer than so many steps have been taken. For that, a save begins after every second half of
    so many steps, and lasts at most for the first half: then training waits for it.

    Every rank makes one, and calls its methods.

    Args:
        dir: See `save`, also for all others up to `extra`; mostly `InMemory`.
        model: See `save`.
        optim: See `save`.
        extra: See `save`.
        lose_at_most: How many steps may be taken again; with 1, every step waits for its save.
        keep_last: See `save`.
        process_group: See `save`.

    Raises:
        ValueError: If `lose_at_most` is less than 1.
    """

    def __init__(
        self,
        dir: str | os.PathLike[str] | InMemory,
        model: nn.Module,
        optim: Optimizers = None,
        extra: Mapping[str, Any] | None = None,
        *,
        lose_at_most: int,
        keep_last: int | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if lose_at_most < 1:
            raise ValueError(f"lose_at_most must be at least 1 step, not {lose_at_most}")
        self._save = partial(
            async_save, dir, model, optim, extra, keep_last=keep_last, process_group=process_group
        )
        self._longest = lose_at_most // 2
        self.every = lose_at_most - self._longest
        """Steps from one save to the next."""
        self._pending: PendingSave | None = None
        self._begun = 0

    def after(self, step: int) -> None:
        """Does what is due after a step: begins a save, or waits for the one before.

        Args:
            step: The number of the step that has been taken, from 1.

        Raises:
            RuntimeError: If a save in the background failed; on all ranks.
        """
        if step - self._begun >= self._longest:
            self.finish()
        if step % self.every == 0:
            self._pending, self._begun = self._save(step=step), step
            if self._longest == 0:
                self.finish()

    def finish(self) -> None:
        """Waits for the save in the background, if there is one.

        Raises:
            RuntimeError: If it failed; on all ranks.
        """
        if self._pending is not None:
            pending, self._pending = self._pending, None
            pending.result()


def _planned(
    doing: str, dir: Any, model: nn.Module, optim: Any, extra: Any, group: Any, copied: bool, **options: Any
) -> Save:
    """Waits for an earlier save and plans one, of one step on all ranks; `copied` to host memory, or not."""
    wait_for_pending()
    team = Team.of(group, doing, model)

    def plan() -> Save:
        place = None if isinstance(dir, InMemory) else place_at(dir)
        if team.is_first and place is not None:
            place.refuse_unusable()
        state = Subject(model, optim, extra).taken(team)
        if copied:
            elsewhere = None if place is not None and place.is_of_process else in_process.filled
            aside = elsewhere and elsewhere(state, model)
            state, options["writer"] = aside or (staged(state), CheckedWriter)
        what = {"team": team, "state": state, **options}
        return MemorySave(folder=dir.folder, **what) if place is None else SharedSave(place=place, **what)

    with uncollected():
        to_do = team.together(plan)
    optim = to_do.state.get("optim", {"param_groups": []})
    names = [group["params"] for group in optim["param_groups"]]
    steps, sums = zip(*team.gather((to_do.step, zlib.crc32(repr(names).encode()))))
    if len(set(steps)) > 1:
        told = ", ".join(f"{step} on rank {rank}" for rank, step in enumerate(steps))
        raise ValueError(f"all ranks must save the same step; step is {told}")
    if len(set(sums)) > 1:  # each has another stage of a pipeline
        joined = {**optim, "param_groups": _joined(team.gather(optim["param_groups"]))}
        return replace(to_do, state={**to_do.state, "optim": joined})
    return to_do


def _joined(of_ranks: Sequence[Sequence[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Merges all ranks' parameter groups; a parameter stays in the first group that has it."""
    known: set[str] = set()
    joined = []
    for group in (group for groups in of_ranks for group in groups):
        new = [name for name in group["params"] if name not in known]
        known.update(new)
        if new:
            joined.append({**group, "params": new})
    return joined
