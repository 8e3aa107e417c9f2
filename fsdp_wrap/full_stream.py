"""Full tensors one after the other."""

from fsdp_wrap._state import FullParams, iter_full_params, param_aliases

__all__ = ["FullParams", "iter_full_params", "param_aliases"]
