"""Optimizer state dicts by name."""

from fsdp_wrap._state import (
    full_optim_state_dict,
    iter_full_optim_state,
    rekey_optim_state_dict,
    sharded_optim_state_dict,
)

__all__ = [
    "full_optim_state_dict",
    "iter_full_optim_state",
    "rekey_optim_state_dict",
    "sharded_optim_state_dict",
]
