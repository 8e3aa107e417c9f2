"""`fsdp-wrap plan FILE.py:setup`: the memory, communication and time of a step, without running it.

The function is as `fsdp_wrap.plan` takes it: it builds and shards the model, makes the optimizer, and returns
(model, optimizer, step). The status is 1 where a step does not fit into --device-memory.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsdp_wrap._core import format_bytes, memory_of
from fsdp_wrap.tools.command.users_code import errors_of, load_function
from fsdp_wrap.tools.fitting import fit
from fsdp_wrap.tools.machines import measure_machine, preset
from fsdp_wrap.tools.planning import Machine, Plan, plan
from fsdp_wrap.tools.planning.planner import MOST_RANKS
from fsdp_wrap.tools.progress import progress_bar

_MEASURED = "measure"
_MOST_PROPOSED, _DOUBLINGS = 3, 5
"""Configurations that are proposed, and how often the number of ranks is doubled."""


def add_command(commands: Any) -> None:
    """Adds `plan` to the command line."""
    command = commands.add_parser(
        "plan", help="the memory, communication and time of a step", description=__doc__
    )
    add = command.add_argument
    add("setup", metavar="FILE.py:setup", help="the function, and the file in which it is")
    add("--ranks", type=counts, default=[8], metavar="N,...", help="numbers of ranks; default: 8")
    add_machine_options(add)
    for former in ("--fit", "--vary"):
        add(former, nargs="?", const=True, action="append", help=argparse.SUPPRESS)
    add("--json", action="store_true", help="print JSON")
    add("--plot", type=Path, metavar="FILE", help="draw the step's memory, such as plan.svg")
    command.set_defaults(run=_run)


def add_machine_options(add: Callable[..., Any]) -> None:
    """Adds options for the device, its memory, and the machine."""
    add(
        "--device-memory",
        metavar="SIZE",
        help="memory of a rank's device, such as 80GB; default: the machine's",
    )
    add("--device", default=None, metavar="TYPE", help="cpu or cuda; need not exist here")
    machine = "the machine for predicted times: a preset's name, 'measure' for this one, or a JSON file"
    add("--machine", metavar="NAME", help=machine)
    add(
        "--attained",
        type=float,
        metavar="PART",
        help="fraction of a preset's peak that is reached, such as 0.6; default: a range",
    )
    add("--ranks-per-host", type=int, metavar="N", help="default: the machine's")


def counts(text: str) -> list[int]:
    """Parses numbers of ranks."""
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of ranks: write it as in 8,64,512")
    return counts


def _run(options: argparse.Namespace) -> int:
    if options.fit or options.vary:
        raise ValueError("--fit is a command of its own now, which takes --vary: fsdp-wrap fit FILE.py:setup")
    given, limit = given_machine(options)
    setup = load_function(options.setup)
    return _plan(setup, options, given, limit)


def given_machine(options: argparse.Namespace) -> tuple[dict[str, Any], int | None]:
    """Returns the arguments `device` and `machine` that options give, and the memory of a rank."""
    machine = _machine(options)
    if options.ranks_per_host is not None:
        if machine is None:
            raise ValueError("--ranks-per-host is for predictions of time: name a --machine")
        machine = dataclasses.replace(machine, ranks_per_host=options.ranks_per_host)
    memory = options.device_memory or (machine.device_memory if machine else None)
    limit = None if memory is None else memory_of(memory, "--device-memory")
    machine = machine and dataclasses.replace(machine, device_memory=limit)
    is_preset = options.machine not in (None, _MEASURED)  # of an accelerator
    given = {"device": options.device or ("cuda" if is_preset else "cpu"), "machine": machine}
    return given, limit


def _plan(
    setup: Callable[..., Any], options: argparse.Namespace, given: dict[str, Any], limit: int | None
) -> int:
    try:
        inspect.signature(setup).bind()
    except TypeError as error:
        raise ValueError(
            f"{options.setup}: {error}: give it a default, or call `fsdp-wrap fit --vary`"
        ) from error
    plans = []
    with progress_bar(len(options.ranks)) as bar:
        for ranks in options.ranks:
            bar.describe(f"planning {ranks} ranks")
            with errors_of(file_of(options), f"planning for {ranks} ranks"):
                plans.append(plan(setup, ranks, **given))
            bar.advance()
    if options.plot:
        for made in plans:
            made.plot(_numbered(options.plot, made.ranks, len(plans)))
    if options.json:
        print(json.dumps([json.loads(made.to_json()) for made in plans], indent=1))
    else:
        print(*plans, sep="\n\n")
    if limit is None:
        return 0
    fits = [made.needed_bytes <= limit for made in plans]
    if not options.json:
        print("", *(_format_verdict(made, limit) for made in plans), sep="\n")
        if not any(fits):
            print(*_proposals(setup, options, limit, given), sep="\n")
    return int(not all(fits))


def _format_verdict(made: Plan, limit: int) -> str:
    answer = "fits" if made.needed_bytes <= limit else "does not fit"
    return f"{made.ranks} ranks: {answer}, {format_bytes(made.needed_bytes)} of {format_bytes(limit)}"


def _proposals(
    setup: Callable[..., Any], options: argparse.Namespace, limit: int, given: dict[str, Any]
) -> list[str]:
    """Returns choices that fit: other values of the setup's arguments, on more ranks if needed."""
    least = max(options.ranks)
    for ranks in (least << doubled for doubled in range(_DOUBLINGS + 1) if least << doubled <= MOST_RANKS):
        with errors_of(file_of(options), "fitting"):
            answer = fit(setup, ranks, device_memory=f"{limit}B", progress=True, **given)
        if not answer.complete:  # its answers were printed as they were found
            raise KeyboardInterrupt
        if answer.best is not None:
            return [f"but {choice}" for choice in answer.choices[:_MOST_PROPOSED] if choice.fits]
    return [f"nor does it on {ranks} ranks: let setup() take batch or recipe"]


def _machine(options: argparse.Namespace) -> Any:
    name = options.machine
    path = Path(name or "")
    is_file = path.suffix == ".json" or path.is_file()
    if options.attained is not None and (name in (None, _MEASURED) or is_file):
        raise ValueError(
            "--attained is a part of a preset's peak: name a preset by --machine, or leave it out"
        )
    if name is None:
        return None
    if name == _MEASURED:
        with progress_bar(task="measuring this machine"):
            return measure_machine(options.device)
    if is_file:
        try:
            return Machine.from_dict(json.loads(path.read_text()))
        except OSError as error:
            raise ValueError(f"--machine {name}: {error.strerror}") from error
        except (ValueError, TypeError, AttributeError) as error:
            raise ValueError(f"--machine {name} does not describe a machine: {error}") from error
    return preset(name, attained=options.attained)


def file_of(options: argparse.Namespace) -> Path:
    return Path(options.setup.rpartition(":")[0])


def _numbered(path: Path, ranks: int, of: int) -> Path:
    return path if of == 1 else path.with_name(f"{path.stem}-{ranks}{path.suffix}")
