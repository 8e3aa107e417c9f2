"""Runs whose numbers are the same, bit for bit, at any number of ranks."""

from __future__ import annotations

import hashlib

import torch

from fsdp_wrap import (
    FullyShardedDataParallel,
    Reproducible,
    iter_full_optim_state,
    iter_full_params,
    reproducible,
)
from lm.options import Options


def make_reproducible(model: FullyShardedDataParallel, options: Options) -> Reproducible | None:
    """Makes a model reproducible if the command line asks for it."""
    if not options.reproducible:
        return None
    assert options.global_batch is not None
    torch.set_num_threads(1)  # kernels on the host add in another order with another number
    return reproducible(model, micro_batches=options.global_batch // options.batch, seed=options.seed)


def digest(model: FullyShardedDataParallel, optimizer: torch.optim.Optimizer) -> str:
    """Returns a hash of all parameters and of the optimizer's state; called by every rank."""
    hasher = hashlib.blake2b(digest_size=8)
    for name, value in iter_full_params(model):
        _add(hasher, name, value)
    for name, key, value in iter_full_optim_state(model, optimizer):
        if isinstance(value, torch.Tensor):
            _add(hasher, f"{name} {key}", value)
    return hasher.hexdigest()


def _add(hasher: hashlib.blake2b, name: str, value: torch.Tensor) -> None:
    hasher.update(name.encode())
    hasher.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
