"""Memory of a backward that steps, and whether its losses are those of steps after it.

python -m benchmarks.in_backward --cases mlp
"""

from __future__ import annotations

from functools import partial

import torch

from benchmarks.harness import Figures, Question, Settings, Table, ask_alone, run_fake, run_ranks
from benchmarks.implementations import IN_PLACE, Trained
from benchmarks.memory import FAKE_RANKS, phases_of
from benchmarks.models import SHORT_CASES, Case
from fsdp_wrap.optim import step_in_backward

IN_BACKWARD = {name: f"{name}_steps" for name in ("fsdp_wrap", "fsdp_wrap_flat", "fully_shard", IN_PLACE)}
BASE, STEPS = "fsdp1", 5


class InBackward(Trained):
    """An implementation of ours whose units are updated in the backward."""

    def __init__(self, implementation: str, case: Case) -> None:
        super().__init__(implementation, case)
        self.optimizer = step_in_backward(self.model, torch.optim.AdamW)


def measure_fake(case: str) -> Table:
    """Returns the phases of each implementation by its tensors, with and without; called on a fake group."""
    chosen = SHORT_CASES[case]
    rows = {name: phases_of(partial(Trained, name, chosen), chosen) for name in (BASE, *IN_BACKWARD)}
    for name, steps in IN_BACKWARD.items():
        rows[steps] = phases_of(partial(InBackward, name, chosen), chosen)
    base = rows[BASE]["backward"]
    return {name: {**row, f"/ {BASE}": row["backward"] / base} for name, row in rows.items()}


def measure_losses(case: str) -> Table:
    """Returns the largest difference of a loss from that of a later step; called on every rank."""
    rows = {}
    for name, steps in IN_BACKWARD.items():
        trained, usual = InBackward(name, SHORT_CASES[case]), Trained(name, SHORT_CASES[case])
        differs = 0.0
        for _ in range(STEPS):
            trained.step()
            usual.step()
            differs = max(differs, abs(trained.loss - usual.loss))
        rows[steps] = {"difference of a loss": differs, "last loss": trained.loss}
    return rows


def ask(settings: Settings) -> Figures:
    """Returns two tables a case: tensors on a fake group, and losses over gloo."""
    figures = {}
    for case in settings.cases_of([*SHORT_CASES], usual=["gpt", "mlp"]):
        if case != "lora":
            figures[f"{case}, fake group"] = run_fake(measure_fake, FAKE_RANKS, case)
            figures[f"{case}, losses"] = run_ranks(measure_losses, settings.ranks, case)
    return figures


QUESTION = Question(
    "in_backward",
    "Steps in the backward",
    f"""\
`_steps`: with `step_in_backward(model, AdamW)`; the columns are those of the memory of a rank above, on a
group of {FAKE_RANKS} that sends nothing. `/ {BASE}`: the backward's peak, gradients counted, to torch's.
`difference of a loss`: the most in {STEPS} steps of 2 ranks from what steps after the backward lead to.""",
    ask,
    chart="backward",
    cases=[case for case in SHORT_CASES if case != "lora"],
)


if __name__ == "__main__":
    ask_alone(QUESTION)
