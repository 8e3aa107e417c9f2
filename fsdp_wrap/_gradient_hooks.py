"""Users' hooks on the gradients of sharded parameters: which are called, and which are refused."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import nn

__all__ = ["HOOKS_OF", "REFUSED_HOOKS_OF", "run_gradient_hooks"]

HOOKS_OF = operator.attrgetter("_post_accumulate_grad_hooks")
"""Returns what was given to `register_post_accumulate_grad_hook`; nothing true if nothing was."""

REFUSED_HOOKS_OF = operator.attrgetter("_backward_hooks")
"""The same of `register_hook`: it has no place to run, since no graph leads to a sharded parameter."""


def run_gradient_hooks(params: Sequence[nn.Parameter], used: Sequence[bool]) -> None:
    """Calls what users gave to `register_post_accumulate_grad_hook`, now that gradients were added.

    Without gradients, as autograd would. A hook may take the gradient away, or step.

    Args:
        params: The sharded parameters; one may stand for several original ones.
        used: For each, whether a gradient was added to it, if this rank holds any of it.
    """
    changed = dict.fromkeys(param for param, by_any in zip(params, used) if by_any and param.requires_grad)
    with torch.no_grad():
        for param in changed:
            for hook in [*(HOOKS_OF(param) or {}).values()] if param.grad is not None else ():
                hook(param)
