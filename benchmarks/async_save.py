"""Costs of saving beside training: how long a step is held up, and what the next ten steps cost.

    python -m benchmarks.async_save --impl fsdp_wrap,fsdp2_thread --cases gpt

A checkpoint is the model and its AdamW state, written to a temporary folder on disk and synced. `save` is one
for which training waits. `held up` is the call that begins one in the background. `ten steps` are the next
ten, beside it, relative to ten steps without a save; these are in turns. Each implementation has processes of
its own, as a training has: ours keep the plan of one save.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from benchmarks.harness import Figures, Question, Settings, ask_alone, run_ranks, slowest
from benchmarks.implementations import SHARED, Trained
from benchmarks.meters import resident
from benchmarks.models import CASES, Case, stacked
from fsdp_wrap import checkpoint

WARMUP, STEPS = 1, 10
MANY = "2,000 parameters"
ROUNDS = {"gpt": 3, MANY: 4, "tiny": 5}
"""Of ours; torch's, which take several times as long, take half as many."""
SAVED = {"gpt": CASES["gpt"], MANY: stacked(50, 40), "tiny": CASES["tiny"]}


class OursSaving(Trained):
    """A model that `fsdp_wrap.checkpoint` saves."""

    def save(self, folder: Path) -> None:
        """Saves, and waits."""
        checkpoint.save(folder, self.model, self.optimizer)

    def begin(self, folder: Path) -> Callable[[], object]:
        """Begins a save in the background; returns what waits for its end."""
        return checkpoint.async_save(folder, self.model, self.optimizer).result


class TorchsSaving(Trained):
    """A model that `torch.distributed.checkpoint` saves, in a thread or a process of its own."""

    def __init__(self, how: AsyncCheckpointerType, implementation: str, case: Case) -> None:
        super().__init__(implementation, case)
        self._how, self._group = how, dist.new_group(backend="gloo")

    def save(self, folder: Path) -> None:
        """Saves, and waits."""
        dcp.save(self._state(), checkpoint_id=folder)

    def begin(self, folder: Path) -> Callable[[], object]:
        """Begins a save in the background; returns what waits for its end."""
        state = self._state()
        pending: Any = dcp.async_save(
            state, checkpoint_id=folder, process_group=self._group, async_checkpointer_type=self._how
        )
        return pending.result  # type: ignore[no-any-return]

    def _state(self) -> dict[str, Any]:
        model, optim = torch_state_dict.get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optim}


COMPETITORS: dict[str, Callable[[Case], Any]] = {
    "fsdp2_thread": partial(TorchsSaving, AsyncCheckpointerType.THREAD, "fsdp2"),
    "fsdp2_process": partial(TorchsSaving, AsyncCheckpointerType.PROCESS, "fsdp2"),
    **{name: partial(OursSaving, name) for name in ("fsdp_wrap", "fully_shard", *SHARED.values())},
}
USUAL = ["fsdp2_thread", "fsdp2_process", "fsdp_wrap", "fully_shard"]


def measure(case: str, name: str, rounds: int, folder: str) -> dict[str, float]:
    """Returns a competitor's milliseconds and ratios; called on every rank."""
    competitor = COMPETITORS[name](SAVED[case])
    times: dict[str, list[float]] = {}
    for turn in range(WARMUP + rounds):
        taken = _turn(competitor, Path(folder, name), STEPS if turn >= WARMUP else 1)
        for what, seconds in taken.items() if turn >= WARMUP else ():
            times.setdefault(what, []).append(seconds)
    return _row(slowest(times))


def _turn(competitor: Any, folder: Path, steps: int) -> dict[str, float]:
    """Returns seconds of a save, of some steps, of the begin of a save, and of as many steps beside it."""
    waiting: list[Callable[[], object]] = []
    acts = {
        "save": lambda: competitor.save(folder),
        "steps": lambda: _steps(competitor, steps),
        "held": lambda: waiting.append(competitor.begin(folder)),
        "beside": lambda: _steps(competitor, steps),
        "rest": lambda: waiting.pop()(),
    }
    taken = {}
    for what, act in acts.items():
        if what in ("save", "held"):
            _empty(folder)
        if what != "rest":
            dist.barrier()
        started = time.perf_counter()
        act()
        taken[what] = time.perf_counter() - started
    return taken


def _empty(folder: Path) -> None:
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()


def _steps(competitor: Any, count: int) -> None:
    for _ in range(count):
        competitor.step()


def _row(times: dict[str, list[float]]) -> dict[str, float]:
    save, steps, held, beside = (times[what] for what in ("save", "steps", "held", "beside"))
    return {
        "save ms": 1e3 * median(save),
        "held up ms": 1e3 * median(held),
        "held up / save": median(own / other for own, other in zip(held, save)),
        "ten steps": median(own / other for own, other in zip(beside, steps)),
        "ended after ms": 1e3 * median(map(sum, zip(held, beside, times["rest"]))),
    }


def memory(case: str, name: str, folder: str) -> float:
    """Returns megabytes that a first save in the background takes of the first rank's process."""
    competitor = COMPETITORS[name](SAVED[case])
    competitor.step()
    return resident(lambda: competitor.begin(Path(folder))()).peak / 1e6


def ask(settings: Settings) -> Figures:
    """Returns a table a case."""
    names = settings.implementations([*COMPETITORS] if settings.impl else USUAL)
    figures: Figures = {}
    for case in settings.cases_of([*SAVED], usual=["gpt", MANY]):
        for name in names:
            rounds = settings.rounds or ROUNDS[case]
            if name.startswith("fsdp2"):
                rounds = max(1, rounds // 2)
            with tempfile.TemporaryDirectory() as folder:
                row = run_ranks(measure, settings.ranks, case, name, rounds, folder)
            with tempfile.TemporaryDirectory() as folder:  # alone: what is kept for the next save is no cost
                row["host MB"] = run_ranks(memory, settings.ranks, case, name, folder)
            figures.setdefault(case, {})[name] = row
    return figures


QUESTION = Question(
    "async_save",
    "Saving beside training",
    f"""\
Milliseconds of a save of model and AdamW state for which training waits, and of the call that begins one in
the background; the next {STEPS} steps relative to as many without a save; how long until the files are there;
and by how much the first rank's resident memory rises at most in a first one, without the process that
writes. 2 ranks over gloo, to disk and synced, medians of {ROUNDS["gpt"]} rounds of gpt and
{ROUNDS[MANY]} of {MANY}; of torch's, half as many. Each implementation has processes of its own. The first
save, which plans and starts what writes, is not among them.""",
    ask,
    chart="held up ms",
    cases=[*SAVED],
    implementations=[*COMPETITORS],
)


if __name__ == "__main__":
    ask_alone(QUESTION)
