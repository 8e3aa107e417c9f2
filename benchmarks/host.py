"""Host time per unit and step: what sharding costs besides computing and sending, and by what cause.

python -m benchmarks.host --impl fsdp1_flat,fsdp2,fsdp_wrap,fully_shard
python -m benchmarks.host --cases "by cause"
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from benchmarks.causes import by_cause
from benchmarks.harness import Figures, Question, Settings, ask_alone, compare, interleave, run_fake
from benchmarks.implementations import DEFAULTS, KEEPING, PLAIN, SHARDING, Trained
from benchmarks.models import stacked

RANKS, BLOCKS = 8, 16
PARAMETERS = {f"{count} parameters": count for count in (4, 12, 24)}
BY_CAUSE = "by cause"
CAUSED_BY = ("fsdp_wrap", "fully_shard")
BASELINES = {"fsdp1_flat": ("fsdp1_flat",), "fsdp1": ("fsdp1",), "fsdp2": ("fsdp2",)}


def measure(
    parameters: int,
    names: list[str],
    rounds: int | None,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Returns seconds per unit and step beyond those of the plain model; called on a fake group."""
    case = stacked(BLOCKS, parameters)
    competitors = {name: Trained(name, case, fused=True) for name in (PLAIN, *names)}
    turns = {name: competitor.pass_through for name, competitor in competitors.items()}
    times = interleave(turns, rounds or case.rounds, warmup=5, clock=clock)
    plain = statistics.median(times.pop(PLAIN))
    return {name: [(seconds - plain) / BLOCKS for seconds in mine] for name, mine in times.items()}


def ask(settings: Settings) -> Figures:
    """Returns a table for each number of parameters in a unit, and one of the cost of a further parameter."""
    usual = [name for name in DEFAULTS if name in SHARDING]
    names = settings.implementations(SHARDING if settings.impl else usual)
    figures = {
        case: compare(
            run_fake(measure, RANKS, PARAMETERS[case], names, settings.rounds), BASELINES, ("us", 1e6)
        )
        for case in settings.cases_of([*PARAMETERS])
    }
    if len(figures) > 1:
        (few, low), *_, (many, high) = figures.items()
        further = PARAMETERS[many] - PARAMETERS[few]
        figures["each further parameter"] = {
            name: {"us": (high[name]["us"] - low[name]["us"]) / further} for name in names
        }
    if settings.cases_of([*PARAMETERS, BY_CAUSE])[-1:] == [BY_CAUSE]:
        figures |= _by_cause()
    return figures


def _by_cause() -> Figures:
    """Returns a table for each way to wrap: of whole steps, and of steps in which nothing is due."""
    figures = {}
    for name in CAUSED_BY:
        figures[f"{BY_CAUSE}: {name}"] = run_fake(by_cause, RANKS, name, True)
        figures[f"{BY_CAUSE}: {KEEPING[name]}, nothing due"] = run_fake(by_cause, RANKS, KEEPING[name], False)
    return figures


QUESTION = Question(
    "host",
    "Host time",
    f"""\
Microseconds per unit of 4, 12 and 24 tiny parameters and step (zero_grad, forward, backward), on a process
group of {RANKS} ranks that sends nothing, beyond those of the model without wrapping; {BLOCKS} units and
the root. `each further parameter` is the difference of two medians, so its noise is larger; a negative
value is noise. `/ fsdp1` is relative to original parameters. `{BY_CAUSE}`: calls of Python functions, and
microseconds, for one more unit of four parameters and for one more parameter; in a full step, and in one in
which nothing is due because parameters are kept and gradients accumulate. Calls into torch are counted, but
their time cannot be separated from the model's.""",
    ask,
    chart="us",
    cases=[*PARAMETERS, BY_CAUSE],
    implementations=SHARDING,
)


if __name__ == "__main__":
    ask_alone(QUESTION)
