"""Bytes that steps take where they run, for what plans say of them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from bed.paths import ROOT

sys.path.insert(0, str(ROOT))  # benchmarks are not installed

from benchmarks.meters import tensors


def rest_and_peak(setup: Callable[[], Any]) -> tuple[int, int, Callable[[], None]]:
    """Returns bytes at rest, those at the peak of a third step, and the step."""
    held: list[Any] = []

    def build() -> None:
        held.append(setup())
        held[0][2](), held[0][2]()

    with torch.backends.mkldnn.flags(enabled=False):  # whose scratch memory depends on the processor
        rest = tensors(build).kept
        return rest, rest + tensors(held[0][2]).peak, held[0][2]
