"""`audit`: looks for silent data corruption in drawn steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

from torch import nn

from fsdp_wrap._core import check_kind, warn_caller
from fsdp_wrap._runtime import step_of
from fsdp_wrap._values.auditing.corruption import Corruption, CorruptionError, text_of
from fsdp_wrap._values.auditing.tree import TreeAudit
from fsdp_wrap._values.finding import quoted
from fsdp_wrap._values.pieces import idle_units
from fsdp_wrap._values.record import check_every

OnFault = Literal["warn", "raise"] | Callable[[Corruption], object]


class Audit:
    """An audit that runs; a context that ends it.

    Attributes:
        findings: All findings up to now, the same on all ranks.
        skipped: Units whose computation cannot be repeated, with the reason.
    """

    def __init__(self, model: nn.Module, every: int, on_fault: OnFault, seed: int) -> None:
        self.findings: list[Corruption] = []
        self.skipped: dict[str, str] = {}
        self._on_fault = on_fault
        names = idle_units(model, "audit()")
        self._trees = [
            TreeAudit(
                step,
                {unit: name for unit, name in names.items() if step_of(unit) is step},
                *(every, seed, self._report, self._skip),
            )
            for step in dict.fromkeys(map(step_of, names))
        ]

    @property
    def steps(self) -> int:
        """Number of steps that were audited."""
        return sum(tree.audited for tree in self._trees)

    def end_step(self) -> None:
        """Ends a step by hand: for optimizers that are not torch's."""
        for tree in self._trees:
            tree.end_step()

    def remove(self) -> None:
        """Ends the audit; an audited step that is not over is dropped."""
        for tree in self._trees:
            tree.close(meets=False)

    def __enter__(self) -> Audit:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        for tree in self._trees:
            tree.close(meets=error is None)

    def _skip(self, unit: str, reason: str) -> None:
        if reason not in self.skipped.values():
            warn_caller(
                f"audit() cannot repeat the computation of unit {quoted(unit)}, nor of others like it: "
                f"{reason}. The rest is audited"
            )
        self.skipped[unit] = reason

    def _report(self, corruptions: Sequence[Corruption]) -> None:
        self.findings += corruptions
        first, *also = corruptions
        if self._on_fault == "raise":
            raise CorruptionError(text_of(first, also), first, also)
        if self._on_fault == "warn":
            warn_caller(text_of(first, also))
        elif callable(self._on_fault):
            self._on_fault(first)


def audit(model: nn.Module, every: int = 100, *, on_fault: OnFault = "warn", seed: int = 0) -> Audit:
    """Looks for silent data corruption while a model trains: a GPU, memory or link that computes wrong.

    One of each `every` steps is drawn. In it the ranks check that gathered parameters are the shards of their
    owners, that shards change by updates alone and are alike on replicas, and that reduced gradients are sums
    of the ranks' gradients, up to rounding. One drawn unit's forward and backward, and one drawn parameter's
    update, are computed again and compared bit for bit. In other steps nothing is looked at.

    A step ends when an optimizer of `torch.optim` that has parameters of the model has stepped, and the next
    forward of all ranks begins. What ranks compute inside `uneven`, or in `Join` once one has no batch left,
    is not looked at.

    Args:
        model: Wrapped or sharded, or with such modules inside. All ranks call this with the same arguments.
        every: Number of steps of which one is drawn.
        on_fault: "warn", "raise", which raises a `CorruptionError` on all ranks at the same place, or a
            function that is called on all ranks with the first finding of a step; it may raise as well, to
            leave the run by its last checkpoint.
        seed: Draws steps, units and parameters.

    Returns:
        The audit, as a context or to `remove`.

    Raises:
        ValueError: If nothing in the model is wrapped or sharded, `every` is no positive number, or
            `on_fault` is none of these.
        TypeError: If `seed` is no int.
        CorruptionError: In a step, by `on_fault="raise"`: a RuntimeError, on all ranks alike.
    """
    check_every(every)
    check_kind("seed", seed, int, optional=False)
    if on_fault not in ("warn", "raise") and not callable(on_fault):
        raise ValueError(f"on_fault={on_fault!r} must be 'warn', 'raise' or a function")
    return Audit(model, every, on_fault, seed)
