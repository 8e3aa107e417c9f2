"""Mistakes that show at an optimizer's step: each rank sees its own part, and the ranks compare.

Lives here: what ranks tell each other of an optimizer's step, and what they conclude.
May import: `_core`, `_comm`, `_params`, and units.
Must never know: when units run.
"""

from fsdp_wrap._runtime.step_checks.checks import StepChecks, scaling_alike
from fsdp_wrap._runtime.step_checks.notes import StepNotes

__all__ = ["StepChecks", "StepNotes", "scaling_alike"]
