"""A receiver of weights: takes them until the sender ends, then prints the checksums of what it has.

python -m benchmarks.following HOST:PORT
"""

from __future__ import annotations

import json
import sys

import torch

from examples.lm.weight_channel import Pair, received
from fsdp_wrap.weights import checksum


def follow(address: str, timeout: float = 120.0) -> dict[str, torch.Tensor]:
    """Returns what is there when the sender has ended; waits for it so many seconds at most."""
    state: dict[str, torch.Tensor] = {}
    for message in received(Pair(address, receives=True, timeout=timeout)):
        if message.whole:
            state = {meta.name: torch.empty(meta.shape, dtype=meta.dtype) for meta in message.metadata}
        message.apply(state)
    return state


if __name__ == "__main__":
    print(json.dumps({name: checksum(value) for name, value in follow(sys.argv[1]).items()}))
