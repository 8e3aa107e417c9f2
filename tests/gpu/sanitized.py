"""Programs under torch's CUDA sanitizer, in a process of its own: python tests/gpu/sanitized.py [NAME ...]

The sanitizer must be on before anything else happens on the GPU. It tells when two kernels on different
streams touch the same tensor and nothing orders them. `race` is a program with such a fault, which must fail;
`ordered` is the same without.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

os.environ["NCCL_SOCKET_IFNAME"] = os.environ["GLOO_SOCKET_IFNAME"] = "lo"
ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "gpu")]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

HAS_GPU = torch.cuda.is_available()
if HAS_GPU:
    from torch.cuda._sanitizer import CUDASanitizerErrors, enable_cuda_sanitizer

    enable_cuda_sanitizer()
else:
    CUDASanitizerErrors = AssertionError  # type: ignore[misc, assignment]

from benchmarks.implementations import over_the_group  # noqa: E402
from stream_programs import PROGRAMS  # noqa: E402

_MORE_RANKS = ("hybrid", "kept_within_a_host", "summons-first")
NAMES = [name for name in PROGRAMS if not name.startswith(_MORE_RANKS)]


class Device:
    """A real device, as the programs ask a simulated one."""

    group_has_stream = False

    def __init__(self) -> None:
        self._streams: dict[str, Any] = {}

    @property
    def compute(self) -> Any:
        return torch.accelerator.current_stream() if HAS_GPU else _no_stream()

    def stream(self, name: str) -> Any:
        if name not in self._streams:
            self._streams[name] = torch.Stream("cuda") if HAS_GPU else _no_stream()
        return self._streams[name]

    def end_step(self) -> None:
        if HAS_GPU:
            torch.cuda.synchronize()

    aside = staticmethod(nullcontext)


def _no_stream() -> Any:
    """What stands for a stream where there is none, so that programs run on the CPU."""
    return mock.MagicMock(**{"__exit__.return_value": False})


def race(rank: int, device: Device) -> None:
    """Two streams that nothing orders write to one tensor."""
    values = torch.ones(1 << 20, device="cuda" if HAS_GPU else "cpu")
    with device.stream("side"):
        values.mul_(2)
    if not HAS_GPU:
        raise CUDASanitizerErrors("a race, were there a GPU")  # type: ignore[arg-type]


def ordered(rank: int, device: Device) -> None:
    """The same, with an event."""
    values = torch.ones(1 << 20, device="cuda" if HAS_GPU else "cpu")
    side, before = device.stream("side"), device.compute
    side.wait_stream(before)
    with side:
        values.mul_(2)
        done = side.record_event()
    before.wait_event(done)
    values.add_(1)


ALL = {"race": race, "ordered": ordered} | {name: program for name, (_, program) in PROGRAMS.items()}


def run(name: str, alone: bool) -> None:
    """Runs one program as the only rank of a group.

    Args:
        name: Of the program.
        alone: Whether the rank copies what several would send; otherwise it asks its group.
    """
    program: Callable[[int, Any], object] = ALL[name]
    with over_the_group(not alone):
        program(0, Device())
    if HAS_GPU:
        torch.cuda.synchronize()


def main(names: list[str]) -> int:
    """Runs programs in both ways; returns how many the sanitizer, or anything else, objects to."""
    dist.init_process_group("nccl" if HAS_GPU else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    failed = 0
    for name in names or NAMES:
        for alone in (True, False):
            try:
                torch.manual_seed(0)
                run(name, alone)
            except CUDASanitizerErrors as race:
                failed += 1
                print(f"{name}: order: {race}", flush=True)
            except Exception:
                failed += 1
                print(f"{name}: {traceback.format_exc()}", flush=True)
    print(f"{len(names or NAMES)} programs, {failed} failed", flush=True)
    dist.destroy_process_group()
    return failed


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 99))
