"""`Twice`: computes one drawn unit's forward and backward again, and compares the bits."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

from fsdp_wrap._core import REFUSED_HOOKS_OF, iter_tensors, map_tensors
from fsdp_wrap._params import Showing
from fsdp_wrap._runtime import Unit, units_in
from fsdp_wrap._values.auditing.corruption import BACKWARD, FORWARD, Corruption
from fsdp_wrap._values.finding import first_true, index_at
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
        modules = [torch, *([torch.get_device_module(device)] if device.type != "cpu" else [])]
        self._states = [(module.set_rng_state, module.get_rng_state()) for module in modules]
        self._python = random.getstate()

    def restore(self) -> None:
        for write, state in self._states:
            write(state)
        random.setstate(self._python)


@dataclass
class _Forward:
    """One forward of the drawn unit: its inputs, parameters, random state and settings, and its outputs."""

    unit: Unit
    compute: Callable[..., Any]
    args: Any
    params: list[list[torch.Tensor]]
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
    differs: bool = False

    def results(self) -> dict[str, torch.Tensor]:
        """Returns by name what the training step has computed."""
        return _by_name(self.outputs, self.input_grads, self.grads)


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
                *(unit, compute, _copied((args, kwargs))[0]),
                params=[[_alike(leaf.data) for leaf in segment.leaves] for segment in unit.segments],
                attributes=[(vars(module), _with_buffers(vars(module))) for module in unit.module.modules()],
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
        distinct = {id(tensor): tensor for tensor in iter_tensors((args, kwargs))}
        for number, tensor in enumerate(distinct.values()):
            if tensor.requires_grad and tensor.grad_fn is not None and call.with_grad:
                tensor.grad_fn.register_prehook(partial(_note, call.input_grads, number, 0))

    def take_outputs(self, unit: Unit, tensors: Sequence[torch.Tensor]) -> None:
        """Keeps the outputs of the drawn unit, and has their gradients kept."""
        call = self._call
        if call is None or unit is not call.unit or call.outputs:
            return
        call.outputs = [tensor.detach().clone() for tensor in tensors]
        for number, tensor in enumerate(tensors):
            if tensor.grad_fn is not None and call.with_grad:
                tensor.grad_fn.register_prehook(partial(_note, call.output_grads, number, tensor.output_nr))

    def take_gradients(self, unit: Unit, alone: bool) -> None:
        """Keeps the gradients on the leaves of the drawn unit, unless other code may use those too.

        A rank `alone` could not tell that from a fault.
        """
        call = self._call
        if call is None or unit is not call.unit:
            return
        call.backwards += 1
        used_elsewhere = unit.step is None or unit.step.root is unit or unit.kept_module is not None
        if alone or used_elsewhere or not unit.options.reshard_after_forward:
            return
        for segment in unit.segments:
            for fqn, leaf in zip(segment.layout.fqns, segment.leaves):
                if leaf.grad is not None and not REFUSED_HOOKS_OF(leaf) and leaf.grad.layout is torch.strided:
                    call.grads[fqn] = leaf.grad

    # comparison

    def differs(self) -> bool:
        """Computes again; returns whether anything differs."""
        call = self._call
        if call is None or not call.outputs:
            return False
        try:
            call.differs = bool(_different(call.results(), self._compute()))
            return call.differs
        except Exception as error:  # of code that must not run twice
            self.refused, self._call = f"it raises a {type(error).__name__} when it is repeated", None
            return False

    def judge(self, rank: int, step: int, unit: str) -> list[Corruption]:
        """Repeats the computation; returns results that differ from all repetitions, or sets `refused`.

        All ranks call it if one has found something, since the unit may communicate.
        """
        call = self._call
        if call is None or not call.outputs:
            return []
        first, *others = (self._compute() for _ in range(3))
        with warnings.catch_warnings(record=True) as told, _warning_of_kernels():
            others.append(self._compute())
        if not call.differs:
            return []
        kernels = {
            str(warning.message).split(_HAS_NO)[0] for warning in told if _HAS_NO in str(warning.message)
        }
        results = call.results()
        differing = _different(results, first)
        if kernels:
            self.refused = f"it uses kernels that are not deterministic: {', '.join(sorted(kernels))}"
        elif not differing or any(_different(first, other) for other in others):
            self.refused = (
                "repetitions on a rank differ: its code or kernels are not deterministic, or it is faulty"
            )
        else:
            return [_finding(rank, step, unit, name, results[name], first[name]) for name in differing]
        return []

    def forget(self) -> None:
        """Drops all that is kept."""
        self._call = None

    def _compute(self) -> dict[str, torch.Tensor]:
        """Computes forward and backward again, without an effect on anything; returns results by name."""
        call, now = self._call, _Random(self._device)
        assert call is not None
        try:
            with _as_it_was(call) as params, torch.set_grad_enabled(call.with_grad):
                (args, kwargs), copies = _copied(call.args, call.with_grad)
                outputs = [*iter_tensors(call.compute(*args, **kwargs))]
                outputs = [
                    output.to(was.dtype) if output.is_floating_point() else output
                    for output, was in zip(outputs, call.outputs)
                ]
                grads = call.output_grads if not call.again and call.backwards <= 1 else {}
                if not grads or not all(outputs[n].requires_grad for n in grads):
                    return _by_name(outputs, {}, {})
                torch.autograd.backward([outputs[n] for n in grads], [*grads.values()])
                own = {fqn: params[fqn].grad for fqn in call.grads}
                cast = {fqn: grad.to(call.grads[fqn].dtype) for fqn, grad in own.items() if grad is not None}
                return _by_name(outputs, {n: copies[n].grad for n in call.input_grads}, cast)
        finally:
            now.restore()


def can_be_twice(unit: Unit) -> bool:
    """Whether a unit can be computed again on its own: no units, hooks or foreign parameters inside."""
    buffers = unit.buffers
    if not unit.params or unit.companions or unit.tied_to is not None or unit.parts:
        return False
    if len({*units_in(unit.module).values()}) > 1 or buffers.shown.state is not Showing.SHARDED:
        return False
    if any(sharded.extended or sharded.distributed is not None for sharded in unit.params):
        return False
    own = {id(param) for sharded in unit.params for param in (sharded.flat_param, *sharded.sharded_params)}
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
        for element in value:
            _refuse_mutable(element)
    elif not isinstance(value, _FIXED):
        raise NotAudited(f"its forward takes a {type(value).__name__}, which it may change")


def _note(
    into: dict[int, torch.Tensor], number: int, of_node: int, grads: Sequence[torch.Tensor | None]
) -> None:
    """Keeps a gradient that has come to a node of the graph; a second one makes it unusable."""
    grad = grads[of_node]
    if grad is not None and not torch.is_grad_enabled():
        into[number] = grad.detach()


def _copied(value: Any, keeps_grad: bool = True) -> tuple[Any, list[torch.Tensor]]:
    """Returns a value with copies of its tensors, and these; one tensor stays one."""
    copies: dict[int, torch.Tensor] = {}

    def copy(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in copies:
            copies[id(tensor)] = _alike(tensor).requires_grad_(tensor.requires_grad and keeps_grad)
        return copies[id(tensor)]

    return map_tensors(copy, value), [*copies.values()]


def _with_buffers(attributes: dict[str, Any]) -> dict[str, Any]:
    """Returns a module's attributes with copies of its buffers."""
    return {**attributes, "_buffers": map_tensors(_alike, attributes["_buffers"])}


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


@contextmanager
def _as_it_was(call: _Forward) -> Iterator[dict[str, nn.Parameter]]:
    """Shows modules copies of a forward's parameters and buffers, with its random numbers and casts."""
    buffers = call.unit.buffers
    by_name: dict[str, nn.Parameter] = {}
    with ExitStack() as undo:
        for held, before in call.attributes:
            undo.callback(_put_back, held, dict(held))
            _put_back(held, _with_buffers(before))
        leaves = buffers.shown.state is Showing.LEAVES
        for segment, values in zip(call.unit.segments, call.params):
            shown = [
                nn.Parameter(_alike(value), leaf.requires_grad) for value, leaf in zip(values, segment.leaves)
            ]
            for copied, leaf in zip(shown, segment.leaves):
                vars(copied).update(vars(leaf))
            by_name.update(zip(segment.layout.fqns, shown))
            display = segment.params.display
            undo.callback(display.leaves.show if leaves else display.show_sharded)
            display.show_others(shown)
        for kind, enabled, dtype in call.autocasts:
            undo.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False))
        call.random.restore()
        yield by_name


def _put_back(held: dict[str, Any], before: dict[str, Any]) -> None:
    held.clear()
    held.update(before)


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


def _by_name(
    outputs: Sequence[torch.Tensor],
    input_grads: Mapping[int, torch.Tensor | None],
    grads: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Returns what a unit has computed, by name."""
    results = {
        **{f"output {number}": output for number, output in enumerate(outputs)},
        **{f"the gradient of input {number}": grad for number, grad in input_grads.items()},
        **{f"the gradient of '{fqn}'": grad for fqn, grad in grads.items()},
    }
    return {name: result.detach() for name, result in results.items() if result is not None}


def _different(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """Returns the names of results that have other bits."""
    return [name for name in one if name in other and not same_bits(one[name], other[name])]


def _finding(
    rank: int, step: int, unit: str, name: str, result: torch.Tensor, repeated: torch.Tensor
) -> Corruption:
    phase = FORWARD if name.startswith("output") else BACKWARD
    told = "Repetitions from the same inputs, parameters and random numbers agree on other bits"
    alike = result.shape == repeated.shape
    index, count = first_different(result, repeated) if alike else (None, -1)
    what, quote, fqn = name.rstrip("'").partition("'")
    tensor = f"{what}'{whole_name(unit, fqn)}'" if quote else name
    return Corruption(rank, step, phase, unit, tensor, told, index, tuple(result.shape), count)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors are the same, also where they are not finite."""
    alike = one.shape == other.shape and one.dtype == other.dtype
    return alike and torch.equal(bits_of(one), bits_of(other))


def first_different(one: torch.Tensor, other: torch.Tensor) -> tuple[tuple[int, ...], int]:
    """Returns the index of the first element that has other bits, and how many have."""
    wrong = (bits_of(one) != bits_of(other)).cpu()
    return index_at(first_true(wrong), one.shape), int(wrong.sum())
