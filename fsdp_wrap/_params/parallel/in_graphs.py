"""`Redistribution`: lets graphs use the whole of a sharded parameter outside of its module's forward.

`DTensor` assumes the same computation with the whole value on all ranks. Here each rank has another batch: so
the gradient goes to the leaf, and is averaged with the unit's others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from fsdp_wrap._params.parallel.local_part import LocalPart


class Sharded(Protocol):
    """The owner of sharded parameters, as far as `Redistribution` needs it."""

    def sharded_param(self, index: int) -> nn.Parameter:
        """Returns the sharded parameter of an index."""

    def graph_leaf(self, index: int) -> nn.Parameter | None:
        """Returns the leaf that takes its gradients; None while the unit is in no schedule."""


@dataclass(eq=False, slots=True)
class Redistribution:
    """The method `redistribute` of one sharded parameter, which `full_tensor` calls as well.

    Attributes:
        owner: Returns the owner of the parameter; None once it is gone, and in copies.
        index: The parameter's index there.
        part: The part of the parameter that is sharded, if it was distributed before.
    """

    # Tensors with weak references to themselves cannot be swapped, so it has one to the owner.
    owner: Callable[[], Sharded | None]
    index: int
    part: LocalPart | None

    def __call__(self, *args: Any, **kwargs: Any) -> DTensor:
        owner = self.owner()
        if owner is None:
            raise RuntimeError("a copy of a sharded parameter has no unit: use param.detach().full_tensor()")
        param = owner.sharded_param(self.index)
        placements = kwargs.get("placements", args[1] if len(args) > 1 else ()) or [None]
        whole = all(isinstance(placement, Replicate) for placement in placements)
        in_graph = whole and param.requires_grad and torch.is_grad_enabled()
        leaf = owner.graph_leaf(self.index) if in_graph else None
        if leaf is None:
            return DTensor.redistribute(param, *args, **kwargs)  # type: ignore[arg-type]
        gathered = DTensor.redistribute(param.detach(), *args, **kwargs)  # type: ignore[arg-type]
        result: DTensor = _ThroughLeaf.apply(leaf, [gathered], self.part)  # type: ignore[no-untyped-call]
        return result

    def __reduce__(self) -> Any:
        return _of_a_copy, ()


def _of_a_copy() -> Redistribution:
    return Redistribution(_nothing, 0, None)


def _nothing() -> None:
    """Returns None, for the owner of a copy."""


torch.serialization.add_safe_globals([_of_a_copy])


class _ThroughLeaf(torch.autograd.Function):
    """Returns a parameter's gathered value; the gradient of this rank's batch goes to the leaf."""

    @staticmethod
    def forward(ctx: Any, leaf: nn.Parameter, gathered: list[DTensor], part: LocalPart | None) -> DTensor:
        ctx.device, ctx.part = leaf.device, part
        return gathered[0]

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        everywhere = [Replicate()] * grad.device_mesh.ndim
        whole = grad.redistribute(placements=everywhere).to_local().to(ctx.device)
        return whole if ctx.part is None else ctx.part.shown_gradient(ctx.part.cut(whole)), None, None
