"""Time of a training step: zero_grad, forward, backward and AdamW in fp32.

python -m benchmarks.step --impl ddp,fsdp1,fsdp2,fsdp_wrap --cases "gpt,small,mlp,lora,gpt on 4 ranks"
"""

from __future__ import annotations

from benchmarks.harness import Figures, Question, Settings, ask_alone, compare, interleave, run_ranks
from benchmarks.implementations import DEEPSPEED, DEFAULTS, IMPLEMENTATIONS, SHARED, Trained, trained
from benchmarks.meshes import BACKWARDS, COPIES, OVER_MESHES, RANKS, TENSOR, Accumulated, TensorParallel
from benchmarks.models import CASES, PART_CASES, SPLIT_CASES, Case

USUAL = [*DEFAULTS, *SHARED.values()]
LONG = ("gpt", "lora")  # where ours takes as long without original parameters, and each step about a second
# On four ranks, which share fewer cores, a step takes twice as long: fewer take part, in fewer rounds.
ON_FOUR = {f"{case} on 4 ranks": case for case in CASES}
USUAL_ON_FOUR, ROUNDS_ON_FOUR = ["ddp", "fsdp1_flat", "fsdp2", *SHARED.values()], 9
# On a mesh of two dimensions: what is trained there, and how.
ROUNDS_ON_MESHES = 7
ON_MESHES: dict[str, tuple[type[Trained], Case]] = {
    **{f"{name} with tensor parallelism": (TensorParallel, case) for name, case in SPLIT_CASES.items()},
    **{f"{name} accumulated over replicas": (Accumulated, case) for name, case in PART_CASES.items()},
}
ALL_CASES = [*CASES, *ON_FOUR, *ON_MESHES]


def measure(case: Case, names: list[str], rounds: int) -> dict[str, list[float]]:
    """Returns seconds per step of each implementation; called on every rank."""
    return _raced({name: trained(name, case) for name in case.taken_by(names)}, rounds)


def _raced(competitors: dict[str, Trained], rounds: int) -> dict[str, list[float]]:
    steps = {name: competitor.step for name, competitor in competitors.items()}
    times = interleave(steps, rounds, warmup=1)
    losses = {name: competitor.loss for name, competitor in competitors.items()}
    _check_same_work({name: loss for name, loss in losses.items() if name not in DEEPSPEED})
    return times


def _measure_case(name: str, names: list[str], rounds: int) -> dict[str, list[float]]:
    return measure(CASES[name], names, rounds)


def _measure_on_mesh(title: str, names: list[str], rounds: int) -> dict[str, list[float]]:
    kind, case = ON_MESHES[title]
    return _raced({name: kind(name, case) for name in names}, rounds)


def _check_same_work(losses: dict[str, float]) -> None:
    """Competitors that do the same work have, up to rounding, the same loss."""
    low, high = min(losses.values()), max(losses.values())
    if not high - low <= 1e-2 * abs(high):
        raise RuntimeError(f"the implementations do not train alike; their losses are {losses}")


def ask(settings: Settings) -> Figures:
    """Returns a table a case: at the ranks asked for, on 4, and on meshes."""
    titles = settings.cases_of(ALL_CASES, usual=[case for case in ALL_CASES if "tiny" not in case])
    return {title: compare(_times(title, settings)) for title in titles}


def _times(title: str, settings: Settings) -> dict[str, list[float]]:
    if title in ON_MESHES:
        names, rounds = settings.implementations([*OVER_MESHES]), settings.rounds or ROUNDS_ON_MESHES
        return run_ranks(_measure_on_mesh, RANKS, title, names, rounds)  # type: ignore[no-any-return]
    case = ON_FOUR.get(title, title)
    ranks, rounds = (4, ROUNDS_ON_FOUR) if title in ON_FOUR else (settings.ranks, CASES[case].rounds)
    names = settings.implementations([*IMPLEMENTATIONS, *DEEPSPEED] if settings.impl else usual(title))
    return run_ranks(_measure_case, ranks, case, names, settings.rounds or rounds)  # type: ignore[no-any-return]


def usual(title: str) -> list[str]:
    """Returns the implementations in a table if nobody asks for others."""
    if title not in ON_FOUR:
        return [name for name in USUAL if name != "fsdp_wrap_flat" or title not in LONG]
    refused = CASES[ON_FOUR[title]].refused_by
    return ["fsdp1" if name in refused else name for name in USUAL_ON_FOUR]


QUESTION = Question(
    "step",
    "Time of a step",
    f"""\
Milliseconds of zero_grad, forward, backward and AdamW in fp32, each block a unit, one thread a rank;
`_shared` through memory, all others over gloo. 2 ranks of one host, or 4 where the table says so, which then
share two cores. All implementations of a table train in the same processes and take turns; the slowest rank
counts. Medians of {CASES["gpt"].rounds} rounds for gpt and lora, of {CASES["mlp"].rounds}
for small and mlp, of {ROUNDS_ON_FOUR} on 4 ranks, after one to warm up.
{"; ".join(f"`{name}`: {case.about}" for name, case in CASES.items() if name != "tiny")}.
FSDP1 with flat parameters refuses lora; on 4 ranks it is the only form of FSDP1 in the other cases. Our flat
parameters take the same time in gpt and lora, and are left out there.

On {RANKS} ranks as a mesh of two dimensions, {ROUNDS_ON_MESHES} rounds: `with tensor parallelism`, blocks
with separate matrices for query, key and value are cut over {TENSOR} ranks by `parallelize_module`, and
sharded over the others. `accumulated over replicas`: {COPIES} copies of {RANKS // COPIES} ranks, {BACKWARDS}
backwards a step, with the batch of mlp or one row of small. All but the last reduce within the copy alone
(`set_requires_all_reduce(False)`, `no_sync(reduce_within_copy=True)`); FSDP1 cannot, and does not reduce
(`no_sync()`). Tensor parallelism alone, without sharding, takes about four fifths of FSDP2's step in gpt: no
sharding can be faster than that.""",
    ask,
    chart="/ ddp",
    cases=ALL_CASES,
    implementations=[*IMPLEMENTATIONS, *DEEPSPEED],
)


if __name__ == "__main__":
    ask_alone(QUESTION)
