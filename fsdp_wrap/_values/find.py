"""`find_nonfinite`: the context that ends a step when a value is NaN or infinite."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from fsdp_wrap._core import PlugIn, Precedence, ValueSeam, check_flag, clean_fqn, encloses, everywhere, walk
from fsdp_wrap._core.torch_private import current_transform, graph_task
from fsdp_wrap._params import Layout, held_params
from fsdp_wrap._runtime import Schedule, Unit, schedule_of
from fsdp_wrap._values.council import Council, all_begin, all_here
from fsdp_wrap._values.finding import quoted, raise_first
from fsdp_wrap._values.looks import Looks, Origin, Spot
from fsdp_wrap._values.modules import ModuleLooks, Names, not_finite, numbered
from fsdp_wrap._values.pieces import (
    Piece,
    full_params,
    gradient_pieces,
    idle_units,
    own_gradients,
    shard_pieces,
)

UPDATE = "update"


@contextmanager
def find_nonfinite(model: nn.Module, *, modules: bool = True, gradients: bool = True) -> Iterator[None]:
    """Ends a step on all ranks with one error if a value in it is NaN or infinite.

    The error names rank, unit, module, phase, the first index, how many there are, and finite values around,
    and whether they were made there or came in. It is raised on all ranks at the same place: at the end of
    the backward, at the beginning of the next forward for what came after that, or at the end of the context;
    not before the end of `uneven`, in which ranks may run different forwards.
    The model can be used afterwards; its gradients are not finite, so call `zero_grad()`.

    Args:
        model: Wrapped or sharded, or with such modules inside. All ranks enter and leave the context.
        modules: Whether to look at each module's outputs, and at their gradients. False looks at units alone,
            which costs less, and on an accelerator reads the results once a step: the error then knows no
            index and no counts.
        gradients: Whether to look at gradients and updates. False is for a gradient scaler, whose scaled
            gradients may overflow.

    Raises:
        ValueError: If nothing in the model is wrapped or sharded.
        NonFiniteError: A RuntimeError, on all ranks alike, if a value is not finite.
    """
    check_flag("modules", modules)
    check_flag("gradients", gradients)
    finder = Finder(model, modules, gradients)
    with finder.looking():
        yield
    finder.meet_all()


class Finder(PlugIn):
    """Looks at the values of a model's steps, and meets the other ranks."""

    order = Precedence.VALUES

    def __init__(self, model: nn.Module, modules: bool, gradients: bool) -> None:
        self._units = idle_units(model, "find_nonfinite()")
        self._meetings = {
            schedule: Council(schedule) for schedule in dict.fromkeys(map(schedule_of, self._units))
        }
        self._met = {schedule: schedule.iteration for schedule in self._meetings}
        self._layouts: dict[Layout, Unit] = {}
        self._gradients = gradients
        on_device = any(schedule.device.type != "cpu" for schedule in self._meetings)
        self._looks = Looks(dist.get_rank(), deferred=on_device and not modules)
        self._modules = ModuleLooks(self._looks, self._names(model), gradients) if modules else None
        self._seen: Sequence[ref[torch.Tensor]] = ()

    def _names(self, model: nn.Module) -> dict[nn.Module, Names]:
        """Names all modules of the model, and the units that they belong to."""
        owners = sorted(self._units.values(), key=len, reverse=True)
        found = {}
        for name, module in walk(model):
            fqn = clean_fqn(name)
            unit = next((each for each in owners if each == fqn or encloses(each, fqn)), "")
            found[module] = Names(fqn, unit)
        return found

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Looks while the context is open; adds to an error that leaves it what this rank has found."""
        with ExitStack() as undo:
            everywhere.attach(self)
            undo.callback(everywhere.detach, self)
            if self._gradients:
                undo.callback(register_optimizer_step_post_hook(self._on_step).remove)
            if self._modules is not None:
                self._modules.open()
                undo.callback(self._modules.close)
            try:
                yield
            except Exception as error:
                found = self._looks.take()
                if found is not None:
                    error.add_note(f"find_nonfinite() has found before: {found.describe()}")
                raise

    # meetings

    def forward_opens(self, schedule: Schedule) -> None:
        if schedule in self._meetings:
            if all_begin(schedule):
                self._meet(schedule)
            self._layouts = {each: unit for unit in self._units for each in unit.layouts}
            self._looks.restart(schedule.iteration)
            if self._modules is not None:
                self._modules.restart()

    def backward_ended(self, schedule: Schedule) -> None:
        if schedule in self._meetings:
            self._meet(schedule)

    def meet_all(self) -> None:
        """Meets the other ranks at the end; collective."""
        for schedule in self._meetings:
            self._meet(schedule)

    def _meet(self, schedule: Schedule) -> None:
        """Raises, on all ranks, the first of what they have found; not while some ranks have no batch."""
        if not all_here(schedule):
            return
        self._looks.settle()
        own, met = self._looks.found, self._met[schedule]
        self._met[schedule] = schedule.iteration
        # Counted from the last meeting: a rank that has evaluated alone is further.
        found = self._meetings[schedule].share(None if own is None else (own.iteration - met, own))
        if found:
            self._looks.take()
            found.sort(key=lambda told: (told[0], told[1].order))
            raise_first([finding for _, finding in found])

    # looks

    def sees(self, owner: Any, seam: ValueSeam, values: Sequence[torch.Tensor | None]) -> None:
        if seam is ValueSeam.REDUCED:
            if self._gradients and values[0] is not None:
                self._look_at_reduced(owner, values[0])
        elif owner in self._units and current_transform() is None:
            tensors = [each for each in values if each is not None]
            if seam is ValueSeam.PARAMETERS:
                self._look_at_parameters(owner)
            elif seam is ValueSeam.INPUTS or seam is ValueSeam.OUTPUTS:
                if graph_task() == -1:  # else a recomputation
                    self._look_forward(owner, seam, tensors)
            elif self._gradients and seam is ValueSeam.GRADIENTS:
                self._look_at_gradients(owner)
            elif self._gradients and self._modules is None:
                self._look_backward(owner, seam, tensors)

    def _look_at_parameters(self, unit: Unit) -> None:
        if graph_task() != -1 and self._modules is None:
            return
        place = Spot("parameter", self._units[unit], self._units[unit])
        told = "It came in by the gather: this rank's shard of it is finite"
        hit = self._looks.at(Origin(place, False, told), full_params(unit, place.unit))
        if hit is None:
            return
        name, tensor = hit
        made = any(piece.fqn == name and not_finite(piece.data) for piece in shard_pieces(unit, place.unit))
        if made:
            told = "This rank's shard of it is not finite"
        self._looks.report(Origin(_of_param(place, name), made, told), (f"parameter '{name}'", tensor))

    def _look_forward(self, unit: Unit, seam: ValueSeam, tensors: Sequence[torch.Tensor]) -> None:
        name = module = self._units[unit]
        outer = self._enclosing(name)
        if self._modules is not None and (outer is not None or seam is ValueSeam.OUTPUTS):
            return  # modules are looked at
        ids = [each if each._base is None else each._base for each in tensors]
        if len(ids) == len(self._seen) and all(known() is each for known, each in zip(self._seen, ids)):
            return  # the output of the unit before
        self._seen = [*map(ref, ids)]
        told, made = "Made here: inputs and parameters are finite", True
        if seam is ValueSeam.INPUTS:
            told, made = "It came in with the input of the model", outer is not None
        if seam is ValueSeam.INPUTS and outer is not None:
            told, module = f"Made in the forward of {quoted(outer)}, outside of the units in it", outer
        origin = Origin(Spot(seam.value, name, module), made, told)
        self._looks.look(origin, numbered(seam.value, tensors))

    def _enclosing(self, name: str) -> str | None:
        """Returns the name of the unit around another one; None for the outermost."""
        outer = [each for each in self._units.values() if each != name and encloses(each, name)]
        return max(outer, key=len, default=None)

    def _look_backward(self, unit: Unit, seam: ValueSeam, tensors: Sequence[torch.Tensor]) -> None:
        name = self._units[unit]
        made = seam is ValueSeam.INPUT_GRADIENTS or self._enclosing(name) is not None
        told = "It came in from the loss"
        if seam is ValueSeam.INPUT_GRADIENTS:
            told = "Made here, in the backward: gradients of the outputs are finite"
        elif made:
            told = "Made in the backward of what uses this output, outside of other units"
        origin = Origin(Spot(seam.value, name, name), made, told)
        self._looks.look(origin, numbered(seam.value, tensors))

    def _look_at_gradients(self, unit: Unit) -> None:
        place = Spot(ValueSeam.GRADIENTS.value, self._units[unit], self._units[unit])
        told = "Made here, in the backward: gradients of the outputs are finite"
        hit = self._looks.at(Origin(place, True, told), own_gradients(unit, place.unit))
        if hit is not None:
            origin = Origin(_of_param(place, hit[0]), True, told)
            self._looks.report(origin, (f"the gradient of '{hit[0]}'", hit[1]))

    def _look_at_reduced(self, layout: Layout, reduced: torch.Tensor) -> None:
        unit = self._layouts.get(layout)
        if unit is not None:
            place = Spot(ValueSeam.REDUCED.value, self._units[unit], self._units[unit])
            told = "Made in the reduction: all ranks' gradients of it were finite"
            self._look_at_pieces(
                place, told, [*gradient_pieces(unit, layout, place.unit, reduced)], "the reduced gradient"
            )

    def _on_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Looks at the shards that an optimizer has updated."""
        held = {*map(id, held_params(optimizer))}
        told = f"Made by {type(optimizer).__name__}: gradients were finite"
        for unit, name in self._units.items():
            place = Spot(UPDATE, name, name)
            for layout in unit.layouts:
                if any(id(param) in held for param in layout.sharded_params):
                    updated = [*shard_pieces(unit, name, [layout])]
                    self._look_at_pieces(place, told, updated, "the updated parameter")

    def _look_at_pieces(self, place: Spot, told: str, pieces: Sequence[Piece], what: str) -> None:
        named = [(piece.fqn, piece.data) for piece in pieces]
        hit = self._looks.at(Origin(place, True, told), named)
        if hit is not None:
            place_of = hit[1].data_ptr()
            piece = next(each for each in pieces if each.data.data_ptr() == place_of)
            origin = Origin(_of_param(place, piece.fqn), True, told)
            self._looks.report(origin, (f"{what} '{piece.fqn}'", piece.data), piece.start, piece.shape)


def _of_param(place: Spot, fqn: str) -> Spot:
    """Returns a place in the module that has a parameter."""
    return place._replace(module=fqn.rpartition(".")[0])
