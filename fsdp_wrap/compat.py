"""Runs programs that were written for torch's wrapper, unchanged, on this one.

`install()` makes the names of torch's wrapper resolve to ours, by rebinding attributes in place: those of
torch's own modules, and those of every module that has imported them already. FSDP2's names stay as they are.
From the command line: `python -m fsdp_wrap.compat script.py arguments...`.
"""

from __future__ import annotations

import argparse
import functools
import importlib.abc
import importlib.util
import inspect
import os
import runpy
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from torch import nn
from torch.distributed import fsdp as torch_fsdp
from torch.distributed.checkpoint import state_dict as torch_state_dict
from torch.distributed.fsdp import _fully_shard
from torch.distributed.fsdp import api as torch_api
from torch.distributed.fsdp import fully_sharded_data_parallel as torch_wrapper
from torch.distributed.fsdp import sharded_grad_scaler as torch_scaler
from torch.distributed.fsdp import wrap as torch_wrap

from fsdp_wrap import (
    api,
    distributed_state_dict,
    flat_param,
    fully_sharded_data_parallel,
    sharded_grad_scaler,
    wrap,
)
from fsdp_wrap.api import ShardingStrategy, StateDictType
from fsdp_wrap.fully_sharded_data_parallel import FullyShardedDataParallel, clean_names

__all__ = ["Installation", "install", "missing", "replacements", "uninstall"]

_OURS = (fully_sharded_data_parallel, api, wrap, flat_param, sharded_grad_scaler)


def _wrapper_names() -> dict[str, Any]:
    """Returns the public names of torch's wrapper with what they stand for before any installation."""
    public = {"FlatParameter": torch_fsdp, "ShardedGradScaler": torch_scaler}
    for module in (torch_fsdp, torch_api, torch_wrap, torch_wrapper):
        public.update((name, module) for name in module.__all__ if name not in _fully_shard.__all__)
    return {name: getattr(module, name) for name, module in public.items()}


_WRAPPER_NAMES = _wrapper_names()

_STATE_DICT_FUNCTIONS = [
    (getattr(torch_state_dict, name), getattr(distributed_state_dict, name))
    for name in distributed_state_dict.__all__
    if name.endswith("_state_dict")
]
"""(torch's, ours) of the functions of `torch.distributed.checkpoint.state_dict`."""


def replacements() -> dict[str, tuple[Any, Any]]:
    """Returns (torch's, ours) for every public name of torch's wrapper that we have."""
    ours = {name: value for module in _OURS for name, value in vars(module).items()}
    return {name: (old, ours[name]) for name, old in _WRAPPER_NAMES.items() if name in ours}


def missing() -> set[str]:
    """Returns the public names of torch's wrapper that we do not have: they stay torch's."""
    return _WRAPPER_NAMES.keys() - replacements().keys()


class Installation:
    """What one call of `install` has changed; as a context manager it takes that back at the end."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], Any]] = []

    def rebind(self, owner: Any, name: str, value: Any) -> None:
        """Sets an attribute until the end."""
        self._undo.append(functools.partial(setattr, owner, name, inspect.getattr_static(owner, name)))
        setattr(owner, name, value)

    def set_environment(self, name: str, value: str) -> None:
        """Sets an environment variable until the end, if it is not set."""
        if name not in os.environ:
            self._undo.append(functools.partial(os.environ.pop, name, None))
            os.environ[name] = value

    def when_imported(self, name: str, adapt: Callable[[Installation, Any], None]) -> None:
        """Calls `adapt(self, module)` once the module of that name is loaded: now, or later until the end."""
        if name in sys.modules:
            adapt(self, sys.modules[name])
        else:
            finder = _OnImport(name, functools.partial(adapt, self))
            sys.meta_path.insert(0, finder)
            self._undo.append(finder.remove)

    def end(self) -> None:
        """Takes all changes back. Modules imported in between keep the names that they got."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class _OnImport(importlib.abc.MetaPathFinder):
    """Finds one module as the others would, and calls a function with it when it has been loaded."""

    def __init__(self, name: str, act: Callable[[ModuleType], None]) -> None:
        self._name, self._act = name, act

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname != self._name:
            return None
        self.remove()
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_act(module: ModuleType) -> None:
                execute(module)
                self._act(module)

            spec.loader.exec_module = execute_and_act  # type: ignore[method-assign]
        return spec


_installations: list[Installation] = []


def install(cpu: bool = False) -> Installation:
    """Makes the names of torch's wrapper resolve to ours, in all loaded modules and for later imports.

    Call it before anything is wrapped. A further call changes what has come since. With it, peft saves and
    loads the adapters of nested wrappers, too, which it would miss by their names, and on all ranks.

    Args:
        cpu: Let accelerate (with it transformers' `Trainer`) and Lightning accept FSDP on a host without
            accelerators, over gloo. They refuse it otherwise.

    Returns:
        A context manager that takes the changes of this call back, if used in a `with` statement.
    """
    installation = Installation()
    for module, name, value in list(_bindings()):
        installation.rebind(module, name, value)
    installation.when_imported("peft.utils.save_and_load", _adapt_saving)
    installation.when_imported("peft.tuners.tuners_utils", _adapt_loading)
    for client, adapt in _GATES.items() if cpu else ():
        installation.when_imported(client, adapt)
    _installations.append(installation)
    return installation


def uninstall() -> None:
    """Takes back what all calls of `install` have changed."""
    while _installations:
        _installations.pop().end()


def _bindings() -> Iterator[tuple[ModuleType, str, Any]]:
    """Yields (module, name, ours) wherever a loaded module holds something of torch's wrapper."""
    # Not in torch's own runtime, nor in FSDP2, nor in this package.
    kept = (f"{torch_fsdp.__name__}._", f"{api.__name__.partition('.')[0]}.")
    for module, name, ours in _holders([*replacements().values(), *_STATE_DICT_FUNCTIONS]):
        if not module.__name__.startswith(kept):
            yield module, name, ours
    if vars(torch_state_dict)[_STATE_OF] is not _state_of:
        yield torch_state_dict, _STATE_OF, _state_of
        hybrid = {ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2}
        yield torch_state_dict, "HYBRID_SHARDING_STRATEGIES", hybrid


def _holders(pairs: Iterable[tuple[Any, Any]]) -> Iterator[tuple[ModuleType, str, Any]]:
    """Yields (module, name, new) wherever a loaded module holds the old one of (old, new)."""
    by_id = {id(old): new for old, new in pairs}
    for module in list(sys.modules.values()):
        if isinstance(module, ModuleType):
            for name, value in list(vars(module).items()):
                if id(value) in by_id:
                    yield module, name, by_id[id(value)]


_STATE_OF = "_get_module_fsdp_state_if_fully_sharded_module"


def _state_of(module: nn.Module) -> nn.Module | None:
    return module if isinstance(module, FullyShardedDataParallel) else None


# Clients.


def _adapt_saving(installation: Installation, save_and_load: Any) -> None:
    """Lets peft see the names that state dicts have.

    It compares the two, and knows of one prefix at most, so it would miss what nested wrappers hold.
    """

    def by_clean_names(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            with clean_names():
                return function(*args, **kwargs)

        return call

    functions = [getattr(save_and_load, f"{verb}_peft_model_state_dict") for verb in ("get", "set")]
    for module, name, new in list(_holders([(each, by_clean_names(each)) for each in functions])):
        installation.rebind(module, name, new)


def _adapt_loading(installation: Installation, tuners_utils: Any) -> None:
    """Lets peft read a model's names on all ranks, also where only the first is to get a full state dict."""
    tuner = tuners_utils.BaseTuner
    original = tuner._remap_adapter_state_dict_for_load.__func__

    @functools.wraps(original)
    def remap(cls: type, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
            return original(cls, model, *args, **kwargs)

    installation.rebind(tuner, original.__name__, classmethod(remap))


def _open_accelerate(installation: Installation, state: Any) -> None:
    original = state.PartialState._prepare_backend

    @functools.wraps(original)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        backend, kind = original(self, *args, **kwargs)
        if kind is not state.DistributedType.NO or "LOCAL_RANK" not in os.environ:
            return backend, kind
        return "gloo", state.DistributedType.MULTI_GPU  # what the plugin makes FSDP of

    installation.set_environment("ACCELERATE_TORCH_DEVICE", "cpu")
    installation.rebind(state.PartialState, original.__name__, prepare)


def _open_lightning(connector: str, installation: Installation, module: Any) -> None:
    original = getattr(module, connector)._check_strategy_and_fallback

    @functools.wraps(original)
    def check(self: Any) -> None:
        chosen = self._strategy_flag
        by_name = isinstance(chosen, str) and chosen.startswith("fsdp")
        if self._accelerator_flag != "cpu" or not (by_name or type(chosen) is module.FSDPStrategy):
            original(self)

    installation.rebind(getattr(module, connector), original.__name__, check)


_open_trainer = functools.partial(_open_lightning, "_AcceleratorConnector")
_open_fabric = functools.partial(_open_lightning, "_Connector")

_GATES: dict[str, Callable[[Installation, Any], None]] = {
    "accelerate.state": _open_accelerate,
    "lightning.pytorch.trainer.connectors.accelerator_connector": _open_trainer,
    "pytorch_lightning.trainer.connectors.accelerator_connector": _open_trainer,
    "lightning.fabric.connector": _open_fabric,
    "lightning_fabric.connector": _open_fabric,
}
"""Where clients refuse FSDP on a host without accelerators."""


def main(arguments: list[str] | None = None) -> None:
    """Runs a script in which the names of torch's wrapper stand for those of fsdp_wrap."""
    parser = argparse.ArgumentParser(prog="python -m fsdp_wrap.compat", description=main.__doc__)
    accept = "let accelerate and Lightning accept FSDP on a host without accelerators"
    parser.add_argument("--cpu", action="store_true", help=accept)
    parser.add_argument("script", help="a file of Python code")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the script gets")
    given = parser.parse_args(arguments)
    install(given.cpu)
    sys.argv = [given.script, *given.arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(given.script))
    runpy.run_path(given.script, run_name="__main__")


if __name__ == "__main__":
    importlib.import_module("fsdp_wrap.compat").main()  # not this copy of the module, which nobody else finds
