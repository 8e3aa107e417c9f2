"""Chooses the way of communicating for a group."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from fsdp_wrap._collectives import Communicator, GroupCommunicator, SoloCommunicator
from fsdp_wrap._host_communicator import HostCommunicator
from fsdp_wrap._mesh import Ranks

__all__ = ["make_communicator"]


def make_communicator(ranks: Ranks | None, device: torch.device) -> Communicator:
    """Chooses the way of communicating for a group (None: this rank alone) and a device.

    With FSDP_WRAP_SHARED_MEMORY=1 in the environment, on all ranks alike, those of gloo groups that share a
    host communicate through shared memory.
    """
    if ranks is None or ranks.size == 1:
        return SoloCommunicator(device)
    wanted = os.environ.get("FSDP_WRAP_SHARED_MEMORY") == "1" and device.type == "cpu"
    way = HostCommunicator if wanted and _runs_gloo(ranks.group) else GroupCommunicator
    return way(ranks, device)


def _runs_gloo(group: dist.ProcessGroup) -> bool:
    """Whether the ranks of a group are processes that communicate from the CPU."""
    try:
        return group._get_backend(torch.device("cpu")).name() == "gloo"
    except RuntimeError:
        return False
