"""Communication hooks: ready-made ones, and how one is registered."""

from fsdp_wrap._state import (
    DefaultState,
    LowPrecisionState,
    allreduce_hook,
    bf16_compress_hook,
    compress,
    fp16_compress_hook,
    reduce_scatter_hook,
    register_comm_hook,
)

__all__ = [
    "DefaultState",
    "LowPrecisionState",
    "allreduce_hook",
    "bf16_compress_hook",
    "compress",
    "fp16_compress_hook",
    "reduce_scatter_hook",
    "register_comm_hook",
]
