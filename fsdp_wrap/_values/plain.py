"""`PlainSeams`: records the values of a plain module at the seams that its units would have."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from fsdp_wrap._core import clean_fqn, encloses, iter_tensors, map_tensors
from fsdp_wrap._core.torch_private import graph_task
from fsdp_wrap._values import files
from fsdp_wrap._values.rows import Rows


class PlainSeams:
    """Records a plain module.

    Args:
        model: The module.
        units: Names of the modules that count as units, without the root.
        rows: The rows of the running step.
        alone: Whether no other rank computes gradients, which are reduced then.

    Attributes:
        by_unit: The parameters of each unit by name.
    """

    def __init__(self, model: nn.Module, units: Sequence[str], rows: Rows, alone: bool) -> None:
        self._model, self._rows, self._alone = model, rows, alone
        names = {clean_fqn(name): module for name, module in model.named_modules()}
        unknown = [name for name in units if name not in names]
        if unknown:
            raise ValueError(f"units={unknown} are no modules of {type(model).__name__}")
        self._units = {names[name]: name for name in units}
        self._units[model] = ""
        owners = sorted(self._units.values(), key=len, reverse=True)
        self.by_unit: dict[str, dict[str, nn.Parameter]] = {name: {} for name in owners}
        for name, param in model.named_parameters():
            fqn = clean_fqn(name)
            owner = next(each for each in owners if encloses(each, fqn))
            self.by_unit[owner][fqn] = param
        self._hooks = ExitStack()
        self._kept: list[Any] = []  # nodes live as long as their hooks
        rows.at_end = self._look_at_ends

    def open(self) -> None:
        """Begins to look."""
        enter: Callable[..., Any] = self._enter  # torch's annotation admits no changed inputs
        self._hooks.callback(register_module_forward_pre_hook(enter).remove)
        self._hooks.callback(register_module_forward_hook(self._leave, with_kwargs=True).remove)
        for unit, params in self.by_unit.items():
            for fqn, param in params.items():
                if param.requires_grad:
                    node = get_gradient_edge(param).node
                    self._kept.append(node)
                    hook = node.register_prehook(partial(self._on_param, unit, fqn))
                    self._hooks.callback(hook.remove)

    def close(self) -> None:
        """Ends looking."""
        self._hooks.close()
        self._kept.clear()

    def params(self) -> Iterable[nn.Parameter]:
        """Returns the parameters."""
        return self._model.parameters()

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if module is self._model and graph_task() == -1:
            self._rows.begin_pass(torch.is_grad_enabled())
        unit = self._units.get(module)
        if unit is None or not self._rows.recording or graph_task() != -1:
            return None
        if not self._rows.has(files.PARAMETER, unit):
            for seam in (files.SHARD, files.PARAMETER):
                self._add_params(seam, unit)
        self._add(files.INPUT, unit, args)
        watched: tuple[Any, ...] = map_tensors(partial(self._watched, unit), args, [])
        return watched

    def _watched(self, unit: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns a view of an input whose gradient, as far as this unit makes it, is recorded."""
        if not torch.is_grad_enabled() or not tensor.requires_grad:
            return tensor
        view = tensor.view_as(tensor)
        assert view.grad_fn is not None
        view.grad_fn.register_prehook(partial(self._on_gradient, files.INPUT_GRADIENT, unit, 0))
        return view

    def _leave(self, module: nn.Module, args: Any, kwargs: Mapping[str, Any], output: Any) -> None:
        unit = self._units.get(module)
        if unit is None or not self._rows.recording or graph_task() != -1:
            return
        self._add(files.INPUT, unit, kwargs)
        self._add(files.OUTPUT, unit, output)
        for tensor in iter_tensors(output):
            if tensor.grad_fn is not None:
                on_gradient = partial(self._on_gradient, files.OUTPUT_GRADIENT, unit, tensor.output_nr)
                tensor.grad_fn.register_prehook(on_gradient)

    def _on_gradient(self, seam: str, unit: str, number: int, grads: Sequence[torch.Tensor | None]) -> None:
        grad = grads[number]
        if self._rows.recording and grad is not None:
            self._rows.at(seam, unit).add(grad)

    def _on_param(self, unit: str, fqn: str, grads: Sequence[torch.Tensor | None]) -> None:
        if self._rows.recording and grads[0] is not None:
            self._rows.at(files.GRADIENT, unit).add(grads[0], fqn)

    def _add(self, seam: str, unit: str, values: Any) -> None:
        row = self._rows.at(seam, unit)
        for tensor in iter_tensors(values):
            row.add(tensor)

    def _add_params(self, seam: str, unit: str) -> None:
        row = self._rows.at(seam, unit)
        for fqn, param in self.by_unit[unit].items():
            row.add(param, fqn)

    def _look_at_ends(self) -> None:
        for unit in self.by_unit:
            if self._alone and self._rows.has(files.GRADIENT, unit):
                self._rows.at(files.REDUCED, unit).merge(self._rows.at(files.GRADIENT, unit))
        for unit in self.by_unit:
            self._add_params(files.UPDATE, unit)
