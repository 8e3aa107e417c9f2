"""`fsdp-wrap doctor`: checks this machine and torch, and how ranks will communicate.

Two ranks are started: they connect, communicate as the package chooses, and one of them is lost.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from packaging.requirements import Requirement
from packaging.version import Version

from fsdp_wrap._core import NEWEST_TORCH, OLDEST_TORCH, __version__, format_bytes, format_seconds
from fsdp_wrap.tools.command.meeting import Meeting, meet
from fsdp_wrap.tools.progress import progress_bar

_FEW_DESCRIPTORS = 1024
_SETTINGS = ("FSDP_WRAP_SHARED_MEMORY", "FSDP_WRAP_GLOO", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_FOR = {
    "safetensors": "reading safetensors",
    "matplotlib": "pictures of plans and timelines",
}
_CLIENTS = ("accelerate", "transformers", "lightning", "peft", "torchao", "torchtitan")


@dataclass(frozen=True)
class Finding:
    """One line of the report; `advice` is "" where all is well, `fatal` means that ranks cannot train."""

    name: str
    told: str
    advice: str = ""
    fatal: bool = False
    part: str = ""


def add_command(commands: Any) -> None:
    """Adds `doctor` to the command line."""
    command = commands.add_parser(
        "doctor", help="check this machine and torch, and how ranks will communicate", description=__doc__
    )
    command.add_argument("--json", action="store_true", help="print JSON")
    command.add_argument("--alone", action="store_true", help="start no ranks, which saves some seconds")
    command.set_defaults(run=_run)


def _run(options: argparse.Namespace) -> int:
    parts = {
        "versions": _versions(),
        "machine": _machine(),
        "torch.distributed": _backends(),
        "accelerators": _accelerators(),
        "packages": _packages(),
    }
    if not options.alone and dist.is_available() and dist.is_gloo_available():
        with progress_bar(task="starting two ranks"):
            parts["two ranks of this host, on the CPU"] = _ranks(meet())
    findings = [replace(finding, part=part) for part, members in parts.items() for finding in members]
    if options.json:
        print(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        _print(findings)
    return int(any(finding.fatal for finding in findings))


def _print(findings: list[Finding]) -> None:
    width = max(len(finding.name) for finding in findings)
    for part, members in groupby(findings, lambda finding: finding.part):
        print(part)
        for finding in members:
            print(f"{'!' if finding.advice else ' '} {finding.name.ljust(width)}  {finding.told}")
            if finding.advice:
                print(f"  {' ' * width}  -> {finding.advice}")
        print()
    advised = sum(bool(finding.advice) for finding in findings)
    print(f"{advised} of these could be better: see the lines with '!'" if advised else "all is well")


def _versions() -> Iterator[Finding]:
    installed = Version(torch.__version__)
    yield Finding("fsdp_wrap", __version__)
    yield Finding("python", f"{platform.python_version()}, {sys.executable}")
    told = f"{torch.__version__}; supported are {OLDEST_TORCH} to {NEWEST_TORCH}"
    minor, advice = Version(f"{installed.major}.{installed.minor}"), ""
    if minor < Version(OLDEST_TORCH):
        advice = f"install torch {OLDEST_TORCH} or newer: this one lacks what fsdp_wrap needs"
    elif minor > Version(NEWEST_TORCH):
        advice = "this one is newer than all versions that were tested: run the tests first"
    yield Finding("torch", told, advice, fatal=minor < Version(OLDEST_TORCH))


def _machine() -> Iterator[Finding]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Finding("system", f"{platform.system()} on {platform.machine()}, {cores} cores for this process")
    if hasattr(os, "sysconf"):
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        yield Finding("memory", format_bytes(memory))
    files, most_files = resource.getrlimit(resource.RLIMIT_NOFILE)
    few = 0 < files < _FEW_DESCRIPTORS
    advice = "raise it (ulimit -n 65536): many ranks open many sockets" if few else ""
    yield Finding("descriptors", _format_limits(files, most_files), advice)
    space, most_space = resource.getrlimit(resource.RLIMIT_AS)
    bound = space != resource.RLIM_INFINITY
    advice = "lift it (ulimit -v unlimited), or ranks may not share memory" if bound else ""
    yield Finding("address space", _format_limits(space, most_space), advice)
    if not os.access("/proc/self/fd", os.R_OK):
        advice = "mount it: without it ranks share no memory, and slow ranks are not named"
        yield Finding("/proc", "not readable", advice)
    for name in _SETTINGS:
        if name in os.environ:
            yield Finding(name, os.environ[name])


def _format_limits(soft: int, hard: int) -> str:
    now, most = ("unlimited" if limit == resource.RLIM_INFINITY else f"{limit:,}" for limit in (soft, hard))
    return f"{now} at most (may be raised to {most})"


def _backends() -> Iterator[Finding]:
    if not dist.is_available():
        advice = "install a torch that was built with it: fsdp_wrap communicates by it"
        yield Finding("available", "no", advice, fatal=True)
        return
    backends = [name for name in ("gloo", "nccl", "xccl", "ucc", "mpi") if dist.is_backend_available(name)]
    yield Finding("backends", ", ".join(backends) or "none")
    if "nccl" in backends and torch.cuda.is_available():
        nccl: Any = torch.cuda.nccl
        yield Finding("nccl", ".".join(map(str, nccl.version())))


def _accelerators() -> Iterator[Finding]:
    if not torch.accelerator.is_available():
        versions = {"CUDA": torch.version.cuda, "ROCm": torch.version.hip}
        built = [f"{name} {version}" for name, version in versions.items() if version] or ["the CPU"]
        told = f"none; this torch is built for {built[0]}. Models train on the CPU, over gloo"
        yield Finding("found", told)
        return
    kind = torch.accelerator.current_accelerator()
    count = torch.accelerator.device_count()
    yield Finding("found", f"{count} of type {kind}; models train there, over the backend of that type")
    for index in range(count if torch.cuda.is_available() else 0):
        device = torch.cuda.get_device_properties(index)
        told = f"{device.name}, {format_bytes(device.total_memory)}, capability {device.major}.{device.minor}"
        yield Finding(f"device {index}", told)


def _packages() -> Iterator[Finding]:
    wanted = _wanted()
    for name, purpose in {**_FOR, **dict.fromkeys(_CLIENTS, "a client")}.items():
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            yield Finding(name, f"not installed ({purpose})")
            continue
        asked = wanted.get(name)
        fits = asked is None or asked.specifier.contains(version, prereleases=True)
        advice = "" if fits else f"fsdp_wrap was tested with {name}{asked.specifier if asked else ''}"
        yield Finding(name, f"{version} ({purpose})", advice)


def _wanted() -> dict[str, Requirement]:
    """Returns the requirements of this library's extras; none where it is not installed."""
    try:
        lines = metadata.requires("fsdp-wrap") or []
    except metadata.PackageNotFoundError:
        return {}
    return {requirement.name: requirement for requirement in map(Requirement, lines)}


def _ranks(met: Meeting) -> Iterator[Finding]:
    """Yields the findings of two ranks of this host."""
    if met.error:
        advice = "name the network device that ranks should use, such as GLOO_SOCKET_IFNAME=lo on one host"
        yield Finding("meeting", met.error, advice, fatal=True)
        return
    yield Finding("meeting", "they found each other over the loopback device")
    speed = f"{format_bytes(met.bandwidth)}/s, {format_seconds(met.latency)} at least"
    way = met.way or "gloo's own collectives"
    slow = "; ".join(met.warnings)
    yield Finding("communicate by", f"{way}: {speed}", slow)
    told = "a rank that ends is noticed, and named" if met.watched else "the end of a rank was not noticed"
    advice = "" if met.watched else "the others would wait for a lost rank until the group's time limit"
    yield Finding("watch", told, advice)
