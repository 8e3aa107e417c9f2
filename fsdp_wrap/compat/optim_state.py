"""Static methods for optimizer state that torch's wrapper keeps for old programs, on ours.

Importing this file adds them to the wrapper. New programs call `optim_state_dict` and
`optim_state_dict_to_load`, after `set_state_dict_type`.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_wrap._core import FullOptimStateDictConfig
from fsdp_wrap._state import (
    full_optim_state_dict,
    load_optim_state_dict,
    only_rank,
    refitted,
    sharded_optim_state_dict,
)
from fsdp_wrap._state_dict_methods import warn_of_optim_input
from fsdp_wrap.fully_sharded_data_parallel import FullyShardedDataParallel

_load = partial(load_optim_state_dict, only_known=True)


class _OldMethods:
    """The methods; this class is never instantiated."""

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_input: list[dict[str, Any]] | Iterable[nn.Parameter] | None = None,
        rank0_only: bool = True,
        group: dist.ProcessGroup | None = None,
    ) -> dict[str, Any]:
        """Returns `optim_state_dict` of full tensors, on the host; ignores `optim_input` and `group`.

        Args:
            model: The wrapped module, or a module that contains it.
            optim: An optimizer of the model's parameters.
            optim_input: Ignored.
            rank0_only: Give the state to the first rank alone; the others get an empty dict.
            group: Ignored.
        """
        warn_of_optim_input(optim_input)
        only = only_rank(model, FullOptimStateDictConfig(rank0_only=rank0_only))
        return full_optim_state_dict(model, optim, None, to_host=True, only=only)

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module, optim: torch.optim.Optimizer, group: dist.ProcessGroup | None = None
    ) -> dict[str, Any]:
        """Returns `optim_state_dict` of this rank's pieces, on the host; `group` has no effect.

        Args:
            model: The wrapped module, or a module that contains it.
            optim: An optimizer of the model's parameters.
            group: Ignored.
        """
        return sharded_optim_state_dict(model, optim, None, to_host=True)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any],
        model: nn.Module,
        optim_input: list[dict[str, Any]] | Iterable[nn.Parameter] | None = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """Returns `optim_state_dict_to_load` of full tensors on every rank; `optim` may be None.

        Args:
            full_optim_state_dict: The state, by names of the unwrapped module.
            model: The wrapped module, or a module that contains it.
            optim_input: Ignored.
            optim: The optimizer; None if the model has one.
        """
        warn_of_optim_input(optim_input)
        return _load(model, optim, full_optim_state_dict, optim_input=optim_input)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: dict[str, Any] | None,
        model: nn.Module,
        optim_input: list[dict[str, Any]] | Iterable[nn.Parameter] | None = None,
        optim: torch.optim.Optimizer | None = None,
        group: Any | None = None,
    ) -> dict[str, Any]:
        """Returns `optim_state_dict_to_load` of the first rank's full tensors; `optim` may be None.

        Args:
            full_optim_state_dict: The state on the first rank, by names of the unwrapped module; ignored on
                the others.
            model: The wrapped module, or a module that contains it.
            optim_input: Ignored.
            optim: The optimizer; None if the model has one.
            group: Ignored.
        """
        warn_of_optim_input(optim_input)
        given = full_optim_state_dict
        return _load(model, optim, given, optim_input=optim_input, from_first_rank=True)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: torch.optim.Optimizer
    ) -> dict[str, Any]:
        """Returns `optim_state_dict_to_load` of pieces, also of another wrapping; collective.

        Args:
            sharded_optim_state_dict: The state of `sharded_optim_state_dict`.
            model: The wrapped module, or a module that contains it.
            optim: An optimizer of the model's parameters.
        """
        return _load(model, optim, refitted(model, sharded_optim_state_dict))


for _name, _method in vars(_OldMethods).items():
    if isinstance(_method, staticmethod):
        setattr(FullyShardedDataParallel, _name, _method)
