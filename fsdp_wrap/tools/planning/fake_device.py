"""Meta tensors that claim to be on the planned device, as Python reads and moves them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FunctionType
from typing import Any

import torch
from torch.autograd.function import FunctionMeta
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from fsdp_wrap._core.torch_private import (
    has_storage,
    is_traceable_wrapper_subclass,
    push_saved_tensor_hooks,
    replaced_saved_tensor_hooks,
)
from fsdp_wrap.tools.planning.autocast import Autocast, without_autocast
from fsdp_wrap.tools.planning.kernels import KERNELS
from fsdp_wrap.tools.planning.ledger import Ledger, StorageRecord
from fsdp_wrap.tools.planning.tensors import CPU, META, MetaDispatch, complete, depends_on_data

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class FakeDevice(TorchFunctionMode):
    """Answers reads of `device`, `is_meta`, `data_ptr` and the like by the ledger, and redirects factories.

    torch switches a mode off inside its own `__torch_function__`; wherever torch's Python code runs further
    functions (`Tensor.backward`, hooks of saved tensors), the mode is entered again.
    """

    def __init__(self, ledger: Ledger, dispatch: MetaDispatch) -> None:
        super().__init__()
        self._ledger, self._dispatch = ledger, dispatch
        self.autocast = Autocast(self._device_of)
        self._running: set[FunctionType] = set()
        self._answers: dict[Any, Callable[..., Any]] = {
            _getter("device"): lambda record, tensor: record.device,
            _getter("is_meta"): lambda record, tensor: False,
            _getter("is_cpu"): lambda record, tensor: record.device.type == "cpu",
            _getter("is_cuda"): lambda record, tensor: record.device.type == "cuda",
            torch.Tensor.get_device: lambda record, tensor: -1 if record.device.type == "cpu" else 0,
            torch.Tensor.data_ptr: _data_ptr,
            torch.Tensor.is_pinned: lambda record, tensor, *_: record.pinned,
            torch.Tensor.pin_memory: self._pin,
            torch.Tensor.tolist: _refuse("tensor.tolist()"),
            torch.Tensor.numpy: _refuse("tensor.numpy()"),
            torch.Tensor.__deepcopy__: _deepcopy,
        }
        self._moves = {torch.Tensor.to: _to, torch.Tensor.cpu: _to_cpu, torch.Tensor.cuda: _to_cuda}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func in self._answers:
            record = self._record_of(args[0])
            return func(*args, **kwargs) if record is None else self._answers[func](record, *args, **kwargs)
        if func in self._moves:
            return self._move(args[0], *self._moves[func](args[1:], kwargs))
        if func in KERNELS:
            return self._call_fused(func, args, kwargs)
        if isinstance(func, FunctionType):
            return self._call_python(func, args, kwargs)
        if isinstance(getattr(func, "__self__", None), FunctionMeta):
            return self._apply(func, args, kwargs)
        return self._call_builtin(func, args, kwargs)

    def _call_fused(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a fused kernel where torch would, with the arguments as autocast casts them."""
        record = self._record_of(args[0] if args else kwargs["query"])
        if record is None:
            return func(*args, **kwargs)
        operator, kernel = KERNELS[func]
        changed = self.autocast.cast(operator, args, kwargs)
        with without_autocast() if changed else nullcontext():
            _, args, kwargs = changed or (func, args, kwargs)
            result = kernel(record.device.type, *args, **kwargs)
            return func(*args, **kwargs) if result is None else result

    def _call_builtin(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls an operator that may name a device or ask for pinned memory."""
        pins, wanted = kwargs.pop("pin_memory", False), kwargs.get("device")
        device = CPU if wanted is None else torch.device(wanted)
        if device == META or (device.type == "cpu" and not pins):
            return func(*args, **kwargs)
        if func in (torch.tensor, torch.as_tensor):
            with self:
                return func(*args, **{**kwargs, "device": CPU}).to(device)
        with self._dispatch.asking(complete(device), pins):
            return func(*args, **{**kwargs, "device": META})

    def _call_python(self, func: FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs a Python function of torch with the mode on, so that its calls are answered too."""
        if func in self._running:  # it came back by a check that `_without_check` does not replace
            return func(*args, **kwargs)
        self._running.add(func)
        try:
            with self:
                return _without_check(func)(*args, **kwargs)
        finally:
            self._running.discard(func)

    def _apply(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a user's autograd function, whose forward runs with the mode off: it sees the meta device."""
        records = (self._record_of(arg) for arg in args if isinstance(arg, torch.Tensor))
        record = next((candidate for candidate in records if candidate is not None), None)
        if record is None:
            return func(*args, **kwargs)
        with self._dispatch.asking(record.device):
            return func(*args, **kwargs)

    @contextmanager
    def in_hooks(self) -> Iterator[None]:
        """Keeps the mode on in hooks of saved tensors, which autograd calls from its operators."""

        def push(pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
            push_saved_tensor_hooks(self._with_mode(pack), self._with_mode(unpack))

        with replaced_saved_tensor_hooks(push):
            yield

    def _with_mode(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with self:
                return hook(*args)

        return run

    def _device_of(self, tensor: torch.Tensor) -> torch.device:
        record = self._record_of(tensor)
        return _local(tensor).device if record is None else record.device

    def _record_of(self, tensor: torch.Tensor) -> StorageRecord | None:
        local = _local(tensor)
        return self._ledger.record_of(local) if has_storage(local) and local.is_meta else None

    def _pin(self, record: StorageRecord, tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        if record.pinned:
            return tensor
        with self._dispatch.asking(CPU, pins=True):
            return torch.empty_like(tensor, device=META)

    def _move(self, tensor: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Copies a tensor to the device in `kwargs`, unless it is there."""
        wanted = kwargs.pop("device", None)
        if wanted is None:
            return tensor.to(*args, **kwargs)
        if isinstance(tensor, DTensor) or torch.device(wanted) == META:
            return tensor.to(*args, **{**kwargs, "device": wanted})
        record, device = self._record_of(tensor), complete(torch.device(wanted))
        if tensor.is_meta and record is None:
            raise NotImplementedError(
                "a tensor on the meta device has no values to move: call to_empty(device=...) on its module"
            )
        if not tensor.is_meta and device.type == "cpu":
            return tensor.to(*args, **kwargs)
        copies = record is not None and record.device != device
        with self._dispatch.asking(device):
            return tensor.to(*args, **{**kwargs, "device": META, "copy": copies or kwargs.get("copy", False)})


def _without_check(func: FunctionType) -> FunctionType:
    """Returns a copy of a Python function of torch that never asks whether a mode overrides it.

    Such a function begins by `if has_torch_function(...)`. While the mode is on, that would lead back to the
    mode, for ever; with the mode off, nothing that the function calls would be answered. So it runs with the
    mode on, and with those checks replaced among its globals.
    """
    checks = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    copied = FunctionType(
        func.__code__,
        {**func.__globals__, **dict.fromkeys(checks, lambda *_: False)},
        func.__name__,
        func.__defaults__,
        func.__closure__,
    )
    copied.__kwdefaults__ = func.__kwdefaults__
    return copied


def _getter(name: str) -> Any:
    """Returns the function that torch reports when an attribute of a tensor is read."""
    return getattr(torch.Tensor, name).__get__


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the tensor with the memory: the local part of a `DTensor`, the first tensor in a subclass."""
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    while is_traceable_wrapper_subclass(local):
        local = getattr(local, local.__tensor_flatten__()[0][0])
    return local


def _data_ptr(record: StorageRecord, tensor: torch.Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    local = _local(tensor)
    return record.address + int(local.storage_offset()) * local.element_size()


def _refuse(asked: str) -> Callable[..., Any]:
    def refuse(record: StorageRecord, *_: Any, **__: Any) -> Any:
        raise depends_on_data(asked)

    return refuse


def _deepcopy(record: StorageRecord, tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    if id(tensor) not in memo:
        memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    copied: torch.Tensor = memo[id(tensor)]
    return copied


# Arguments of `to` in the place of those of a function that moves a tensor; a device is always named.


def _to(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments:
    first, rest = (args[0], args[1:]) if args else (kwargs.get("other"), ())
    if isinstance(first, torch.Tensor):
        others = {name: value for name, value in kwargs.items() if name != "other"}
        return (first.dtype, *rest), {**others, "device": first.device}
    if isinstance(first, (str, int, torch.device)) and not isinstance(first, bool):
        names = ("dtype", "non_blocking", "copy")
        return (), {**dict(zip(names, rest)), **kwargs, "device": first}
    return args, kwargs


def _to_cpu(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments:
    return (), {**kwargs, "device": CPU}


def _to_cuda(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments:
    named = dict(zip(("device", "non_blocking"), args)) | kwargs
    wanted = named.pop("device", None)
    index = wanted if isinstance(wanted, int) else torch.device(wanted or "cuda").index
    return (), {**named, "device": torch.device("cuda", index or 0)}
