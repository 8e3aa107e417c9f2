"""Cost of recording a timeline: steps with and without a recording take turns in the same processes.

python -m benchmarks.recording
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from operator import truediv

import torch

from benchmarks.harness import (
    Figures,
    Question,
    Settings,
    Table,
    ask_alone,
    compare,
    interleave,
    run_fake,
    run_ranks,
)
from benchmarks.implementations import Trained, trained
from benchmarks.models import CASES
from fsdp_wrap._core import everywhere
from fsdp_wrap.tools.models import named_units
from fsdp_wrap.tools.timeline.recorder import TimelineRecorder

ROUNDS = {"gpt": 12, "small": 100, "mlp": 40, "lora": 12}
NOTHING_SENT = "on a group that sends nothing"
WAYS = {"": "fsdp_wrap_shared", "over gloo": "fsdp_wrap", NOTHING_SENT: "fsdp_wrap"}
TITLES = [f"{case} {way}".strip() for case in ROUNDS for way in WAYS]
ALL_TITLES = [*TITLES, "tiny"]
OFF, AGAIN, ON = "not recorded", "not recorded, again", "recorded"


def measure(implementation: str, case: str, rounds: int) -> Table:
    """Returns a row for each way to take a step; the second one shows the noise. Called on every rank."""
    torch.set_num_threads(1)
    subject = trained(implementation, CASES[case])
    recorder = TimelineRecorder(named_units(subject.model, "timeline"), [*subject.model.parameters()], None)
    recorder.follow_optimizers()
    ways: dict[str, Callable[[], object]] = {
        OFF: subject.step,
        AGAIN: subject.step,
        ON: partial(_recorded, subject, recorder),
    }
    busy: dict[str, list[float]] = {way: [] for way in ways}
    turns = {way: partial(_counting, step, busy[way]) for way, step in ways.items()}
    times = interleave(turns, rounds)
    recorder.stop()
    table = compare(times, {OFF: (OFF,)})
    for way, seconds in busy.items():
        table[way]["CPU ms"] = 1e3 * statistics.median(seconds)
        table[way]["CPU / not recorded"] = statistics.median(map(truediv, seconds, busy[OFF]))
    table[ON]["entries a step"] = len([*recorder.log]) / (rounds + 2)
    return table


def _counting(step: Callable[[], object], seconds: list[float]) -> None:
    """Takes a step, and notes the time in which this process had a processor."""
    begin = time.process_time()
    step()
    seconds.append(time.process_time() - begin)


def _recorded(subject: Trained, recorder: TimelineRecorder) -> None:
    with everywhere.having(recorder):
        subject.step()


def ask(settings: Settings) -> Figures:
    """Returns a table for each model and way to travel."""
    figures: Figures = {}
    for title in settings.cases_of(ALL_TITLES, usual=TITLES):
        case, _, way = title.partition(" ")
        run = run_fake if way == NOTHING_SENT else run_ranks
        rounds = settings.rounds or ROUNDS.get(case, 1)
        figures[title] = run(measure, settings.ranks, WAYS[way], case, rounds)
    return figures


QUESTION = Question(
    "recording",
    "Cost of recording a timeline",
    f"""\
The steps of "Time of a step", with `fsdp_wrap.timeline` recording and without, in turn, through shared
memory, over gloo, and on a group that sends nothing: milliseconds, and ratios to a step that is not
recorded, of the same round and of the medians
({", ".join(f"{n} rounds for {case}" for case, n in ROUNDS.items())}).
Steps that are not recorded run twice a round, which shows what is chance. `CPU`: the time in which rank 0 had
a processor, which bears a machine that others use as well. `entries a step`: what the recording writes down.
Not counted is what happens once, when a recording begins and ends. While none runs, the runtime asks in some
places whether a list is empty.""",
    ask,
    chart="CPU / not recorded",
    cases=ALL_TITLES,
)


if __name__ == "__main__":
    ask_alone(QUESTION)
