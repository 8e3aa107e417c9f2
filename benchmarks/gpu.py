"""Memory, speed, offload and overlap on one CUDA device, with a verdict on each goal.

python -m benchmarks.gpu [--cases memory,small] [--impl fsdp2,fsdp_wrap,fully_shard] [--dry-run]

It ends with 0 if all goals that were asked for are met, with 1 if one is missed or was not measured, with 2
if there is no CUDA device. `--dry-run` takes every way through the program on the CPU, at sizes that measure
nothing: its figures mean nothing either.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed import fsdp as torch_fsdp

import fsdp_wrap
from benchmarks.goals import GOALS, verdicts
from benchmarks.harness import (
    Figures,
    Question,
    Settings,
    Table,
    ask_parsed,
    compare,
    interleave,
    parser_of,
    run_fake,
    run_group,
)
from benchmarks.implementations import IMPLEMENTATIONS, PLAIN, Trained, over_the_group
from benchmarks.memory import sharded_state
from benchmarks.meters import tensors
from benchmarks.models import TINY, Block, Case, largest_block, sizes, transformer
from benchmarks.timeline import COMPUTE, record
from fsdp_wrap._comm.device import accelerator_of

USUAL = ["fsdp1", "fsdp2", "fsdp_wrap", "fully_shard"]
OURS = ["fsdp_wrap", "fully_shard"]
CASES = ["memory", "small", "wide", "offload", "overlap"]
FAKE_RANKS = (8, 64)
GB = 10**9


# --- sizes --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scale:
    """A device and the sizes of its models, in numbers, which can be sent to other processes.

    Attributes:
        device: Where the models are trained.
        memory: Arguments of `transformer`, as are the next ones; for memory.
        small: For many small units.
        wide: For few wide units.
        huge: For offload to host memory.
        traced: For profiles.
        probe: Width of the matrices that measure the speed of the machine.
        rounds: Rounds of the wide and the small model.
    """

    device: str
    memory: tuple[int, ...]
    small: tuple[int, ...]
    wide: tuple[int, ...]
    huge: tuple[int, ...]
    traced: tuple[int, ...]
    probe: int
    rounds: int

    def at(self, name: str) -> Case:
        """Returns the case of a name."""
        blocks, width, heads, length, vocabulary, batch = getattr(self, name)
        return replace(transformer(blocks, width, heads, length, vocabulary, batch), rounds=self.rounds)


_TINY = (2, 16, 2, 4, 16, 2)
DRY = Scale("cpu", _TINY, _TINY, _TINY, _TINY, _TINY, probe=64, rounds=2)


def scale_for(device_bytes: int, host_bytes: int) -> Scale:
    """Returns the sizes that fit into the free memory of a GPU and of its host."""
    # A block of width 4096 has 201 million parameters. In bf16 with gradients and AdamW it takes 1.6 GB, in
    # each of five competitors; in host memory 16 bytes a parameter, more where pinned memory is rounded up.
    wide = max(1, min(4, int(0.7 * device_bytes / (5 * 1.9 * GB))))
    huge = max(1, min(16, int(0.8 * host_bytes / (24 * 0.202 * GB))))
    return Scale(
        "cuda",
        memory=(8, 2048, 16, 16, 4096, 1),
        small=(48, 256, 4, 64, 256, 2),
        wide=(wide, 4096, 32, 2048, 256, 2),
        huge=(huge, 4096, 32, 2048, 256, 4),
        traced=(4, 2048, 16, 2048, 256, 8),  # its products take as long as copies from the host
        probe=1 << 13,
        rounds=20,
    )


def host_memory() -> int:
    """Returns bytes that are free in host memory."""
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def placed(case: Case, device: torch.device, dtype: torch.dtype = torch.float32) -> Case:
    """Returns the case with its model and batch on a device."""
    return replace(
        case,
        model=lambda: case.model().to(device, dtype),
        batch=lambda: case.batch().to(device),
    )


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# --- memory -------------------------------------------------------------------------------------------


def measure_memory(case: Case, name: str, device: str) -> dict[str, float]:
    """Called on a fake group, in a process of its own: most bytes above the sharded state, and in blocks.

    `reserved in vain` is what the allocator reserves beyond the most that it has given, as a share of that.
    """
    place = torch.device(device)
    _load_kernels(place)
    before = torch.cuda.memory_allocated() if place.type == "cuda" else 0
    trained = Trained(name, placed(case, place))
    trained.step()
    trained.step()
    trained.optimizer.zero_grad()
    gc.collect()
    if place.type != "cuda":
        peak = tensors(trained.pass_through).peak
        return {"peak MB": peak / 1e6, "blocks": peak / largest_block(case)}
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    trained.pass_through()
    torch.cuda.synchronize()
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    peak = allocated - before - sharded_state(trained)
    return {
        "peak MB": peak / 1e6,
        "blocks": peak / largest_block(case),
        "reserved in vain": reserved / allocated - 1,
    }


def _load_kernels(place: torch.device) -> None:
    """Lets kernels take what memory they keep, in the threads of forward and of backward."""
    model = TINY.model().to(place)
    model(TINY.batch().to(place)).backward()
    del model
    gc.collect()
    _synchronize()


# --- speed --------------------------------------------------------------------------------------------


def measure_speed(
    case: Case, names: list[str], device: str, dtype: str, rounds: int | None
) -> dict[str, list[float]]:
    """Measures a step on the only rank; it ends with the loss on the host, so all has run."""
    where = placed(case, torch.device(device), getattr(torch, dtype))
    competitors = {name: Trained(name, where, fused=True) for name in (PLAIN, *names)}
    steps = {name: competitor.step for name, competitor in competitors.items()}
    return interleave(steps, rounds or case.rounds, 5)


# --- offload ------------------------------------------------------------------------------------------


def _offloaded_fsdp2(model: nn.Module) -> nn.Module:
    policy = torch_fsdp.CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    precision = torch_fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for unit in [*(child for child in model.modules() if isinstance(child, Block)), model]:
        torch_fsdp.fully_shard(unit, mp_policy=precision, offload_policy=policy)
    return model


def _offloaded_fully_shard(model: nn.Module) -> nn.Module:
    policy = fsdp_wrap.CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
    precision = fsdp_wrap.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    for unit in [*(child for child in model.modules() if isinstance(child, Block)), model]:
        fsdp_wrap.fully_shard(unit, mp_policy=precision, offload_policy=policy)
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
    "fully_shard": _offloaded_fully_shard,
}


def measure_offload(
    name: str, case: Case, device: str, rounds: int | None, probe: int = 1 << 13
) -> dict[str, Any]:
    """Measures each step with all parameters in host memory, and the least time; called on the only rank."""
    torch.set_num_threads(os.cpu_count() or 1)
    model = OFFLOADED[name](filled(case))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    batch = case.batch().to(device)

    def step() -> None:
        optimizer.zero_grad()
        loss = model(batch)
        loss.backward()
        optimizer.step()
        loss.item()

    times = interleave({name: step}, rounds or 3, 2)[name]
    tokens, params = batch[:, 1:].numel(), parameters(case)
    return {"s": times, "least": roofline(params, tokens, torch.device(device), probe), "tokens": tokens}


def filled(case: Case) -> nn.Module:
    """Returns a case's model in host memory, with values that took little time to draw."""
    model = sizes(case).to_empty(device="cpu")
    pattern = 0.02 * torch.randn(1 << 16)
    for param in model.parameters():
        flat = param.data.view(-1)
        for part in flat.split(len(pattern)):
            part.copy_(pattern[: len(part)])
    return model


def parameters(case: Case) -> int:
    """Counts the parameters of a case's model."""
    return sum(param.numel() for param in sizes(case).parameters())


def in_turn(visits: list[tuple[str, dict[str, Any]]], params: int) -> Table:
    """Medians over all visits to each competitor, and what they are of the least of all visits.

    Competitors of this size do not fit beside each other. So each is visited twice, in an order that a
    machine which gets faster or slower favours nobody by.
    """
    least = statistics.median(row["least"] for _, row in visits)
    table: Table = {}
    for name in dict.fromkeys(name for name, _ in visits):
        times = [seconds for visited, row in visits if visited == name for seconds in row["s"]]
        tokens = next(row["tokens"] for visited, row in visits if visited == name)
        median = statistics.median(times)
        table[name] = {
            "s": median,
            "tokens/s": tokens / median,
            "/ roofline": median / least,
            "parameters, 1e9": params / 1e9,
        }
    return table


def roofline(params: int, tokens: int, device: torch.device, size: int) -> float:
    """Least seconds of an offloaded step: of computing, copying either way, and AdamW on the host.

    Speeds are those of square matrices of a size.
    """
    left = torch.randn(size, size, dtype=torch.bfloat16, device=device)
    host = torch.ones(size, size, pin_memory=device.type == "cuda")
    there = host.to(device)
    flops = 2 * size**3 / _seconds(lambda: left @ left)
    down = host.nbytes / _seconds(lambda: there.copy_(host, non_blocking=True))
    up = host.nbytes / _seconds(lambda: host.copy_(there, non_blocking=True))
    memory = 3 * host.nbytes / _seconds(lambda: torch.add(host, host, out=host))
    return max(6 * params * tokens / flops, 4 * params / down, 4 * params / up, 30 * params / memory)


def _seconds(action: Callable[[], Any], repeats: int = 5) -> float:
    action()
    _synchronize()
    started = time.perf_counter()
    for _ in range(repeats):
        action()
    _synchronize()
    return (time.perf_counter() - started) / repeats


# --- overlap ------------------------------------------------------------------------------------------


def measure_overlap(name: str, case: Case, device: str, offload: bool) -> dict[str, float]:
    """Returns the share of a step's collectives that lies beside computation; called on the only rank.

    Offloaded parameters are copied from the host and to it. Otherwise parameters travel in bf16 by the
    process group, as between several ranks.
    """
    place = torch.device(device)
    where = placed(case, place)
    with over_the_group(not offload):
        model = OFFLOADED[name](case.model()) if offload else _mixed(name, where.model())
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        batch = where.batch()

        def step() -> None:
            optimizer.zero_grad()
            model(batch).backward()
            optimizer.step()

        for _ in range(3):
            step()
        _synchronize()
        timeline = record(step, 3, _streams(place))
    row = {"waits of the host": statistics.median(timeline.waits)}
    if place.type == "cuda":
        row["compute ms"] = timeline.busy(COMPUTE) / 3e3
        for purpose in ("gather", "reduce"):
            row[f"{purpose} ms"] = timeline.busy(purpose) / 3e3
            row[f"{purpose} exposed"] = 1 - timeline.beside(purpose)
    return row


def _mixed(name: str, model: nn.Module) -> nn.Module:
    if name == "fully_shard":
        precision = fsdp_wrap.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for unit in [*(child for child in model.modules() if isinstance(child, Block)), model]:
            fsdp_wrap.fully_shard(unit, mp_policy=precision)
        return model
    return fsdp_wrap.FullyShardedDataParallel(
        model,
        auto_wrap_policy=fsdp_wrap.wrap.ModuleWrapPolicy({Block}),
        mixed_precision=fsdp_wrap.MixedPrecision(param_dtype=torch.bfloat16),
        use_orig_params=True,
    )


def _streams(place: torch.device) -> dict[str, Any]:
    """Returns the streams of a device by purpose: the caller's, and ours."""
    if place.type != "cuda":
        return {COMPUTE: None}
    accelerator = accelerator_of(torch.device("cuda", torch.cuda.current_device()))
    assert accelerator is not None
    return {COMPUTE: None} | {purpose: lane._stream for purpose, lane in accelerator.lanes.items()}


# --- asking -------------------------------------------------------------------------------------------


class _Asking:
    """Asks at one scale; prints failures, and measures the rest."""

    def __init__(self, scale: Scale, settings: Settings) -> None:
        self.scale, self.settings = scale, settings
        self.failed: list[str] = []
        self._alone = partial(run_group, processes=1, backend="nccl", ranks=1)
        if scale.device == "cpu":
            self._alone = partial(run_group, processes=1, backend="gloo", ranks=1)

    def _attempt(self, what: str, ask: Callable[[], Any]) -> Any:
        print(f"{what} ...", flush=True)
        try:
            return ask()
        except Exception as error:  # of a process that is gone
            self.failed.append(what)
            print(f"{what} failed: {error}", file=sys.stderr, flush=True)
            return None

    def _rows(self, what: str, names: list[str], ask: Callable[[str], Any]) -> Table:
        rows = {name: self._attempt(f"{what}: {name}", partial(ask, name)) for name in names}
        return {name: row for name, row in rows.items() if row is not None}

    def memory(self) -> Figures:
        """Returns a table for each number of ranks; every implementation in a process of its own."""
        names = self.settings.implementations([name for name in USUAL if name in IMPLEMENTATIONS])
        return {
            title: self._rows(title, names, partial(self._memory_of, ranks))
            for ranks in FAKE_RANKS
            for title in [f"memory, fake group of {ranks}"]
        }

    def _memory_of(self, ranks: int, name: str) -> Any:
        return run_fake(_memory, ranks, self.scale, name)

    def speed(self, title: str, case: str, dtype: str) -> Figures:
        """Returns one table; all implementations in one process, which take turns."""
        names = self.settings.implementations([name for name in USUAL if name in IMPLEMENTATIONS])
        arguments = (self.scale, case, names, dtype, self.settings.rounds)
        times = self._attempt(title, lambda: self._alone(_speed, arguments=arguments))
        return {title: compare(times, {PLAIN: (PLAIN,), "fsdp2": ("fsdp2",)})} if times else {}

    def offload(self) -> Figures:
        """Returns one table of competitors that were visited in turn."""
        names = self.settings.implementations([*OFFLOADED])
        visits = []
        for name in (*names, *reversed(names)):
            arguments = (self.scale, name, self.settings.rounds)
            row = self._attempt(f"offload: {name}", partial(self._alone, _offload, arguments=arguments))
            visits += [] if row is None else [(name, row)]
        return {"offload": in_turn(visits, parameters(self.scale.at("huge")))} if visits else {}

    def overlap(self) -> Figures:
        """Returns a table of our own by the process group, and one with all in host memory."""
        names = self.settings.implementations(OURS)
        return {
            title: self._rows(title, names, partial(self._overlap_of, offload))
            for title, offload in (("overlap", False), ("overlap, offload", True))
        }

    def _overlap_of(self, offload: bool, name: str) -> Any:
        return self._alone(_overlap, arguments=(self.scale, name, offload))

    def all(self) -> Figures:
        """Asks all questions that were chosen."""
        ways: dict[str, Callable[[], Figures]] = {
            "memory": self.memory,
            "small": lambda: self.speed("48 small units", "small", "float32"),
            "wide": lambda: self.speed("width 4096 in bf16", "wide", "bfloat16"),
            "offload": self.offload,
            "overlap": self.overlap,
        }
        figures: Figures = {}
        for case in self.settings.cases_of(CASES):
            figures |= ways[case]()
        return {title: table for title, table in figures.items() if table}


def ask(settings: Settings) -> Figures:
    """Asks at the scale of the machine; nothing where there is no CUDA device."""
    if not torch.cuda.is_available():
        print("skipped: there is no CUDA device")
        return {}
    free, total = torch.cuda.mem_get_info()
    scale = scale_for(free, host_memory())
    print(f"{torch.cuda.get_device_name()}, {free / GB:.0f} of {total / GB:.0f} GB free; {scale}", flush=True)
    return _Asking(scale, settings).all()


def ask_dry(settings: Settings) -> Figures:
    """Takes every way through the program on the CPU.

    Raises:
        RuntimeError: If one fails.
    """
    asking = _Asking(DRY, settings)
    figures = asking.all()
    if asking.failed:
        raise RuntimeError(f"failed: {', '.join(asking.failed)}")
    return figures


# Functions that other processes find by name.


def _memory(scale: Scale, name: str) -> dict[str, float]:
    return measure_memory(scale.at("memory"), name, scale.device)


def _speed(
    scale: Scale, case: str, names: list[str], dtype: str, rounds: int | None
) -> dict[str, list[float]]:
    return measure_speed(scale.at(case), names, scale.device, dtype, rounds)


def _offload(scale: Scale, name: str, rounds: int | None) -> dict[str, Any]:
    return measure_offload(name, scale.at("huge"), scale.device, rounds, scale.probe)


def _overlap(scale: Scale, name: str, offload: bool) -> dict[str, float]:
    return measure_overlap(name, scale.at("traced"), scale.device, offload)


QUESTION = Question(
    "gpu",
    "On a GPU",
    """\
One CUDA device. Memory: bytes above the sharded state in a step of a transformer on groups that send nothing,
in megabytes and in blocks of the model, and what the allocator reserves beyond that. Milliseconds of a step
at world size 1, of 48 small units and of wide ones in bf16, relative to the model without wrapping. Offload:
seconds of a step of a transformer whose parameters lie in host memory, as large as that allows (up to 3.2
billion), relative to the slowest of computing, copying either way and AdamW on the host at measured speeds.
Overlap: milliseconds a step of gathers and reductions on their streams, and the share of them during which
nothing is computed, from a trace; and how often the host waits for the GPU in a step. What a simulated GPU
tells of memory and of order is in `docs/architecture/streams.md`.""",
    ask,
    chart="/ fsdp2",
    cases=CASES,
    implementations=[*dict.fromkeys([*USUAL, *OFFLOADED])],
)


def main() -> int:
    """Asks as the command line says, prints tables and verdicts; returns the exit code."""
    parser = parser_of(QUESTION)
    parser.add_argument("--dry-run", action="store_true", help="on the CPU, at sizes that measure nothing")
    options = vars(parser.parse_args())
    if options.pop("dry_run"):
        ask_parsed(replace(QUESTION, ask=ask_dry), parser, options)
        print("\ndry run on the CPU at tiny sizes: these figures mean nothing, and no goal was judged")
        return 0
    if not torch.cuda.is_available():
        print("benchmarks.gpu needs a CUDA device and finds none (try --dry-run)", file=sys.stderr)
        return 2
    answered = ask_parsed(QUESTION, parser, options)
    goals = [goal for goal in GOALS if goal.place[0] == "gpu"]
    judged = verdicts({QUESTION.name: answered["figures"]}, goals)
    print("\n" + "\n".join(map(str, judged)))
    return 0 if all(verdict.met for verdict in judged) else 1


if __name__ == "__main__":
    sys.exit(main())
