"""Time of a training step: zero_grad, forward, backward and AdamW in fp32, over gloo.

python -m benchmarks.step --impl ddp,fsdp1,fsdp2,fsdp_wrap --cases gpt,small,mlp,lora
"""

from __future__ import annotations

from benchmarks.harness import Figures, Question, Settings, ask_alone, compare, interleave, run_ranks
from benchmarks.implementations import DEEPSPEED, IMPLEMENTATIONS, IN_PLACE, trained
from benchmarks.models import CASES, Case

USUAL = [name for name in IMPLEMENTATIONS if name not in ("fsdp_wrap_grad_op", IN_PLACE)]


def measure(case: Case, names: list[str], rounds: int) -> dict[str, list[float]]:
    """Called on every rank: seconds per step of each implementation."""
    competitors = {name: trained(name, case) for name in case.taken_by(names)}
    times = interleave({name: each.step for name, each in competitors.items()}, rounds)
    _check_same_work({name: each.loss for name, each in competitors.items() if name not in DEEPSPEED})
    return times


def _measure_case(name: str, names: list[str], rounds: int | None) -> dict[str, list[float]]:
    return measure(CASES[name], names, rounds or CASES[name].rounds)


def _check_same_work(losses: dict[str, float]) -> None:
    """Competitors that do the same work have, up to rounding, the same loss."""
    low, high = min(losses.values()), max(losses.values())
    if not high - low <= 1e-2 * abs(high):
        raise RuntimeError(f"the implementations do not train alike; their losses are {losses}")


def ask(settings: Settings) -> Figures:
    """A table a case."""
    names = settings.implementations([*IMPLEMENTATIONS, *DEEPSPEED] if settings.impl else USUAL)
    return {
        case: compare(run_ranks(_measure_case, settings.ranks, case, names, settings.rounds))
        for case in settings.cases_of([*CASES], usual=["gpt", "small", "mlp", "lora"])
    }


QUESTION = Question(
    "step",
    "Time of a step",
    f"""\
Milliseconds of zero_grad, forward, backward and AdamW in fp32, each block a unit, 2 ranks over gloo on one
host, one thread each. All implementations train in the same processes and take turns; the slowest rank
counts. {"; ".join(f"`{name}`: {case.about}" for name, case in CASES.items() if name != "tiny")}. FSDP1
without original parameters refuses lora.""",
    ask,
    chart="/ ddp",
)


def main() -> None:
    ask_alone(QUESTION)


if __name__ == "__main__":
    main()
