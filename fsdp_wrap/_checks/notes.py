"""`StepNotes`: what the log of collectives says of this rank's steps: begun, ended, or failed."""

from __future__ import annotations

from typing import Any

import torch

from fsdp_wrap._comm import Tree
from fsdp_wrap._core import PlugIn, Precedence


class StepNotes(PlugIn):
    """Notes in a tree's log the forwards and backwards that reduce, and those that raise.

    A rank that leaves one out shifts its reductions against those of the others.

    Args:
        tree: The identity of the tree in logs.
    """

    order = Precedence.CHECKS

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._notes = False  # whether the running forward or backward counts

    def forward_begins(self, step: Any) -> None:
        self._notes = torch.is_grad_enabled() and step.shifts_alone
        if self._notes:
            self._tree.begin_forward()

    def backward_opens(self, step: Any) -> None:
        self._notes = step.shifts_alone

    def backward_ended(self, step: Any) -> None:
        if step.gradients_came and self._notes:
            self._tree.end_backward()

    def failed(self, step: Any) -> None:
        if self._notes and not step.plug_ins.align:  # else it may have failed before it began
            self._tree.fail()
