"""Optimizers that fit sharded parameters.

`on_shards` lets any elementwise optimizer step on the plain shards behind `DTensor`s. Torch's own do so by
themselves, unless `steps_on_shards` says otherwise. `owned_matrices` brings each whole matrix to one rank,
and `Muon` is built on that. `step_in_backward` lets one update each unit as soon as its gradients are
reduced, and `backward_steps` tells how that goes. `HostAdamW` updates what lies in host memory in one pass
over it. `stochastic_rounding` rounds updates of bfloat16 parameters by draws that do not depend on the
sharding.
"""

from fsdp_wrap.optim._host_adamw import HostAdamW
from fsdp_wrap.optim._in_backward import BackwardSteps, backward_steps, step_in_backward
from fsdp_wrap.optim._muon import Muon
from fsdp_wrap.optim._on_shards import on_shards
from fsdp_wrap.optim._owned_matrices import OwnedMatrices, owned_matrices
from fsdp_wrap.optim._owner_group import Matrix
from fsdp_wrap.optim._stochastic_rounding import stochastic_rounding
from fsdp_wrap.optim._taken_steps import steps_on_shards
from fsdp_wrap.optim._views import Block, View, batch, per_head, split

__all__ = [
    "BackwardSteps",
    "Block",
    "HostAdamW",
    "Matrix",
    "Muon",
    "OwnedMatrices",
    "View",
    "backward_steps",
    "batch",
    "on_shards",
    "owned_matrices",
    "per_head",
    "split",
    "step_in_backward",
    "steps_on_shards",
    "stochastic_rounding",
]
