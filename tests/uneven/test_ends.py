"""Ranks that leave `uneven` by an error, or die: all ranks are told, and have the gradients from before."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
from torch import nn

from forks import run_forks
from fronts import shard
from fsdp_wrap import uneven
from fsdp_wrap._params import to_local
from fsdp_wrap._runtime import units_in
from fsdp_wrap.wrap import ModuleWrapPolicy
from nets import WIDTH, Middle

VICTIM, IDLE = 1, 2
BATCHES = [3, 3, 0]


class Fault(Exception):
    pass


def model_of(front: str = "orig") -> nn.Module:
    torch.manual_seed(0)
    return shard(front, nn.Sequential(Middle(), Middle(), Middle()), ModuleWrapPolicy({Middle}))


def loss_of(model: nn.Module, rank: int = 0) -> torch.Tensor:
    return model(torch.full((2, WIDTH), 1.0 + rank)).square().mean()


def grads(model: nn.Module) -> list[Any]:
    return [None if p.grad is None else to_local(p.grad).clone() for p in model.parameters()]


def act_in_second(module: nn.Module, where: str, act: Any) -> None:
    """Lets a rank act in its second forward or backward, in the middle of the model."""
    calls: list[None] = []

    def hook(*_: Any) -> None:
        calls.append(None)
        if len(calls) == 2:
            act()

    if where == "forward":
        module.register_forward_hook(hook)
    else:
        module.register_full_backward_hook(hook)


def raise_fault(*_: Any) -> None:
    raise Fault("a document is broken")


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def end_in(
    rank: int, world_size: int, front: str, where: str, act: Any, victim: int
) -> tuple[str, str, bool]:
    """Returns what a rank is told, and whether it has the gradients from before."""
    model = model_of(front)
    loss_of(model, rank).backward()
    before = grads(model)
    batches = BATCHES if victim == VICTIM else [0, 3, 3][::-1]
    if rank == victim and where in ("forward", "backward"):
        middle = next(
            module
            for name, module in model.named_modules()
            if name.endswith("1.linear") or (name.endswith("linear") and ".1." in name)
        )
        act_in_second(middle, where, act)
    try:
        with uneven(model):
            if rank == victim and where == "at once":
                act()
            for index in range(batches[rank]):
                if rank == victim and where == "between" and index == 1:
                    act()
                loss_of(model, rank).backward()
            if rank == victim and where == "at the end":
                act()
    except (Fault, RuntimeError) as error:
        same = all(a is b is None or torch.equal(a, b) for a, b in zip(before, grads(model), strict=True))
        return type(error).__name__, str(error), same
    return "", "", False


WHERE = ["at once", "between", "forward", "backward", "at the end"]


@pytest.mark.parametrize(
    "front", ["orig", *(pytest.param(front, marks=pytest.mark.slow) for front in ("flat", "composable"))]
)
def test_an_error_of_one_rank_is_an_error_of_all(front):
    cases = [(front, where, raise_fault, victim) for where in WHERE for victim in (0, VICTIM)]
    for case, ends in zip(cases, run_forks(end_in, cases, len(BATCHES))):
        victim = case[3]
        for rank, end in enumerate(ends):
            kind, told, same = end.value
            assert same, (case, rank)
            if rank == victim:
                assert (kind, told) == ("Fault", "a document is broken")
            else:
                assert f"rank {victim} left uneven() by Fault: a document is broken." in told, (case, rank)


def fail_to_help(rank: int, world_size: int) -> str:
    """The rank without a batch has no memory for its second gather; returns what a rank is told."""
    model = model_of()
    unit = units_in(model)["1"]
    if rank == IDLE:
        unit.buffers.gather = raise_fault  # type: ignore[assignment,method-assign]
    with pytest.raises((Fault, RuntimeError)) as told, uneven(model):
        for _ in range(BATCHES[rank]):
            loss_of(model, rank).backward()
    return str(told.value)


def test_a_rank_that_fails_to_help_is_named():
    ((*others, idle),) = run_forks(fail_to_help, [()], len(BATCHES))
    assert "a document is broken" in idle.value
    for end in others:
        assert f"rank {IDLE} left uneven() by Fault: a document is broken." in end.value


@pytest.mark.slow
def test_a_rank_that_dies_is_named():
    cases = [("orig", where, kill, victim) for where in WHERE for victim in (0, VICTIM)]
    for case, ends in zip(cases, run_forks(end_in, cases, len(BATCHES))):
        for rank, end in enumerate(ends):
            if rank == case[3]:
                assert end.exitcode == -signal.SIGKILL
            else:
                kind, told, _ = end.value
                assert kind == "RuntimeError" and f"rank {case[3]} (dead)" in told, (case, rank)
