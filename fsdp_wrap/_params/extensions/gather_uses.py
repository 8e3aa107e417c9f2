"""`GatherUses`: asks tensor subclasses for what a forward needs, what a backward needs, or both."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from fsdp_wrap._core import Computing, Phase, PlugIn, Precedence
from fsdp_wrap._params.extensions.gathered import Use
from fsdp_wrap._params.extensions.segment import ExtensionSegment

_USES = {Computing.FORWARD: Use.FORWARD, Computing.RECOMPUTE: Use.BOTH, Computing.BACKWARD: Use.BACKWARD}


class GatherUses(PlugIn):
    """Asks the tensor subclasses of one unit before each of its gathers, and tells what the gather is for.

    Values that do not serve what the unit will compute are gathered anew. A forward may be recomputed amidst
    its unit's backward, and so takes values for both. A unit that was recomputed once gets such values at
    once in later backwards.
    """

    order = Precedence.SETTINGS

    def __init__(self) -> None:
        self._recomputes = False

    def enters(self, unit: Any, what: Computing) -> None:
        if what is Computing.RECOMPUTE:
            self._recomputes = True
            _check_recomputed(unit)
        if not _serve(unit.buffers.segments.extended, _USES[what]):
            unit.reshard(Phase.FORWARD if what is Computing.FORWARD else Phase.BACKWARD)

    def to_gather(self, units: tuple[Any, ...], phase: Phase) -> None:
        (unit,) = units  # such units are gathered alone
        use = Use.BACKWARD if phase is Phase.BACKWARD else Use.FORWARD
        both = _stays(unit) or (use is Use.BACKWARD and self._recomputes)
        wanted = Use.BOTH if both else use
        made_anew = [segment.prepare(wanted) for segment in unit.buffers.segments.extended]
        unit.buffers.segments.follow_subclasses(any(made_anew))


def tell_use(segments: Iterable[ExtensionSegment], whether_both: bool = False) -> Use | None:
    """Tells a subclass that is asked now what it is asked for; None if none is."""
    told = [segment.tell_use(whether_both) for segment in segments]
    return next((use for use in told if use is not None), None)


def _serve(segments: Iterable[ExtensionSegment], use: Use) -> bool:
    """Whether the values that were gathered last may be used so."""
    return all(segment.serves(use) for segment in segments)


def _stays(unit: Any) -> bool:
    """Whether full parameters stay from forward to backward."""
    options = unit.options
    return not options.reshard_after_forward or (options.keeps_as_root and not unit.nested)


def _check_recomputed(unit: Any) -> None:
    """Refuses a recomputation for which no values can be gathered."""
    segments = unit.buffers.segments.extended
    if all(segment.made_for is None for segment in segments):
        return
    if not all(segment.gives_both for segment in segments):
        why = (
            "does not read _reshard_after_forward of its FSDP module's state, which tells that both are "
            "needed: let it read that"
        )
    elif unit.plug_ins.align:
        why = "runs inside uneven() or Join, where ranks without a batch could not tell what is gathered"
    elif unit.buffers.gradients.in_place and not _serve(segments, Use.BOTH):
        why = "has gradients in the place of its parameters: call set_gradients_in_place(model, False)"
    else:
        return
    raise RuntimeError(
        f"a forward of {unit.name} is recomputed in its backward. A tensor subclass in it gives other "
        f"tensors to be gathered in backward than in forward, and {why}, or call "
        "set_reshard_after_forward(False)"
    )
