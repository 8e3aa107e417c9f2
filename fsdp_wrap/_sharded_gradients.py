"""What a layout does with the gradients of its sharded parameters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

__all__ = ["ShardedGradients"]


class ShardedGradients(Protocol):
    """The gradients of one segment's sharded parameters, and marks where unreduced ones wait."""

    def notes(self, travelling: torch.Tensor) -> torch.Tensor:
        """Views where in a buffer that will be reduced `note_used` notes something."""
        ...

    def note_used(self, notes: torch.Tensor, used: Sequence[bool]) -> None:
        """Notes, where other ranks must know it, what this rank used.

        Args:
            notes: From `notes`, of the buffer that will be reduced.
            used: For each original parameter, whether this rank has contributed to its gradient.
        """
        ...

    def note_in_shard(self, shard: torch.Tensor, used: Sequence[bool]) -> None:
        """Notes in a shard that was reduced in a way which loses notes what all ranks used.

        Args:
            shard: The shard, 1-D, in the reduce dtype.
            used: For each original parameter, whether any rank has contributed to its gradient.
        """
        ...

    def used_by_any(self, shard: torch.Tensor, used: Sequence[bool]) -> Sequence[bool]:
        """Tells which original parameters any rank has used, all ranks alike.

        Args:
            shard: What was reduced, with what the ranks noted; neither divided nor cast since.
            used: For each original parameter, whether this rank has contributed to its gradient.
        """
        ...

    def add_reduced(self, reduced: torch.Tensor, used: Sequence[bool]) -> None:
        """Adds a reduced gradient shard to the sharded parameters' gradients.

        Args:
            reduced: The shard, 1-D, in the gradients' dtype.
            used: For each original parameter, whether any rank contributed to its gradient. One that no
                rank used gets none, so that optimizers pass over it as they do on a plain module.
        """
        ...

    def take_gradients_in(self, dtype: torch.dtype) -> None:
        """Lets the sharded parameters take gradients of another dtype than their own."""
        ...

    def mark_unsynced(self) -> None:
        """Makes the sharded parameters' gradients tell later whether they were zeroed meanwhile."""
        ...

    def zeroed(self) -> list[bool]:
        """For each leaf, whether its gradient was zeroed since `mark_unsynced`."""
        ...

    def write_gradient(self, out: torch.Tensor) -> None:
        """Copies this rank's shard of the gradient to where it travels from: zeros where there is none."""
        ...

    def read_gradient(self, own: torch.Tensor | None, present: Sequence[bool]) -> None:
        """Replaces the sharded parameters' gradients.

        Args:
            own: This rank's part of the unsharded gradient; None where no parameter has one.
            present: For each original parameter, whether it has one. Gradients that would not change are
                left untouched, so that `zeroed` does not take them for the user's doing.
        """
        ...

    def gradients(self) -> list[torch.Tensor | None]:
        """For each original parameter, this rank's piece of its gradient; None without a gradient."""
        ...

    def gradient_blocks(self) -> list[torch.Tensor]:
        """This rank's gradients in as few tensors as possible, none empty; zero padding may be among them."""
        ...
