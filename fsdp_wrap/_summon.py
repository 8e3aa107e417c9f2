"""The full parameters of one segment while the user holds them."""

from __future__ import annotations

import torch
from torch import nn

from fsdp_wrap._collectives import Communicator
from fsdp_wrap._layout import Layout

__all__ = ["SummonedSegment"]


class SummonedSegment:
    """The full parameters of one segment while the user holds them."""

    def __init__(self, layout: Layout, communicator: Communicator, copies: bool) -> None:
        self._layout = layout
        self._full = communicator.empty(layout.numel, layout.dtype)
        self._own = communicator.own_part(self._full)
        layout.write_shard(self._own)
        communicator.all_gather([self._full]).wait()
        views = layout.views(self._full)
        self._params = [
            nn.Parameter(view.clone() if copies else view, requires_grad=source.requires_grad)
            for view, source in zip(views, layout.sources)
        ]
        layout.show_full(self._params, copies)

    def edits(self, prefix: str) -> list[torch.Tensor]:
        """Returns what the modules show now, or refuses what does not fit."""
        edited = []
        for fqn, param, shown in zip(self._layout.fqns, self._params, self._layout.shown()):
            found = param if shown is None else shown
            if found.shape != param.shape or found.dtype != param.dtype:
                raise ValueError(
                    f"parameter '{prefix}{fqn}' was replaced inside summon_full_params by one of shape "
                    f"{tuple(found.shape)} and dtype {found.dtype}; it must keep {tuple(param.shape)} and "
                    f"{param.dtype}. No edit was written back"
                )
            edited.append(found.detach())
        return edited

    def write_back(self, edited: list[torch.Tensor]) -> None:
        """Takes this rank's part of the edited parameters into the shard."""
        for view, tensor in zip(self._layout.views(self._full), edited):
            if tensor.data_ptr() != view.data_ptr():
                view.copy_(tensor)
        self._layout.read_shard(self._own)
