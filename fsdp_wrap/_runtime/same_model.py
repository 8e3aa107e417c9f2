"""`SameModel`: lets the ranks compare their units, each before the first collective for it."""

from __future__ import annotations

import functools
import warnings

import torch.distributed as dist

from fsdp_wrap._comm import SAME_SETTINGS, Agreement, Communicator, Tree, UnitPositions, accelerator_of
from fsdp_wrap._runtime.initial_values import find_difference
from fsdp_wrap._runtime.unit import Unit

__all__ = ["SameModel", "communicators_of"]

_SAME_MODEL = "All ranks must shard the same model"
_CURE = (
    "what is trained is a mixture of models. Initialise with the same seed on all ranks, pass "
    "sync_module_states=True to the wrapper, or broadcast or load the parameters before sharding"
)


class SameModel:
    """The units of one tree, as the ranks compare them."""

    def __init__(self) -> None:
        self._tree = Tree()
        self._told_of_values = False

    def positions_of(self, unit: Unit) -> UnitPositions:
        """Returns what a unit tells other ranks by, which compares the unit at first."""
        communicators = communicators_of(unit)
        within = unit.options.reshards_within
        return UnitPositions(
            unit.name,
            self._tree,
            gathering=[one.positions for one in communicators[:1] if one.positions is not None],
            # The replicas' first: who finds a mix-up there does not tell the others that it comes to reduce.
            reducing=[one.positions for one in reversed(communicators) if one.positions is not None],
            keeping=[] if within is None or within.positions is None else [within.positions],
            waits=all(accelerator_of(one.device) is None for one in communicators),
            agree=functools.partial(self._agree, unit),
        )

    def _agree(self, unit: Unit, agreement: Agreement, name: str) -> None:
        """Checks that the ranks of a group have the same unit, and warns once if it began differently."""
        agreement.require(f"what {name} consists of", _contents_of(unit), _SAME_MODEL)
        settings = [setting for one in communicators_of(unit) for setting in one.settings]
        agreement.require(f"how {name} communicates", settings, SAME_SETTINGS)
        handle = unit.handle
        if handle is None or unit.initial is None or self._told_of_values or not agreement.compares:
            return
        lines = unit.initial.lines(handle.layouts)
        if not any(lines):  # who has loaded values says nothing
            return
        rank, others = agreement.first(f"the initial values of {name}", lines)
        differs = find_difference(lines, others)
        if differs is not None:
            self._told_of_values = True
            fqns = [fqn for layout in handle.layouts for fqn in layout.fqns]
            warnings.warn(
                f"the parameter '{unit.name_of(fqns[differs])}' began with other values on rank "
                f"{dist.get_rank()} than on rank {rank}, and each rank keeps its own: {_CURE}",
                stacklevel=2,
            )


def communicators_of(unit: Unit) -> list[Communicator]:
    """Returns what a unit communicates by: within its copy, and over the replicas."""
    return [] if unit.handle is None else [unit.handle.communicator, unit.handle.replicas]


def _contents_of(unit: Unit) -> list[str]:
    """Names the parameters, in the order in which they travel, with their shapes and dtypes."""
    return [
        f"'{fqn}' of shape {tuple(leaf.shape)}, {segment.layout.dtype}"
        for segment in ([] if unit.handle is None else unit.handle.segments)
        for fqn, leaf in zip(segment.layout.fqns, segment.leaves)
    ]
