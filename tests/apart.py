"""Programs in which ranks do different things, as the package allows; each leaves the gradients empty."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join

from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import ShardingStrategy, reproducible, uneven

Program = Callable[[nn.Module, torch.optim.Optimizer, Callable[[nn.Module], torch.Tensor]], None]


_kept: list[torch.optim.Optimizer] = []


def _end(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def usual(model: Any, optimizer: Any, loss: Any) -> None:
    """A step of two micro-batches."""
    for _ in range(2):
        loss(model).backward()
    _end(optimizer)


def without_a_batch(model: Any, optimizer: Any, loss: Any) -> None:
    with uneven(model):
        for _ in range((2, 0)[dist.get_rank()]):
            loss(model).backward()
    _end(optimizer)


def with_fewer_batches(model: Any, optimizer: Any, loss: Any) -> None:
    """Accumulates backwards of ranks with different numbers of batches between two usual ones."""
    loss(model).backward()
    with uneven(model):
        for _ in range((1, 2)[dist.get_rank()]):
            loss(model).backward()
    loss(model).backward()
    _end(optimizer)


def backward_after_others(model: Any, optimizer: Any, loss: Any) -> None:
    """One rank alone evaluates between a forward and its backward."""
    result = loss(model)
    with uneven(model), torch.no_grad():
        if dist.get_rank():
            loss(model)
    result.backward()
    _end(optimizer)


def evaluation_between(model: Any, optimizer: Any, loss: Any) -> None:
    result = loss(model)
    with torch.no_grad():
        loss(model)
    result.backward()
    _end(optimizer)


def another_optimizer(model: Any, optimizer: Any, loss: Any) -> None:
    """A second optimizer steps; one rank drops it, the other keeps it, as a reference cycle would."""
    other = torch.optim.SGD(model.parameters(), lr=0.1)
    usual(model, other, loss)
    if dist.get_rank():
        _kept.append(other)


def joined(model: Any, optimizer: Any, loss: Any) -> None:
    """torch's `Join`: ranks have one and two steps."""
    with Join([model], optimizer=optimizer):
        for _ in range(1 + dist.get_rank()):
            loss(model).backward()
            _end(optimizer)
    optimizer.zero_grad()


def evaluation_alone(model: Any, optimizer: Any, loss: Any) -> None:
    """One rank evaluates a model whose parameters it holds whole, while the other waits."""
    usual(model, optimizer, loss)
    if dist.get_rank():
        with torch.no_grad():
            loss(model)
    dist.barrier()
    usual(model, optimizer, loss)


def same_bits(model: Any, optimizer: Any, loss: Any) -> None:
    """A step of `reproducible`."""
    reproduced = reproducible(model, micro_batches=4)
    for _ in reproduced.micro_batches(0):
        loss(model).backward()
    _end(optimizer)
    reproduced.remove()


def programs_for(model: nn.Module) -> list[Program]:
    """Returns the programs that a model can run, with usual steps between them."""
    programs: list[Program] = [without_a_batch, with_fewer_batches, backward_after_others, evaluation_between]
    programs.append(same_bits)
    if isinstance(model, FSDP):
        programs.append(joined)
        if model.sharding_strategy is ShardingStrategy.NO_SHARD:
            programs.append(evaluation_alone)
    return [another_optimizer, *(program for another in programs for program in (usual, another, usual))]
