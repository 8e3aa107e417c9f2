"""Communication hooks, registered or ready-made, and `compress`, which needs none."""

from fsdp_wrap._compression import compress
from fsdp_wrap._hooks import register_comm_hook
from fsdp_wrap._ready_hooks import (
    DefaultState,
    LowPrecisionState,
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
    reduce_scatter_hook,
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
