"""`summon_full_params`: full parameters in the user's hands."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn

from fsdp_wrap._by_hand import note_change, require_idle
from fsdp_wrap._checks import refuse_replaced
from fsdp_wrap._comm import calling
from fsdp_wrap._core import NotIdleError
from fsdp_wrap._params import Buffers, LentParams, Summoning
from fsdp_wrap._runtime import Unit, buffers_of, communicators_of, units_in
from fsdp_wrap._state.originals import used_by

_EVERYWHERE = Summoning()


def is_summoned(unit: Unit) -> bool:
    """Whether the unit's full parameters are in the user's hands."""
    return unit.buffers.lent.summoned


@contextmanager
def summon_full_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Shows full parameters, in their original shapes and master dtype, in place of the sharded ones.

    Collective: every rank enters and leaves. On leaving, each rank keeps its shard of the parameters that
    it sees, so edits must be the same on all ranks, except with `rank0_only`. Buffers stay in the dtype
    that forwards compute with (`buffer_dtype`); state dicts have them in their own dtype. Parameters of
    tensor parallelism are shown as before sharding: `DTensor`s over their mesh, with the whole parameter
    as `full_tensor()`.

    Args:
        module: Any module; all units at and below it take part.
        recurse: Also show the units below the outermost one. Without it, no parameter is shown unless
            `module` itself is a unit.
        writeback: Keep edits of the parameters (and gradients); otherwise edits are dropped, also with
            NO_SHARD, where torch keeps them.
        rank0_only: Show full parameters only on the first rank of each unit's process group (of the first
            copy, with several copies). The other ranks go on showing sharded parameters, and get the
            first rank's edits. If any rank leaves by an exception, no edit is kept on any rank.
        offload_to_cpu: Show full parameters in host memory. Then at most one unit at a time is on the
            accelerator.
        with_grads: Show the full gradients as `.grad`; None if no rank has one.

    Raises:
        NotIdleError: Inside a forward, a backward, or another summon of the same unit.
        RuntimeError: With `with_grads`, while gradients accumulated under `no_sync` wait to be reduced;
            on leaving, if another rank's edits are lost (`rank0_only`).
        ReplacedError: If a sharded parameter was replaced by another object before.
        ValueError: On leaving, if a parameter was replaced by one of another shape, dtype or placement.
    """
    units = [unit for unit in units_in(module).values() if recurse or unit.module is module]
    # Programs know torch's words.
    require_idle(units, "Cannot manually unshard parameters during forward/backward: summon_full_params")
    refuse_summoned(units, "another summon_full_params()")
    for unit in units:
        if with_grads and unit.buffers.gradients.accumulated:
            raise RuntimeError(
                f"{unit.name} holds gradients accumulated under no_sync, which are not reduced yet; call "
                "summon_full_params(with_grads=True) after a backward outside of no_sync, or zero them"
            )
    how = Summoning(rank0_only=rank0_only, offload_to_cpu=offload_to_cpu, with_grads=with_grads)
    with full_units(units, "summon_full_params()", writeback=writeback, how=how):
        yield


@contextmanager
def full_units(
    units: Sequence[Unit], doing: str, *, writeback: bool, how: Summoning = _EVERYWHERE
) -> Iterator[None]:
    """Shows the full parameters that units use; after an exception inside, nothing is written back.

    `doing` names the user's call in errors.
    """
    summoned: list[Unit] = []
    how = replace(how, tells_edits=writeback and not how.rank0_only)
    with _taken_back(summoned, writeback):
        gathered = (unit for unit in used_by(units) if not is_summoned(unit))
        with calling(doing, [buffers.communicator.positions for buffers in buffers_of(gathered)]):
            for unit in units:
                summoned += summon(unit, how)
        with _all_or_none(summoned if how.rank0_only and writeback else ()):
            yield
            if writeback:
                _take_edits(summoned)
                # Without replicas and gathers nothing else tells a rank that does this alone.
                note_change((unit for unit in summoned if unit.buffers.lent.edited), "edit", summoned)


@contextmanager
def _taken_back(units: Iterable[Unit], writeback: bool) -> Iterator[None]:
    """Takes full parameters back at the end, with the edits that were noted if nothing was raised."""
    kept = False
    try:
        yield
        kept = writeback
    finally:
        for buffers in buffers_of(units):
            buffers.take_back(kept)


@contextmanager
def _all_or_none(units: Sequence[Unit]) -> Iterator[None]:
    """Raises at the end if any rank of the units' groups has raised inside; collective in either case."""
    try:
        yield
    except Exception:
        _agree(units, False)
        raise
    if not _agree(units, True):
        raise RuntimeError(
            "another rank left summon_full_params by an exception, so no edit is written back on any: "
            "see that rank's error"
        )


def _agree(units: Sequence[Unit], fine: bool) -> bool:
    for communicator in communicators_of(units):
        flag = torch.tensor([fine], dtype=torch.int32, device=communicator.device)
        communicator.all_reduce([flag], dist.ReduceOp.MIN).wait()
        fine = bool(flag.item())
    return fine


@contextmanager
def original_buffers(units: Iterable[Unit]) -> Iterator[None]:
    """Shows the buffers of units in their own dtype."""
    units = list(units)
    for unit in units:
        unit.buffer_casts.hold_original()
    try:
        yield
    finally:
        for unit in units:
            unit.buffer_casts.release()


def summon(unit: Unit, how: Summoning = _EVERYWHERE) -> list[Unit]:
    """Summons a unit and its lenders unless they are already; returns those summoned, for `dismiss`."""
    used = used_by([unit])
    summoned = [used_unit for used_unit in used if not is_summoned(used_unit)]
    for used_unit in used if not how.rank0_only else ():
        refuse_hidden(used_unit)
    sharded_buffers(summoned)  # summoning would leave no trace of what was replaced
    for buffers in buffers_of(summoned):
        buffers.become_sharded()
        buffers.lend(LentParams.full(buffers.params, buffers.communicator, buffers.replicas, how))
    return summoned


def refuse_hidden(unit: Unit) -> None:
    """Raises if full parameters are summoned on the first rank only (`rank0_only`), and this is another."""
    if is_summoned(unit) and not unit.buffers.lent.shows_full:
        raise RuntimeError(
            f"the full parameters of {unit.name} are on the first rank only: this call must come after "
            f"summon_full_params(rank0_only=True), or on that rank alone, not on rank {dist.get_rank()}"
        )


def dismiss(units: Sequence[Unit], writeback: bool) -> None:
    """Takes full parameters back; if one cannot be written back, none is."""
    with _taken_back(units, writeback):
        if writeback:
            _take_edits(units)


def _take_edits(units: Iterable[Unit]) -> None:
    for unit in units:
        unit.buffers.lent.take_edits(unit.name_of(""))


def refuse_summoned(units: Iterable[Unit], doing: str) -> None:
    """Raises NotIdleError if a unit is summoned."""
    for unit in units:
        if is_summoned(unit):
            raise NotIdleError(
                f"the parameters of {unit.name} are shown in full by summon_full_params; leave its context "
                f"before {doing}"
            )


def settle(units: Iterable[Unit], doing: str) -> None:
    """Reshards units and their lenders to read their shards; raises if they are in use or were replaced."""
    used = used_by(units)
    require_idle(used, doing)
    refuse_summoned(used, doing)
    ready = {*sharded_buffers(used)}
    for unit in used:
        if unit.params and unit.buffers not in ready:
            raise RuntimeError(f"{doing} must not run while a state dict of {unit.name} is taken or loaded")


def sharded_buffers(units: Iterable[Unit]) -> list[Buffers]:
    """Reshards units and their lenders; returns the buffers that show nothing else to the user."""
    all_buffers = []
    for unit in used_by(units):
        if unit.buffers.become_sharded():
            for segment in unit.buffers.segments:
                refuse_replaced(unit, segment.params)
            all_buffers.append(unit.buffers)
    return all_buffers
