"""`ShardedGradScaler`, under the path that torch has for it."""

from fsdp_wrap._state import ShardedGradScaler

__all__ = [
    "ShardedGradScaler",
]
