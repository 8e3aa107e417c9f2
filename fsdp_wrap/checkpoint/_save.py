"""`Save`: the interface of saves to disk and to the memory of hosts."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fsdp_wrap.checkpoint._team import Team


@dataclass(frozen=True, kw_only=True)
class Save(ABC):
    """A planned save; `keep_last` counts this step too, None is the default of the place."""

    team: Team
    state: dict[str, Any]
    step: int | None = None
    keep_last: int | None = None
    progress: bool = False

    def __post_init__(self) -> None:
        for name, least in (("step", 0), ("keep_last", 1)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | None):
                raise TypeError(f"{name} must be a whole number or None, not {type(value).__name__}")
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")

    @abstractmethod
    def write(self) -> Path:
        """Writes the step, on every rank; it appears once all have succeeded, or not at all."""
