"""`Twice`: computes one drawn unit's forward and backward again, and compares the bits."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from fsdp_wrap._core import iter_tensors, map_tensors
from fsdp_wrap._params import Showing
from fsdp_wrap._runtime import Unit, units_in
from fsdp_wrap._values.auditing.corruption import BACKWARD, FORWARD, Corruption
from fsdp_wrap._values.pieces import whole_name
from fsdp_wrap._values.statistics import bits_of

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_HAS_NO = " does not have a deterministic"
_ALIGNMENT = 256
"""Bytes. Kernels may round differently on less aligned memory, so copies lie as the originals do."""


_FIXED = (torch.Tensor, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


class NotAudited(Exception):
    """A unit cannot be computed twice; the text tells why."""


class _Random:
    """The state of the random number generators of this process."""

    def __init__(self, device: torch.device) -> None:
        module = torch.get_device_module(device) if device.type != "cpu" else None
        self._get = [torch.get_rng_state, *([module.get_rng_state] if module is not None else [])]
        self._set = [torch.set_rng_state, *([module.set_rng_state] if module is not None else [])]
        self._states, self._python = [get() for get in self._get], random.getstate()

    def restore(self) -> None:
        for write, state in zip(self._set, self._states):
            write(state)
        random.setstate(self._python)


class _Seen(NamedTuple):
    """A named result that is compared: its name in messages, and its value."""

    name: str
    value: torch.Tensor


@dataclass
class _Forward:
    """One forward of the drawn unit, with all that it depends on, and what came out."""

    unit: Unit
    compute: Callable[..., Any]
    args: Any
    params: list[list[torch.Tensor]]
    buffers: list[tuple[nn.Module, str, torch.Tensor]]
    attributes: list[tuple[dict[str, Any], dict[str, Any]]]
    random: _Random
    autocasts: list[tuple[str, bool, torch.dtype]]
    with_grad: bool
    again: int = 0
    outputs: list[torch.Tensor] = field(default_factory=list)
    output_grads: dict[int, torch.Tensor] = field(default_factory=dict)
    input_grads: dict[int, torch.Tensor] = field(default_factory=dict)
    grads: dict[str, torch.Tensor] = field(default_factory=dict)
    backwards: int = 0


class Twice:
    """The drawn unit of a step.

    Attributes:
        refused: Why the drawn unit could not be computed again; empty if it could.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._unit: Unit | None = None
        self._call: _Forward | None = None
        self.refused = ""

    def draw(self, unit: Unit | None) -> None:
        """Chooses the unit of a step; None for no unit."""
        self._unit, self._call, self.refused = unit, None, ""

    # evidence

    def begin(self, unit: Unit, compute: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Keeps what a forward of the drawn unit depends on; later forwards of a step are not looked at."""
        if unit is not self._unit:
            return
        if self._call is not None:
            self._call.again += 1
            return
        try:
            _refuse_mutable((args, *kwargs.values()))
            call = _Forward(
                *(unit, compute, _Copies().of((args, kwargs)), _copied_params(unit), _copied_buffers(unit)),
                attributes=[(vars(each), dict(vars(each))) for each in unit.module.modules()],
                random=_Random(self._device),
                autocasts=[
                    (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
                    for kind in dict.fromkeys(("cpu", self._device.type))
                ],
                with_grad=torch.is_grad_enabled(),
            )
        except NotAudited as reason:
            self._unit, self.refused = None, str(reason)
            return
        self._call = call
        for number, tensor in enumerate(_distinct((args, kwargs))):
            if tensor.requires_grad and tensor.grad_fn is not None and call.with_grad:
                tensor.grad_fn.register_prehook(partial(_note, call.input_grads, number, 0))

    def take_outputs(self, unit: Unit, tensors: Sequence[torch.Tensor]) -> None:
        """Keeps the outputs of the drawn unit, and has their gradients kept."""
        call = self._call
        if call is None or unit is not call.unit or call.outputs:
            return
        call.outputs = [each.detach().clone() for each in tensors]
        for number, tensor in enumerate(tensors):
            if tensor.grad_fn is not None and call.with_grad:
                tensor.grad_fn.register_prehook(partial(_note, call.output_grads, number, tensor.output_nr))

    def take_gradients(self, unit: Unit) -> None:
        """Keeps the gradients on the leaves of the drawn unit."""
        call = self._call
        if call is None or unit is not call.unit:
            return
        call.backwards += 1
        for segment in unit.segments:
            for fqn, leaf in zip(segment.layout.fqns, segment.leaves):
                hooked = getattr(leaf, "_backward_hooks", None)
                if leaf.grad is not None and not hooked and leaf.grad.layout is torch.strided:
                    call.grads[fqn] = leaf.grad

    # comparison

    def differs(self) -> bool:
        """Computes again; returns whether anything differs."""
        call = self._call
        if call is None or not call.outputs:
            return False
        try:
            return bool(_differences(call, self._compute()))
        except Exception as error:  # of code that must not run twice
            self.refused, self._call = f"it raises a {type(error).__name__} when it is repeated", None
            return False

    def judge(self, rank: int, step: int, name: str) -> list[Corruption] | str:
        """Computes more often; returns what differs from all of that, or why it proves nothing.

        All ranks call it if one has found something, since the unit may communicate.
        """
        call = self._call
        if call is None or not call.outputs:
            return []
        first, *others = (self._compute() for _ in range(3))
        with warnings.catch_warnings(record=True) as told, _warning_of_kernels():
            others.append(self._compute())
        kernels = {str(each.message).split(_HAS_NO)[0] for each in told if _HAS_NO in str(each.message)}
        if kernels:
            return f"it uses kernels that are not deterministic: {', '.join(sorted(kernels))}"
        found = _differences(call, first)
        if not found or any(not _same(*pair) for other in others for pair in zip(first, other)):
            return "repetitions on a rank differ: its code or kernels are not deterministic, or it is faulty"
        return [_finding(rank, step, name, *each) for each in found]

    def forget(self) -> None:
        """Drops all that is kept."""
        self._call = None

    def _compute(self) -> list[_Seen]:
        """Computes forward and backward again, without an effect on anything."""
        call = self._call
        assert call is not None
        now = _Random(self._device)
        try:
            with _as_it_was(call) as params, torch.set_grad_enabled(call.with_grad):
                copies = _Copies(call.with_grad)
                args, kwargs = copies.of(call.args)
                outputs = [*iter_tensors(call.compute(*args, **kwargs))]
                outputs = [
                    each.to(was.dtype) if each.is_floating_point() else each
                    for each, was in zip(outputs, call.outputs)
                ]
                seen = [_Seen(f"output {n}", each.detach()) for n, each in enumerate(outputs)]
                complete = call.output_grads and not call.again and call.backwards <= 1
                if complete and all(outputs[n].requires_grad for n in call.output_grads):
                    numbers = [*call.output_grads]
                    torch.autograd.backward(
                        [outputs[n] for n in numbers], [call.output_grads[n] for n in numbers]
                    )
                    seen += _gradients(call, params, copies.made)
                return seen
        finally:
            now.restore()


def can_be_twice(unit: Unit) -> bool:
    """Whether a unit can be computed again on its own: no units, hooks or foreign parameters inside."""
    handle = unit.handle
    if handle is None or unit.companions or unit.tied_to is not None or unit.parts:
        return False
    if len({*units_in(unit.module).values()}) > 1 or handle.shown.state is not Showing.SHARDED:
        return False
    if any(layout.extended or layout.distributed is not None for layout in unit.layouts):
        return False
    own = {id(param) for layout in unit.layouts for param in (layout.flat_param, *layout.sharded_params)}
    shown = [param for param in unit.module.parameters() if id(param) not in own]
    for module in unit.module.modules():
        hooked = any(getattr(module, name, None) for name in _HOOKS)
        compiled = getattr(module, "_compiled_call_impl", None) is not None
        if hooked or compiled or "_orig_mod" in module._modules or isinstance(module, ParametrizationList):
            return False
    return not shown


def _refuse_mutable(value: Any) -> None:
    """Refuses arguments that a forward may change, other than tensors."""
    if isinstance(value, tuple):
        for each in value:
            _refuse_mutable(each)
    elif not isinstance(value, _FIXED):
        raise NotAudited(f"its forward takes a {type(value).__name__}, which it may change")


def _note(
    into: dict[int, torch.Tensor], number: int, of_node: int, grads: Sequence[torch.Tensor | None]
) -> None:
    """Keeps a gradient that has come to a node of the graph; a second one makes it unusable."""
    grad = grads[of_node]
    if grad is not None and not torch.is_grad_enabled():
        into[number] = grad.detach()


def _distinct(value: Any) -> list[torch.Tensor]:
    """Returns the tensors in arguments, each once."""
    return [*{id(each): each for each in iter_tensors(value)}.values()]


class _Copies:
    """Copies of tensors with the same strides and alignment; one tensor stays one."""

    def __init__(self, keeps_grad: bool = True) -> None:
        self._keeps_grad = keeps_grad
        self.made: list[torch.Tensor] = []
        self._by_id: dict[int, torch.Tensor] = {}

    def of(self, value: Any) -> Any:
        return map_tensors(self._copy, value)

    def _copy(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._by_id:
            copied = _alike(tensor).requires_grad_(tensor.requires_grad and self._keeps_grad)
            self._by_id[id(tensor)] = copied
            self.made.append(copied)
        return self._by_id[id(tensor)]


@torch.no_grad()
def _alike(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a copy with the same strides and alignment."""
    if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
        raise NotAudited(f"it computes with a {type(tensor).__name__}")
    shape, strides, size = tensor.shape, tensor.stride(), tensor.element_size()
    distinct = [1 if not stride else length for length, stride in zip(shape, strides)]  # not expanded
    numel = sum((length - 1) * stride for length, stride in zip(distinct, strides)) + 1
    memory = torch.empty(max(numel, 1) + _ALIGNMENT, dtype=tensor.dtype, device=tensor.device)
    offset = (tensor.data_ptr() - memory.data_ptr()) % _ALIGNMENT // size
    if tensor.numel():
        source = tensor.detach().as_strided(distinct, strides, tensor.storage_offset())
        memory.as_strided(distinct, strides, offset).copy_(source)
    return memory.as_strided(shape, strides, offset)


def _copied_params(unit: Unit) -> list[list[torch.Tensor]]:
    return [[_alike(leaf.data) for leaf in segment.leaves] for segment in unit.segments]


def _copied_buffers(unit: Unit) -> list[tuple[nn.Module, str, torch.Tensor]]:
    return [
        (module, name, _alike(buffer))
        for module in unit.module.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]


@contextmanager
def _as_it_was(call: _Forward) -> Iterator[list[list[nn.Parameter]]]:
    """Shows modules copies of the parameters and buffers of a forward, with its random numbers and casts."""
    unit, undo = call.unit, ExitStack()
    params = [
        [_as_leaf(_alike(value), leaf) for value, leaf in zip(values, segment.leaves)]
        for values, segment in zip(call.params, unit.segments)
    ]
    with undo:
        for held, before in call.attributes:
            undo.callback(_put_back, held, dict(held))
            _put_back(held, before)
        for module, name, value in call.buffers:
            undo.callback(module._buffers.__setitem__, name, module._buffers[name])
            module._buffers[name] = _alike(value)
        assert unit.handle is not None
        leaves = unit.handle.shown.state is Showing.LEAVES
        for segment, shown in zip(unit.segments, params):
            display = segment.layout.display
            undo.callback(display.show_leaves if leaves else display.show_sharded)
            segment.layout.show(shown)
        for kind, enabled, dtype in call.autocasts:
            undo.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
        call.random.restore()
        yield params


def _put_back(held: dict[str, Any], before: dict[str, Any]) -> None:
    held.clear()
    held.update(before)


def _as_leaf(value: torch.Tensor, leaf: nn.Parameter) -> nn.Parameter:
    copied = nn.Parameter(value, requires_grad=leaf.requires_grad)
    copied.__dict__.update(leaf.__dict__)
    return copied


@contextmanager
def _warning_of_kernels() -> Iterator[None]:
    """Lets torch warn of kernels that are not deterministic."""
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    warnings.simplefilter("always")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _gradients(
    call: _Forward, params: Sequence[Sequence[nn.Parameter]], inputs: Sequence[torch.Tensor]
) -> list[_Seen]:
    seen = [
        _Seen(f"the gradient of input {n}", grad)
        for n in call.input_grads
        if (grad := inputs[n].grad) is not None
    ]
    for segment, shown in zip(call.unit.segments, params):
        for fqn, param in zip(segment.layout.fqns, shown):
            if fqn in call.grads and param.grad is not None:
                value = param.grad.to(call.grads[fqn].dtype)
                seen.append(_Seen(f"the gradient of '{fqn}'", value))
    return seen


def _differences(call: _Forward, seen: Sequence[_Seen]) -> list[tuple[_Seen, _Seen]]:
    """Returns originals with their repetitions, where these differ."""
    found = {f"output {n}": each for n, each in enumerate(call.outputs)}
    found |= {f"the gradient of input {n}": each for n, each in call.input_grads.items()}
    found |= {f"the gradient of '{fqn}'": each for fqn, each in call.grads.items()}
    pairs = [(_Seen(each.name, found[each.name]), each) for each in seen if each.name in found]
    return [pair for pair in pairs if not _same(*pair)]


def _same(one: _Seen, other: _Seen) -> bool:
    if one.value.shape != other.value.shape or one.value.dtype != other.value.dtype:
        return False
    return torch.equal(bits_of(one.value), bits_of(other.value))


def _finding(rank: int, step: int, unit: str, original: _Seen, repeated: _Seen) -> Corruption:
    name, found = original
    phase = FORWARD if name.startswith("output") else BACKWARD
    told = "Repetitions from the same inputs, parameters and random numbers agree on other bits"
    index, count = None, -1
    if found.shape == repeated.value.shape:
        wrong = bits_of(found) != bits_of(repeated.value)
        count, first = int(wrong.sum()), wrong.reshape(-1).to(torch.uint8).argmax().cpu()
        index = tuple(int(each) for each in torch.unravel_index(first, found.shape))
    if "'" in name:
        name = f"the gradient of '{whole_name(unit, name.split(chr(39))[1])}'"
    return Corruption(rank, step, phase, unit, name, told, index, tuple(found.shape), count)
