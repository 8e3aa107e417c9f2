"""`fit`: which configurations of a training step fit into memory, the largest batch of each, and how fast.

At each place of a step memory is affine in the batch. So each configuration is planned at two batches, every
place is extrapolated, and the answer is planned once more to be sure of it.
"""

from __future__ import annotations

import itertools
import json
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fsdp_wrap._core import format_bytes, format_seconds, memory_of, own_output, tells_keywords
from fsdp_wrap.tools.fitting.variants import STANDARD
from fsdp_wrap.tools.planning import Machine, Plan, plan
from fsdp_wrap.tools.planning.planner import many_plans
from fsdp_wrap.tools.progress import progress_bar
from fsdp_wrap.tools.setups import REFUSALS, Setup, first_line, keywords_of

Values = Mapping[str, Any]

_BATCH, _ACCUMULATION = "batch", "accumulation"
_FIRST, _SECOND = 2, 4  # batches that are planned; a batch of 1 has fewer copies than others
_MOST = 1 << 20  # the largest batch
_LOOKS = 6  # plans in search of one answer, at most


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One configuration and its answer.

    Attributes:
        ranks: Number of ranks.
        values: The arguments of `setup`, except the batch.
        batch: The largest batch that fits, on each rank; 0 if not even the smallest does; None where `setup`
            takes no batch.
        fits: Whether it fits, at that batch.
        peak_bytes: The most bytes that a rank's device holds, at that batch; at the smallest if none fits.
        bytes_per_sample: Bytes of one more sample; None where `setup` takes no batch.
        predicted_seconds: Seconds of a step; None without a machine.
        samples_per_second: Samples of all ranks; None without a machine, or where `setup` takes no batch.
        refused: Why it cannot be planned; "" if it can.
        plan: The plan of the answer; None if it cannot be planned.
    """

    ranks: int
    values: Values
    batch: int | None = None
    fits: bool = False
    peak_bytes: int = 0
    bytes_per_sample: float | None = None
    predicted_seconds: float | None = None
    samples_per_second: float | None = None
    refused: str = ""
    plan: Plan | None = field(default=None, repr=False, compare=False)

    @property
    def order(self) -> tuple[Any, ...]:
        """The sort key: choices that fit first, then the fastest, then the largest batch."""
        speed = self.samples_per_second
        if speed is None and self.predicted_seconds is not None:
            speed = 1 / self.predicted_seconds
        return bool(self.refused), not self.fits, -(speed or 0.0), -(self.batch or 0), self.peak_bytes

    def __str__(self) -> str:
        """One line: the configuration and its answer."""
        batch = "" if self.batch is None else f" at batch {self.batch}" if self.fits else " at any batch"
        answer = f"{'fits' if self.fits else 'does not fit'}{batch}, {format_bytes(self.peak_bytes)}"
        return f"{_format_case(self.ranks, self.values)}: {self.refused or answer}"

    def to_dict(self) -> dict[str, Any]:
        """Returns all but the plan, of types that JSON knows; other values by their `str`."""
        plain = {name: value for name, value in vars(self).items() if name != "plan"}
        return {**plain, "values": {name: _plain(value) for name, value in self.values.items()}}


@dataclass(frozen=True, kw_only=True)
class Fit:
    """All configurations of a `fit`, the fastest that fits first.

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

    def __str__(self) -> str:
        """A table that a person reads."""
        shown = [choice for choice in self.choices if not choice.refused]
        names = list(dict.fromkeys(name for choice in shown for name in choice.values))
        varied = [name for name in names if len({repr(choice.values.get(name)) for choice in shown}) > 1]
        head = ["ranks", *varied, "batch", "peak", "a sample", "step", "samples/s"]
        rows = [head, *(_row(choice, varied) for choice in shown)]
        kept = [index for index in range(len(head)) if any(row[index] != "" for row in rows[1:])]
        widths = {index: max(len(row[index]) for row in rows) for index in kept}
        lines = ["  ".join(row[index].rjust(widths[index]) for index in kept) for row in rows]
        fixed = {name: shown[0].values[name] for name in names if name not in varied}
        lines = [*self._heading(fixed), "", *(line.rstrip() for line in lines)]
        lines += [f"refused: {choice}" for choice in self.choices if choice.refused]
        return "\n".join(lines)

    def _heading(self, fixed: Values) -> Iterator[str]:
        fitting = sum(choice.fits for choice in self.choices)
        memory = format_bytes(self.device_memory)
        rest = "" if self.complete else ", interrupted before the rest"
        yield f"{fitting} of {len(self.choices)} fit into {memory} ({self.plans} plans{rest})"
        if fixed:
            yield f"all with {_format_values(fixed)}"
        if self.machine is not None:
            yield f"predicted for {self.machine.title}: {self.machine.source or 'figures of the caller'}"


def _row(choice: Choice, varied: Sequence[str]) -> list[str]:
    batch = "" if choice.batch is None else str(choice.batch) if choice.fits else "none"
    if choice.batch is None and not choice.fits:
        batch = "too large"
    per_sample, seconds, speed = choice.bytes_per_sample, choice.predicted_seconds, choice.samples_per_second
    return [
        str(choice.ranks),
        *(str(_plain(choice.values.get(name, ""))) for name in varied),
        batch,
        format_bytes(choice.peak_bytes),
        "" if per_sample is None else format_bytes(per_sample),
        "" if seconds is None or not choice.fits else format_seconds(seconds),
        "" if speed is None or not choice.fits else f"{speed:.4g}",
    ]


def _format_case(ranks: int, values: Values) -> str:
    return ", ".join(filter(None, (f"{ranks} ranks", _format_values(values))))


def _format_values(values: Values) -> str:
    return ", ".join(f"{name}={_plain(value)}" for name, value in values.items())


def _plain(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, bool, type(None))) else str(value)


@tells_keywords({"memory": "pass it as device_memory"})
def fit(
    setup: Setup,
    ranks: int | Sequence[int] = 8,
    *,
    device_memory: int | str | None = None,
    vary: Mapping[str, Sequence[Any]] | None = None,
    device: str = "cpu",
    machine: Machine | None = None,
    progress: bool = False,
) -> Fit:
    """Answers which configurations of a step fit, the fastest first, and the largest batch of each.

    Every combination of the values in `vary` is a configuration: `setup` gets them by keyword, and its own
    code gives them a meaning (`fsdp_wrap.tools.shard_as` is one way). `fit` itself knows two names.
    `batch` is the number of samples in one forward of one rank; the largest that fits is found, so `setup`
    must take it. `accumulation` is the number of forwards in a step; speed counts all of their samples.

    A configuration is planned at two batches and at the answer. The peak is that of all tensors while the
    model is built, in the first step and in later ones. It leaves out the context of a device, fragments of
    its allocator, and buffers of NCCL: leave room for them in `device_memory`.

    Args:
        setup: The `setup` of `plan`, with keyword arguments that may vary.
        ranks: Number of ranks, or several numbers to try.
        device_memory: Bytes that a rank may use, such as `"80GB"`; None for the machine's.
        vary: Values to try by the name of the argument. `batch` may be left out, for any number; given, it
            names the batches that may be. None for sharding, offload and checkpointing, as far as `setup`
            takes them by the names that `shard_as` has.
        device: The `device` of `plan`.
        machine: The `machine` of `plan`; None for no prediction of time: then the largest batch comes first.
        progress: Show a progress bar after two seconds, and each configuration's answer when it is found, on
            standard error. An interrupt (Ctrl-C) then ends the search, and what was found is returned.

    Returns:
        All configurations, in order; `print` shows a table.

    Raises:
        TypeError: If `setup` lacks an argument that varies, or an argument has the wrong type.
        ValueError: If an argument makes no sense, or no configuration can be planned; the first error is its
            cause.
    """
    if device_memory is None:
        device_memory = None if machine is None else machine.device_memory
        if device_memory is None:
            raise ValueError("fit() needs device_memory, such as '80GB', or a machine with device_memory")
    limit = memory_of(device_memory, "device_memory")
    taken = keywords_of(setup)
    varied = _varied(vary, taken, device)
    batches = _batches(varied, taken)
    counts = [ranks] if isinstance(ranks, int) else ranks
    groups = [dict(zip(varied, values)) for values in itertools.product(*varied.values())]
    searches: list[_Search] = []
    choices: list[Choice] = []
    complete = True
    with many_plans(), progress_bar(len(counts) * len(groups), disable=not progress) as bar:

        def planned(count: int, values: Values) -> Plan:
            bar.describe(_format_case(count, values))
            return plan(partial(setup, **values), count, device=device, machine=machine)

        sought = f"{len(counts) * len(groups)} configurations for what fits into {format_bytes(limit)}"
        bar.report(f"searching {sought}; Ctrl-C ends the search, and keeps what was found")
        try:
            for count, values in itertools.product(counts, groups):
                searches.append(_Search(partial(planned, count), count, values, batches, limit))
                choices.append(searches[-1].choice())
                bar.report(str(choices[-1]))
                bar.advance()
        except KeyboardInterrupt:
            if not progress or all(choice.refused for choice in choices):
                raise
            complete = False
    if all(choice.refused for choice in choices):
        raise ValueError(f"no configuration can be planned: {choices[0].refused}") from searches[0].error
    ordered = tuple(sorted(choices, key=lambda choice: choice.order))
    plans = sum(len(search.known) for search in searches)
    return Fit(device_memory=limit, choices=ordered, plans=plans, machine=machine, complete=complete)


def _varied(
    vary: Mapping[str, Sequence[Any]] | None, taken: set[str] | None, device: str
) -> dict[str, list[Any]]:
    if vary is None:
        vary = {name: values for name, values in STANDARD.items() if taken is None or name in taken}
        if device == "cpu" and "checkpointing" in vary:  # activations are in host memory already
            vary["checkpointing"] = [word for word in vary["checkpointing"] if word != "host"]
    unknown = [] if taken is None else [name for name in vary if name not in taken]
    if unknown:
        raise TypeError(f"setup() takes no argument {unknown[0]!r}: add it, or do not vary it")
    for name, values in vary.items():
        if isinstance(values, str) or not isinstance(values, Sequence) or not len(values):
            raise TypeError(f"vary[{name!r}] must be a sequence of values, not {values!r}")
    return {name: [*values] for name, values in vary.items()}


def _batches(varied: dict[str, list[Any]], taken: set[str] | None) -> Sequence[int] | None:
    """Removes the batches from `varied`, and returns them; None where `setup` takes none."""
    if _BATCH not in varied:
        return None if taken is not None and _BATCH not in taken else range(1, _MOST + 1)
    batches: list[int] = sorted(set(varied.pop(_BATCH)))
    if not all(isinstance(batch, int) and batch > 0 for batch in batches):
        raise ValueError(f"vary['batch'] must be whole numbers from 1 on, not {batches}")
    return batches


@dataclass
class _Search:
    """Finds the answer of one configuration: its largest batch.

    `values` leave out the batch. `batches`, in order, is None where `setup` takes none. `error` is that of a
    refusal. `known` has the plans by their batches.
    """

    planned: Callable[[Values], Plan]
    ranks: int
    values: Values
    batches: Sequence[int] | None
    limit: int
    error: Exception | None = None
    known: dict[int | None, Plan] = field(default_factory=dict)

    def choice(self) -> Choice:
        """Returns the answer; a refusal where the configuration cannot be planned."""
        try:
            return self._answer()
        except REFUSALS as error:
            self.error = error
            return Choice(ranks=self.ranks, values=self.values, refused=first_line(error))

    def _answer(self) -> Choice:
        batch = None if self.batches is None else self._largest(self.batches)
        planned_batch = self.batches[0] if self.batches is not None and batch == 0 else batch
        plan = self._plan(planned_batch)
        need, seconds, speed = plan.needed_bytes, plan.predicted_seconds, None
        if seconds and batch:
            speed = batch * int(self.values.get(_ACCUMULATION, 1)) * self.ranks / seconds
        return Choice(
            ranks=self.ranks,
            values=self.values,
            batch=batch,
            fits=need <= self.limit and batch != 0,
            peak_bytes=need,
            bytes_per_sample=None if planned_batch is None else self._slope(planned_batch),
            predicted_seconds=seconds,
            samples_per_second=speed,
            plan=plan,
        )

    def _plan(self, batch: int | None) -> Plan:
        if batch not in self.known:
            given = {} if batch is None else {_BATCH: batch}
            self.known[batch] = self.planned({**self.values, **given})
        return self.known[batch]

    def _largest(self, batches: Sequence[int]) -> int:
        """Returns the largest batch that fits, planned to be sure; 0 if none does."""
        for batch in (_FIRST, _SECOND) if len(batches) == _MOST else batches[:2]:
            self._plan(batch)
        for look in range(_LOOKS + 1):
            fitting, failing = self._known_batches()
            fits = batches.index(fitting[-1]) if fitting else -1
            fails = batches.index(failing[0]) if failing else len(batches)
            between = range(fits + 1, fails)
            if look == _LOOKS or not between or (fitting and self._guess(batches[between[0]]) > self.limit):
                break
            too_much = bisect_left(between, True, key=lambda i: self._guess(batches[i]) > self.limit)
            index = between[max(too_much - 1, 0)]
            if look > 2 and look % 2 and failing:
                index = (fits + fails) // 2  # bisect where guesses are bad
            self._plan(batches[index])
        return fitting[-1] if fitting else 0

    def _known_batches(self) -> tuple[list[int], list[int]]:
        """Returns the planned batches that fit, and those that do not."""
        known = sorted(batch for batch in self.known if batch is not None)
        count = sum(self.known[batch].needed_bytes <= self.limit for batch in known)
        return known[:count], known[count:]

    def _guess(self, batch: int) -> float:
        """Returns the peak bytes of a batch, extrapolated from the two planned ones nearest to the limit."""
        fitting, failing = self._known_batches()
        pair = [*fitting[-1:], *failing[:1]] if fitting and failing else fitting[-2:] or failing[:2]
        plans = [self.known[each] for each in pair]
        if len(plans) == 1:
            return float(plans[0].needed_bytes)
        (places, first), (others, second) = map(_needs, plans)
        if places != others:  # different steps: only their peaks compare
            first, second = ([plan.needed_bytes] for plan in plans)
        part = (batch - pair[0]) / (pair[1] - pair[0])
        return max(a + (b - a) * part for a, b in zip(first, second))

    def _slope(self, batch: int) -> float | None:
        """Returns the bytes of one more sample; None where there is one batch alone."""
        if len(self.known) == 1:
            return None
        if batch == _MOST and self._plan(_FIRST).needed_bytes == self._plan(batch).needed_bytes:
            raise ValueError(
                f"setup(batch={_FIRST}) and setup(batch={_MOST}) need the same memory: let setup() use its "
                "batch, or give it no such argument"
            )
        return self._guess(batch + 1) - self._guess(batch)


def _needs(plan: Plan) -> tuple[tuple[Any, ...], list[int]]:
    """Returns the places of a step, and the bytes of each place, of the first step and of building."""
    numbers = [moment.nbytes for moment in plan.moments]
    places = tuple(moment.place for moment in plan.moments)
    return places, [*numbers, plan.first_peak_bytes, plan.setup_peak_bytes]
