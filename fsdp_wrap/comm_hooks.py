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

for _public in map(globals().__getitem__, __all__):
    _public.__module__ = __name__  # the path that errors and pickles name
