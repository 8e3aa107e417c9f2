"""Time of clipping the gradients' norm and of AdamW, of a model with 288 parameters.

python -m benchmarks.update --impl fsdp1,fsdp2,fsdp_wrap,fully_shard
"""

from __future__ import annotations

from benchmarks.harness import (
    Figures,
    Question,
    Settings,
    ask_alone,
    compare,
    interleave,
    run_fake,
    run_ranks,
)
from benchmarks.implementations import DEFAULTS, IMPLEMENTATIONS, SHARDING, SHARED, Trained
from benchmarks.models import stacked

FAKE_RANKS, BLOCKS, PARAMETERS = 8, 24, 12
BASELINES = {"fsdp1": ("fsdp1",), "fsdp2": ("fsdp2",)}
GROUPS = {"gloo": run_ranks, "fake group": run_fake}


def measure(names: list[str], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Called on every rank: seconds of clipping and of the optimizer, by implementation."""
    case = stacked(BLOCKS, PARAMETERS)
    competitors = {name: Trained(name, case, fused=True) for name in names}
    for each in competitors.values():
        each.pass_through()
    clips = {name: each.clip for name, each in competitors.items()}
    steps = {name: each.optimizer.step for name, each in competitors.items()}
    return {"clip": interleave(clips, rounds, warmup=3), "AdamW": interleave(steps, rounds, warmup=3)}


def ask(settings: Settings) -> Figures:
    """A table of clipping and one of the optimizer, for either group."""
    figures: Figures = {}
    for group in settings.cases_of([*GROUPS]):
        ranks, known = (settings.ranks, [*IMPLEMENTATIONS]) if group == "gloo" else (FAKE_RANKS, SHARDING)
        usual = [name for name in (*DEFAULTS, *SHARED.values()) if name in known]
        names = settings.implementations(known if settings.impl else usual)
        found = GROUPS[group](measure, ranks, names, settings.rounds or 60)
        for what, times in found.items():
            figures[f"{what}, {group}"] = compare(times, BASELINES)
    return figures


QUESTION = Question(
    "update",
    "Clipping and optimizer",
    f"""\
Milliseconds of `clip_grad_norm_` (the library's own where it has one) and of a step of AdamW(fused=True),
for {BLOCKS * PARAMETERS} parameters in {BLOCKS} units, by the slower of 2 ranks (`gloo`; `_shared` through
memory), and by one of {FAKE_RANKS} on a group that sends nothing. Every call scales the gradients. What
ran just before was another's turn, so each call finds cold caches, as it does after a backward.""",
    ask,
    chart="ms",
    cases=[*GROUPS],
    implementations=[*IMPLEMENTATIONS],
)


if __name__ == "__main__":
    ask_alone(QUESTION)
