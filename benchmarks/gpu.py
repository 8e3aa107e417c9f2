"""Memory, speed and offload on one CUDA device; without one there is nothing to measure.

python -m benchmarks.gpu --impl fsdp2,fsdp_wrap,fully_shard
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp

import fsdp_wrap
from benchmarks.harness import (
    Figures,
    Question,
    Settings,
    Table,
    ask_alone,
    compare,
    interleave,
    run_fake,
    run_group,
)
from benchmarks.implementations import IMPLEMENTATIONS, PLAIN, Trained
from benchmarks.memory import sharded_state
from benchmarks.meters import tensors
from benchmarks.models import Block, Case, transformer

USUAL = ["fsdp1", "fsdp2", "fsdp_wrap", "fully_shard"]
FAKE_RANKS = (8, 64)
MEMORY = transformer(8, 1024, 16, 16, 4096, batch=1)
SMALL = replace(transformer(48, 256, 4, 64, 256, batch=2), rounds=20)
WIDE = transformer(4, 4096, 32, 2048, 256, batch=2)
HUGE = replace(transformer(16, 4096, 32, 2048, 256, batch=4), rounds=3)


def placed(case: Case, device: torch.device, dtype: torch.dtype = torch.float32) -> Case:
    """The case with its model and batch on a device."""
    return replace(
        case,
        model=lambda: case.model().to(device, dtype),
        batch=lambda: case.batch().to(device),
    )


# --- memory -------------------------------------------------------------------------------------------


def measure_memory(case: Case, names: list[str], device: str) -> Table:
    """Called on a fake group: most megabytes above the sharded state, and the share reserved in vain."""
    return {name: _peaks(Trained(name, placed(case, torch.device(device)))) for name in names}


def _peaks(each: Trained) -> dict[str, float]:
    each.step()
    each.step()
    each.optimizer.zero_grad()
    state = sharded_state(each)
    if not torch.cuda.is_available():
        return {"peak MB": tensors(each.pass_through).peak / 1e6}
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    each.pass_through()
    torch.cuda.synchronize()
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    return {"peak MB": (allocated - state) / 1e6, "reserved in vain": reserved / allocated - 1}


# --- speed --------------------------------------------------------------------------------------------


def measure_speed(
    case: Case, names: list[str], device: str, dtype: str, rounds: int | None
) -> dict[str, list[float]]:
    """Called on the only rank: seconds of a step; it ends with the loss on the host, so all has run."""
    where = placed(case, torch.device(device), getattr(torch, dtype))
    competitors = {name: Trained(name, where, fused=True) for name in (PLAIN, *names)}
    return interleave({name: each.step for name, each in competitors.items()}, rounds or case.rounds, 5)


# --- offload ------------------------------------------------------------------------------------------


def _offloaded_fsdp2(model: nn.Module) -> nn.Module:
    policy = torch_fsdp.CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    precision = torch_fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for unit in [*(child for child in model.modules() if isinstance(child, Block)), model]:
        torch_fsdp.fully_shard(unit, mp_policy=precision, offload_policy=policy)
    return model


def _offloaded_fsdp_wrap(model: nn.Module) -> nn.Module:
    return fsdp_wrap.FullyShardedDataParallel(
        model,
        auto_wrap_policy=fsdp_wrap.wrap.ModuleWrapPolicy({Block}),
        cpu_offload=fsdp_wrap.CPUOffload(offload_params=True),
        mixed_precision=fsdp_wrap.MixedPrecision(param_dtype=torch.bfloat16),
        device_id=torch.cuda.current_device() if torch.cuda.is_available() else None,
        use_orig_params=True,
    )


OFFLOADED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "fsdp2": _offloaded_fsdp2,
    "fsdp_wrap": _offloaded_fsdp_wrap,
}


def measure_offload(
    name: str, case: Case, device: str, rounds: int | None, probe: int = 1 << 13
) -> dict[str, float]:
    """Called on the only rank: seconds of a step with all parameters in host memory; tokens a second."""
    torch.set_num_threads(os.cpu_count() or 1)
    model = OFFLOADED[name](case.model())
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = case.batch().to(device)

    def step() -> None:
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        loss.item()

    times = sorted(interleave({name: step}, rounds or case.rounds, 1)[name])
    median = times[len(times) // 2]
    tokens = batch[:, 1:].numel()
    params = sum(param.numel() for param in case.model().parameters())
    least = roofline(params, tokens, torch.device(device), probe)
    return {"s": median, "tokens/s": tokens / median, "/ roofline": median / least}


def roofline(params: int, tokens: int, device: torch.device, size: int) -> float:
    """Least seconds of an offloaded step: of computing, copying either way, and AdamW on the host.

    Speeds are those of square matrices of a size.
    """
    left = torch.ones(size, size, dtype=torch.bfloat16, device=device)
    host = torch.ones(size, size, pin_memory=device.type == "cuda")
    there = host.to(device)
    flops = 2 * size**3 / _seconds(lambda: left @ left)
    down = host.nbytes / _seconds(lambda: there.copy_(host, non_blocking=True))
    up = host.nbytes / _seconds(lambda: host.copy_(there, non_blocking=True))
    memory = 3 * host.nbytes / _seconds(lambda: torch.add(host, host, out=host))
    return max(6 * params * tokens / flops, 4 * params / down, 4 * params / up, 30 * params / memory)


def _seconds(action: Callable[[], Any], repeats: int = 5) -> float:
    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    action(), wait()
    started = time.perf_counter()
    for _ in range(repeats):
        action()
    wait()
    return (time.perf_counter() - started) / repeats


# --- asking -------------------------------------------------------------------------------------------


def ask(settings: Settings) -> Figures:
    """Memory on fake groups, speed and offload on one rank; nothing where there is no CUDA device."""
    if not torch.cuda.is_available():
        print("skipped: there is no CUDA device")
        return {}
    names = settings.implementations([name for name in USUAL if name in IMPLEMENTATIONS])
    figures: Figures = {
        f"memory, fake group of {ranks}": run_fake(_memory, ranks, names) for ranks in FAKE_RANKS
    }
    alone = partial(run_group, processes=1, backend="nccl", ranks=1)
    for title in SPEEDS:
        times = alone(_speed, arguments=(title, names, settings.rounds))
        figures[title] = compare(times, {PLAIN: (PLAIN,), "fsdp2": ("fsdp2",)})
    figures["offload"] = {
        name: alone(_offload, arguments=(name, settings.rounds))
        for name in settings.implementations([*OFFLOADED])
    }
    return figures


# A case is made of functions, which do not travel to other processes; these find it there.
SPEEDS = {"48 small units": (SMALL, "float32"), "width 4096 in bf16": (WIDE, "bfloat16")}


def _memory(names: list[str]) -> Table:
    return measure_memory(MEMORY, names, "cuda")


def _speed(title: str, names: list[str], rounds: int | None) -> dict[str, list[float]]:
    case, dtype = SPEEDS[title]
    return measure_speed(case, names, "cuda", dtype, rounds)


def _offload(name: str, rounds: int | None) -> dict[str, float]:
    return measure_offload(name, HUGE, "cuda", rounds)


QUESTION = Question(
    "gpu",
    "On a GPU",
    """\
One CUDA device. Megabytes above the sharded state in a step of a transformer on groups that send nothing,
and what the allocator reserves beyond that; milliseconds of a step at world size 1, of 48 small units and
of wide ones in bf16, relative to the model without wrapping; seconds of a step of a transformer of 3.2
billion parameters that lie in host memory, relative to the slowest of computing, copying either way and
AdamW on the host at measured speeds.""",
    ask,
    chart="/ fsdp2",
    implementations=[*dict.fromkeys([*USUAL, *OFFLOADED])],
)


if __name__ == "__main__":
    ask_alone(QUESTION)
