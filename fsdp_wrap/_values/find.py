"""`find_nonfinite`: the context that ends a step when a value is NaN or infinite."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from weakref import ref

import torch
import torch.distributed as dist
from torch import nn

from fsdp_wrap._core import check_flag, clean_fqn, walk
from fsdp_wrap._runtime import Step
from fsdp_wrap._values import files
from fsdp_wrap._values.council import Council, all_begin, all_here
from fsdp_wrap._values.finding import not_finite, quoted, raise_first
from fsdp_wrap._values.looks import Hit, Looks, Origin, Spot
from fsdp_wrap._values.modules import ModuleLooks, Names
from fsdp_wrap._values.pieces import Piece, idle_units, innermost
from fsdp_wrap._values.recorder import Reader, UnitRecorder

_GRADIENTS = (files.OUTPUT_GRADIENT, files.INPUT_GRADIENT, files.GRADIENT, files.REDUCED)
_WHAT = {
    files.GRADIENT: "the gradient of",
    files.REDUCED: "the reduced gradient",
    files.UPDATE: "the updated parameter",
}
"""How the names of tensors begin, where it is not with the seam."""

_MADE_BACKWARD = "Made here, in the backward: gradients of the outputs are finite"


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


class Finder(Reader):
    """Looks at the values of a model's steps, and meets the other ranks."""

    def __init__(self, model: nn.Module, modules: bool, gradients: bool) -> None:
        units = idle_units(model, "find_nonfinite()")
        self._recorder, self._gradients = UnitRecorder(units, self), gradients
        steps = self._recorder.steps
        self._councils = {step: Council(step) for step in steps}
        self._met = {step: step.iteration for step in steps}
        on_device = any(step.device.type != "cpu" for step in steps)
        self._looks = Looks(dist.get_rank(), deferred=on_device and not modules)
        names = {module: clean_fqn(name) for name, module in walk(model)}
        owned = {
            module: Names(name, innermost(self._recorder.units, name) or "") for module, name in names.items()
        }
        self._modules = ModuleLooks(self._looks, owned, gradients) if modules else None
        self._seen: Sequence[ref[torch.Tensor]] = ()

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Looks while the context is open; adds this rank's finding to an error that leaves the context."""
        with ExitStack() as undo:
            undo.callback(self._recorder.leave)
            self._recorder.follow()
            self._recorder.open()
            if self._modules is not None:
                undo.callback(self._modules.close)
                self._modules.open()
            try:
                yield
            except Exception as error:
                finding = self._looks.take()
                if finding is not None:
                    error.add_note(f"find_nonfinite() has found before: {finding.describe()}")
                raise

    # meetings

    def begin(self, step: Step | None) -> None:
        assert step is not None
        if all_begin(step):
            self.end(step)
        self._looks.restart(step.iteration)
        if self._modules is not None:
            self._modules.restart()

    def meet_all(self) -> None:
        """Meets the other ranks at the end; collective."""
        for step in self._councils:
            self.end(step)

    def end(self, step: Step) -> None:
        """Raises the ranks' first finding on all of them, unless some ranks have no batch."""
        if not all_here(step):
            return
        self._looks.settle()
        own, met = self._looks.finding, self._met[step]
        self._met[step] = step.iteration
        # Counted from the last meeting: a rank that has evaluated alone is further.
        findings = self._councils[step].share(None if own is None else (own.iteration - met, own))
        if findings:
            self._looks.take()
            findings.sort(key=lambda told: (told[0], told[1].order))
            raise_first([finding for _, finding in findings])

    # looks

    def see(self, seam: str, unit: str, pieces: Iterable[Piece]) -> None:
        if seam in _GRADIENTS and not self._gradients:
            return
        if seam in (files.INPUT, files.OUTPUT):
            self._look_forward(seam, unit, [*pieces])
        elif seam in (files.OUTPUT_GRADIENT, files.INPUT_GRADIENT):
            if self._modules is None:
                self._look(seam, unit, *self._told_of_gradient(seam, unit), pieces)
        elif seam == files.GRADIENT:
            self._look(seam, unit, True, _MADE_BACKWARD, pieces)
        elif seam == files.REDUCED:
            told = "Made in the reduction: all ranks' gradients of it were finite"
            self._look(seam, unit, True, told, pieces)
        elif seam == files.PARAMETER or self._modules is not None:
            told = "It came in by the gather: this rank's shard of it is finite"
            self._look(files.PARAMETER, unit, False, told, pieces, partial(self._trace_to_shard, unit))

    def _look(
        self,
        seam: str,
        unit: str,
        made: bool,
        told: str,
        pieces: Iterable[Piece],
        trace: Callable[[Hit], Hit] = lambda hit: hit,
    ) -> None:
        self._looks.look(Origin(Spot(seam, unit, unit), made, told), _WHAT.get(seam, seam), pieces, trace)

    def _trace_to_shard(self, unit: str, hit: Hit) -> Hit:
        """Tells whether this rank's own shard of a gathered parameter is not finite."""
        own = (piece for piece in self._recorder.shards(unit) if piece.fqn == hit.piece.fqn)
        if not any(not_finite(piece.data) for piece in own):
            return hit
        origin = hit.origin._replace(made=True, told="This rank's shard of it is not finite")
        return hit._replace(origin=origin)

    def _look_forward(self, seam: str, unit: str, pieces: Sequence[Piece]) -> None:
        outer = self._enclosing(unit)
        if self._modules is not None and (outer is not None or seam == files.OUTPUT):
            return  # modules are looked at
        bases = [piece.data if piece.data._base is None else piece.data._base for piece in pieces]
        if len(bases) == len(self._seen) and all(known() is base for known, base in zip(self._seen, bases)):
            return  # the output of the unit before
        self._seen = [*map(ref, bases)]
        module, made, told = unit, True, "Made here: inputs and parameters are finite"
        if seam == files.INPUT:
            made, told = outer is not None, "It came in with the input of the model"
        if seam == files.INPUT and outer is not None:
            module, told = outer, f"Made in the forward of {quoted(outer)}, outside of the units in it"
        self._looks.look(Origin(Spot(seam, unit, module), made, told), seam, pieces)

    def _enclosing(self, unit: str) -> str | None:
        """Returns the name of the unit around another one; None for the outermost."""
        return innermost((name for name in self._recorder.units if name != unit), unit)

    def _told_of_gradient(self, seam: str, unit: str) -> tuple[bool, str]:
        """Returns whether the gradient of an activation was made here, and a sentence about it."""
        if seam == files.INPUT_GRADIENT:
            return True, _MADE_BACKWARD
        if self._enclosing(unit) is None:
            return False, "It came in from the loss"
        return True, "Made in the backward of what uses this output, outside of other units"

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if self._gradients:
            told = f"Made by {type(optimizer).__name__}: gradients were finite"
            for unit, pieces in self._recorder.updated(optimizer):
                self._look(files.UPDATE, unit, True, told, pieces)
