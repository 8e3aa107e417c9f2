"""`step_in_backward`: units are updated while the backward goes on, and their gradients freed."""

from fsdp_wrap.optim._in_backward.making import backward_steps, step_in_backward
from fsdp_wrap.optim._in_backward.steps import BackwardSteps

__all__ = ["BackwardSteps", "backward_steps", "step_in_backward"]
