"""Loss curves and bytes of optimizers that keep state in few bits, against AdamW in float32.

python -m benchmarks.small_states --impl AdamW,AdamW8bit --rounds 500
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import textwrap
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.harness import Figures, Question, Settings, ask_alone, run_ranks
from benchmarks.models import CASES, Block
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap.wrap import ModuleWrapPolicy

ALIGNMENT, LR, STEPS, SEQUENCES, WINDOW = 4096, 1e-3, 500, 16, 50
PLAIN = "AdamW"
KINDS = [PLAIN, "AdamW8bit", "AdamWFp8", "AdamW4bit"]


def _text() -> torch.Tensor:
    """Returns bytes to learn from, the same with every run of one Python."""
    source = "".join(inspect.getsource(module) for module in (argparse, inspect, textwrap))
    return torch.tensor([*source.encode()])


def _optimizer(kind: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    package = torch.optim if kind == PLAIN else importlib.import_module("torchao.optim")
    return getattr(package, kind)(model.parameters(), lr=LR)


def train(kind: str, case: str, steps: int) -> dict[str, Any]:
    """Returns losses of all steps, and bytes of this rank's state and parameters; called on every rank."""
    torch.manual_seed(0)
    policy = ModuleWrapPolicy({Block})
    model = FSDP(
        CASES[case].model(), auto_wrap_policy=policy, use_orig_params=True, shard_alignment=ALIGNMENT
    )
    length = CASES[case].batch().shape[1]
    optimizer, text, losses = _optimizer(kind, model), _text(), []
    vocabulary = model.module.token.num_embeddings
    rank, size = dist.get_rank(), dist.get_world_size()
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        starts = torch.randint(len(text) - length, (SEQUENCES * size,), generator=generator)
        batch = torch.stack([text[start : start + length] for start in starts[rank::size]]) % vocabulary
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        with torch.compiler.set_stance("force_eager"):
            optimizer.step()
        mean = loss.detach()
        dist.all_reduce(mean)
        losses.append(float(mean) / size)
    elements = sum(param.numel() for param in model.parameters())
    return {"losses": losses, "bytes": _state_bytes(optimizer) / elements}


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    values = [value for entry in optimizer.state.values() for value in entry.values()]
    return sum(map(_nbytes, (value for value in values if value.dim())))


def _nbytes(value: Any) -> int:
    if not hasattr(value, "__tensor_flatten__"):
        return value.nbytes
    return sum(getattr(value, name).nbytes for name in value.__tensor_flatten__()[0])


def ask(settings: Settings) -> Figures:
    """Returns a table of a model; none without torchao."""
    if importlib.util.find_spec("torchao") is None:
        return {}
    figures: Figures = {}
    for case in settings.cases_of(["small"]):
        steps = settings.rounds or STEPS
        kinds = [PLAIN, *(kind for kind in settings.implementations(KINDS) if kind != PLAIN)]
        runs = {kind: run_ranks(train, settings.ranks, kind, case, steps) for kind in kinds}
        plain = _windows(runs[PLAIN]["losses"])
        figures[case] = {
            kind: {
                "last loss": _windows(run["losses"])[-1],
                "furthest from AdamW %": max(
                    100 * abs(own / other - 1) for own, other in zip(_windows(run["losses"]), plain)
                ),
                "bytes of state per parameter": run["bytes"],
            }
            for kind, run in runs.items()
        }
    return figures


def _windows(losses: list[float]) -> list[float]:
    """Means over so many steps each."""
    cut = [losses[first : first + WINDOW] for first in range(0, len(losses), WINDOW)]
    return [sum(window) / len(window) for window in cut]


QUESTION = Question(
    "small_states",
    "Optimizer state in few bits",
    f"""\
{STEPS} steps of torchao's AdamW on text, lr {LR}, {SEQUENCES} sequences a rank, the wrapper with original
parameters, each block a unit, shards aligned to {ALIGNMENT} elements; the same initial values and batches for
all. `last loss`: mean of the last {WINDOW} steps. `furthest`: the largest difference of a mean of {WINDOW}
steps from that of `{PLAIN}` in float32. Bytes with the scales and tables; vectors keep state of all bits.""",
    ask,
    chart="bytes of state per parameter",
    cases=["small"],
    implementations=KINDS,
)


if __name__ == "__main__":
    ask_alone(QUESTION)
