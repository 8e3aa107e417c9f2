"""Time and memory of getting the weights of a model in training; how few elements a step changes.

python -m benchmarks.weights --cases gpt,changes
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import fsdp as torch_fsdp

import fsdp_wrap
from benchmarks.harness import Figures, Question, Settings, Table, ask_alone, compare, interleave, run_ranks
from benchmarks.implementations import SHARED, Trained
from benchmarks.meters import tensors
from benchmarks.models import SHORT_CASES, Case, stacked

STATE_DICT, FULL_TENSOR = "fsdp1", "fsdp2"
BASELINES = {"full_tensor": (FULL_TENSOR,), "state_dict": (STATE_DICT,)}
MODELS = {"gpt": SHORT_CASES["gpt"], "lora": SHORT_CASES["lora"], "288 parameters": stacked(24, 12)}
RATES, CHANGES, WARM = (1e-3, 1e-5, 1e-6), "changes", 3
USUAL = ["fsdp_wrap", "fully_shard", *SHARED.values(), STATE_DICT, FULL_TENSOR]


def reader(name: str, case: Case) -> Callable[[], object]:
    """Called on every rank: what reads all full tensors once."""
    each = Trained(name, case)
    each.step()
    model = each.model
    if name == FULL_TENSOR:
        return lambda: [param.full_tensor() is None for param in model.parameters()]
    if name == STATE_DICT:
        return lambda: _state_dict(model)
    source = fsdp_wrap.weight_source(model)
    return lambda: [value is None for _, value in source]


def _state_dict(model: Any) -> None:
    config = torch_fsdp.FullStateDictConfig(rank0_only=True)
    with torch_fsdp.FullyShardedDataParallel.state_dict_type(
        model, torch_fsdp.StateDictType.FULL_STATE_DICT, config
    ):
        model.state_dict()


def measure(case: str, names: list[str], rounds: int) -> Table:
    """Called on every rank: milliseconds of reading all, and the most megabytes of tensors meanwhile."""
    readers = {name: reader(name, MODELS[case]) for name in names}
    table = compare(interleave(readers, rounds), BASELINES)
    for name, read in readers.items():
        table[name]["peak MB"] = tensors(read).peak / 1e6
    return table


def changes(rounds: int) -> Table:
    """Called on every rank: what one step of AdamW changes in bf16, by learning rate."""
    each = Trained("fsdp_wrap", SHORT_CASES["gpt"])
    source = fsdp_wrap.weight_source(each.model, dtype=torch.bfloat16)
    full = sum(torch.Size(meta.shape).numel() * meta.dtype.itemsize for meta in source.metadata())
    table: Table = {}
    for rate in RATES:
        each.optimizer.param_groups[0]["lr"] = rate
        for _ in range(WARM):
            each.step()
        following = fsdp_wrap.weight_changes(each.model, torch.bfloat16)
        seconds: dict[str, list[float]] = {"changes": [], "all": []}
        for _ in range(rounds):
            each.step()
            dist.barrier()
            begin = time.perf_counter()
            found = following.collect(checksums=False)
            seconds["changes"].append(time.perf_counter() - begin)
            dist.barrier()
            begin = time.perf_counter()
            for _ in source:
                pass
            seconds["all"].append(time.perf_counter() - begin)
        count = sum(len(change.index) for change in found)
        table[f"lr {rate:g}"] = {
            "elements %": 100 * count / (full / 2),
            "bytes / all": found.nbytes / full,
            "ms": 1e3 * statistics.median(seconds["changes"]),
            "ms of all": 1e3 * statistics.median(seconds["all"]),
        }
    return table


def ask(settings: Settings) -> Figures:
    """A table for each model, and one of changes."""
    figures: Figures = {}
    names = settings.implementations(USUAL)
    for case in settings.cases_of([*MODELS, CHANGES]):
        if case == CHANGES:
            figures[case] = run_ranks(changes, settings.ranks, settings.rounds or 5)
        else:
            figures[case] = run_ranks(measure, settings.ranks, case, names, settings.rounds or 20)
    return figures


QUESTION = Question(
    "weights",
    "Weights out",
    """\
Milliseconds of reading all full tensors once, one after the other, on 2 ranks: by `weight_source` (`_shared`
through memory), by torch's `state_dict` for the first rank (`fsdp1`), and by `full_tensor()` of each
parameter of torch's `fully_shard` (`fsdp2`); and the most megabytes of tensors meanwhile. `changes`: what one
step of AdamW changes in bf16, for `gpt`: `weight_changes` to reading all of it.""",
    ask,
    chart="ms",
    cases=[*MODELS, CHANGES],
    implementations=USUAL,
)


if __name__ == "__main__":
    ask_alone(QUESTION)
