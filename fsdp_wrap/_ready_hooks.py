"""Ready-made communication hooks.

Their names are those of torch's hooks for its wrapper. A hook averages by itself. These divide
once before and once after they sum, by about the root of the number of ranks each time, so that low precision
neither overflows nor underflows.
"""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from fsdp_wrap._objects import reduce_scatter_single

__all__ = [
    "DefaultState",
    "LowPrecisionState",
    "allreduce_hook",
    "bf16_compress_hook",
    "fp16_compress_hook",
    "reduce_scatter_hook",
]


class DefaultState:
    """What the ready-made hooks need to know.

    Args:
        process_group: The ranks to average over.

    Attributes:
        process_group: See there.
        world_size: How many they are.
        gradient_predivide_factor: What gradients are divided by before they are summed, a power of two.
        gradient_postdivide_factor: What the sum is divided by; the product of both is `world_size`.

    Raises:
        ValueError: If there is no process group.
    """

    def __init__(self, process_group: dist.ProcessGroup) -> None:
        if process_group is None:
            raise ValueError("a communication hook's state needs the process group to average over, not None")
        self.process_group = process_group
        self.world_size = dist.get_world_size(process_group)
        self.gradient_predivide_factor = 2.0 ** math.ceil(math.log2(self.world_size) / 2)
        self.gradient_postdivide_factor = self.world_size / self.gradient_predivide_factor


class LowPrecisionState(DefaultState):
    """What the compressing hooks need to know.

    Args:
        process_group: The ranks to average over.
        parameter_type: Accepted as torch's is; gradients come back in the dtype in which they were given.
    """

    def __init__(self, process_group: dist.ProcessGroup, parameter_type: torch.dtype = torch.float32) -> None:
        super().__init__(process_group)
        self.parameter_type = parameter_type


def allreduce_hook(state: DefaultState, grad: torch.Tensor) -> None:
    """Averages gradients that every rank holds whole, in place.

    Args:
        state: The ranks and the divisors.
        grad: 1-D, of any floating dtype.
    """
    grad.div_(state.gradient_predivide_factor)
    dist.all_reduce(grad, group=state.process_group)
    grad.div_(state.gradient_postdivide_factor)


def reduce_scatter_hook(state: DefaultState, grad: torch.Tensor, output: torch.Tensor) -> None:
    """Averages gradients of which every rank keeps its part.

    Args:
        state: The ranks and the divisors.
        grad: This rank's gradients of all parameters of a unit, 1-D; spoiled.
        output: Gets this rank's part of the average: 1-D, of `grad.numel() / state.world_size` elements.
    """
    grad.div_(state.gradient_predivide_factor)
    reduce_scatter_single(output, grad, group=state.process_group)
    output.div_(state.gradient_postdivide_factor)


def fp16_compress_hook(
    state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None = None
) -> None:
    """As `allreduce_hook`, or with an output `reduce_scatter_hook`, but float16 travels."""
    _compress(torch.float16, state, grad, output)


def bf16_compress_hook(
    state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None = None
) -> None:
    """As `allreduce_hook`, or with an output `reduce_scatter_hook`, but bfloat16 travels."""
    _compress(torch.bfloat16, state, grad, output)


def _compress(
    dtype: torch.dtype, state: LowPrecisionState, grad: torch.Tensor, output: torch.Tensor | None
) -> None:
    travelling = grad.div_(state.gradient_predivide_factor).to(dtype)
    if output is None:
        dist.all_reduce(travelling, group=state.process_group)
        grad.copy_(travelling).div_(state.gradient_postdivide_factor)
    else:
        shard = travelling.new_empty(output.shape)
        reduce_scatter_single(shard, travelling, group=state.process_group)
        output.copy_(shard).div_(state.gradient_postdivide_factor)
