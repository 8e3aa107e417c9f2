"""Records the public names and signatures of the package, so that no change of them goes unnoticed.

    python docs/public_api.py            writes public_api/now.txt
    python docs/public_api.py --release  writes public_api/release.txt too, of the version that is released

A line is a name with its arguments and defaults, without types. What classes have from torch is left out:
it differs from version to version. Fields of FSDP's configurations are recorded, as these are ours.
`tests/core/test_api_table.py` compares the files with the package, and what changed between them with
CHANGELOG.md.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).with_name("public_api")
NOW, RELEASE = FOLDER / "now.txt", FOLDER / "release.txt"
CHANGELOG = Path(__file__).resolve().parents[1] / "CHANGELOG.md"

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")


def public_modules(package: ModuleType) -> Iterator[ModuleType]:
    """Yields a package and its modules that export names, save those below a name with an underscore."""
    yield package
    for info in pkgutil.iter_modules(package.__path__, f"{package.__name__}."):
        if info.name.rpartition(".")[2].startswith("_"):
            continue
        module = importlib.import_module(info.name)
        if info.ispkg:
            yield from public_modules(module)
        elif hasattr(module, "__all__"):
            yield module


def lines_of(package: ModuleType) -> list[str]:
    """Returns the record of a package."""
    return [
        line
        for module in public_modules(package)
        for name in sorted(getattr(module, "__all__", []))
        for line in described(f"{module.__name__}.{name}", getattr(module, name), package.__name__)
    ]


def described(path: str, thing: Any, package: str) -> Iterator[str]:
    """Yields the lines of one exported thing."""
    if isinstance(thing, type):
        yield from _class_lines(path, thing, package)
    elif inspect.isfunction(thing):
        yield path + _arguments(thing)
    else:
        yield path


def _class_lines(path: str, cls: type, package: str) -> Iterator[str]:
    if issubclass(cls, Enum):
        yield from (f"{path}.{member.name} = {member.value!r}" for member in cls)
        return
    own = [base for base in cls.__mro__ if _is_own(base, package)]
    makes = next(
        (vars(base)[name] for base in own for name in ("__init__", "__new__") if name in vars(base)), None
    )
    yield path + (_arguments(makes) if inspect.isfunction(makes) else "")
    members = {name: member for base in reversed(own) for name, member in vars(base).items()}
    for name, member in sorted(members.items()):
        if not name.startswith("_"):
            function = getattr(member, "__func__", member)
            yield f"{path}.{name}" + (_arguments(function) if inspect.isfunction(function) else "")


def _is_own(cls: type, package: str) -> bool:
    """Whether a class is the package's, or a configuration of torch's FSDP."""
    of_fsdp = cls.__module__.startswith("torch.distributed.fsdp") and dataclasses.is_dataclass(cls)
    return of_fsdp or cls.__module__.split(".")[0] == package


def _arguments(function: Any) -> str:
    named = inspect.signature(function).parameters.items()
    params = [param for name, param in named if name not in ("self", "cls")]
    plain = [param.replace(annotation=param.empty, default=_Shown.of(param)) for param in params]
    return str(inspect.Signature(plain))


class _Shown:
    """Stands for a default, and looks as it was written, in every version of Python and torch."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text

    @classmethod
    def of(cls, parameter: inspect.Parameter) -> Any:
        """Returns what stands for a parameter's default, or that it has none."""
        value = parameter.default
        if value is parameter.empty:
            return value
        if isinstance(value, Enum):
            return cls(f"{type(value).__name__}.{value.name}")
        if isinstance(value, type) or inspect.isfunction(value):
            return cls(value.__name__)
        if dataclasses.is_dataclass(value):
            return cls(f"{type(value).__name__}(...)")
        return cls(_ADDRESS.sub("", repr(value)))


def changed(before: list[str], now: list[str]) -> set[str]:
    """Returns the last parts of the names that came, went or have other arguments."""
    paths = (re.split(r"[( ]", line)[0] for line in set(before) ^ set(now))
    return {path.rpartition(".")[2] for path in paths}


def unreleased(changelog: str) -> str:
    """Returns what a changelog says of changes since the last release."""
    return changelog.partition("\n## [Unreleased]")[2].partition("\n## [")[0]


def untold(before: list[str], now: list[str], changelog: str) -> list[str]:
    """Returns the changed names that the changelog's section of changes since the release does not have."""
    told = set(re.findall(r"\w+", unreleased(changelog)))
    return sorted(changed(before, now) - told)


def read(path: Path) -> list[str]:
    """Reads a record; the first line is the version."""
    return path.read_text().splitlines()[1:]


def main(arguments: list[str]) -> int:
    """Writes the record; returns the exit status, 1 where changes are not told."""
    sys.path.insert(0, str(CHANGELOG.parent))  # of this checkout
    package = importlib.import_module("fsdp_wrap")
    FOLDER.mkdir(exist_ok=True)
    lines = lines_of(package)
    for path in [NOW, RELEASE] if "--release" in arguments else [NOW]:
        path.write_text("\n".join([f"# fsdp_wrap {package.__version__}", *lines]) + "\n")
    missing = untold(read(RELEASE), lines, CHANGELOG.read_text()) if RELEASE.exists() else []
    if missing:
        print(f"tell of {', '.join(missing)} under [Unreleased] in {CHANGELOG.name}", file=sys.stderr)
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
