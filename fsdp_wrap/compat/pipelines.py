"""Adapts torch's pipeline stages to our units.

A stage gathers and reduces once in a step for all its microbatches, and may compute gradients of inputs
before those of parameters. It takes the latter of `parameters()`, which are sharded in our units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from itertools import chain
from typing import Any

import torch.distributed as dist
from torch import nn

from fsdp_wrap._by_hand import showing
from fsdp_wrap._core import torch_private as torchs
from fsdp_wrap._fsdp_module import FSDPModule
from fsdp_wrap._runtime import units_in
from fsdp_wrap.compat.installation import Installation

__all__ = ["adapt_stages"]


def adapt_stages(installation: Installation) -> None:
    """Lets torch's pipeline stages run modules that our `fully_shard` has sharded as they run torch's.

    Args:
        installation: Takes the changes back at its end.
    """
    stage = torchs.pipeline_stage()
    for name, adapted in (("forward_one_chunk", _forward), ("backward_maybe_with_nosync", _backward)):
        installation.rebind(stage, name, adapted(getattr(stage, name)))


def _forward(theirs: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(theirs)
    def forward_one_chunk(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.has_backward and isinstance(self.submod, FSDPModule):
            # As each backward does, so the second forward finds the parameters that the first has kept.
            self.submod.set_reshard_after_backward(False)
        return theirs(self, *args, **kwargs)

    return forward_one_chunk


def _backward(theirs: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(theirs)
    def backward_maybe_with_nosync(self: Any, backward_type: str, *args: Any, **kwargs: Any) -> Any:
        if backward_type == "full" or not units_in(self.submod):
            return theirs(self, backward_type, *args, **kwargs)
        if not isinstance(self.submod, FSDPModule):
            raise RuntimeError(
                f"the module of pipeline stage {self.stage_index} ({type(self.submod).__name__}) on rank "
                f"{dist.get_rank()} has sharded parameters, but fully_shard was not applied to itself, so "
                "nothing would reduce the gradients that its schedule computes after those of inputs; apply "
                "fully_shard to it, or use a schedule that computes both at once, such as Schedule1F1B"
            )
        with _leading_to_leaves(self.submod, shows=backward_type == "weight"):
            return theirs(self, backward_type, *args, **kwargs)

    return backward_maybe_with_nosync


@contextmanager
def _leading_to_leaves(module: nn.Module, shows: bool) -> Iterator[None]:
    """Makes `module.parameters()` return the full parameters, to which graphs lead, in memory or not.

    With `shows` the modules show them too, for checkpointed parts: where backwards begin in the middle of the
    graph, no gradient of an output tells the units.
    """
    units = [*dict.fromkeys(units_in(module).values())]
    segments = chain.from_iterable(unit.segments for unit in units)
    leaves = dict(chain.from_iterable(zip(segment.params.sources, segment.leaves) for segment in segments))
    given = [leaves.get(param, param) for param in module.parameters()]
    vars(module)["parameters"] = lambda: iter(given)
    with ExitStack() as undo:
        undo.callback(vars(module).pop, "parameters")
        for unit in units if shows else ():
            undo.enter_context(showing(unit))
        yield
