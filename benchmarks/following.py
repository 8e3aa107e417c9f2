"""A receiver of weights: takes updates until the sender ends, then prints the checksums of what it has.

python -m benchmarks.following gloo HOST:PORT
python -m benchmarks.following memory PATH
"""

from __future__ import annotations

import json
import sys

import torch

from fsdp_wrap.weights import GlooChannel, SharedMemoryChannel, checksum, received

WAYS = {"gloo": GlooChannel, "memory": SharedMemoryChannel}


def follow(way: str, where: str, timeout: float = 120.0) -> dict[str, torch.Tensor]:
    """Returns what is there when the sender has ended; waits for it so many seconds at most."""
    state: dict[str, torch.Tensor] = {}
    for update in received(WAYS[way](where, receives=True, timeout=timeout)):
        if update.whole:
            state = {each.name: torch.empty(each.shape, dtype=each.dtype) for each in update.metadata}
        update.apply(state)
    return state


if __name__ == "__main__":
    print(json.dumps({name: checksum(value) for name, value in follow(sys.argv[1], sys.argv[2]).items()}))
