"""Time of clipping the gradients' norm and of AdamW, of a model with 288 parameters.

python -m benchmarks.update --impl fsdp1,fsdp2,fsdp_wrap,fully_shard
"""

from __future__ import annotations

import fsdp_wrap
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
from benchmarks.implementations import (
    DEFAULTS,
    IMPLEMENTATIONS,
    MAX_NORM,
    ON_SHARDS,
    SHARDING,
    SHARED,
    Trained,
)
from benchmarks.models import Case, stacked

FAKE_RANKS, BLOCKS, PARAMETERS = 8, 24, 12
TRAINED = [*IMPLEMENTATIONS, ON_SHARDS]
BASELINES = {"fsdp1": ("fsdp1",), "fsdp2": ("fsdp2",)}


class OnShards(Trained):
    """`fully_shard` with what the library has for steps and clipping."""

    def __init__(self, case: Case) -> None:
        super().__init__("fully_shard", case, fused=True)
        fsdp_wrap.optim.on_shards(self.optimizer)

    def clip(self) -> None:
        fsdp_wrap.clip_grad_norm_(self.model, MAX_NORM)


def _trained(name: str, case: Case) -> Trained:
    return OnShards(case) if name == ON_SHARDS else Trained(name, case, fused=True)


GROUPS = {"gloo": run_ranks, "fake group": run_fake}


def measure(names: list[str], rounds: int) -> dict[str, dict[str, list[float]]]:
    """Returns seconds of clipping and of the optimizer, by implementation; called on every rank."""
    case = stacked(BLOCKS, PARAMETERS)
    competitors = {name: _trained(name, case) for name in names}
    for competitor in competitors.values():
        competitor.pass_through()
    clips = {name: competitor.clip for name, competitor in competitors.items()}
    steps = {name: competitor.optimizer.step for name, competitor in competitors.items()}
    return {"clip": interleave(clips, rounds, warmup=3), "AdamW": interleave(steps, rounds, warmup=3)}


def ask(settings: Settings) -> Figures:
    """Returns a table of clipping and one of the optimizer, for either group."""
    figures: Figures = {}
    for group in settings.cases_of([*GROUPS]):
        ranks, known = (settings.ranks, TRAINED) if group == "gloo" else (FAKE_RANKS, [*SHARDING, ON_SHARDS])
        usual = [name for name in (*DEFAULTS, ON_SHARDS, *SHARED.values()) if name in known]
        names = settings.implementations(known if settings.impl else usual)
        measured = GROUPS[group](measure, ranks, names, settings.rounds or 60)
        for what, times in measured.items():
            figures[f"{what}, {group}"] = compare(times, BASELINES)
    return figures


QUESTION = Question(
    "update",
    "Clipping and optimizer",
    f"""\
Milliseconds of `clip_grad_norm_` (the library's own where it has one) and of a step of AdamW(fused=True),
for {BLOCKS * PARAMETERS} parameters in {BLOCKS} units, by the slower of 2 ranks (`gloo`; `_shared` through
memory), and by one of {FAKE_RANKS} on a group that sends nothing. `_on_shards` is with `on_shards` and
`fsdp_wrap.clip_grad_norm_`. Every call scales the gradients. What
ran just before was another's turn, so each call finds cold caches, as it does after a backward.""",
    ask,
    chart="ms",
    cases=[*GROUPS],
    implementations=TRAINED,
)


if __name__ == "__main__":
    ask_alone(QUESTION)
