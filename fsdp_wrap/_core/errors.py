"""Errors that are of our type and of torch's in the same place; warnings that point at the caller's line.

And what is said of keywords that a public function does not have.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import pickle
import warnings
from collections.abc import Callable, Mapping
from types import FrameType, MappingProxyType
from typing import Any, TypeVar

_OURS = ("fsdp_wrap", "torch")
"""Packages whose frames lie between a program's line and the warning: torch calls the hooks of modules."""
_Function = TypeVar("_Function", bound=Callable[..., Any])
_NONE: Mapping[str, str] = MappingProxyType({})


class NotIdleError(RuntimeError, AssertionError, ValueError):
    """A method that must not run inside a forward, a backward or `summon_full_params` was called there."""


class ChangedBetweenError(RuntimeError, AssertionError):
    """Parameters were changed between a forward and its backward."""


class ReplacedError(ValueError, RuntimeError):
    """A sharded parameter was replaced by something else."""


class AlreadyShardedError(ValueError, AssertionError, RuntimeError):
    """A module is in a unit already; torch's `replicate` raises `RuntimeError`."""


class NoDimensionError(ValueError, AssertionError):
    """A parameter is to be cut along a dimension that it does not have."""


class UnevenCutError(ValueError, NotImplementedError):
    """A parameter would be cut into chunks that no rank could hold; torch raises `NotImplementedError`."""


class NoValuesError(ValueError, RuntimeError):
    """Parameters on the meta device were to compute."""


class NotRootError(RuntimeError, AssertionError):
    """A method for a whole model was called on a unit that another one encloses."""


class OtherCommsError(RuntimeError, AssertionError):
    """A unit's communication is chosen by something else already."""


class UnfitBackendError(ValueError, RuntimeError):
    """The backend of a process group cannot do what was asked for."""


class WrongConfigError(TypeError, RuntimeError):
    """The configuration of one kind of state dict was given for another."""


class NotPicklableError(TypeError, pickle.PicklingError):
    """A sharded module was to be pickled."""


def not_picklable(what: str) -> NotPicklableError:
    """Returns the error of a sharded module that is to be pickled."""
    return NotPicklableError(
        f"{what} cannot be pickled, being tied to its process group: save its state_dict() by "
        "fsdp_wrap.checkpoint or torch.distributed.checkpoint (copy.deepcopy makes a second module)"
    )


class WrongKindError(TypeError, ValueError):
    """An argument, or the result of a function given as an argument, is of the wrong type."""


def warn_caller(message: str, category: type[Warning] = UserWarning) -> None:
    """Warns at the innermost line that is neither this package's nor torch's, else at the outermost line."""
    frame = inspect.currentframe()
    depth = 1
    while frame is not None and _is_ours(frame) and frame.f_back is not None:
        frame, depth = frame.f_back, depth + 1
    warnings.warn(message, category, stacklevel=depth)


def _is_ours(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] in _OURS


def tells_keywords(instead: Mapping[str, str] = _NONE) -> Callable[[_Function], _Function]:
    """Makes a function tell what to write where it is called with a keyword that it does not have.

    Args:
        instead: What to write, by keywords that other functions have.
    """

    def decorate(function: _Function) -> _Function:
        known = [*inspect.signature(function).parameters]
        owner, _, name = function.__qualname__.rpartition(".")
        called = owner if name == "__init__" else name

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            for keyword in kwargs:
                if keyword not in known:
                    raise TypeError(_told(called, keyword, instead, known))
            return function(*args, **kwargs)

        return checked  # type: ignore[return-value]  # its signature is the function's

    return decorate


def _told(called: str, keyword: str, instead: Mapping[str, str], known: list[str]) -> str:
    error = f"{called}() has no argument '{keyword}'"
    if keyword in instead:
        return f"{error}: {instead[keyword]}"
    close = difflib.get_close_matches(keyword, known, n=1)
    return f"{error}: did you mean '{close[0]}'?" if close else f"{error}; it has {', '.join(known)}"
