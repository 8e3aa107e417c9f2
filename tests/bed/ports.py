"""Ports of this machine that nobody listens at."""

from __future__ import annotations

import socket
from random import SystemRandom

_RANGE = range(12_000, 32_000)
"""Where systems choose no port by themselves, so that no connection takes one before its caller listens."""


def free_port() -> int:
    """Returns a free port at random, since other processes look for one too."""
    while True:
        with socket.socket() as probe:
            try:
                probe.bind(("localhost", port := SystemRandom().choice(_RANGE)))
            except OSError:  # taken
                continue
            return port
