"""One step folder: all ranks agree on it, write it, see to it that all of it is there, and publish it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_wrap._torch_private import save_state_dict
from fsdp_wrap.checkpoint import _folders as folders
from fsdp_wrap.checkpoint._folders import Begun, Claim
from fsdp_wrap.checkpoint._storage import CheckedWriter, rank_of
from fsdp_wrap.checkpoint._team import Place, Team, errors_of_all_ranks

__all__ = ["Save"]


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

    def agreed(self, team: Team) -> None:
        """Refuses a step that not all ranks name."""
        steps = team.gather(self.step)
        if len(set(steps)) > 1:
            told = ", ".join(f"{step} on rank {rank}" for rank, step in enumerate(steps))
            raise ValueError(f"all ranks must save the same step; step is {told}")

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
            told = "; ".join(f"{lack}, written by {_writer(lack, places)}" for lack in lacks)
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
        with suppress(RuntimeError, OSError):  # another one does, or the next save will
            claim = Claim.take(self.parent)
            try:
                folders.clean_up(self.parent)
            finally:
                claim.release()


def _remove_what_is_left(folder: Path) -> None:
    with suppress(OSError):  # then the next save removes it
        folders.remove(folder)


def _writer(lack: str, places: Sequence[Place]) -> str:
    rank = rank_of(lack.partition(" ")[0])
    return f"rank {rank} ({places[rank]})"
