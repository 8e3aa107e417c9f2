"""Ports of this machine that nobody listens at."""

from __future__ import annotations

import socket


def free_port() -> int:
    """Returns one; another program may take it before the caller does."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])
