"""Mistakes of users: calls that cannot be served, edits that training would lose, steps that differ by rank.

Lives here: plug-ins that each tree of units has, checks of calls, and what ranks tell each other of an
optimizer's step.
May import: `_core`, `_comm`, `_params`, `_runtime`.
Must never know: when units run, and which front-end made them.
"""

from fsdp_wrap._checks.calls import converted, refuse_replaced, refuse_unsharded, require_root
from fsdp_wrap._checks.edits import UserEdits
from fsdp_wrap._checks.errors import ErrorNames, out_of_memory
from fsdp_wrap._checks.freed import tell_of_freed
from fsdp_wrap._checks.notes import StepNotes
from fsdp_wrap._checks.order import OrderCheck
from fsdp_wrap._checks.own_gradients import OwnGradients
from fsdp_wrap._checks.steps import StepChecks, scaling_gradients

__all__ = [
    "ErrorNames",
    "OrderCheck",
    "OwnGradients",
    "StepChecks",
    "StepNotes",
    "UserEdits",
    "converted",
    "out_of_memory",
    "refuse_replaced",
    "refuse_unsharded",
    "require_root",
    "scaling_gradients",
    "tell_of_freed",
]
