"""Tells where the host waits for the device in a step, by option and front-end.

    python tests/streams/host_waits.py

It prints the table of `docs/architecture/streams.md`. Each option trains on simulated accelerators.
"""

import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).resolve().parents[2]), str(Path(__file__).resolve().parents[1])]

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from bed.accelerator import Simulation, run_simulated
from fronts import FRONTS, HYBRID, KEPT, no_sync
from fsdp_wrap import (
    CPUOffload,
    set_gradients_in_place,
)
from fsdp_wrap.clip_grad import clip_grad_norm_
from fsdp_wrap.comm_hooks import compress
from stream_programs import BF16, NO_SHARD, OFFLOAD, batch, hook, list_prefetches, prepared, wrapped

STEPS = 5
WRAPPER = ("flat", "orig")


@dataclass(frozen=True)
class Case:
    """An option with which a model trains, and what is called before and after each reduced backward."""

    name: str
    make: Callable[[str], nn.Module]
    fronts: tuple[str, ...] = tuple(FRONTS)
    size: int = 2
    before: Callable[[nn.Module, int], object] = lambda model, rank: None
    after: Callable[[nn.Module], object] = lambda model: None


def _fill(module: nn.Module) -> nn.Module:
    for number, param in enumerate(module.parameters()):
        param.data = torch.rand(param.shape, generator=torch.Generator().manual_seed(number)) - 0.5
    return module


class _Partly(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.sometimes, self.always = nn.Linear(16, 16), nn.Linear(16, 16)
        _fill(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.always(x)
        return y + self.sometimes(y) if dist.get_rank() else y


def _unused(front: str) -> nn.Module:
    return wrapped(front, module=nn.Sequential(_Partly(), _Partly()), kinds={_Partly})


def _hybrid(front: str, **options: Any) -> nn.Module:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "copy"))
    return wrapped(front, sharding_strategy=HYBRID, device_mesh=mesh, **options)


def mixed(front: str, offload: bool = False) -> nn.Module:
    return wrapped(front, mixed_precision=BF16, cpu_offload=CPUOffload(offload))


def _compressed(front: str, **codecs: str) -> nn.Module:
    layers = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 64), nn.Linear(64, 16))
    model = wrapped(front, module=_fill(layers), kinds={nn.Linear})
    compress(model, **codecs)
    return model


def _accumulate(model: nn.Module, rank: int) -> None:
    with no_sync(model):
        model(batch(rank, 50)).square().sum().backward()


def _accumulate_in_vain(model: nn.Module, rank: int) -> None:
    _accumulate(model, rank)
    model.zero_grad(set_to_none=False)


def _evaluate(model: nn.Module, rank: int) -> None:
    with torch.no_grad():
        model(batch(rank, 60))


def _unshard(model: nn.Module, rank: int) -> None:
    handles = [model[number].unshard(async_op=True) for number in (0, 1)]
    handles[0].wait()


def _clip(model: Any) -> None:
    if hasattr(model, "clip_grad_norm_"):
        model.clip_grad_norm_(0.1)
    else:
        clip_grad_norm_(model.parameters(), 0.1)


_COMPOSABLE = ("composable",)
CASES = [
    Case("nothing else", wrapped),
    Case("accumulation in `no_sync`", wrapped, before=_accumulate),
    Case("the same, and zeroed in place after that", wrapped, before=_accumulate_in_vain),
    Case("checkpointing", partial(wrapped, checkpoints=True)),
    Case("mixed precision", mixed),
    Case("parameters kept after forward", partial(wrapped, sharding_strategy=KEPT)),
    Case("NO_SHARD", partial(wrapped, sharding_strategy=NO_SHARD), WRAPPER),
    Case("hybrid", _hybrid, size=4),
    Case("forward prefetch", partial(wrapped, forward_prefetch=True), WRAPPER),
    Case("`unshard` by hand", wrapped, _COMPOSABLE, before=_unshard),
    Case("prefetch lists", partial(prepared, list_prefetches), _COMPOSABLE),
    Case("an evaluation before each step", wrapped, before=_evaluate),
    Case("gradients in place", partial(prepared, set_gradients_in_place), ("orig", "composable")),
    Case("gathers in int8", partial(_compressed, gathers="int8")),
    Case("reductions in int8", partial(_compressed, reductions="int8")),
    Case("a communication hook", partial(prepared, hook), WRAPPER),
    Case("the same with NO_SHARD", partial(prepared, hook, sharding_strategy=NO_SHARD), WRAPPER),
    Case("parameters that this rank did not use, in two units", _unused),
    Case("clipping", wrapped, after=_clip),
    Case("offload", partial(wrapped, cpu_offload=OFFLOAD)),
    Case("offload with mixed precision", partial(mixed, offload=True)),
]


def waits(case: Case, front: str) -> list[list[str]]:
    """Returns what the first rank's host waits for in each step; later steps have equal peaks."""
    told: list[tuple[list[str], dict[str, int]]] = []

    def program(rank: int, device: Simulation) -> None:
        model = case.make(front)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=True)
        for step in range(STEPS):
            optimizer.zero_grad()
            case.before(model, rank)
            model(batch(rank, step)).square().sum().backward()
            case.after(model)
            optimizer.step()
            if rank == 0:
                told.append(device.end_step())

    run_simulated(case.size, program)
    peaks = [peaks for _, peaks in told[2:]]
    assert all(peak == peaks[0] for peak in peaks), (case.name, front, peaks)
    return [waits for waits, _ in told]


HEAD = ("| option | wrapper, flat | wrapper, original parameters | `fully_shard` |", "|---|---|---|---|")


def cell(case: Case, front: str) -> str:
    """How often, in which phases, in a step from the second on; all of these are alike."""
    if front not in case.fronts:
        return "–"
    later = [Counter(wait.rsplit(", ")[-1].rstrip(")") for wait in step) for step in waits(case, front)[1:]]
    assert all(counts == later[0] for counts in later), (case.name, front, later)
    return ", ".join(f"{number} in {phase}" for phase, number in sorted(later[0].items())) or "0"


if __name__ == "__main__":
    print("\n".join(HEAD))
    for case in CASES:
        print(f"| {case.name} | {' | '.join(cell(case, front) for front in FRONTS)} |", flush=True)
