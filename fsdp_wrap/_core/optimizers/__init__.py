"""Optimizers as users give them: how often they step, and what they compute with.

Lives here: the hooks on steps, and the trial that finds out whether an optimizer is elementwise.
May import: `_core`.
Must never know: how parameters are sharded; the caller tells which ones are pieces.
"""

from fsdp_wrap._core.optimizers.optimizer_steps import (
    OptimizerPiece,
    note_elsewhere,
    note_pieces,
    reason_against_pieces,
    refuse_in_steps,
    steps_taken,
    warn_of_lost_decay,
    watch_steps,
)
from fsdp_wrap._core.optimizers.probe import (
    TrialGroup,
    by_rows,
    computes_with_wholes,
    knows_its_shards,
    note_knows_shards,
)
