"""Milliseconds of `import fsdp_wrap`: its own files, and what it needs beyond `import torch`; all take turns.

    python -m benchmarks.imports [--rounds 15]

Each import runs in a process of its own, and finds compiled files, which Python keeps after the first one.
"Own files" imports the package where all that it takes from elsewhere has been imported before.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence

GOAL = 60.0
"""Milliseconds that the package's own files may take."""

_TIMED = """
import importlib, sys, time
for name in sys.argv[2:]:
    importlib.import_module(name)
begin = time.perf_counter()
importlib.import_module(sys.argv[1])
print(time.perf_counter() - begin)
"""

_NEEDED = """
import sys, torch
import fsdp_wrap
print(*(name for name in sys.modules if not name.startswith(("fsdp_wrap", "__"))))
"""


def milliseconds(module: str, before: Sequence[str]) -> float:
    """Returns how long a new process takes to import a module once it has imported others."""
    return 1e3 * float(_printed(_TIMED, module, *before))


def needed() -> list[str]:
    """Returns the modules of others that the package imports, in their order."""
    return [name for name in _printed(_NEEDED).split() if _importable(name)]


def measure(rounds: int) -> dict[str, float]:
    """Returns the median of each case over rounds in which they take turns."""
    others = needed()
    cases = {
        "torch": ("torch", []),
        "torch.distributed.fsdp, after torch": ("torch.distributed.fsdp", ["torch"]),
        "fsdp_wrap, after torch": ("fsdp_wrap", ["torch"]),
        "fsdp_wrap, own files": ("fsdp_wrap", others),
    }
    times: dict[str, list[float]] = {name: [] for name in cases}
    for _ in range(rounds):
        for name, (module, before) in cases.items():
            times[name].append(milliseconds(module, before))
    return {name: statistics.median(durations) for name, durations in times.items()}


def _printed(code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    keeps = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.run(command, check=True, capture_output=True, text=True, env=keeps).stdout


def _importable(name: str) -> bool:
    """Whether a name of `sys.modules` is that of a file, and not of an object that somebody put there."""
    return getattr(sys.modules.get(name), "__spec__", True) is not None


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the medians; the status is 1 where the goal is missed."""
    parser = argparse.ArgumentParser(description="How long imports take.")
    parser.add_argument("--rounds", type=int, default=15)
    medians = measure(parser.parse_args(arguments).rounds)
    for name, median in medians.items():
        print(f"{name:40} {median:8.1f} ms")
    return int(medians["fsdp_wrap, own files"] > GOAL)


if __name__ == "__main__":
    sys.exit(main())
