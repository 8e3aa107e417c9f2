"""Runs programs that were written for torch's wrapper, unchanged, on this one.

`install()` makes the names of torch's wrapper resolve to ours, by rebinding attributes in place: those of
torch's own modules, and those of every module that has imported them already. FSDP2's names stay as they are,
unless `install(fully_shard=True)` makes them resolve to our `fully_shard` and what belongs to it. Names of
enums and configurations stay as they are in any case, since we take torch's.
Torch's private helpers that programs call for a wrapper (`compat/helpers.py`) answer for ours as well.
From the command line: `python -m fsdp_wrap.compat [--fully-shard] [--cpu] script.py arguments...`, or
`-m module` in place of the script.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from typing import Any

from torch.distributed import fsdp as torch_fsdp
from torch.distributed.fsdp import api as torch_api
from torch.distributed.fsdp import fully_sharded_data_parallel as torch_wrapper
from torch.distributed.fsdp import sharded_grad_scaler as torch_scaler
from torch.distributed.fsdp import wrap as torch_wrap

import fsdp_wrap
from fsdp_wrap import api, sharded_grad_scaler, wrap
from fsdp_wrap._core.torch_private import torch_fully_shard
from fsdp_wrap.compat._checking import report, warn_of_held
from fsdp_wrap.compat.clients import adapt_clients
from fsdp_wrap.compat.fully_shard_state import adapt_fully_shard
from fsdp_wrap.compat.helpers import HELPERS
from fsdp_wrap.compat.installation import Installation

__all__ = ["Installation", "install", "main", "missing", "replacements", "uninstall"]

_KEPT = (f"{torch_fsdp.__name__}._", "fsdp_wrap.")
"""Torch's own runtime, FSDP2 and this package hold what they held, save for the helpers."""


def _wrapper_names() -> dict[str, Any]:
    """Returns the public names of torch's wrapper with what they stand for before any installation.

    Without enums and configurations, which are ours as well.
    """
    public = {"FlatParameter": torch_fsdp, "ShardedGradScaler": torch_scaler}
    others = {*torch_fully_shard.__all__, *api.__all__}
    for module in (torch_fsdp, torch_api, torch_wrap, torch_wrapper):
        public.update((name, module) for name in module.__all__ if name not in others)
    return {name: getattr(module, name) for name, module in public.items()}


_WRAPPER_NAMES = _wrapper_names()


def replacements() -> dict[str, tuple[Any, Any]]:
    """Returns (torch's, ours) for every public name of torch's wrapper for which we have another object."""
    ours = {
        name: value
        for module in (fsdp_wrap, wrap, sharded_grad_scaler)
        for name, value in vars(module).items()
    }
    return {name: (old, ours[name]) for name, old in _WRAPPER_NAMES.items() if name in ours}


def missing() -> set[str]:
    """Returns the public names of torch's wrapper that we do not have: they stay torch's."""
    return _WRAPPER_NAMES.keys() - replacements().keys()


_installations: list[Installation] = []


def install(cpu: bool = False, fully_shard: bool = False) -> Installation:
    """Makes the names of torch's wrapper resolve to ours, in all loaded modules and for later imports.

    Call it before anything is wrapped. A further call changes what has come since. With it, peft saves and
    loads the adapters of nested wrappers, too, which it would miss by their names, and on all ranks.

    It rebinds names of loaded modules. A warning names other objects of theirs that hold torch's, such as a
    subclass, or a default of an argument: these stay as they are.

    Args:
        cpu: Let accelerate (with it transformers' `Trainer`) and Lightning accept FSDP on a host without
            accelerators, over gloo. They refuse it otherwise.
        fully_shard: Let the names of FSDP2 (`fully_shard`, `FSDPModule`, `UnshardHandle` and so on) resolve
            to ours as well. Modules that it has sharded are instances of torch's `FSDPModule`, too.

    Returns:
        A context manager that takes the changes of this call back, if used in a `with` statement.
    """
    installation = Installation()
    pairs = [*replacements().values()]
    installation.replace(pairs, kept=_KEPT)
    installation.replace(HELPERS, kept=("fsdp_wrap.",))
    if fully_shard:
        pairs += adapt_fully_shard(installation)
    adapt_clients(installation, cpu)
    warn_of_held(old for old, _ in pairs)
    _installations.append(installation)
    return installation


def uninstall() -> None:
    """Takes back what all calls of `install` have changed."""
    while _installations:
        _installations.pop().end()


def main(arguments: list[str] | None = None) -> None:
    """Runs a script, or a module, in which the names of torch's wrapper stand for those of fsdp_wrap.

    With `--check` it runs nothing: it prints which names of torch's FSDP installed packages use, and which of
    these are served. It exits with 1 if one is not.

    Args:
        arguments: The command's words; None for those of this process.
    """
    parser = argparse.ArgumentParser(prog="python -m fsdp_wrap.compat", description=main.__doc__)
    packages = "tell the names of torch's FSDP that packages use (all installed ones, if none is given)"
    parser.add_argument("--check", nargs="*", metavar="PACKAGE", help=packages)
    parser.add_argument("--cpu", action="store_true", help="let clients accept a host without accelerators")
    parser.add_argument("--fully-shard", action="store_true", help="let FSDP2's names stand for ours, too")
    parser.add_argument("-m", action="store_true", dest="by_name", help="the script is a module's name")
    parser.add_argument("script", nargs="?", help="a file of Python code")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the script gets")
    given = parser.parse_args(arguments)
    if given.check is not None:
        sys.exit(report(given.check, lambda: install(fully_shard=True)))
    if given.script is None:
        parser.error("the following arguments are required: script")
    install(given.cpu, given.fully_shard)
    sys.argv = [given.script, *given.arguments]
    if given.by_name:
        runpy.run_module(given.script, run_name="__main__", alter_sys=True)
        return
    sys.path[0] = os.path.dirname(os.path.abspath(given.script))
    runpy.run_path(given.script, run_name="__main__")
