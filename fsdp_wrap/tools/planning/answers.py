"""What Python is told of tensors without numbers: where they are, and where their memory begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType
from typing import Any

import torch
from torch.autograd.function import FunctionMeta
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from fsdp_wrap._core.torch_private import has_storage, push_saved_tensor_hooks, replaced_saved_tensor_hooks
from fsdp_wrap.tools.planning.kernels import KERNELS
from fsdp_wrap.tools.planning.ledger import Ledger, Record
from fsdp_wrap.tools.planning.tensors import CPU, META, Operators, complete, depends_on_data

_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
"""By what torch's functions in Python ask whether somebody answers in their place."""


class Answers(TorchFunctionMode):
    """Answers in the place of tensors on the meta device that stand for others.

    Args:
        ledger: Knows where they are said to be.
        operators: Is told which device is asked for.
    """

    def __init__(self, ledger: Ledger, operators: Operators) -> None:
        super().__init__()
        self._ledger, self._operators = ledger, operators
        self._twins: dict[FunctionType, FunctionType] = {}
        self._running: set[FunctionType] = set()
        self._answers: dict[Any, Callable[..., Any]] = {
            _getter("device"): lambda record, tensor: record.device,
            _getter("is_meta"): lambda record, tensor: False,
            _getter("is_cpu"): lambda record, tensor: record.device.type == "cpu",
            _getter("is_cuda"): lambda record, tensor: record.device.type == "cuda",
            torch.Tensor.get_device: lambda record, tensor: -1 if record.device.type == "cpu" else 0,
            torch.Tensor.data_ptr: _begin,
            torch.Tensor.is_pinned: lambda record, tensor, *_: record.pinned,
            torch.Tensor.pin_memory: self._pin,
            torch.Tensor.tolist: _refuse("tensor.tolist()"),
            torch.Tensor.numpy: _refuse("tensor.numpy()"),
            torch.Tensor.__deepcopy__: _deepcopy,
        }
        self._moves = {torch.Tensor.to: _parsed, torch.Tensor.cpu: _to_cpu, torch.Tensor.cuda: _to_cuda}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        answer = self._answers.get(func)
        if answer is not None:
            record = self._record_of(args[0])
            return func(*args, **kwargs) if record is None else answer(record, *args, **kwargs)
        if func in self._moves:
            return self._move(func, args, kwargs)
        if func in KERNELS:
            record = self._record_of(args[0] if args else kwargs["query"])
            done = None if record is None else KERNELS[func](record.device.type, *args, **kwargs)
            return func(*args, **kwargs) if done is None else done
        if isinstance(func, FunctionType):
            return self._call(func, args, kwargs)
        if isinstance(getattr(func, "__self__", None), FunctionMeta):
            return self._apply(func, args, kwargs)
        pins, wanted = kwargs.pop("pin_memory", False), kwargs.get("device")
        device = CPU if wanted is None else torch.device(wanted)
        if device == META or (device.type == "cpu" and not pins):
            return func(*args, **kwargs)
        if func in (torch.tensor, torch.as_tensor):
            with self:
                return func(*args, **{**kwargs, "device": CPU}).to(device)
        with self._operators.asking(complete(device), pins):
            return func(*args, **{**kwargs, "device": META})

    def _call(self, func: FunctionType, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a function of torch's in Python; what that calls is answered, too."""
        if func in self._running:  # it asks in another way who answers for it
            return func(*args, **kwargs)
        self._running.add(func)
        try:
            with self:
                return self._twin(func)(*args, **kwargs)
        finally:
            self._running.discard(func)

    def _apply(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Calls a user's autograd function, in which we cannot answer: it sees the meta device."""
        records = (self._record_of(each) for each in args if isinstance(each, torch.Tensor))
        record = next((each for each in records if each is not None), None)
        if record is None:
            return func(*args, **kwargs)
        with self._operators.asking(record.device):
            return func(*args, **kwargs)

    @contextmanager
    def in_hooks(self) -> Iterator[None]:
        """Answers in hooks of tensors that autograd saves, too, which operators call by themselves."""

        def push(pack: Callable[..., Any], unpack: Callable[..., Any]) -> None:
            push_saved_tensor_hooks(self._answering(pack), self._answering(unpack))

        with replaced_saved_tensor_hooks(push):
            yield

    def _answering(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def answered(*args: Any) -> Any:
            with self:
                return hook(*args)

        return answered

    def _record_of(self, tensor: torch.Tensor) -> Record | None:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if not has_storage(local):
            return None
        record = self._ledger.record_of(local)
        return None if record is None or not local.is_meta else record

    def _pin(self, record: Record, tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        if record.pinned:
            return tensor
        with self._operators.asking(CPU, pins=True):
            return torch.empty_like(tensor, device=META)

    def _move(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Copies a tensor to where it is asked for, unless it is there."""
        tensor, (args, kwargs) = args[0], self._moves[func](args[1:], kwargs)
        wanted = kwargs.pop("device", None)
        if isinstance(tensor, DTensor) or wanted is None or torch.device(wanted) == META:
            return tensor.to(*args, **({} if wanted is None else {"device": wanted}), **kwargs)
        record, device = self._record_of(tensor), complete(torch.device(wanted))
        if tensor.is_meta and record is None:
            raise NotImplementedError(
                "a tensor on the meta device has no values to move: call to_empty(device=...) on its module"
            )
        if not tensor.is_meta and device.type == "cpu":
            return tensor.to(*args, **kwargs)
        apart = record is not None and record.device != device
        with self._operators.asking(device):
            return tensor.to(*args, **{**kwargs, "device": META, "copy": apart or kwargs.get("copy", False)})

    def _twin(self, func: FunctionType) -> FunctionType:
        """Returns the same function of torch's in Python, which does not ask again who answers for it."""
        twin = self._twins.get(func)
        if twin is None:
            names = {**func.__globals__, **dict.fromkeys(_CHECKS, _nobody)}
            twin = FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
            twin.__kwdefaults__ = func.__kwdefaults__
            self._twins[func] = twin
        return twin


def _getter(name: str) -> Any:
    """Returns what torch tells us was called where an attribute of a tensor is read."""
    return getattr(torch.Tensor, name).__get__


def _nobody(*_: Any) -> bool:
    return False


def _begin(record: Record, tensor: torch.Tensor) -> int:
    if tensor.numel() == 0:
        return 0
    local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return record.address + int(local.storage_offset()) * local.element_size()


def _refuse(what: str) -> Callable[..., Any]:
    def refuse(record: Record, *_: Any, **__: Any) -> Any:
        raise depends_on_data(what)

    return refuse


def _deepcopy(record: Record, tensor: torch.Tensor, memo: dict[int, Any]) -> torch.Tensor:
    if id(tensor) not in memo:
        memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    copied: torch.Tensor = memo[id(tensor)]
    return copied


_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def _parsed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Arguments:
    """Returns the arguments of `to`, of which the device, if one is asked for, is named."""
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
    there = dict(zip(("device", "non_blocking"), args)) | kwargs
    wanted = there.pop("device", None)
    index = wanted if isinstance(wanted, int) else torch.device(wanted or "cuda").index
    return (), {**there, "device": torch.device("cuda", index or 0)}
