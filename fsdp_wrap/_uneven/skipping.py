"""`allow_skipping`: a part of the model that some ranks do not run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import nn

from fsdp_wrap._building import REGISTRY
from fsdp_wrap._by_hand import require_idle
from fsdp_wrap._core import WRAPPED_ATTR, PlugIn, Precedence
from fsdp_wrap._runtime import Unit, units_in


def allow_skipping(module: nn.Module) -> None:
    """Allows ranks to leave out a part of the model in any forward, such as an expert without tokens.

    The collectives of the units at and below the module are tied to the nearest unit around it that has
    parameters and may not be skipped itself. It unshards them with its own parameters, and all ranks
    reduce their gradients when its backward ends, so no rank needs to know of the others. Gradients are means
    over all ranks, of which those that left the part out count zeros. A parameter that no rank has used gets
    no gradient.

    All units of the part are held in full while the unit around it computes, and their gradients until its
    backward has reached its inputs. Where none of its inputs needs a gradient, as those of a root, they are
    held until the whole backward ends.

    The module may have a unit itself, or be plain and have units below it. All ranks must call this, in the
    same order, once the whole model is wrapped.

    Args:
        module: The part of the model.

    Raises:
        TypeError: If it is no module.
        ValueError: If it has no unit, is the root, or is used by several units; if no unit around it has
            parameters; if one of its units is shared: with other modules (`fully_shard` of a list), or by
            tied parameters.
        RuntimeError: Inside a forward or backward.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"allow_skipping() takes a module, not a {type(module).__name__}")
    units = [*units_in(module).values()]
    around = _around(module, units)
    _refuse_shared(units, around)
    require_idle([*units, *around], "allow_skipping()")
    for unit in units:
        if unit.tied_to is None:
            unit.plug_ins.attach(RunsBackward())
    around[0].tie(units)


class RunsBackward(PlugIn):
    """Refuses a forward after which this rank has no backward to reduce a tied unit's gradients in."""

    order = Precedence.CHECKS
    copied = True

    def ran(self, unit: Unit, outputs: Sequence[torch.Tensor]) -> None:
        if not torch.is_grad_enabled() or any([output.requires_grad for output in outputs]):
            return
        if unit.buffers.segments.trainable and unit.tied_to is not None:
            raise RuntimeError(
                f"no output of {unit.tied_to.name} needs a gradient on rank {dist.get_rank()}, where "
                f"{unit.name} may be skipped (allow_skipping) and trains: other ranks would wait for its "
                "gradients. Use something that trains, or an input that needs a gradient, on all ranks"
            )


def _around(module: nn.Module, units: Sequence[Unit]) -> list[Unit]:
    """Returns the units around a part that may not be skipped, innermost first; refuses other parts."""
    name = units[0].name if units else f"this {type(module).__name__}"
    candidates = REGISTRY.units().difference(units)
    contents = {unit: set(unit.module.modules()) for unit in candidates if not unit.mesh_label}
    contents = {
        unit: inside for unit, inside in contents.items() if module in inside and unit.tied_to is None
    }
    around = sorted(contents, key=lambda unit: len(contents[unit]))
    if not units or any(unit.module._modules.get(WRAPPED_ATTR) is module for unit in around):
        raise ValueError(
            f"{name} is no unit and has none below it that allow_skipping() could tie: pass the wrapped or "
            "sharded module itself; parameters that belong to the unit around it need no permission"
        )
    if not around:
        raise ValueError(
            f"{name} is the root, or no unit around it has parameters of its own, so all ranks must run it: "
            "allow_skipping() takes a part of a model, once the whole model is wrapped"
        )
    outer = next((unit for unit in around[1:] if around[0].module not in contents[unit]), None)
    if outer is not None:
        raise ValueError(
            f"{name} is part of {around[0].name} and of {outer.name}, neither inside the other, so neither "
            "can run its collectives: make no unit of it"
        )
    return around


def _refuse_shared(units: Sequence[Unit], around: Sequence[Unit]) -> None:
    """Refuses units whose collectives other units issue as well, or that would issue those of others."""
    for unit in (*units, around[0]):
        if unit.parts:
            raise ValueError(
                f"{unit.name} was made of a list of modules, of which each runs by itself: for "
                "allow_skipping() make a unit of each"
            )
    for unit in units:
        borrowers = [borrower for borrower in REGISTRY.units() if unit in _lenders(borrower)]
        # Lenders around the part run whenever it does.
        lenders = [lender for lender in _lenders(unit) if lender not in around]
        other = next((sharer for sharer in (*borrowers, *lenders) if sharer not in units), None)
        if other is not None:
            raise ValueError(
                f"{unit.name} and {other.name} share tied parameters, and {other.name} runs where "
                f"{unit.name} may be skipped: untie them, or make one unit of both"
            )


def _lenders(unit: Unit) -> Iterable[Unit]:
    """Returns the units that lend parameters to a unit, without those of its own module."""
    return [lender for lender in unit.lenders if lender not in unit.over_all_meshes]
