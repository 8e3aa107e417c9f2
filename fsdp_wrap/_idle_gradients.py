"""The gradients below a module, looked at between its iterations."""

from __future__ import annotations

import copy
from collections.abc import Collection
from typing import Any

from torch import nn

from fsdp_wrap._errors import NotIdleError
from fsdp_wrap._held_gradients import HeldGradients
from fsdp_wrap._schedule import schedule_of
from fsdp_wrap._unit import Unit, units_in
from fsdp_wrap.full_params import is_summoned

__all__ = ["IdleGradients"]


class IdleGradients:
    """The gradients of a wrapper.

    Who holds them is found out anew only when modules or parameters have come or gone.

    Args:
        module: The wrapper.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._known: HeldGradients | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> IdleGradients:
        return type(self)(copy.deepcopy(self._module, memo))

    def found(self, doing: str) -> HeldGradients:
        """Returns what there is.

        Raises:
            RuntimeError: Inside a forward, a backward or `summon_full_params`; it names what is being done.
        """
        known = self._known if self._known is not None and self._known.is_current else None
        _require_idle(units_in(self._module).values() if known is None else known.units, doing)
        self._known = HeldGradients(self._module) if known is None else known
        return self._known


def _require_idle(units: Collection[Unit], doing: str) -> None:
    for schedule in dict.fromkeys(map(schedule_of, units)):
        schedule.require_idle(doing)
        schedule.end_failed_backward()
    if any(map(is_summoned, units)):
        raise NotIdleError(f"{doing} must not run inside summon_full_params, which hides gradients")
