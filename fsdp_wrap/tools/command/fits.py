"""`fsdp-wrap fit FILE.py:setup`: whether a step fits into memory, with which recipe and batch, and how fast.

The function is as `fsdp_wrap.fit` takes it. The status is 1 where nothing fits.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fsdp_wrap.tools.command.plans import add_machine_options, counts, file_of, given_machine
from fsdp_wrap.tools.command.users_code import errors_of, load_function
from fsdp_wrap.tools.fitting import fit
from fsdp_wrap.tools.machines import correct_machine
from fsdp_wrap.tools.planning import plan
from fsdp_wrap.tools.setups import keywords_of
from fsdp_wrap.tools.timeline.recording import load


def add_commands(commands: Any) -> None:
    """Adds `fit` to the command line, and `tune`, its former name."""
    command = commands.add_parser("fit", help="what fits, and the fastest recipe", description=__doc__)
    former = commands.add_parser("tune", description="The former name of fit, for one release.")
    for parser, run in ((command, _run), (former, _run_former)):
        add = parser.add_argument
        add("setup", metavar="FILE.py:setup", help="the function, and the file in which it is")
        add("--ranks", type=counts, default=[8], metavar="N,...", help="numbers of ranks; default: 8")
        add_machine_options(add)
        vary = "values of an argument of the setup; may be repeated"
        add("--vary", action="append", default=[], metavar="NAME=A,B,...", help=vary)
        add(
            "--timeline",
            type=Path,
            metavar="FILE",
            help="a recording of the setup's own step, which corrects the machine",
        )
        add("--out", type=Path, metavar="FILE", help="write the recipe of the fastest, such as recipe.json")
        add("--json", action="store_true", help="print JSON")
        parser.set_defaults(run=run)
    former.add_argument("--ran", help=argparse.SUPPRESS)


def _run_former(options: argparse.Namespace) -> int:
    print("warning: fsdp-wrap tune is fsdp-wrap fit now: call that", file=sys.stderr)
    if options.ran is not None:
        raise ValueError(
            "--ran is gone: --timeline is of the setup's own step; for another recipe call correct_machine()"
        )
    return _run(options)


def _run(options: argparse.Namespace) -> int:
    given, limit = given_machine(options)
    if limit is None:
        raise ValueError("fit needs --device-memory, such as 80GB, or a --machine with a known memory")
    setup = load_function(options.setup)
    taken = keywords_of(setup)
    if options.out is not None and taken is not None and "recipe" not in taken:
        raise ValueError(f"--out writes a recipe, and {options.setup} takes none: add recipe=Recipe() to it")
    vary = dict(_varied(text) for text in options.vary)
    with errors_of(file_of(options), "fitting"):
        if options.timeline is not None:
            own = plan(setup, options.ranks[0], **given)
            given["machine"] = correct_machine(own, load(options.timeline))
        answer = fit(setup, options.ranks, device_memory=f"{limit}B", vary=vary, progress=True, **given)
    print(answer.to_json() if options.json else answer)
    if options.out is not None and answer.best is not None and answer.best.recipe is not None:
        answer.best.recipe.to_json(options.out)
    if not answer.complete:
        raise KeyboardInterrupt
    return int(answer.best is None)


def _varied(text: str) -> tuple[str, Sequence[Any]]:
    """Parses NAME=A,B: numbers, True, False and None as in Python, all else as text."""
    name, equals, values = text.partition("=")
    if not equals or not name.isidentifier() or not values:
        raise ValueError(f"--vary {text!r} names no values: write NAME=A,B,..., as in length=2048,4096")
    return name, [_value(part) for part in values.split(",")]


def _value(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
