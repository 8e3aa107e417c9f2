"""`verify`: runs the user's own steps sharded and plain, and says whether they are the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from fsdp_wrap._comm import all_gather_object, default_group
from fsdp_wrap._values import files
from fsdp_wrap._values.verifying.launch import launch
from fsdp_wrap._values.verifying.observe import (
    Errand,
    Observed,
    Setup,
    WrongSetup,
    observe,
    places_of,
    seed_as_of,
)
from fsdp_wrap._values.verifying.pair import Pair
from fsdp_wrap._values.verifying.report import Verification, verification_of

_AGAINST = ("plain", "one rank")
_ROUNDED = {"float64": 1e-14, "bfloat16": 4e-3, "float16": 5e-4}
"""Relative sizes by which parameters are changed in a rounded run, by the coarsest dtype; else 1e-6."""

Runs = Callable[[Errand], list[Observed]]


def verify(
    setup: Setup, ranks: int | None = None, steps: int = 3, *, against: str = "plain", timeout: float = 600.0
) -> Verification:
    """Tells whether sharded training is right: runs a few steps sharded and plain, and compares all values.

    Processes of its own run `setup(True)` on some ranks, and then `setup(False)` on one. In a program with a
    process group its ranks run the sharded steps, all have to call this, and the first of them starts a
    process for the plain steps. Each process is a rank of a group that has numbers, seeds and environment
    variables as torchrun gives them; seeds are others on each rank.

    Modules of dropout are turned off in both runs. Where values first differ in an update or a later step,
    the plain program is run once more with rounded parameters, which shows how much rounding grows there.

    Args:
        setup: Called with `sharded`; shards the model if that is true, and returns
            `(model, optimizer, step)`. The optimizer may be a list of them. `step()` runs one training step
            with the rows of the rank by `torch.distributed.get_rank()` and `get_world_size()`: all rows if it
            is rank 0 of 1. It may return the loss. Define it by `def` at the top of a module, so that other
            processes can import it; others are called in forks of this process, where the system has them.
        ranks: Number of ranks; by default 2, or that of the process group.
        steps: Number of steps.
        against: "plain", or "one rank" for a model that one device cannot hold: the sharded program on one
            rank, `setup(True)`, in which `setup` may offload.
        timeout: Seconds after which a run is given up.

    Returns:
        The outcome; print it for a page.

    Raises:
        TypeError: If an argument, or what `setup` returns, is of another type.
        ValueError: If an argument is out of range, or `setup` cannot be called in other processes.
        RuntimeError: If the program fails on a rank; it has the traceback.

    Example:
        ```python
        def setup(sharded):
            torch.manual_seed(0)
            model = Transformer()
            if sharded:
                model = FullyShardedDataParallel(model, auto_wrap_policy=policy)
            optimizer = torch.optim.AdamW(model.parameters())
            batches = iter(load_batches())

            def step():
                rows = next(batches).chunk(dist.get_world_size())[dist.get_rank()]
                optimizer.zero_grad()
                loss = model(rows)
                loss.backward()
                optimizer.step()
                return loss

            return model, optimizer, step

        if __name__ == "__main__":
            print(fsdp_wrap.verify(setup, ranks=4))
        ```
    """
    _check(setup, ranks, steps, against, timeout)
    alone = partial(launch, ranks=1, timeout=timeout)
    if not dist.is_initialized():
        return _verified(setup, steps, against, partial(launch, ranks=ranks or 2, timeout=timeout), alone)
    if ranks not in (None, dist.get_world_size()):
        raise ValueError(f"ranks={ranks}, and the process group has {dist.get_world_size()}: leave it out")
    return _verified(setup, steps, against, _on_all, partial(_on_first, alone))


def _check(setup: Any, ranks: Any, steps: Any, against: Any, timeout: Any) -> None:
    if not callable(setup):
        raise TypeError(
            f"setup must be a function of `sharded` that returns (model, optimizer, step), not {setup!r}"
        )
    for name, number, least in (("ranks", ranks, 2), ("steps", steps, 1)):
        if number is None and name == "ranks":
            continue
        if isinstance(number, bool) or not isinstance(number, int) or number < least:
            raise ValueError(f"{name}={number!r} must be a number from {least}")
    if against not in _AGAINST:
        raise ValueError(f"against={against!r} must be one of {_AGAINST}")
    if not isinstance(timeout, (int, float)) or not timeout > 0:
        raise ValueError(f"timeout={timeout!r} must be a positive number of seconds")


def _verified(setup: Setup, steps: int, against: str, on_all: Runs, on_one: Runs) -> Verification:
    sharded = on_all(Errand(setup, True, steps))
    places = places_of(sharded)
    units = tuple(dict.fromkeys(name.partition(" ")[0] for name in sharded[0].units))
    alone = (
        Errand(setup, True, steps) if against == "one rank" else Errand(setup, False, steps, units, places)
    )
    plain = on_one(alone)
    pair = Pair(plain, sharded)
    if against == "plain" and _may_be_grown(pair):
        errand = Errand(setup, False, steps, units, rounding=_rounding_of(pair))
        pair = Pair(plain, sharded, on_one(errand))
    return verification_of(pair, against)


def _may_be_grown(pair: Pair) -> bool:
    """Whether the first large difference comes after an optimizer, which may make rounding grow."""
    verdict = pair.verdict() if pair.steps else None
    first = verdict.first if verdict is not None else None
    if first is None or verdict is None or verdict.kind in ("equal", "rounding"):
        return False
    return first.step > pair.steps[0] or first.seam == files.UPDATE


def _rounding_of(pair: Pair) -> float:
    rows = pair.ranks.records[0].steps[pair.steps[0]].rows.values()
    return max(_ROUNDED.get(row.dtype, 1e-6 if row.dtype == "float32" else 0.0) for row in rows)


def _on_all(errand: Errand) -> list[Observed]:
    """Runs an errand on the ranks of the process group."""
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        seed_as_of(dist.get_rank())
        try:
            return all_gather_object(observe(errand), default_group("verify()"))
        except WrongSetup as wrong:
            raise wrong.error from None


def _on_first(alone: Runs, errand: Errand) -> list[Observed]:
    """Runs an errand in a process of the first rank, and tells all ranks what it has observed."""
    told: list[Any] = [None, None]
    if dist.get_rank() == 0:
        try:
            told[0] = alone(errand)
        except (RuntimeError, TypeError, ValueError) as error:
            told[1] = error
    dist.broadcast_object_list(told, src=0)
    if told[1] is not None:
        raise told[1]
    observed: list[Observed] = told[0]
    return observed
