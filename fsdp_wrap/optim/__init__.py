"""Optimizers that fit sharded parameters.

`on_shards` lets any elementwise optimizer step on the plain shards behind `DTensor`s. `step_in_backward`
lets one update each unit as soon as its gradients are reduced, and `backward_steps` tells how that goes.
`HostAdamW` updates what lies in host memory in one pass over it.
"""

from fsdp_wrap.optim._host_adamw import HostAdamW
from fsdp_wrap.optim._in_backward import BackwardSteps, backward_steps, step_in_backward
from fsdp_wrap.optim._on_shards import on_shards

__all__ = ["BackwardSteps", "HostAdamW", "backward_steps", "on_shards", "step_in_backward"]
