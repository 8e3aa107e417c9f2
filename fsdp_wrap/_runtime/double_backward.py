"""Double backward: gradients of gradients, which need the full parameters once more.

A backward with `create_graph=True` makes gradients with graphs of their own. A later backward may enter them
at any unit, where no output tells of it, so the gradients themselves are watched.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from fsdp_wrap._core import Phase
from fsdp_wrap._core.torch_private import hook_gradient
from fsdp_wrap._params import Until
from fsdp_wrap._runtime.unit import ForwardCall

Unshard = Callable[[ForwardCall], None]
"""Shows modules the leaves of a call's forward again."""


def watched(unshard: Unshard, call: ForwardCall, grad: torch.Tensor | None) -> torch.Tensor | None:
    """Returns a hooked view in place of a gradient that has a graph: its own backward needs the leaves."""
    if grad is None or not grad.requires_grad:
        return grad
    view = grad.view_as(grad)
    hook_gradient(view, partial(_reached, unshard, call))
    return view


def _reached(unshard: Unshard, call: ForwardCall, grad: torch.Tensor) -> torch.Tensor | None:
    """Unshards when a double backward reaches a unit; returns a view to watch the gradient, if needed."""
    unshard(call)
    call.unit.reach()
    call.unit.buffers.stays = Until.END
    for tied in call.unit.tied:  # their inputs are not watched
        tied.unshard(Phase.BACKWARD)
    return watched(unshard, call, grad) if torch.is_grad_enabled() else None
