"""Time of a training step: zero_grad, forward, backward and AdamW in fp32.

python -m benchmarks.step --impl ddp,fsdp1,fsdp2,fsdp_wrap --cases "gpt,small,mlp,lora,gpt on 4 ranks"
"""

from __future__ import annotations

from benchmarks.harness import Figures, Question, Settings, ask_alone, compare, interleave, run_ranks
from benchmarks.implementations import DEEPSPEED, IMPLEMENTATIONS, IN_PLACE, SHARED, trained
from benchmarks.models import CASES, Case

# Others as users may choose between them, ours as they are by default.
SELDOM = ("fsdp_wrap_grad_op", "fully_shard_keep", IN_PLACE)
USUAL = [name for name in IMPLEMENTATIONS if name not in SELDOM]
# On four ranks a step takes twice as long: fewer take part, in a third of the rounds.
ON_FOUR = {f"{case} on 4 ranks": case for case in CASES}
USUAL_ON_FOUR = ["ddp", "fsdp1_flat", "fsdp2", "fsdp_wrap", *SHARED.values()]


def measure(case: Case, names: list[str], rounds: int) -> dict[str, list[float]]:
    """Called on every rank: seconds per step of each implementation."""
    competitors = {name: trained(name, case) for name in case.taken_by(names)}
    times = interleave({name: each.step for name, each in competitors.items()}, rounds)
    _check_same_work({name: each.loss for name, each in competitors.items() if name not in DEEPSPEED})
    return times


def _measure_case(name: str, names: list[str], rounds: int) -> dict[str, list[float]]:
    return measure(CASES[name], names, rounds)


def _check_same_work(losses: dict[str, float]) -> None:
    """Competitors that do the same work have, up to rounding, the same loss."""
    low, high = min(losses.values()), max(losses.values())
    if not high - low <= 1e-2 * abs(high):
        raise RuntimeError(f"the implementations do not train alike; their losses are {losses}")


def ask(settings: Settings) -> Figures:
    """A table a case, at the ranks asked for and on 4."""
    known = [*IMPLEMENTATIONS, *DEEPSPEED]
    cases = [*CASES, *ON_FOUR]
    figures = {}
    for title in settings.cases_of(cases, usual=[case for case in cases if "tiny" not in case]):
        case = ON_FOUR.get(title, title)
        usual, ranks, share = (USUAL_ON_FOUR, 4, 3) if title in ON_FOUR else (USUAL, settings.ranks, 1)
        if "fsdp1_flat" in CASES[case].refused_by:
            usual = [*dict.fromkeys("fsdp1" if name == "fsdp1_flat" else name for name in usual)]
        names = settings.implementations(known if settings.impl else usual)
        rounds = settings.rounds or CASES[case].rounds // share
        figures[title] = compare(run_ranks(_measure_case, ranks, case, names, rounds))
    return figures


QUESTION = Question(
    "step",
    "Time of a step",
    f"""\
Milliseconds of zero_grad, forward, backward and AdamW in fp32, each block a unit, 2 or 4 ranks on one host,
one thread each; `_shared` through its memory, all others over gloo. All implementations of a table train in
the same processes and take turns; the slowest rank
counts. {"; ".join(f"`{name}`: {case.about}" for name, case in CASES.items() if name != "tiny")}. FSDP1
without original parameters refuses lora.""",
    ask,
    chart="/ ddp",
)


if __name__ == "__main__":
    ask_alone(QUESTION)
