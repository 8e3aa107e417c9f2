"""The setups that `fit` varies: the arguments that they take, and errors of plans."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

Setup = Callable[..., tuple[Any, Any, Any]]

REFUSALS = (ValueError, RuntimeError, TypeError, NotImplementedError)
"""Errors of a setup or step that cannot be planned."""


def keywords_of(setup: Setup) -> set[str] | None:
    """Returns the names that a setup takes by keyword; None if it takes any."""
    kinds = inspect.Parameter
    parameters = inspect.signature(setup).parameters.values()
    if any(parameter.kind is kinds.VAR_KEYWORD for parameter in parameters):
        return None
    return {
        parameter.name
        for parameter in parameters
        if parameter.kind in (kinds.KEYWORD_ONLY, kinds.POSITIONAL_OR_KEYWORD)
    }


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or its type where there is none."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
