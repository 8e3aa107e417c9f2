"""Counts the files and functions of the package that construction and a training step enter.

    python tests/tools/walk.py [--list]

Four units of one linear layer each, and their root, on two ranks over gloo, with the default options, but
without shared memory, without batches of collectives, and with the optimizer's own step. Rank 0 traces the
sharding of the model and its third step, in fresh processes for each front-end: functions of `fsdp_wrap`, and
for comparison those of `torch.distributed` under torch's `fully_shard`. `--list` prints the functions in
order of first entry.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import math
import sys
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple

import torch
from torch import nn

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS)]

import fsdp_wrap  # noqa: E402
from bed import run_isolated  # noqa: E402
from fsdp_wrap._comm.positions import log_files  # noqa: E402
from fsdp_wrap.optim import steps_on_shards  # noqa: E402

UNITS, WIDTH = 4, 8
PLAIN: dict[str, Any] = {"shared_memory": False, "travel_together_bytes": 0}
TORCHS = "torch's fully_shard"
_BODIES = {"<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>"}
"""Names of code that is part of the function around it."""


class Walk(NamedTuple):
    """Functions in order of first entry, as `(file, qualified name)`, and the number of all calls."""

    functions: list[tuple[str, str]]
    calls: int

    @property
    def files(self) -> list[str]:
        """The files of the functions, in order of first entry."""
        return [*dict.fromkeys(file for file, _ in self.functions)]


def _wrap(model: nn.Sequential, **options: Any) -> nn.Module:
    wrapper: Callable[..., nn.Module] = partial(fsdp_wrap.FullyShardedDataParallel, **options, **PLAIN)
    return wrapper(nn.Sequential(*map(wrapper, model)))


def _shard(fully_shard: Callable[..., Any], model: nn.Sequential, **options: Any) -> nn.Module:
    for module in (*model, model):
        fully_shard(module, **options)
    return model


def _shard_as_torch(model: nn.Sequential) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    return _shard(fully_shard, model, mesh=init_device_mesh("cpu", (2,)))


FRONTS: dict[str, Callable[[nn.Sequential], nn.Module]] = {
    "flat": partial(_wrap, use_orig_params=False),
    "original": partial(_wrap, use_orig_params=True),
    "fully_shard": partial(_shard, fsdp_wrap.fully_shard, **PLAIN),
    TORCHS: _shard_as_torch,
}


def walk(rank: int, world_size: int, front: str) -> dict[str, Walk]:
    """Traces the construction and the third step of a front-end, in a rank of a process group."""
    package = torch.distributed if front == TORCHS else fsdp_wrap
    (folder,) = package.__path__
    torch.manual_seed(0)
    log_files._LEFT_OVER_AFTER = math.inf  # files of other runs on this host are not on the way
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(UNITS)))
    steps_on_shards(False)  # the step is torch's
    constructed, sharded = _traced(partial(FRONTS[front], model), f"{folder}/")
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    inputs = torch.randn(2, WIDTH)

    def step() -> None:
        sharded(inputs).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    step()
    return {"construct": constructed, "step": _traced(step, f"{folder}/")[0]}


def _traced(function: Callable[[], Any], counted: str) -> tuple[Walk, Any]:
    """Calls a function; returns what it enters of the files that are counted, and its result."""
    entered: dict[CodeType, None] = {}
    calls = 0

    def trace(frame: Any, event: str, argument: object) -> None:
        nonlocal calls
        code = frame.f_code
        is_function = code.co_flags & inspect.CO_NEWLOCALS and code.co_name not in _BODIES
        if event == "call" and is_function and code.co_filename.startswith(counted):
            entered[code] = None
            calls += 1

    gc.collect()
    gc.disable()  # what it frees of earlier models is no part of this
    sys.setprofile(trace)  # on the CPU a backward runs in this thread as well
    try:
        result = function()
    finally:
        sys.setprofile(None)
        gc.enable()
    names = [
        (code.co_filename.removeprefix(counted), getattr(code, "co_qualname", code.co_name))
        for code in entered
    ]
    return Walk(names, calls), result


def _lines_of_rank(rank: int, world_size: int, front: str, folder: str) -> dict[str, set[int]]:
    """Traces a build and four steps; returns the lines that are entered in a folder, by file."""
    (package,) = fsdp_wrap.__path__
    entered: defaultdict[str, set[int]] = defaultdict(set)

    def trace(frame: Any, event: str, argument: object) -> Any:
        name = frame.f_code.co_filename.removeprefix(f"{package}/")
        if not name.startswith(f"{folder}/"):
            return None
        entered[name].add(frame.f_lineno)
        return trace

    torch.manual_seed(0)
    inputs = torch.randn(2, WIDTH)
    sys.settrace(trace)  # on the CPU a backward runs in this thread as well
    try:
        sharded = FRONTS[front](nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(UNITS))))
        optimizer = torch.optim.AdamW(sharded.parameters())
        for _ in range(4):
            sharded(inputs).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    finally:
        sys.settrace(None)
    return dict(entered)


def lines_entered(folder: str) -> dict[str, set[int]]:
    """Returns the lines of a folder that a plain program enters, by file: on rank 0, with any front-end."""
    entered: defaultdict[str, set[int]] = defaultdict(set)
    for front in FRONTS.keys() - {TORCHS}:
        outcome, _ = run_isolated(_lines_of_rank, front, folder, world_size=2)
        if outcome.kind != "passed":
            raise SystemExit(f"{front}: {outcome.headline}\n{outcome.text}")
        for name, lines in outcome.value.items():
            entered[name] |= lines
    return entered


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--list", action="store_true", help="print the functions in order of first entry")
    options = parser.parse_args()
    print(f"{'front-end':22}{'':12}{'files':>7}{'functions':>11}{'calls':>7}")
    for front in FRONTS:
        outcome, _ = run_isolated(walk, front, world_size=2)
        if outcome.kind != "passed":
            raise SystemExit(f"{front}: {outcome.headline}\n{outcome.text}")
        for name, entered in outcome.value.items():
            _print_row(front, name, entered)
            if front == TORCHS:
                own = [function for function in entered.functions if function[0].startswith("fsdp/")]
                _print_row("  its files in fsdp/", name, Walk(own, 0))
            for file, function in entered.functions if options.list else ():
                print(f"    {file:40} {function}")


def _print_row(front: str, name: str, entered: Walk) -> None:
    calls = entered.calls or ""
    print(f"{front:22}{name:12}{len(entered.files):7}{len(entered.functions):11}{calls:>7}")


if __name__ == "__main__":
    main()
