"""The answer of `fit`: configurations of a step, whether they fit, with which recipe, and how fast."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fsdp_wrap._core import format_bytes, format_seconds, own_output
from fsdp_wrap.tools.fitting.recipe import Recipe
from fsdp_wrap.tools.planning import Machine, Plan

Values = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One configuration of a step, as it was planned.

    Attributes:
        ranks: Number of ranks.
        values: The arguments of `setup`, except the batch and the recipe.
        batch: Samples in one forward of each rank; None where `setup` takes no batch.
        recipe: How the model is sharded, and what is kept; None where `setup` takes no recipe.
        fits: Whether it fits.
        peak_bytes: The most bytes that a rank's device holds.
        predicted_seconds: Seconds of a step; None without a machine.
        samples_per_second: Samples of all ranks; None without a machine, or where `setup` takes no batch.
        refused: Why it cannot be planned; "" if it can.
        plan: The plan; None if it cannot be planned.
    """

    ranks: int
    values: Values
    batch: int | None = None
    recipe: Recipe | None = None
    fits: bool = False
    peak_bytes: int = 0
    predicted_seconds: float | None = None
    samples_per_second: float | None = None
    refused: str = ""
    plan: Plan | None = field(default=None, repr=False, compare=False)

    @property
    def speed(self) -> float:
        """Samples a second, or steps a second where there are no samples; 0 without a machine."""
        if self.samples_per_second is None and self.predicted_seconds:
            return 1 / self.predicted_seconds
        return self.samples_per_second or 0.0

    @property
    def order(self) -> tuple[Any, ...]:
        """The sort key: what fits, by speed; then what does not, by bytes; then what was refused."""
        rest = -self.speed, -(self.batch or 0), self.peak_bytes
        return bool(self.refused), not self.fits, 0 if self.fits else self.peak_bytes, *rest

    def __str__(self) -> str:
        """One line: the configuration and its answer."""
        answer = f"{'fits' if self.fits else 'does not fit'}, {format_bytes(self.peak_bytes)}"
        return f"{format_case(self.ranks, _values_of(self))}: {self.refused or answer}"

    def to_dict(self) -> dict[str, Any]:
        """Returns all but the plan, of types that JSON knows; other values by their `str`."""
        plain = {name: value for name, value in vars(self).items() if name != "plan"}
        plain["values"] = {name: _plain(value) for name, value in self.values.items()}
        plain["recipe"] = None if self.recipe is None else dataclasses.asdict(self.recipe)
        return plain


@dataclass(frozen=True, kw_only=True)
class Fit:
    """The configurations that `fit` has planned, the fastest that fits first.

    Attributes:
        device_memory: The bytes that a rank may use.
        choices: Configurations that fit, by speed; then those that do not; then those that were refused.
        plans: Number of steps that were planned.
        machine: The machine of the predictions; None if there was none.
        complete: Whether all configurations were tried: an interrupt ends the search.
    """

    device_memory: int
    choices: tuple[Choice, ...]
    plans: int
    machine: Machine | None = None
    complete: bool = True

    @property
    def best(self) -> Choice | None:
        """The first that fits; None if none does."""
        return self.choices[0] if self.choices and self.choices[0].fits else None

    def to_json(self, path: str | Path | None = None) -> str:
        """Returns the answer as JSON, and writes it to a file if one is named.

        Args:
            path: The file to write; None for none.
        """
        plain = {
            "device_memory": self.device_memory,
            "plans": self.plans,
            "complete": self.complete,
            "machine": None if self.machine is None else self.machine.to_dict(),
            "choices": [choice.to_dict() for choice in self.choices],
        }
        text = json.dumps(plain, indent=1)
        if path is not None:
            own_output(Path(path)).write_text(text)
        return text

    def missing(self) -> str:
        """Returns what the configuration that needs least lacks, and where it does; "" if one fits."""
        least = None if self.best is not None else self.choices[0].plan
        if least is None:
            return ""
        place, kinds = _tightest(least)
        case = format_case(least.ranks, _values_of(self.choices[0]))
        missing = format_bytes(least.needed_bytes - self.device_memory)
        avoidable = "".join(f"{line}. " for line in least.avoidable())
        return (
            f"nothing fits into {format_bytes(self.device_memory)}: the least is "
            f"{format_bytes(least.needed_bytes)}, {missing} too much ({case}), at its tightest {place} "
            f"({kinds}). {avoidable}Take more ranks, more memory, a smaller batch or a smaller model"
        )

    def __str__(self) -> str:
        """A table that a person reads, and below it where the first one is tightest, or what is missing."""
        lines = [*self._heading(), "", *self._table()]
        lines += [f"refused: {choice}" for choice in self.choices if choice.refused]
        if self.best is not None and self.best.plan is not None:
            place, kinds = _tightest(self.best.plan)
            lines += ["", f"The first one is tightest {place}: {kinds}"]
        return "\n".join([*lines, *filter(None, ["", self.missing()])])

    def _heading(self) -> Iterator[str]:
        fitting = sum(choice.fits for choice in self.choices)
        memory = format_bytes(self.device_memory)
        rest = "" if self.complete else ", interrupted before the rest"
        yield f"{fitting} of {len(self.choices)} fit into {memory} ({self.plans} plans{rest})"
        if self.machine is not None:
            yield f"predicted for {self.machine.title}: {self.machine.source or 'figures of the caller'}"

    def _table(self) -> Iterator[str]:
        """Yields the lines of the table, without columns that are empty."""
        shown = [choice for choice in self.choices if not choice.refused]
        names = dict.fromkeys(name for choice in shown for name in _values_of(choice) if name != "recipe")
        rows = [["ranks", *names, "peak", "fits", "step", "samples/s", "recipe"]]
        for choice in shown:
            values, seconds, speed = _values_of(choice), choice.predicted_seconds, choice.samples_per_second
            rows.append(
                [
                    str(choice.ranks),
                    *(str(values.get(name, "")) for name in names),
                    format_bytes(choice.peak_bytes),
                    "yes" if choice.fits else "no",
                    "" if seconds is None else format_seconds(seconds),
                    "" if speed is None else f"{speed:.4g}",
                    str(choice.recipe or ""),
                ]
            )
        columns = [column for column in zip(*rows) if any(column[1:])]
        for row in zip(*map(_justified, columns)):
            yield "  ".join(row).rstrip()


def _justified(column: Sequence[str]) -> list[str]:
    width = max(map(len, column))
    return [cell.ljust(width) if column[0] == "recipe" else cell.rjust(width) for cell in column]


def format_case(ranks: int, values: Values) -> str:
    """Names a configuration in one line."""
    return ", ".join([f"{ranks} ranks", *(f"{name}={_plain(value)}" for name, value in values.items())])


def _values_of(choice: Choice) -> dict[str, Any]:
    """Returns the values, the batch and the recipe, as far as there are any."""
    more = {"batch": choice.batch, "recipe": choice.recipe}
    return {**choice.values, **{name: value for name, value in more.items() if value is not None}}


def _plain(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


def _tightest(plan: Plan) -> tuple[str, str]:
    """Returns where a plan needs the most bytes, and the largest kinds of memory in its step."""
    place = f"in {max(plan.moments, key=lambda moment: moment.nbytes).place}"
    if plan.needed_bytes > plan.peak_bytes:
        first = plan.first_peak_bytes == plan.needed_bytes
        place = "in the first step" if first else "while the model is built"
    kinds = sorted(plan.peak_by_kind.items(), key=lambda item: -item[1])[:4]
    return place, ", ".join(f"{kind} {format_bytes(nbytes)}" for kind, nbytes in kinds)
