"""`set_gradients_in_place`: backward in less memory, for modules that allow it."""

from __future__ import annotations

from torch import nn

from fsdp_wrap._runtime import schedule_of, units_in

__all__ = ["set_gradients_in_place"]


def set_gradients_in_place(module: nn.Module, enabled: bool = True) -> None:
    """Lets gradients take the place of their full parameters, which saves a unit's memory in backward.

    As soon as a parameter has its gradient in a backward, its full value is overwritten. So nothing may need
    the value later in that backward: no detached copy-free alias of the parameter with which the module
    computes (`weight.detach()`), and no second gradient of the same parameter by nested reentrant
    checkpoints, which is noticed and raises. Ordinary layers, shared ones as well, allow it.

    It has an effect where gradients are reduced in the dtype of computation and at once (not under
    `no_sync`), on units of the wrapper that are sharded and resharded after backward.

    Args:
        module: Of which all units, itself included, are concerned: wrapped or sharded, or holding such.
        enabled: Whether gradients may do so from the next backward on.

    Raises:
        ValueError: If there is no unit in the module.
        RuntimeError: In the middle of a forward or backward.
    """
    units = units_in(module).values()
    if not units:
        raise ValueError(f"{type(module).__name__} has no wrapped or sharded module; wrap it first")
    for unit in units:
        schedule_of(unit).require_idle("set_gradients_in_place()")
    for unit in units:
        unit.set(gradients_in_place=enabled)
