"""Two hosts on one machine: network namespaces with a link between them, for ranks to move into.

They are those of two processes that sleep, and vanish with them.
"""

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

_CLONE_NEWNET = 0x40000000
_LINK = "between"


@dataclass(frozen=True)
class Host:
    """One of the two; `pid` is of the process whose namespace it is."""

    pid: int

    def enter(self) -> None:
        """Moves the calling thread there, and the threads that it starts from now on."""
        handle = os.open(f"/proc/{self.pid}/ns/net", os.O_RDONLY)
        try:
            if ctypes.CDLL(None, use_errno=True).setns(handle, _CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), "cannot enter a network namespace")
        finally:
            os.close(handle)
        os.environ["GLOO_SOCKET_IFNAME"] = _LINK  # ranks of one host meet there as well, within the kernel


def sent_bytes() -> int:
    """Returns how many bytes have left the calling thread's host."""
    for line in Path("/proc/thread-self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == _LINK:
            return int(counts.split()[8])
    raise AssertionError("this thread is not on one of the two hosts")


@contextlib.contextmanager
def two_hosts() -> Iterator[list[Host]]:
    """Makes two hosts; skips the test where that is not allowed."""
    for tool in ("ip", "unshare", "nsenter"):
        if shutil.which(tool) is None:
            pytest.skip(f"simulating hosts needs the program {tool}")
    with contextlib.ExitStack() as stack:
        hosts = [stack.enter_context(_namespace()) for _ in range(2)]
        _run(f"ip link add {_LINK} netns {hosts[0].pid} type veth peer name {_LINK} netns {hosts[1].pid}")
        for number, host in enumerate(hosts, 1):
            inside = f"nsenter --target {host.pid} --net"
            _run(f"{inside} ip address add 10.87.0.{number}/24 dev {_LINK}")
            for device in ("lo", _LINK):
                _run(f"{inside} ip link set {device} up")
        yield hosts


@contextlib.contextmanager
def _namespace() -> Iterator[Host]:
    holder = subprocess.Popen(
        ["unshare", "--net", "sh", "-c", "echo there; exec sleep 3600"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with holder:
        assert holder.stdout is not None and holder.stderr is not None
        try:
            if holder.stdout.readline() != "there\n":
                pytest.skip(f"network namespaces are not allowed here: {holder.stderr.read().strip()}")
            yield Host(holder.pid)
        finally:
            holder.kill()


def _run(command: str) -> None:
    subprocess.run(command.split(), check=True, capture_output=True, text=True)
