"""Optimizers that fit sharded parameters.

`on_shards` lets any elementwise optimizer step on the plain shards behind `DTensor`s.
`stochastic_rounding` rounds updates of bfloat16 parameters by draws that do not depend on the sharding.
"""

from fsdp_wrap.optim._on_shards import on_shards
from fsdp_wrap.optim._stochastic_rounding import stochastic_rounding

__all__ = ["on_shards", "stochastic_rounding"]
