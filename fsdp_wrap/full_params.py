"""Full parameters in the place of the sharded ones."""

from fsdp_wrap._state import summon_full_params

__all__ = ["summon_full_params"]
