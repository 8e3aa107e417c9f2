"""What it takes to wrap a model of many units, and what each unit keeps: time, memory, objects.

python -m benchmarks.construction --cases "2 ranks"
"""

from __future__ import annotations

import gc
import statistics
import time
from dataclasses import dataclass
from functools import partial

from torch import nn

from benchmarks.harness import Figures, Question, Settings, Table, ask_alone, run_fake
from benchmarks.implementations import IMPLEMENTATIONS
from benchmarks.meters import resident
from benchmarks.models import Case, stacked

PARAMETERS = 2
TORCHS = {"fsdp_wrap_flat": "fsdp1_flat", "fsdp_wrap": "fsdp1", "fully_shard": "fsdp2"}
"""Torch's counterpart of each of our implementations."""
NAMES = [name for pair in TORCHS.items() for name in reversed(pair)]
COMPARED = ("us", "KiB", "KiB after a step", "objects", "objects after a step")


@dataclass(frozen=True)
class Model:
    """What is wrapped: how many units, on how many ranks; and how often, if the command line does not say."""

    ranks: int
    units: int
    rounds: int
    steps: bool  # whether to take a step: not where parameters are smaller than the number of ranks


# Few units of 16,384 ranks: torch's `fully_shard` takes 40 ms for each.
CASES = {"2 ranks": Model(2, 300, 7, steps=True), "16384 ranks": Model(16_384, 40, 3, steps=False)}


def construct(name: str, module: nn.Module, units: int) -> dict[str, float]:
    """Wraps a model; returns what a unit took and keeps.

    Objects are those that the garbage collector looks at. They are counted without those that were there
    before, and so is the time of a full collection.
    """
    gc.collect()
    gc.freeze()
    begin = time.process_time()
    model = IMPLEMENTATIONS[name](module)
    constructed = time.process_time()
    gc.collect()
    objects = len(gc.get_objects())
    collecting = time.process_time()
    gc.collect()
    collected = time.process_time()
    del model
    gc.unfreeze()
    return {
        "us": 1e6 * (constructed - begin) / units,
        "objects": objects / units,
        "us of a collection": 1e6 * (collected - collecting) / units,
    }


def measure_construction(names: list[str], units: int, rounds: int) -> Table:
    """Lets implementations take turns; returns medians."""
    case, rows = stacked(units, PARAMETERS), {name: list[dict[str, float]]() for name in names}
    for turn in range(1 + rounds):
        first = turn % len(names)
        for name in names[first:] + names[:first]:
            row = construct(name, case.model(), units)
            if turn:  # the first one imports, and fills caches
                rows[name].append(row)
    return {
        name: {column: statistics.median(row[column] for row in taken) for column in taken[0]}
        for name, taken in rows.items()
    }


def measure_memory(name: str, units: int, steps: bool) -> dict[str, float]:
    """Returns what a unit keeps in resident memory, and objects after a step; in a process of its own."""
    first = stacked(1, PARAMETERS)
    _step(first, [IMPLEMENTATIONS[name](first.model())])  # imports, and fills caches
    case = stacked(units, PARAMETERS)
    models, module = list[nn.Module](), case.model()
    gc.collect()
    objects = len(gc.get_objects())

    def construct_it() -> None:
        models.append(IMPLEMENTATIONS[name](module))
        gc.collect()

    constructed = resident(construct_it).kept
    row = {"KiB": constructed / 1024 / units}
    if steps:
        stepped = constructed + resident(partial(_step, case, models)).kept
        row["KiB after a step"] = stepped / 1024 / units
        row["objects after a step"] = (len(gc.get_objects()) - objects) / units
    return row


def _step(case: Case, models: list[nn.Module]) -> None:
    models[0](case.batch()).backward()
    gc.collect()


def ask(settings: Settings) -> Figures:
    """Returns a table for each number of ranks."""
    names = settings.implementations(NAMES)
    figures: Figures = {}
    for case in settings.cases_of([*CASES]):
        model = CASES[case]
        rounds = settings.rounds or model.rounds
        table: Table = run_fake(measure_construction, model.ranks, names, model.units, rounds)
        for name in names:
            table[name] |= run_fake(measure_memory, model.ranks, name, model.units, model.steps)
        figures[case] = {name: row | _ratios(table, name) for name, row in table.items()}
    return figures


def _ratios(table: Table, name: str) -> dict[str, float]:
    """Returns the ratios of one of our implementations to torch's counterpart."""
    torchs = table.get(TORCHS.get(name, ""), {})
    return {
        f"{column}, / torch's": table[name][column] / torchs[column]
        for column in COMPARED
        if column in torchs
    }


QUESTION = Question(
    "construction",
    "Construction",
    f"""\
What a unit costs to wrap and at rest, on a process group of 2 and of 16,384 ranks that sends nothing. The
models have {CASES["2 ranks"].units} and {CASES["16384 ranks"].units} units of {PARAMETERS} tiny parameters,
and a root. `us`: microseconds of the processor to wrap it, garbage collection included. `objects`: those that
a full collection looks at, and `us of a collection` what that takes. `KiB`: resident memory of the process
that wrapping adds, in a process for each implementation. `after a step`: with what a first forward and
backward add, gradients included. All are divided by the number of units. `/ torch's` is the ratio to the
counterpart of torch: `fsdp1_flat`, `fsdp1`, `fsdp2`. Times are medians of rounds in which the implementations
take turns. At 16,384 ranks the parameters are smaller than the number of ranks: torch's `fully_shard` makes
an empty tensor for each rank without a part. The functions' figures include the mesh of all ranks, which is
made for each model: that of 16,384 ranks takes 2 MiB.""",
    ask,
    chart="us",
    cases=[*CASES],
    implementations=NAMES,
)


if __name__ == "__main__":
    ask_alone(QUESTION)
