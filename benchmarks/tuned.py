"""Recipes that `fit` finds: measured beside eight usual ones on the CPU; pages of large models on GPUs.

python -m benchmarks.tuned --programs gpt,long,layers,wide,uneven
python -m benchmarks.tuned --gpu 8b,70b-64,70b-512
"""

from __future__ import annotations

import argparse
import itertools
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import nn

import fsdp_wrap
from benchmarks.harness import interleave, preload, run_ranks
from benchmarks.llama import H100, Llama, WholeLlamaBlock
from benchmarks.meters import tensors
from benchmarks.models import Block, LinearBlock, Transformer, TransformerBlock
from fsdp_wrap.tools import Choice, Fit, Machine, Recipe, UnitRecipe
from fsdp_wrap.tools.fitting.recipe import FREED, RECOMPUTED, STAY, TO_BACKWARD

NOISE = 1.03
"""A step counts as clearly slower than another one above this ratio."""


# on the CPU, measured


class Uneven(nn.Module):
    """Blocks of different widths, between layers of the root."""

    def __init__(self, widths: tuple[int, ...], width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)
        self.blocks = nn.Sequential(*(Widening(width, hidden) for hidden in widths))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.blocks(self.first(x))).pow(2).mean()


class Widening(Block):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Layers(nn.Module):
    """Equal layers, of which nearly all is parameters."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(LinearBlock(width) for _ in range(layers)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks(x).pow(2).mean()


@dataclass(frozen=True)
class Program:
    """A model and its input."""

    model: Callable[[], nn.Module]
    batch: Callable[[], torch.Tensor]


PROGRAMS = {
    "gpt": Program(lambda: Transformer(6, 192, 6, 96, 2048), lambda: torch.randint(2048, (6, 97))),
    "long": Program(lambda: Transformer(4, 128, 4, 384, 512), lambda: torch.randint(512, (4, 385))),
    "layers": Program(lambda: Layers(6, 640), lambda: torch.randn(64, 640)),
    "wide": Program(lambda: Uneven((512,) * 5, 128), lambda: torch.randn(3072, 128)),
    "uneven": Program(lambda: Uneven((256, 1024, 128, 1536), 160), lambda: torch.randn(1536, 160)),
}
PARTS = (0.35, 0.8)
"""Budgets, from that of the least to that of the fastest recipe."""


def setup(program: str, recipe: Recipe) -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], object]]:
    """Both planned and run."""
    torch.manual_seed(0)
    kinds = (LinearBlock, Widening, TransformerBlock)
    model = PROGRAMS[program].model()
    present = [kind for kind in kinds if any(isinstance(module, kind) for module in model.modules())]
    model = recipe.apply(model, present)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        model(PROGRAMS[program].batch()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step


def presets(program: str, ranks: int) -> dict[str, Recipe]:
    """Returns the eight recipes that people choose from: all units alike."""
    recipes = {}
    for together, parameters, activations in itertools.product(
        (1, 0), (FREED, TO_BACKWARD), (STAY, RECOMPUTED)
    ):
        run = Recipe(together=together)
        made = fsdp_wrap.plan(partial(setup, program, run), ranks)
        units = tuple(UnitRecipe((unit.name,), parameters, activations) for unit in made.units)
        name = f"{'blocks' if together else 'whole'}, {parameters}, {activations}"
        recipes[name] = replace(run, units=units)
    return recipes


def measured_machine() -> dict[str, Any]:
    """Measures the machine as ranks over gloo see it; called on every rank."""
    os.environ["FSDP_WRAP_SHARED_MEMORY"] = "0"
    return fsdp_wrap.measure_machine("cpu").to_dict()


def measure(program: str, recipes: dict[str, str], rounds: int) -> dict[str, dict[str, Any]]:
    """Returns the most bytes of tensors in building and two steps, and seconds of steps; on every rank."""
    os.environ["FSDP_WRAP_SHARED_MEMORY"] = "0"
    made: dict[str, Any] = {}
    peaks: dict[str, int] = {}
    for name, text in recipes.items():
        recipe = Recipe.from_json(text)

        def whole(name: str = name, recipe: Recipe = recipe) -> None:
            made[name] = setup(program, recipe)
            made[name][2](), made[name][2]()

        if not peaks:
            whole()  # what is made once for all
        peaks[name] = tensors(whole).peak
    times = interleave({name: step for name, (_, _, step) in made.items()}, rounds)
    return {name: {"peak": peaks[name], "seconds": times[name]} for name in recipes}


def ratio_to_best(own: list[float], others: dict[str, list[float]]) -> float:
    """Returns the median ratio of own times to those of the best of others.

    Half of the rounds choose the best, and the other half are compared; then the other way round. Else the
    luckiest of several would count as the best.
    """
    ratios = []
    for chosen, compared in ((slice(0, None, 2), slice(1, None, 2)), (slice(1, None, 2), slice(0, None, 2))):
        best = min(others.values(), key=lambda times: median(times[chosen]))
        ratios += [mine / its for mine, its in zip(own[compared], best[compared])]
    return median(ratios)


def compare(program: str, ranks: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Finds a program's recipes for its budgets, and measures them beside the presets."""
    machine = Machine.from_dict(run_ranks(measured_machine, ranks))
    usual = presets(program, ranks)
    plans = {name: fsdp_wrap.plan(partial(setup, program, recipe), ranks) for name, recipe in usual.items()}
    needs = sorted(made.needed_bytes for made in plans.values())
    choices: dict[int, Choice] = {}
    seconds = {}
    for part in PARTS:
        limit, begin = int(needs[0] + part * (needs[-1] - needs[0])), time.process_time()
        choices[limit] = best_of(
            fsdp_wrap.fit(partial(setup, program), ranks, device_memory=limit, machine=machine)
        )
        seconds[limit] = time.process_time() - begin
    recipes = {**usual, **{f"found {limit}": choice.recipe or Recipe() for limit, choice in choices.items()}}
    measured = run_ranks(
        measure, ranks, program, {name: recipe.to_json() for name, recipe in recipes.items()}, rounds
    )
    rows = {}
    for limit in choices:
        own = measured[f"found {limit}"]
        fitting = {name: measured[name]["seconds"] for name in usual if measured[name]["peak"] <= limit}
        best = min(fitting, key=lambda name: median(fitting[name]))
        rows[f"{program}, {ranks} ranks, {limit / 1e6:.1f} MB"] = {
            "budget": limit,
            "planned": choices[limit].peak_bytes,
            "peak": own["peak"],
            "seconds": median(own["seconds"]),
            "best preset": best,
            "preset seconds": median(fitting[best]),
            "ratio": ratio_to_best(own["seconds"], fitting),
            "search seconds": seconds[limit],
        }
    return rows


def best_of(fit: Fit) -> Choice:
    """Returns the fastest that fits; there is one."""
    assert fit.best is not None
    return fit.best


def as_table(rows: dict[str, dict[str, Any]]) -> str:
    """Returns the table of all cases."""
    lines = ["| case | peak MB | of budget | step ms | best preset ms | ratio | found in s |"]
    lines.append("|---|---:|---:|---:|---:|---:|---:|")
    for name, row in rows.items():
        lines.append(
            f"| {name} | {row['peak'] / 1e6:.1f} | {row['peak'] / row['budget']:.0%} | "
            f"{row['seconds'] * 1e3:.1f} | {row['preset seconds'] * 1e3:.1f} ({row['best preset']}) | "
            f"{row['ratio']:.3f} | {row['search seconds']:.1f} |"
        )
    above = sum(row["peak"] > row["budget"] for row in rows.values())
    slower, clearly = (sum(row["ratio"] > least for row in rows.values()) for least in (1.0, NOISE))
    lines += [
        "",
        f"Of {len(rows)}, {above} above the budget; "
        f"{slower} slower than the best preset, {clearly} by over 3 %.",
    ]
    return "\n".join(lines)


# on GPUs, by plan


A100 = replace(
    fsdp_wrap.preset("a100-80gb", attained=0.7),
    memory_bandwidth=2.0e12 * 0.8,
    bandwidth_within=300e9 * 0.7,
    bandwidth_between=25e9 * 0.8,
)
LLAMA_8B = partial(Llama, 32, 4096, 14336, 32, 8, block=WholeLlamaBlock)
LLAMA_70B = partial(Llama, block=WholeLlamaBlock)
GPUS = {
    "8b": (LLAMA_8B, 2, 8, replace(H100, name="H100 of 96 GB"), "90GB"),
    "70b-64": (LLAMA_70B, 1, 64, A100, "75GB"),
    "70b-512": (LLAMA_70B, 1, 512, H100, "75GB"),
}
"""Model, sequences of 8,192 tokens a rank, ranks, machine and memory."""


def llama(model: Callable[[], nn.Module], batch: int, recipe: Recipe) -> Any:
    """A step of a Llama in bfloat16, sharded as the recipe says."""
    with torch.device("meta"):
        made: Any = model()
    policy = fsdp_wrap.MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    made = recipe.apply(made, WholeLlamaBlock, mp_policy=policy)
    optimizer = torch.optim.AdamW(made.parameters(), lr=1e-4, fused=True)

    def step() -> None:
        tokens = torch.randint(made.token.num_embeddings, (batch, 8193), device="cuda")
        made(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()

    return made, optimizer, step


def fit_on_gpus(name: str) -> None:
    """Prints one page, and what it took to make it."""
    model, batch, ranks, machine, memory = GPUS[name]
    begin, worked = time.monotonic(), time.process_time()
    fit = fsdp_wrap.fit(
        partial(llama, model, batch), ranks, device="cuda", device_memory=memory, machine=machine
    )
    seconds, worked = time.monotonic() - begin, time.process_time() - worked
    print(f"## {name}\n\n{fit}\n")
    print(f"{batch * 8192 / (best_of(fit).predicted_seconds or 1):,.0f} tokens a second on each GPU")
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    print(f"found in {seconds:.0f} s ({worked:.0f} s of one core), {most:.1f} GB at most\n", flush=True)


def main() -> None:
    """Prints what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    split: Callable[[str], list[str]] = lambda text: text.split(",")  # noqa: E731
    parser.add_argument("--programs", type=split, default=[], metavar="A,B", help=f"of {', '.join(PROGRAMS)}")
    parser.add_argument("--ranks", type=split, default=["2", "3"])
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--gpu", type=split, default=[], metavar="A,B", help=f"of {', '.join(GPUS)}")
    options = parser.parse_args()
    for name in options.gpu:
        fit_on_gpus(name)
    preload()
    rows: dict[str, dict[str, Any]] = {}
    for program, ranks in itertools.product(options.programs, map(int, options.ranks)):
        rows |= compare(program, ranks, options.rounds)
        print(as_table(rows), flush=True)


if __name__ == "__main__":
    main()
