"""Mistakes of users that show in a step: edits that training would lose, and steps that differ by rank.

Lives here: plug-ins that each tree of units has, and what ranks tell each other of an optimizer's step.
May import: `_core`, `_comm`, `_params`, `_runtime`.
Must never know: when units run, and which front-end made them.
"""

from fsdp_wrap._checks.trees import scaling_gradients

__all__ = ["scaling_gradients"]
