"""`torch.autocast` for tensors without values: torch's own rules for the device that they stand for.

Autocast acts by dispatch keys of devices, and the meta device has none. So operators for which a device has
a rule get a kernel on a key that no device uses. It hands stand-ins for the arguments, which claim to be on
the device, to torch's kernel for autocast, and sees with which dtypes that calls the operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from fsdp_wrap._core.torch_private import (
    DisableTorchFunction,
    DispatchKey,
    DispatchKeySet,
    ExcludeDispatchKeys,
    exclude_dispatch_key,
    include_dispatch_key,
    make_subclass,
    no_torch_function,
    operators_with_kernel,
    pytree,
)
from fsdp_wrap.tools.planning.kernels import wide_softmax

Operator = Any
Call = tuple[Operator, tuple[Any, ...], dict[str, Any]]
"""An operator and its arguments."""

_RULES = {"cuda": DispatchKey.AutocastCUDA, "cpu": DispatchKey.AutocastCPU}
"""By type of device, the key of its rules; the first ones are applied first."""

_OURS = DispatchKey.AutocastIPU  # type: ignore[attr-defined]
"""A key that no device uses."""

_TO = torch.ops.aten.to.dtype
"""The operator by which torch's kernels cast."""

_DTYPES = [
    dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype) and dtype.is_floating_point
]
_NOTHING = {dtype: torch.empty(0, dtype=dtype, device="meta") for dtype in _DTYPES}
"""The data of stand-ins."""

_libraries: dict[str, torch.library.Library] = {}
_following: ContextVar[Autocast] = ContextVar("_following")


class _Asked(Exception):
    """Carries how torch's kernel for autocast calls an operator."""

    def __init__(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.call: Call = func, args, kwargs


class _Claimant(torch.Tensor):
    """Stands for a tensor, claims to be on another device, and is never computed with."""

    replaced: torch.Tensor
    kind: str

    @staticmethod
    def __new__(cls, replaced: torch.Tensor, kind: str, dtype: torch.dtype) -> _Claimant:
        made: _Claimant = make_subclass(
            cls, _NOTHING[dtype], dispatch_device=True, device_for_backend_keys=torch.device(kind)
        )
        made.replaced, made.kind = replaced, kind
        return made

    __torch_function__ = no_torch_function  # type: ignore[assignment]

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device(self.kind)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Operator, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].device
        raise _Asked(func, args, kwargs or {})


class Autocast:
    """Casts the arguments of operators as autocast does on the devices on which tensors are said to be.

    Casts of parameters are kept until the outermost region of autocast ends, which torch does too.
    """

    def __init__(self, device_of: Callable[[torch.Tensor], torch.device]) -> None:
        self._device_of = device_of
        self._asking = False
        self._ruled: dict[str, set[str]] = {}
        self._casts = WeakTensorKeyDictionary()

    @contextmanager
    def followed(self, device_type: str) -> Iterator[None]:
        """Passes this thread's operators to `run` while `torch.autocast` is on; the device need not exist."""
        token = _following.set(self)
        with ExitStack() as stack:
            stack.callback(_following.reset, token)
            stack.callback(_let_in, False)
            enable, clear = torch.set_autocast_enabled, torch.clear_autocast_cache
            stack.enter_context(patch.object(torch, "set_autocast_enabled", partial(self._enable, enable)))
            stack.enter_context(patch.object(torch, "clear_autocast_cache", partial(self._clear, clear)))
            if device_type == "cuda":
                common = torch.cuda.amp.common
                stack.enter_context(patch.object(common, "amp_definitely_not_available", lambda: False))
                stack.enter_context(patch.object(torch.cuda, "is_bf16_supported", lambda *_, **__: True))
            self._let_in()
            yield

    def _enable(self, enable: Callable[..., None], *args: Any) -> None:
        enable(*args)
        self._let_in()

    def _let_in(self) -> None:
        """Passes operators to our kernels if autocast is on for a device."""
        on = any(map(torch.is_autocast_enabled, _RULES))
        if on and not self._ruled:
            self._ruled = _register()
        _let_in(on)

    def _clear(self, clear: Callable[[], None]) -> None:
        clear()
        self._casts = WeakTensorKeyDictionary()

    def run(self, func: Operator, keys: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Runs an operator that was called under autocast."""
        if self._asking and func is _TO:
            return _Claimant(args[0].replaced, args[0].kind, args[1])
        if self._asking:
            raise _Asked(func, args, kwargs)
        changed = self.cast(func, args, kwargs)
        if changed is None:
            return func.redispatch(keys - DispatchKeySet(_OURS), *args, **kwargs)
        func, args, kwargs = changed
        with without_autocast():
            fused = wide_softmax(func, args)
            return func(*args, **kwargs) if fused is None else fused

    def cast(self, func: Operator, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
        """Returns a call as autocast changes it; None if it does not change it."""
        changed: Call | None = None
        with DisableTorchFunction():
            for kind, names in self._ruled.items():
                if torch.is_autocast_enabled(kind) and func.name() in names:
                    changed = self._cast_on(kind, changed or (func, args, kwargs)) or changed
        return changed

    def _cast_on(self, kind: str, call: Call) -> Call | None:
        func, args, kwargs = call

        def stand_in(tensor: torch.Tensor) -> torch.Tensor:
            there = tensor.is_floating_point() and self._device_of(tensor).type == kind
            return _Claimant(tensor, kind, tensor.dtype) if there else tensor

        given = pytree.tree_map_only(torch.Tensor, stand_in, (args, kwargs))
        if not any(isinstance(leaf, _Claimant) for leaf in pytree.tree_leaves(given)):
            return None
        func, *given = self._ask(func, DispatchKeySet(_RULES[kind]), *given)
        args, kwargs = pytree.tree_map_only(_Claimant, partial(self._resolve, kind), given)
        return func, args, kwargs

    def _ask(self, func: Operator, keys: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Returns how torch's kernel for autocast calls an operator."""
        self._asking = True
        try:
            func.redispatch(keys, *args, **kwargs)
        except _Asked as asked:
            return asked.call
        finally:
            self._asking = False
        raise AssertionError(f"autocast computes {func} of tensors without values")

    def _resolve(self, kind: str, asked: _Claimant) -> torch.Tensor:
        """Returns the tensor that a stand-in replaced, in the stand-in's dtype."""
        tensor, dtype = asked.replaced, asked.dtype
        if tensor.dtype == dtype:
            return tensor
        kept = torch.is_autocast_cache_enabled() and dtype == torch.get_autocast_dtype(kind)
        kept &= tensor.dtype == torch.float32 and tensor.requires_grad
        if not kept or not tensor.is_leaf or tensor._base is not None:
            return tensor.to(dtype)
        if tensor not in self._casts:
            self._casts[tensor] = tensor.to(dtype)
        cast: torch.Tensor = self._casts[tensor]
        return cast


def without_autocast() -> Any:
    """Returns a context in which operators run as they are."""
    return ExcludeDispatchKeys(DispatchKeySet(_OURS))


def _let_in(on: bool) -> None:
    """Passes this thread's operators to our kernels, or stops doing so."""
    exclude_dispatch_key(_OURS, not on)
    include_dispatch_key(_OURS, on)


def _register() -> dict[str, set[str]]:
    """Registers a kernel on our key for operators with a rule; returns their names by type of device."""
    ruled = {kind: set(operators_with_kernel(key.name)) for kind, key in _RULES.items()}
    if "_" not in _libraries:  # all other operators fall through
        _libraries["_"] = torch.library.Library("_", "IMPL")  # type: ignore[no-untyped-call]
        _libraries["_"].fallback(torch.library.fallthrough_kernel, _OURS.name)  # type: ignore[no-untyped-call]
    for name in {"aten::to.dtype"}.union(*ruled.values()).difference(operators_with_kernel(_OURS.name)):
        space, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if space not in _libraries:
            _libraries[space] = torch.library.Library(space, "IMPL")  # type: ignore[no-untyped-call]
        func = getattr(getattr(getattr(torch.ops, space), packet, None), overload or "default", None)
        if func is not None:  # as names of dimensions have none in Python
            kernel = partial(_kernel, func)
            _libraries[space].impl(func, kernel, _OURS.name, with_keyset=True)  # type: ignore[no-untyped-call]
    return ruled


def _kernel(func: Operator, keys: Any, *args: Any, **kwargs: Any) -> Any:
    return _following.get().run(func, keys, args, kwargs)
