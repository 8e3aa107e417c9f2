"""What ranks note of a collective, how notes are compared, and what it means where they differ.

A step that raises on one rank alone, and is caught there, may have issued nothing: then this rank's next step
would pair with the others' last one. So a note also counts the forwards since the last backward, and tells
that one has raised. Ranks that skip a step together have begun equally many. Without an error the numbers may
differ: ranks need not evaluate alike. A note also has the number of optimizer steps, which must be equal.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from fsdp_wrap._comm.positions.host_log import RAISED

_DIGEST_NBYTES, _MARK_BITS = 3, 8  # what the lower half of a word consists of
_MARK = 2**_MARK_BITS - 1
_MOST_TRIES = 254
_STEPS = 2 ** (_MARK_BITS - 1)  # numbers of steps are compared modulo this
_BEHIND = " optimizer step behind"
_CALL = re.compile(r"rank \d+ calls (\S+)")

CHANGED = ", after "
"""Begins the part of a note that tells of changes, which all ranks must have made."""
CALLS = "calls "
"""Begins the note of a call that all ranks must make."""


class Note:
    """The text of a log entry, encoded once and cut to fit, with a digest of the whole text.

    The lowest bits of the digest are free for the mark of `StepCounts`.
    """

    def __init__(self, text: str) -> None:
        encoded = text.encode()
        digest = hashlib.blake2b(encoded, digest_size=_DIGEST_NBYTES).digest()
        self.digest = int.from_bytes(digest, "little") << _MARK_BITS
        self.text = encoded if len(encoded) < 235 else encoded[:30] + b"..." + encoded[-200:]


class StepCounts:
    """Counts the steps that a rank has tried and taken; each note has them.

    Attributes:
        tries: Twice the number of forwards since the last backward with a reduction; odd once one of these
            forwards, or a backward, has raised.
        steps: Number of optimizer steps, modulo `_STEPS`.
        mark: The same as `tries` if that is odd, else `steps` in the higher bits.
    """

    def __init__(self) -> None:
        self.tries = self.steps = self.mark = 0

    def begin_forward(self) -> None:
        """Counts a forward whose backward would reduce."""
        raised = self.tries & 1
        self.tries = min(self.tries + 2, _MOST_TRIES + raised)
        self.mark = self.tries if raised else self.steps << 1

    def fail(self) -> None:
        """Notes that a forward or backward has raised on this rank."""
        self.tries = self.mark = self.tries | 1

    def end_backward(self) -> None:
        """Begins to count anew: a backward has issued its reductions."""
        self.tries, self.mark = 0, self.steps << 1

    def take_step(self) -> None:
        """Counts an optimizer step, which all ranks must take before the next collective."""
        self.steps = (self.steps + 1) % _STEPS
        if not self.tries & 1:
            self.mark = self.steps << 1


class Noted(NamedTuple):
    """A logged collective, for ranks of other hosts: `digest` is the lower half of its word."""

    number: int
    digest: int
    tries: int
    text: str


def alike(noted: Iterable[tuple[int, int]]) -> bool:
    """Whether the (digest, tries) of some ranks are those of one collective, after equally many steps.

    Ranks that have begun different numbers of forwards fit together as long as none of these has raised.
    """
    digests, tries = zip(*noted)
    raised = any(number & 1 for number in tries)
    same = len({digest >> _MARK_BITS for digest in digests}) == 1
    return same and not (raised and len({number >> 1 for number in tries}) > 1) and not any(behind(digests))


def behind(digests: Sequence[int]) -> list[str]:
    """Returns for the digest of each rank how many optimizer steps it is behind the first; "" for none.

    Nothing is known of the steps of a rank on which a forward or backward has raised, nor are they compared
    where the collectives differ.
    """
    marks = [digest & _MARK for digest in digests]
    known = [mark >> 1 for mark in marks if not mark & 1]
    if len(set(known)) < 2 or len({digest >> _MARK_BITS for digest in digests}) > 1:
        return [""] * len(marks)
    ahead = [(steps - known[0] + _STEPS // 2) % _STEPS for steps in known]  # of each other, by less than half
    missing = {steps: max(ahead) - place for steps, place in zip(known, ahead)}
    counts = [0 if mark & 1 else missing[mark >> 1] for mark in marks]
    return [
        f", {count}{_BEHIND if count == 1 else _BEHIND.replace('step', 'steps')}" if count else ""
        for count in counts
    ]


def explained(told: str) -> tuple[str, bool]:
    """Returns the error of ranks whose collectives differ, and whether ranks of other groups need it too.

    `told` says what each rank has done. Ranks of other groups may wait for those of this one: they need the
    error where its cause lies in what the ranks did before.
    """
    if RAISED in told:
        return (
            f"ranks communicate for different units or steps: {told}. A step that raises on one rank "
            "must end on all: let the error end the program, or let all ranks agree to skip the step, "
            "before any of them runs its backward."
        ), False
    if call := _CALL.search(told):
        return f"not all ranks call {call[1]}: {told}. {all_must(call[1])}", False
    if CHANGED in told:
        return (
            f"ranks have loaded or edited apart: {told}. A rank changes its own part of the parameters "
            "(or of an optimizer's state) alone, so all ranks load and edit alike, or none does. A state "
            "dict that one rank alone has goes to all ranks by set_model_state_dict with full_state_dict "
            "and broadcast_from_rank0"
        ), True
    if _BEHIND in told.replace("steps", "step"):
        return (
            f"ranks have taken different numbers of optimizer steps: {told}. One rank has taken a step "
            "that another has skipped, so their parts of the parameters do not belong together. If a "
            "torch.amp.GradScaler found infinite or NaN gradients in the part of one rank alone, use "
            "fsdp_wrap.sharded_grad_scaler.ShardedGradScaler, whose ranks skip together. Let any other "
            "condition of a step be the same on all ranks. Load a checkpoint from before the step"
        ), True
    return (
        f"ranks communicate for different units: {told}. All ranks of a group must run the same units in "
        "the same order."
    ), False


def all_must(name: str) -> str:
    """Returns the rule for a call that all ranks must make."""
    saves = ", and save what it returns on one of them" if "state_dict" in name else ""
    return f"It communicates: call it on all ranks, outside of `if rank == 0:`{saves}."
