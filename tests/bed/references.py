"""What tests compare with: what really went over a process group, and a plain model trained beside."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from fronts import accumulating, full_grads, full_state

NEAR: dict[str, Any] = {"rtol": 0, "atol": 1e-12}
"""How near numbers in float64 are that were computed in another order."""


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
    """Count this rank's collectives by their names in ``torch.distributed``, whoever issues them and however.

    Those issued from a backward count if the backward runs inside the context. Without ``objects``, what
    torch's object collectives issue does not count.
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
    """What messages with our tags stand for."""
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
    """Whether one of torch's object collectives is what issues the present one."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename == dist.distributed_c10d.__file__ and "_object" in frame.f_code.co_name:
            return True
        frame = frame.f_back
    return False


def _bytes(argument: Any) -> int:
    tensors = (leaf for leaf in tree_iter(argument) if isinstance(leaf, torch.Tensor))
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def train_beside(
    model: nn.Module,
    plain: nn.Module,
    loss_of: Callable[[nn.Module, Any], torch.Tensor],
    batches: Callable[[int], Any],
    place: int,
    *,
    steps: int = 2,
    accumulation: str = "F",
    optimizers: tuple[Any, Any] | None = None,
    clip: Callable[[nn.Module], torch.Tensor] | None = None,
    near: dict[str, Any] = NEAR,
) -> None:
    """Trains a sharded model beside a plain one that sees the batches of all ranks; what differs fails.

    Compared are the loss of each backward; before each step norms, gradients, how they lie, and which
    parameters have none; and all parameters after each step.

    Args:
        model: What any of the front-ends has sharded.
        plain: One of the same values.
        loss_of: Runs forward and backward with a batch, and returns the loss.
        batches: By the number of a backward, what each copy of the model computes with.
        place: Which of these batches is this rank's.
        steps: How many there are.
        accumulation: What the backwards of a step reduce, in the letters of `fronts.accumulating`.
        optimizers: Of the model and the plain one; SGD with momentum by default.
        clip: Clips the gradients of either model, and returns their norm.
        near: The tolerance, of which norms in relation to their size have five times as much.
    """
    optimizers = optimizers or (_sgd(model), _sgd(plain))
    for step in range(steps):
        for number, letter in enumerate(accumulation):
            every = batches(10 * step + number)
            with accumulating(model, letter):
                found = loss_of(model, every[place])
            losses = [loss_of(plain, batch) for batch in every]
            torch.testing.assert_close(found.double(), losses[place].double(), **near)
        for param in plain.parameters():
            if param.grad is not None:
                param.grad /= len(every)
        if clip is not None:
            norms = clip(model), clip(plain)
            torch.testing.assert_close(*norms, rtol=5 * near["atol"], atol=0)
        assert_same_gradients(model, plain, near)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        _assert_near(full_state(model), full_state(plain), near)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    params = [param for param in model.parameters() if param.requires_grad]
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def assert_same_gradients(model: nn.Module, plain: nn.Module, near: dict[str, Any] = NEAR) -> None:
    """Gradients of a sharded model are those of a plain one, and are placed as the parameters are.

    Which parameters have none a wrapper does not tell: a unit's have zeros where others have some.
    """
    if not hasattr(model, "summon_full_params"):
        having = [name for name, param in model.named_parameters() if param.grad is not None]
        assert having == [name for name, param in plain.named_parameters() if param.grad is not None]
        for name, param in model.named_parameters():
            if param.grad is not None and hasattr(param, "placements"):
                assert param.grad.placements == param.placements, name
    _assert_near(full_grads(model), full_grads(plain), near)


def _assert_near(found: Mapping[str, Any], expected: Mapping[str, Any], near: dict[str, Any]) -> None:
    assert expected.keys() <= found.keys()  # which may have tied ones by several names
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, msg=f"{name}: {{}}".format, **near)
