"""Collectives of one process group, called directly: of tensors of any dtype, and of small objects."""

from __future__ import annotations

import ctypes
import pickle
from collections.abc import Callable, Sequence
from functools import reduce
from typing import Any

import torch
import torch.distributed as dist

from fsdp_wrap._core.torch_private import AllgatherOptions, ReduceScatterOptions, object_device_of

# Methods of the group: torch's functions around them, with coalescing, double the host's time.
GATHER, _REDUCE = (
    ("all_gather_single", "reduce_scatter_single")
    if hasattr(dist.ProcessGroup, "all_gather_single")  # renamed in torch 2.13
    else ("_allgather_base", "_reduce_scatter_base")
)


def _at_once_and_later(make: Callable[[], Any]) -> tuple[Any, Any]:
    """Makes options for synchronous works, and for asynchronous ones."""
    options = make(), make()
    for later, option in enumerate(options):
        option.asyncOp = bool(later)
    return options


TO_GATHER, _TO_REDUCE = _at_once_and_later(AllgatherOptions), _at_once_and_later(ReduceScatterOptions)
"""Options of gathers and reductions, by whether works are asynchronous."""

TRANSPORTED = frozenset((torch.float64, torch.float32, torch.bfloat16, torch.float16))
"""Dtypes that all backends know."""


def as_transport(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a tensor as bytes if not all backends know its dtype."""
    return tensor if tensor.dtype in TRANSPORTED else tensor.view(torch.uint8)


def all_gather_single(
    full: torch.Tensor, own: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
) -> Any:
    """Fills a tensor of any dtype from all ranks; returns the work if that is asynchronous."""
    work = getattr(group, GATHER)(as_transport(full), as_transport(own), TO_GATHER[async_op])
    return work if async_op or work is None else work.wait()


def reduce_scatter_single(
    shard: torch.Tensor, full: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
) -> Any:
    """Sums a tensor over all ranks, of which each gets a part; returns the work if that is asynchronous."""
    work = getattr(group, _REDUCE)(shard, full, _TO_REDUCE[async_op])
    return work if async_op or work is None else work.wait()


REDUCTIONS: dict[dist.ReduceOp.RedOpType, Callable[..., torch.Tensor]] = {
    dist.ReduceOp.SUM: torch.add,
    dist.ReduceOp.PRODUCT: torch.mul,
    dist.ReduceOp.MIN: torch.minimum,
    dist.ReduceOp.MAX: torch.maximum,
}
"""By kind of reduction, the operator on two tensors."""


def combine(
    sources: Sequence[torch.Tensor], target: torch.Tensor, operation: Callable[..., torch.Tensor] = torch.add
) -> None:
    """Reduces all ranks' tensors, in the order of the ranks, into `target`, which may be one of them.

    So all ranks have the same bits, every time. The arithmetic is done in the target's dtype.
    """
    if target.is_floating_point() and target.element_size() == 1:  # torch does not compute with them
        target.copy_(reduce(operation, [source.float() for source in sources]))
        return
    first, second, *rest = sources
    if first.dtype != target.dtype:
        target.copy_(first)
        first, second, *rest = target, *(source.to(target.dtype) for source in sources[1:])
    rest = [source.clone() if source is target else source for source in rest]
    operation(first, second, out=target)
    for source in rest:
        operation(target, source, out=target)


Run = Callable[[Callable[[bool], Any]], object]
"""Runs a collective to its end, given what issues it, asynchronously or not."""


def all_gather_object(
    value: Any, group: dist.ProcessGroup, run: Run = lambda start: start(False)
) -> list[Any]:
    """Returns every rank's small picklable value, by rank; torch's function of the name needs NumPy."""
    own, ranks = _pickled(value, group), dist.get_world_size(group)
    length = torch.tensor([own.numel()], device=own.device)
    lengths = length.new_empty(ranks)
    run(lambda later: all_gather_single(lengths, length, group, later))
    longest = int(lengths.max())
    full = own.new_empty(ranks * longest)
    padded = torch.nn.functional.pad(own, (0, longest - own.numel()))
    run(lambda later: all_gather_single(full, padded, group, later))
    return [_unpickled(part[:length]) for part, length in zip(full.chunk(ranks), lengths.tolist())]


def broadcast_object(value: Any, group: dist.ProcessGroup, run: Run = lambda start: start(False)) -> Any:
    """Returns the small picklable value of a group's first rank; torch's function needs NumPy."""
    data = _pickled(value if dist.get_rank(group) == 0 else None, group)
    length = torch.tensor([data.numel()], device=data.device)
    run(lambda later: dist.broadcast(length, group=group, group_src=0, async_op=later))
    if dist.get_rank(group) != 0:
        data = data.new_empty(int(length))
    run(lambda later: dist.broadcast(data, group=group, group_src=0, async_op=later))
    return _unpickled(data)


def _pickled(value: Any, group: dist.ProcessGroup) -> torch.Tensor:
    device = object_device_of(group)
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8).to(device)


def _unpickled(data: torch.Tensor) -> Any:
    data = data.cpu()
    return pickle.loads(ctypes.string_at(data.data_ptr(), data.numel()))
