"""The parser of all commands. An error is printed in one line.

The exit status is 0, 1 where an inspected thing is damaged or does not work, and 2 on wrong input.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
import warnings
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from fsdp_wrap._core import __version__
from fsdp_wrap.tools.command import doctor, fits, plans, timelines
from fsdp_wrap.tools.command.users_code import UsersError, load_function
from fsdp_wrap.tools.drawing import drawn

_INTERRUPTED = 130  # as shells have it


def main(arguments: list[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: Without the program's name; None for the process's own.

    Returns:
        The exit status.

    Raises:
        SystemExit: On arguments that are none of a command's, with status 2.
    """
    options = _parser().parse_args(arguments)
    try:
        with warnings.catch_warnings():
            setattr(warnings, "formatwarning", _as_one_line)  # noqa: B010  # mypy admits no assignment
            return int(options.run(options))
    except BrokenPipeError:  # the reader of the output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return _INTERRUPTED
    except Exception as error:
        if options.traceback:
            traceback.print_exc()
        else:
            print(f"error: {_format_error(error)}", file=sys.stderr)
        return 2 if isinstance(error, (ValueError, TypeError, UsersError)) else 1


def _format_error(error: Exception) -> str:
    if isinstance(error, (ValueError, TypeError, RuntimeError, OSError, ImportError, UsersError)):
        return str(error)
    return f"{type(error).__name__}: {error}; --traceback shows where"


def _as_one_line(message: Any, category: type[Warning], *_: Any) -> str:
    return f"warning: {message}\n"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="fsdp-wrap", description="Look at a training step, a checkpoint or a machine without training."
    )
    parser.add_argument("--version", action="version", version=f"fsdp-wrap {__version__}")
    parser.add_argument("--traceback", action="store_true", help="show where an error was raised")
    commands = parser.add_subparsers(
        required=True, metavar="plan|fit|timeline|values|verify|checkpoint|doctor"
    )
    plans.add_command(commands)
    fits.add_commands(commands)
    timelines.add_commands(commands)
    _add_values(commands)
    _add_checkpoint(commands)
    doctor.add_command(commands)
    return parser


def _add_values(commands: Any) -> None:
    """Adds the commands of recorded values, which are an add-on and may be left out."""
    if find_spec("fsdp_wrap._values") is not None:
        import_module("fsdp_wrap._values.command").add_commands(commands, drawn, load_function)


def _add_checkpoint(commands: Any) -> None:
    """Adds the commands of the checkpoint folder, which is an add-on and may be left out."""
    if find_spec("fsdp_wrap.checkpoint") is None:
        return
    command = commands.add_parser("checkpoint", help="inspect a checkpoint, or convert it")
    import_module("fsdp_wrap.checkpoint._command").add_commands(command)
