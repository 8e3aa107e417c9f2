"""`ModuleLooks`: looks at what each module computes, and at the gradients of that."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils.weak import WeakTensorKeyDictionary

from fsdp_wrap._core import encloses, iter_tensors
from fsdp_wrap._core.torch_private import current_transform, graph_task
from fsdp_wrap._values.files import INPUT, INPUT_GRADIENT, OUTPUT, OUTPUT_GRADIENT
from fsdp_wrap._values.finding import not_finite, quoted
from fsdp_wrap._values.looks import Hit, Looks, Origin, Spot, named
from fsdp_wrap._values.pieces import activations, whole


class Names(NamedTuple):
    """The names of a module, and of the unit that it belongs to."""

    module: str
    unit: str


class _Call(NamedTuple):
    """A forward that is running."""

    module: nn.Module
    names: Names
    args: Sequence[Any]


class _Output:
    """An output of a module, the module in whose forward that ran, and the modules that have used it."""

    def __init__(self, names: Names, parent: Names | None) -> None:
        self.names, self.parent = names, parent
        self.users: list[Names] = []


class ModuleLooks:
    """Looks at the outputs of modules and their gradients while it is open."""

    def __init__(self, looks: Looks, names: Mapping[nn.Module, Names], gradients: bool) -> None:
        self._looks, self._names, self._gradients = looks, names, gradients
        self._calls: list[_Call] = []
        self._outputs: MutableMapping[torch.Tensor, _Output] = WeakTensorKeyDictionary()
        self._last: ref[torch.Tensor] | None = None
        self._hooks = ExitStack()
        self._open = False

    def open(self) -> None:
        """Begins to look."""
        self._open = True
        self._hooks.callback(register_module_forward_pre_hook(self._enter).remove)
        self._hooks.callback(register_module_forward_hook(self._leave, with_kwargs=True).remove)

    def close(self) -> None:
        """Ends looking."""
        self._open = False
        self._hooks.close()
        self.restart()

    def restart(self) -> None:
        """Forgets forwards that have not ended."""
        self._calls.clear()
        self._last = None

    # forward

    def _enter(self, module: nn.Module, args: Sequence[Any]) -> None:
        names = self._names.get(module)
        if names is None or torch.compiler.is_compiling():
            return
        self._calls.append(_Call(module, names, args))
        for tensor in iter_tensors(args):
            self._note_use(tensor, names)

    def _note_use(self, tensor: torch.Tensor, names: Names) -> None:
        output = self._outputs.get(tensor)
        if output is None and tensor._base is not None:
            output = self._outputs.get(tensor._base)
        if output is None and self._gradients and tensor.grad_fn is not None:
            self._watch(tensor, names)  # made by the own code of the module around
            output = self._outputs[tensor]
            output.users.append(names)
        elif output is not None and output.names != names:
            output.users.append(names)

    def _leave(self, module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], output: Any) -> None:
        names = self._names.get(module)
        if names is None or torch.compiler.is_compiling():
            return
        running = [call.module for call in self._calls]
        if module in running:  # what stands behind it has raised
            del self._calls[len(running) - 1 - running[::-1].index(module) :]
        for tensor in iter_tensors(kwargs):
            self._note_use(tensor, names)
        if current_transform() is not None:
            return
        tensors = [*iter_tensors(output)]
        if graph_task() == -1:  # else a recomputation
            self._look(module, names, (args, kwargs), tensors)
        for tensor in tensors if self._gradients else ():
            if tensor.grad_fn is not None:
                self._watch(tensor, names)

    def _look(self, module: nn.Module, names: Names, inputs: Any, tensors: Sequence[torch.Tensor]) -> None:
        if len(tensors) == 1 and self._last is not None and self._last() is tensors[0]:
            return  # a container returns what its last module has
        self._last = ref(tensors[0]) if tensors else None
        place = Spot(OUTPUT, names.unit, names.module)
        origin = Origin(place, True, "Made here: inputs and parameters are finite")
        trace = partial(self._trace, module, names, inputs)
        self._looks.look(origin, OUTPUT, activations(tensors), trace)

    def _trace(self, module: nn.Module, names: Names, inputs: Any, hit: Hit) -> Hit:
        """Returns the origin of an output that is not finite: a parameter, buffer, input or the module."""
        for kind, held in (("parameter", module._parameters), ("buffer", module._buffers)):
            for name, value in held.items():
                if value is not None and not_finite(value):
                    place = Spot("parameter", names.unit, names.module)
                    origin = Origin(place, True, f"The {kind} itself is not finite")
                    return Hit(origin, f"{kind} '{name}'", whole("", value))
        came = _came_in(names, inputs)
        if came is None or came.piece.data.data_ptr() == hit.piece.data.data_ptr():  # written in place
            return hit
        for call in reversed(self._calls):
            outer = _came_in(call.names, call.args)
            if outer is None:
                told = f"Made in the forward of {quoted(call.names.module)}, outside of the modules in it"
                return came._replace(origin=came.origin._replace(made=True, told=told))
            came = outer
        return came

    # backward

    def _watch(self, tensor: torch.Tensor, names: Names) -> None:
        """Looks at the gradient of a module's output when it comes."""
        known, parent = self._outputs.get(tensor), self._calls[-1].names if self._calls else None
        if known is not None:
            known.parent = parent  # an inner module's output, returned as it is
            return
        output = _Output(names, parent)
        self._outputs[tensor] = output
        node = tensor.grad_fn
        assert node is not None
        node.register_prehook(partial(self._on_gradient, output, tensor.output_nr))

    def _on_gradient(self, output: _Output, number: int, grads: Sequence[torch.Tensor | None]) -> None:
        grad = grads[number]
        if not self._open or grad is None:
            return
        self._looks.look(_origin_of_gradient(output), "gradient", activations([grad]))


def _origin_of_gradient(output: _Output) -> Origin:
    """Returns where a gradient comes from if it is the first that is not finite."""
    users = [*dict.fromkeys(output.users)]
    inner = [
        user
        for user in users
        if not any(other is not user and encloses(user.module, other.module) for other in users)
    ]  # a module passes its inputs on to those inside
    if inner:
        user = inner[-1]
        told = f"Made in the backward of {quoted(user.module)}: gradients of its outputs are finite"
        return Origin(Spot(INPUT_GRADIENT, user.unit, user.module), True, told)
    place = Spot(OUTPUT_GRADIENT, output.names.unit, output.names.module)
    if output.parent is None:
        return Origin(place, False, "It came in from the loss")
    outer = quoted(output.parent.module)
    return Origin(place, True, f"Made in the backward of {outer}, outside of the modules in it")


def _came_in(names: Names, inputs: Any) -> Hit | None:
    """Returns the first input of a module that is not finite, as if it were one of the model's."""
    origin = Origin(Spot(INPUT, names.unit, names.module), False, "It came in with the input of the model")
    hits = named(origin, INPUT, activations(iter_tensors(inputs)))
    return next((hit for hit in hits if not_finite(hit.piece.data)), None)
