"""Enums and configuration dataclasses of the wrapper; names, values and defaults equal torch's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

__all__ = ["BackwardPrefetch", "CPUOffload", "MixedPrecision", "ShardingStrategy"]


class ShardingStrategy(Enum):
    """What is sharded over the ranks, and for how long parameters stay unsharded.

    Attributes:
        FULL_SHARD: Parameters, gradients and optimizer state are sharded; a unit unshards for its
            forward and again for its backward.
        SHARD_GRAD_OP: As FULL_SHARD, but parameters stay unsharded from forward to backward.
        NO_SHARD: Everything is replicated, gradients are averaged over the ranks.
        HYBRID_SHARD: FULL_SHARD within a host, replicated across hosts.
        _HYBRID_SHARD_ZERO2: SHARD_GRAD_OP within a host, replicated across hosts.
    """

    FULL_SHARD = 1
    SHARD_GRAD_OP = 2
    NO_SHARD = 3
    HYBRID_SHARD = 4
    _HYBRID_SHARD_ZERO2 = 5


class BackwardPrefetch(Enum):
    """When the backward issues the all-gather of the unit that comes next in backward order.

    Attributes:
        BACKWARD_PRE: Before the running unit's gradients are computed: most overlap, one more unit
            in memory.
        BACKWARD_POST: After the running unit's backward is over: less memory, less overlap.
    """

    BACKWARD_PRE = 1
    BACKWARD_POST = 2


@dataclass
class MixedPrecision:
    """Dtypes of computation and communication; None keeps a parameter's own dtype."""

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = False
    cast_root_forward_inputs: bool = True
    _module_classes_to_ignore: Sequence[type[nn.Module]] = (_BatchNorm,)


@dataclass
class CPUOffload:
    """Whether sharded parameters and gradients live in host memory."""

    offload_params: bool = False
