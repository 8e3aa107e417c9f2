"""Users' hooks on the gradients of sharded parameters: the called ones, and the refused ones.

Optimizers that torch's `_apply_optimizer_in_backward` notes on parameters are among them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from fsdp_wrap._core.torch_private import optimizers_in_backward

HOOKS_OF = operator.attrgetter("_post_accumulate_grad_hooks")
"""Returns the hooks from `register_post_accumulate_grad_hook`; false if there are none."""

REFUSED_HOOKS_OF = operator.attrgetter("_backward_hooks")
"""Returns the hooks from `register_hook`, which cannot run: no graph leads to a sharded parameter."""


def run_gradient_hooks(params: Sequence[nn.Parameter], used: Sequence[bool]) -> None:
    """Calls users' post-accumulate-grad hooks, now that gradients were added.

    It does so without recording gradients, as autograd does. A hook may take the gradient away, or step.
    `params` are sharded; one may stand for several original ones. `used` tells for each whether a gradient
    was added to it, if this rank holds any of it.
    """
    changed = dict.fromkeys(param for param, by_any in zip(params, used) if by_any and param.requires_grad)
    with torch.no_grad():
        for param in changed:
            for hook in [*(HOOKS_OF(param) or {}).values()] if param.grad is not None else ():
                hook(param)


def with_optimizers(params: Iterable[nn.Parameter], unit: str) -> list[nn.Parameter]:
    """Returns the sharded parameters with optimizers in backward that `step_in_backward` does not serve yet.

    Raises a RuntimeError, with the unit's name, for a `FlatParameter`: it stands for several parameters.
    """
    unserved = []
    for param in dict.fromkeys(params):
        if optimizers_in_backward(param) and step_in_backward not in (HOOKS_OF(param) or {}).values():
            if hasattr(param, "_is_flat_param"):
                raise RuntimeError(
                    f"an optimizer in backward was given to the FlatParameter of {unit}, which is only "
                    "supported with use_orig_params=True: wrap the module so, or step after backward"
                )
            unserved.append(param)
    return unserved


def step_in_backward(param: nn.Parameter) -> None:
    """Steps the optimizers in backward of a parameter, and frees its gradient."""
    for optimizer in optimizers_in_backward(param):
        optimizer.step()
    param.grad = None
