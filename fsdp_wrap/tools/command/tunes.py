"""`fsdp-wrap tune FILE.py:setup`: the fastest recipe of a step that fits into memory, without running it.

The function is as `fsdp_wrap.tune` takes it. The status is 2 where no recipe fits.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fsdp_wrap.tools.command.plans import add_machine_options, file_of, given_machine
from fsdp_wrap.tools.command.users_code import errors_of, load_function
from fsdp_wrap.tools.timeline.recording import load
from fsdp_wrap.tools.tuning import Recipe, tune


def add_command(commands: Any) -> None:
    """Adds `tune` to the command line."""
    command = commands.add_parser("tune", help="the fastest recipe that fits", description=__doc__)
    add = command.add_argument
    add("setup", metavar="FILE.py:setup", help="the function, and the file in which it is")
    add("--ranks", type=int, default=8, metavar="N", help="number of ranks; default: 8")
    add_machine_options(add)
    add("--timeline", type=Path, metavar="FILE", help="a recording of the step, which corrects the machine")
    add("--ran", type=Path, metavar="FILE", help="the recipe of that recording; default: the setup's own")
    add("--out", type=Path, metavar="FILE", help="write the recipe, such as recipe.json")
    add("--json", action="store_true", help="print JSON")
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    given, limit = given_machine(options)
    if given["machine"] is None:
        raise ValueError("tune compares predicted times: name a --machine")
    recorded = None if options.timeline is None else load(options.timeline)
    ran = None if options.ran is None else Recipe.from_json(options.ran.read_text())
    setup = load_function(options.setup)
    memory = None if limit is None else f"{limit}B"
    with errors_of(file_of(options), "tuning"):
        found = tune(setup, options.ranks, memory=memory, timeline=recorded, ran=ran, progress=True, **given)
    text = found.to_json(options.out)
    print(text if options.json else found)
    return 0
