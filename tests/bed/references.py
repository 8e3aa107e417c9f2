"""Counting what really went over a process group, below any library."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


class Traffic(NamedTuple):
    """Calls of one collective, and their bytes on this rank: of inputs or outputs, whichever is more."""

    calls: int = 0
    bytes: int = 0


_NAMES = {
    "_allgather_base_": "all_gather_into_tensor",
    "_reduce_scatter_base_": "reduce_scatter_tensor",
    "allgather_": "all_gather",
    "allgather_coalesced_": "all_gather_coalesced",
    "allgather_into_tensor_coalesced_": "all_gather_into_tensor_coalesced",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce_coalesced",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all_single",
    "recv_any_source_": "recv",
}
"""From c10d's operators to ``torch.distributed``'s functions, where more than an underscore differs."""


@contextmanager
def count_collectives(objects: bool = True) -> Iterator[dict[str, Traffic]]:
    """Counts this rank's collectives by their names in ``torch.distributed``, whoever issues them.

    Collectives of a backward count if it runs inside the context. Without ``objects``, collectives inside
    torch's object collectives do not count.
    """
    counts: dict[str, Traffic] = {}
    with _Counter(counts, objects):
        yield counts


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, counts: dict[str, Traffic], objects: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._counts, self._objects = counts, objects
        self._exchanges = _exchanges()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = _collective(func)
        if func.namespace == "c10d" and name in ("send", "recv") and args[-1] in self._exchanges:
            self._add_exchange(name, *args)
        elif name is not None and (self._objects or not _carries_objects()):
            self._add(name, max(map(_bytes, (*args, result)), default=0))
        return result

    def _add_exchange(self, name: str | None, tensors: Any, boxed: Any, peer: int, tag: int) -> None:
        """Counts the messages of one collective once, at the first that is received."""
        group = dist.ProcessGroup.unbox(boxed)
        if name == "recv" and peer == (group.rank() - 1) % group.size():
            self._add(self._exchanges[tag], group.size() * _bytes(tensors))

    def _add(self, name: str, size: int) -> None:
        calls, before = self._counts.get(name, Traffic())
        self._counts[name] = Traffic(calls + 1, before + size)


def _exchanges() -> dict[int, str]:
    """Names of the collectives that messages with our tags stand for."""
    from fsdp_wrap._comm.messages import (  # only here: the bed itself needs no library
        _GATHER_TAG,
        _REDUCE_TAG,
    )

    return {_GATHER_TAG: "all_gather_into_tensor", _REDUCE_TAG: "reduce_scatter_tensor"}


def _collective(func: Any) -> str | None:
    name: str = func._schema.name.partition("::")[2]
    if func.namespace == "c10d" and name != "check_for_nan":
        return _NAMES.get(name, name.rstrip("_"))
    if func.namespace == "_c10d_functional" and name != "wait_tensor":
        return name.removesuffix("_out").rstrip("_")
    return None


def _carries_objects() -> bool:
    """Whether one of torch's object collectives issues the current collective."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == dist.distributed_c10d.__file__ and "_object" in frame.f_code.co_name:
            return True
        frame = frame.f_back
    return False


def _bytes(argument: Any) -> int:
    tensors = (leaf for leaf in tree_iter(argument) if isinstance(leaf, torch.Tensor))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
