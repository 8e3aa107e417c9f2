"""`PlainRecorder`: tells of a plain module at the seams that its units would have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from fsdp_wrap._core import clean_fqn, iter_tensors, map_tensors
from fsdp_wrap._core.torch_private import graph_task
from fsdp_wrap._values import files
from fsdp_wrap._values.pieces import Piece, activations, innermost, whole
from fsdp_wrap._values.recorder import Reader, Recorder


class PlainRecorder(Recorder):
    """Tells what passes the modules of a plain module.

    Args:
        model: The module.
        units: Names of the modules that count as units, without the root.
        alone: Whether no other rank computes gradients, which would be reduced.
        reader: Gets what passes.
    """

    def __init__(self, model: nn.Module, units: Sequence[str], alone: bool, reader: Reader) -> None:
        super().__init__(reader)
        self._model, self.is_reduced = model, not alone
        names = {clean_fqn(name): module for name, module in model.named_modules()}
        unknown = [name for name in units if name not in names]
        if unknown:
            raise ValueError(f"units={unknown} are no modules of {type(model).__name__}")
        self._names = {names[name]: name for name in units} | {model: ""}
        self.units = sorted(self._names.values(), key=len, reverse=True)
        self._params: dict[str, dict[str, nn.Parameter]] = {name: {} for name in self.units}
        for name, param in model.named_parameters():
            fqn = clean_fqn(name)
            self._params[innermost(self.units, fqn) or ""][fqn] = param
        self._nodes: list[Any] = []  # live as long as their hooks

    def open(self) -> None:
        super().open()
        enter: Callable[..., Any] = self._enter  # torch's annotation admits no changed inputs
        self.attached.callback(register_module_forward_pre_hook(enter).remove)
        self.attached.callback(register_module_forward_hook(self._leave, with_kwargs=True).remove)
        self.attached.callback(self._nodes.clear)
        for unit, params in self._params.items():
            for fqn, param in params.items():
                if param.requires_grad:
                    node = get_gradient_edge(param).node
                    self._nodes.append(node)
                    hook = node.register_prehook(partial(self._on_gradient, files.GRADIENT, unit, fqn, 0))
                    self.attached.callback(hook.remove)

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if module is self._model and graph_task() == -1:
            self.reader.begin(None)
        unit = self._names.get(module)
        if unit is None or not self.reader.reads or graph_task() != -1:
            return None
        self.reader.see(files.PARAMETER, unit, self.shards(unit))
        self.reader.see(files.INPUT, unit, activations(iter_tensors(args)))
        watched: tuple[Any, ...] = map_tensors(partial(self._watched, unit), args, [])
        return watched

    def _watched(self, unit: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a view of an input, which tells of the part of its gradient that this unit makes."""
        if not torch.is_grad_enabled() or not tensor.requires_grad:
            return tensor
        view = tensor.view_as(tensor)
        self._watch(files.INPUT_GRADIENT, unit, view)
        return view

    def _watch(self, seam: str, unit: str, tensor: torch.Tensor) -> None:
        if tensor.grad_fn is not None:
            on_gradient = partial(self._on_gradient, seam, unit, "", tensor.output_nr)
            tensor.grad_fn.register_prehook(on_gradient)

    def _leave(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        unit = self._names.get(module)
        if unit is None or not self.reader.reads or graph_task() != -1:
            return
        self.reader.see(files.INPUT, unit, activations(iter_tensors(kwargs)))
        self.reader.see(files.OUTPUT, unit, activations(iter_tensors(output)))
        for tensor in iter_tensors(output):
            self._watch(files.OUTPUT_GRADIENT, unit, tensor)

    def _on_gradient(
        self, seam: str, unit: str, fqn: str, number: int, grads: Sequence[torch.Tensor | None]
    ) -> None:
        grad = grads[number]
        if self.reader.reads and grad is not None:
            self.reader.see(seam, unit, [Piece(fqn, grad.shape, 0, grad)])

    def params(self) -> Iterable[nn.Parameter]:
        return self._model.parameters()

    def shards(self, unit: str) -> Iterable[Piece]:
        return (whole(fqn, param) for fqn, param in self._params[unit].items())

    def step_gradients(self, unit: str, held: Set[object]) -> Iterable[Piece]:
        for fqn, param in self._params[unit].items():
            if param.grad is not None and id(param) in held:
                yield whole(fqn, param.grad)

    def keys(self, unit: str) -> Iterator[tuple[str, object]]:
        return ((fqn, id(param)) for fqn, param in self._params[unit].items())
