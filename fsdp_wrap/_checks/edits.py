"""`UserEdits`: refuses writes of users that training would lose, or not notice."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter

import torch
import torch.distributed as dist

from fsdp_wrap._checks.calls import refuse_replaced
from fsdp_wrap._core import (
    ChangedBetweenError,
    Phase,
    PlugIn,
    Precedence,
    ReplacedError,
    added_names,
    added_params,
    clean_fqn,
    joined,
    own_modules,
)
from fsdp_wrap._core.torch_private import copies_before_writes
from fsdp_wrap._params import Buffers, Segment, Where
from fsdp_wrap._runtime import ForwardCall, Step, Unit, kept_for_backward

_VERSION = attrgetter("_version")


class UserEdits(PlugIn):
    """Refuses edits of full parameters, and of sharded ones where nothing would follow them."""

    order = Precedence.CHECKS

    def forward_ready(self, step: Step) -> None:
        for unit in step.units:
            if unit.buffers.where is Where.SHARDED and not unit.buffers.shown.untouched:
                _refuse_changes(unit, unit.buffers)
        if added_names and torch.is_grad_enabled():
            _refuse_added(step.units)
        if copies_before_writes() and torch.is_grad_enabled():
            _refuse_copies(step)

    def ran(self, unit: Unit, outputs: Sequence[torch.Tensor]) -> None:
        for segment in unit.buffers.segments:
            if (*map(_VERSION, segment.counted),) != segment.versions:
                _refuse_edits(unit, segment)

    def resumes(self, call: ForwardCall) -> None:
        unit, buffers = call.unit, call.unit.buffers
        if buffers.shown.changed or call.values != buffers.values:
            unit.reshard(Phase.BACKWARD)
            _refuse_outdated(call)


def _refuse_outdated(call: ForwardCall) -> None:
    """Raises the error of a backward whose parameters have changed since its forward."""
    name, buffers = call.unit.name, call.unit.buffers
    changed = _forget_changed(call.unit)
    if call.generation != buffers.segments.generation:
        what = f"parameters of {name} were converted to another dtype"
        why = " (or it was evaluated in full precision)" if call.unit.options.full_in_eval else ""
    else:
        written = changed or _written_since(call)
        of = f"parameter '{written}' of {name} was" if written else f"parameters of {name} were"
        what, why = f"{of} written to, or its data replaced,", " (by a step, say)"
    raise ChangedBetweenError(
        f"the {what} between forward and backward on rank {dist.get_rank()}{why}; backward needs the "
        "forward's values: change parameters after the last backward of what was computed, or run the "
        "forward again"
    )


def _forget_changed(unit: Unit) -> str | None:
    """Returns the name of a parameter that was changed while shown in full, and clears the record."""
    shown = unit.buffers.shown
    changed, shown.changed = shown.changed, []
    return unit.name_of(changed[0]) if changed else None


def _written_since(call: ForwardCall) -> str | None:
    """Returns the name of the first parameter that was visibly written to since a call's forward."""
    for segment, before in zip(call.unit.segments, call.written):
        for fqn, old, now in zip(segment.layout.fqns, zip(*before), zip(*segment.params.written())):
            if old != now:
                return call.unit.name_of(fqn)
    return None


def _refuse_edits(unit: Unit, segment: Segment) -> None:
    """Refuses a forward that has written to full parameters, since the edits are lost on resharding."""
    for index in segment.edited() if unit.buffers.where is Where.FULL else ():
        name = unit.name_of(segment.layout.fqns[index])
        raise RuntimeError(
            f"the forward of {unit.name} wrote to the parameter '{name}' in place on rank "
            f"{dist.get_rank()} (as clamp_ and Embedding(max_norm=...) do), which is lost when the unit "
            "reshards: compute with a changed copy, edit parameters between steps (inside "
            "summon_full_params, or each shard by itself), or leave the module out by ignored_states"
        )


def _refuse_changes(unit: Unit, buffers: Buffers) -> None:
    """Refuses replaced sharded parameters, hooks that cannot run, and edits of full ones after a forward."""
    for segment in buffers.segments:
        refuse_replaced(unit, segment.params)
        for fqn in segment.params.display.hooked():
            raise ValueError(
                f"on rank {dist.get_rank()}: register_hook on the sharded parameter "
                f"'{unit.name_of(fqn)}' would never be called, since its gradient comes from a "
                "reduction: remove the hook and use register_post_accumulate_grad_hook, or hook the "
                "module's parameter inside its forward"
            )
    if buffers.shown.changed:
        raise ChangedBetweenError(
            f"the parameter '{_forget_changed(unit)}' was written to, or its data replaced, while its module "
            f"showed it in full after a forward, on rank {dist.get_rank()}, which is lost: "
            "edit it inside summon_full_params, or each shard by itself (model.parameters())"
        )


def _refuse_copies(step: Step) -> None:
    """Refuses copies of saved tensors before each write: a gather writes to memory that was freed."""
    for unit in step.units:
        kept = kept_for_backward(unit, unit in step.root.over_all_meshes)
        if not kept and any(segment.full.temporary for segment in unit.segments):
            raise ValueError(
                f"{unit.name} frees its parameters between forward and backward (rank {dist.get_rank()}), so "
                "autograd cannot copy them before its gather writes to them, as "
                "allow_mutation_on_saved_tensors() asks for: leave that context, or keep the parameters "
                "(reshard_after_forward=False, or ShardingStrategy.SHARD_GRAD_OP)"
            )


def _refuse_added(units: Iterable[Unit]) -> None:
    """Refuses trainable parameters that were registered in a unit after sharding, also in new modules."""
    for unit in units:
        for prefix, module in () if unit.gone else own_modules(unit.module):
            added = [*added_params(module)] if module in added_names else []
            for fqn, param in added:
                if param.requires_grad and not any(param in segment.places for segment in unit.segments):
                    name = unit.name_of(clean_fqn(joined(prefix, fqn)))
                    raise ReplacedError(
                        f"the parameter '{name}' was added to {unit.name}, or its module put in the place of "
                        f"another, after sharding (seen on rank {dist.get_rank()}): no rank would get the "
                        "others' gradients of it. Change the model before sharding it (what stays out goes "
                        "into ignored_states, or ignored_params), or freeze what is new"
                    )
            if not added:
                added_names.pop(module, None)
