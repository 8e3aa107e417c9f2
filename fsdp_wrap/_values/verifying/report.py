"""`Verification`: whether sharded training is right, and the page that tells it."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass

from fsdp_wrap._core import listed
from fsdp_wrap._values import files
from fsdp_wrap._values.compare import Departure
from fsdp_wrap._values.verdict import Verdict
from fsdp_wrap._values.verifying.causes import Cause, causes_of
from fsdp_wrap._values.verifying.pair import Pair

_COLUMNS = {
    "weights": (files.SHARD, files.PARAMETER, files.AGAIN),
    "inputs": (files.INPUT,),
    "outputs": (files.OUTPUT,),
    "gradients": (files.OUTPUT_GRADIENT, files.INPUT_GRADIENT, files.GRADIENT, files.REDUCED),
    "at the step": (files.STEP,),
    "updates": (files.UPDATE,),
}
_WIDTH = 96


@dataclass(frozen=True)
class VerifiedStep:
    """One step of both runs.

    Attributes:
        number: Number of the step.
        plain_loss: The number that the plain step returned; None if it was none.
        sharded_loss: The mean of what the ranks' steps returned; None likewise.
        departures: The largest relative difference of "weights", "inputs", "outputs", "gradients", gradients
            "at the step" of the optimizer, and "updates".
    """

    number: int
    plain_loss: float | None
    sharded_loss: float | None
    departures: dict[str, float]

    @property
    def largest(self) -> float:
        """The largest departure of the values that count: of gradients only those that the optimizer sees."""
        return max((size for name, size in self.departures.items() if name != "gradients"), default=0.0)


@dataclass(frozen=True)
class Verification:
    """The outcome of `verify`; as a string, a page.

    Attributes:
        verdict: "equal", "rounding", or the kind of the first cause.
        causes: Each thing that is wrong, with `kind`, `told` and `cure`.
        notes: Other facts worth knowing.
        ranks: Number of ranks.
        steps: The steps of both runs.
        against: The other run: "plain" or "one rank".
    """

    verdict: str
    causes: tuple[Cause, ...]
    notes: tuple[str, ...]
    ranks: int
    steps: tuple[VerifiedStep, ...]
    against: str

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong."""
        return not self.causes

    def __str__(self) -> str:
        """The page that a person reads."""
        with_what = "the plain model" if self.against == "plain" else "one rank"
        lines = [f"Sharded over {self.ranks} ranks, compared with {with_what}: {self.verdict}"]
        for cause in self.causes:
            lines += ["", f"{cause.kind}:", *_wrapped(f"{cause.told}."), *_wrapped(f"Cure: {cause.cure}.")]
        if self.ok and self.steps:
            most = max(step.largest for step in self.steps)
            told = (
                f"Differences are as rounding makes them, at most {most:.1e}." if most else "The same bits."
            )
            lines += ["", *_wrapped(f"Nothing is wrong. {told}")]
        lines += self._table()
        for note in self.notes:
            lines += ["", *_wrapped(f"Note: {note}.")]
        return "\n".join(lines)

    def _table(self) -> list[str]:
        if not self.steps:
            return []
        header = f"{'step':>4} {'plain loss':>11} {'sharded':>11}"
        lines = ["", header + "".join(f"{name:>12}" for name in _COLUMNS)]
        for step in self.steps:
            losses = (_cell(loss, 11, ".6g") for loss in (step.plain_loss, step.sharded_loss))
            sizes = (_cell(step.departures.get(name), 12, ".1e") for name in _COLUMNS)
            lines.append(f"{step.number:>4} {' '.join(losses)}{''.join(sizes)}")
        return lines


def _cell(number: float | None, width: int, form: str) -> str:
    return f"{'-' if number is None else format(number, form):>{width}}"


def verification_of(pair: Pair, against: str) -> Verification:
    """Returns the outcome for what was observed."""
    verdict = pair.verdict() if pair.steps else None
    causes = causes_of(pair, verdict)
    kind = causes[0].kind if causes else _kind(verdict)
    steps = tuple(_step(pair, step) for step in pair.steps)
    return Verification(kind, tuple(causes), tuple(_notes(pair, against)), pair.ranks.ranks, steps, against)


def _kind(verdict: Verdict | None) -> str:
    if verdict is None:
        raise ValueError(
            "no forward of the model that setup() returns has trained: let step() call it and backward()"
        )
    return verdict.kind


def _step(pair: Pair, step: int) -> VerifiedStep:
    departures = pair.departures(step)
    sizes = {}
    for name, seams in _COLUMNS.items():
        if these := [
            departure.size
            for departure in departures
            if departure.seam in seams and _is_comparable(departure)
        ]:
            sizes[name] = max(these)
    losses = [observed.losses[step] for observed in pair.sharded if step < len(observed.losses)]
    known = [loss for loss in losses if loss is not None]
    mean = sum(known) / len(known) if known else None
    return VerifiedStep(step, pair.plain.losses[step] if step < len(pair.plain.losses) else None, mean, sizes)


def _is_comparable(departure: Departure) -> bool:
    """Whether both runs sum over equally many elements; frozen parameters may have gradients in one alone."""
    return math.isfinite(departure.size) or departure.seam not in _COLUMNS["gradients"]


def _notes(pair: Pair, against: str) -> list[str]:
    notes = []
    if against != "plain":
        notes.append(
            "The one rank has run the sharded program, so it is not shown that a plain model does the same"
        )
    if off := pair.plain.dropouts:
        notes.append(f"Dropout was off: {listed(off)}. Other numbers of ranks draw other masks")
        if pair.ranks.ranks > 1 and len({observed.randoms[:1] for observed in pair.sharded}) == 1:
            notes.append(
                "All ranks have the same state of random numbers in the first forward, so with dropout "
                "their rows get the same masks: seed each rank by its number once the model is built"
            )
    if (passes := _passes_reduced(pair)) > 1:
        notes.append(
            f"Gradients are reduced after each of {passes} forwards of a step: with no_sync() around all "
            "but the last they are sent once"
        )
    return notes


def _passes_reduced(pair: Pair) -> int:
    """Returns the number of forwards of a step if gradients are reduced after each of them."""
    if pair.ranks.ranks == 1 or not pair.steps:
        return 0
    step = pair.steps[0]
    reduced, seen = (pair.rows(step, seam, 0) for seam in (files.REDUCED, files.STEP))
    passes = pair.ranks.records[0].steps[step].passes
    often = [reduced[unit].tensors // row.tensors for unit, row in seen.items() if unit in reduced]
    return passes if often and min(often) >= passes else 0


def _wrapped(text: str) -> Sequence[str]:
    return textwrap.wrap(text, _WIDTH, initial_indent="  ", subsequent_indent="  ")
