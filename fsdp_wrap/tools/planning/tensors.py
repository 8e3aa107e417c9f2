"""Tensors with shapes, dtypes and devices, and without values: a step runs and nothing is computed.

They are torch's own tensors on the meta device, so types and autograd are real. `FakeDevice` answers
reads of their attributes; `MetaDispatch` runs each operator on the meta device and keeps the ledger.

Small tensors of integers in memory of the host keep their values: meshes, indices, batches of tokens, and the
step counts of optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from fsdp_wrap._core.torch_private import (
    DisableTorchFunction,
    TorchDispatchMode,
    graph_task,
    pytree,
    shapes_are_asked,
)
from fsdp_wrap.tools.planning.autocast import without_autocast
from fsdp_wrap.tools.planning.ledger import Ledger

META, CPU = torch.device("meta"), torch.device("cpu")

_MOST_KNOWN = 1 << 20
"""Bytes of the largest tensors that keep their values."""

Operator = Any
"""An overload of torch's operators."""


class PlanningError(ValueError):
    """A part of the user's step that cannot be planned."""


def depends_on_data(asked: str) -> PlanningError:
    return PlanningError(
        f"{asked} asks for numbers, and a plan has none: what the step does must not depend on them. Leave "
        "out of setup() and step() what reads values, such as loss.item(), print(loss), bool(mask.any()), "
        "tensor.tolist(), tensor.numpy(), tensor.nonzero(), x[mask], or a gradient scaler"
    )


class MetaDispatch(TorchDispatchMode):
    """Runs operators on the meta device, notes storages in the ledger, and tells `recorded` of computation.

    Operators that name the meta device return tensors of the device `asked`, in pinned memory if `pins`.
    """

    def __init__(self, ledger: Ledger, recorded: Callable[[Operator, Any, Any, Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ledger, self._recorded = ledger, recorded
        self.asked: torch.device | None = None
        self.pins = False

    def __torch_dispatch__(
        self, func: Operator, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if shapes_are_asked():
            return func(*args, **(kwargs or {}))
        if any(kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for kind in types):
            return NotImplemented  # wrapper subclasses: they call operators on their inner tensors
        with DisableTorchFunction(), without_autocast():
            return self._run(func, args, dict(kwargs or {}))

    def _run(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func._schema.name.partition("::")[2]
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        device = self._device(func, tensors, kwargs)
        if device is None:
            return func(*args, **kwargs)
        planned = [tensor for tensor in tensors if tensor.is_meta]
        if len(planned) < len(tensors):
            self._refuse_foreign(tensors)
        if not planned and device.type == "cpu" and self._is_known(func, name, tensors, args, kwargs):
            result = func(*args, **kwargs)
            self._note(func, result, device, known=True)
            return result
        if name in _READING:
            raise depends_on_data(f"torch.{name.strip('_')}")
        written = _written(func, args, kwargs)
        if any(not tensor.is_meta for tensor in written):
            self._spoil(written)
            return written[0] if func._schema.returns else None
        if len(planned) < len(tensors):
            args, kwargs = pytree.tree_map_only(torch.Tensor, _as_meta, (args, kwargs))
        result = self._call(func, name, args, _on_meta(kwargs))
        self._note(func, result, device)
        if not func.is_view:
            self._recorded(func, args, kwargs, result)
        return result

    def _refuse_foreign(self, tensors: Iterable[torch.Tensor]) -> None:
        """Refuses parameters that were made before the plan."""
        for tensor in tensors:
            if (
                isinstance(tensor, nn.Parameter)
                and not tensor.is_meta
                and self._ledger.record_of(tensor) is None
            ):
                raise PlanningError(
                    f"setup() uses a parameter of shape {tuple(tensor.shape)} that was made before plan(), "
                    "which would spoil it: let setup() build the model itself"
                )

    def _call(self, func: Operator, name: str, args: Any, kwargs: Any) -> Any:
        try:
            return func(*args, **kwargs)
        except NotImplementedError as error:
            if "nonzero" in str(error):  # x[mask]
                raise depends_on_data(f"torch.{name}") from error
            if not func._schema.returns:  # such as fused optimizers, of which torch has some rules alone
                return None
            raise PlanningError(
                f"torch.{name} has no rule for the shape of its result ({error}); leave it out of the plan"
            ) from error

    def _device(
        self, func: Operator, tensors: list[torch.Tensor], kwargs: dict[str, Any]
    ) -> torch.device | None:
        """Returns the device of an operator's result; None if the user wants the meta device."""
        if kwargs.get("device") is not None:
            wanted = torch.device(kwargs["device"])
            if wanted != META:
                return complete(wanted)
            if self.asked is not None or graph_task() == -1 or not tensors:
                return self.asked
            # The backward of a cast, which names the device of what was cast.
        device: torch.device | None = None
        for tensor in tensors:
            there = self._where(tensor)
            if there is not None and (device is None or (device.type == "cpu" and tensor.dim() > 0)):
                device = there
        if not tensors and _is_factory(func):
            kwargs["device"] = device = CPU
        return device

    def _where(self, tensor: torch.Tensor) -> torch.device | None:
        if not tensor.is_meta:
            return tensor.device
        record = self._ledger.record_of(tensor)
        return None if record is None else record.device

    def _is_known(
        self, func: Operator, name: str, tensors: list[torch.Tensor], args: Any, kwargs: dict[str, Any]
    ) -> bool:
        """Whether to keep the values of the result of an operator on the host."""
        if self.pins or kwargs.get("pin_memory") or name.startswith(("empty", "new_empty")):
            return False
        records = [self._ledger.record_of(tensor) for tensor in tensors]
        if any(record is not None and not record.known for record in records):
            return False
        if _written(func, args, kwargs) or name in _READING or func.is_view or name == "lift_fresh":
            return True
        args, kwargs = pytree.tree_map_only(torch.Tensor, _as_meta, (args, kwargs))
        outcome = pytree.tree_leaves(func(*args, **_on_meta(kwargs)))
        return all(_keeps_values(leaf) for leaf in outcome if isinstance(leaf, torch.Tensor))

    def _spoil(self, written: Iterable[torch.Tensor]) -> None:
        """Notes that the values of tensors are no longer known."""
        for tensor in written:
            if (record := self._ledger.record_of(tensor)) is not None:
                record.known = False

    def _note(self, func: Operator, result: Any, device: torch.device, known: bool = False) -> None:
        self._ledger.operator = str(func.overloadpacket)
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                record = self._ledger.add(leaf, device)
                record.known, record.pinned = record.known or known, record.pinned or self.pins
        self._ledger.operator = ""

    @contextmanager
    def asking(self, device: torch.device, pins: bool = False) -> Iterator[None]:
        """Lets operators that name the meta device return tensors of another device."""
        before, self.asked, self.pins = (self.asked, self.pins), device, pins
        try:
            yield
        finally:
            self.asked, self.pins = before


_READING = {
    "_local_scalar_dense",
    "equal",
    "is_nonzero",
    "masked_select",
    "nonzero",
    "nonzero_numpy",
    "repeat_interleave",
    "unique_consecutive",
    "unique_dim",
    "_unique",
    "_unique2",
}
"""Operators whose result, or its shape, depends on values."""


def _on_meta(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Returns the keyword arguments of an operator for the meta device, which pins and draws nothing."""
    changed = {"device": META, "generator": None}
    return {name: changed.get(name, value) for name, value in kwargs.items() if name != "pin_memory"}


def _as_meta(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)


def _is_factory(func: Operator) -> bool:
    """Whether an operator is a factory."""
    return any(argument.name == "device" for argument in func._schema.arguments)


def _written(func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Returns the tensors that an operator writes to."""
    if not func._schema.is_mutable:
        return []
    tensors: list[torch.Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            tensors += [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return tensors


def _keeps_values(tensor: torch.Tensor) -> bool:
    plain = not (tensor.dtype.is_floating_point or tensor.dtype.is_complex) or tensor.numel() == 1
    return plain and tensor.nbytes <= _MOST_KNOWN


def complete(device: torch.device) -> torch.device:
    """Adds an index to an accelerator without one."""
    return CPU if device.type == "cpu" else torch.device(device.type, device.index or 0)
