"""Optimizers that fit sharded parameters.

`on_shards` lets any elementwise optimizer step on the plain shards behind `DTensor`s.
"""

from fsdp_wrap.optim._on_shards import on_shards

__all__ = ["on_shards"]
