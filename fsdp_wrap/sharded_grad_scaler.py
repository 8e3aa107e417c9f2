"""`ShardedGradScaler`, under the path that torch has for it."""

from fsdp_wrap._state import ShardedGradScaler

__all__ = ["ShardedGradScaler"]

for _public in map(globals().__getitem__, __all__):
    _public.__module__ = __name__  # the path that errors and pickles name
