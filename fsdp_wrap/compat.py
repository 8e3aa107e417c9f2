"""Runs programs that were written for torch's wrapper, unchanged, on this one.

`install()` makes the names of torch's wrapper resolve to ours, by rebinding attributes in place: those of
torch's own modules, and those of every module that has imported them already. FSDP2's names stay as they are.
From the command line: `python -m fsdp_wrap.compat script.py arguments...`.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import os
import runpy
import sys
from collections.abc import Callable, Iterable, Iterator
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

from fsdp_wrap import api, flat_param, fully_sharded_data_parallel, sharded_grad_scaler, wrap
from fsdp_wrap.api import ShardingStrategy
from fsdp_wrap.fully_sharded_data_parallel import FullyShardedDataParallel

__all__ = ["Installation", "install", "missing", "replacements", "uninstall"]

_OURS = (fully_sharded_data_parallel, api, wrap, flat_param, sharded_grad_scaler)


def _wrapper_names() -> dict[str, Any]:
    """Returns the public names of torch's wrapper with what they stand for before any installation."""
    public = {"FlatParameter": torch_fsdp, "ShardedGradScaler": torch_scaler}
    for module in (torch_fsdp, torch_api, torch_wrap, torch_wrapper):
        public.update((name, module) for name in module.__all__ if name not in _fully_shard.__all__)
    return {name: getattr(module, name) for name, module in public.items()}


_WRAPPER_NAMES = _wrapper_names()


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
        self._undo.append(functools.partial(setattr, owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def set_environment(self, name: str, value: str) -> None:
        """Sets an environment variable until the end, if it is not set."""
        if name not in os.environ:
            self._undo.append(functools.partial(os.environ.pop, name, None))
            os.environ[name] = value

    def end(self) -> None:
        """Takes all changes back. Modules imported in between keep the names that they got."""
        while self._undo:
            self._undo.pop()()

    def __enter__(self) -> Installation:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


_installations: list[Installation] = []


def install(cpu: Iterable[str] = ()) -> Installation:
    """Makes the names of torch's wrapper resolve to ours, in all loaded modules and for later imports.

    Call it before anything is wrapped. A further call changes only what has come since.

    Args:
        cpu: Clients that refuse FSDP on a host without accelerators, and shall accept it: "accelerate" (with
            it transformers' `Trainer`), "lightning", "pytorch_lightning". They are imported.

    Returns:
        A context manager that takes the changes of this call back, if used in a `with` statement.

    Raises:
        ImportError: If a client of `cpu` cannot be imported.
        ValueError: If a client of `cpu` is not known.
    """
    clients = [cpu] if isinstance(cpu, str) else list(cpu)
    unknown = sorted(set(clients) - _GATES.keys())
    if unknown:
        raise ValueError(f"cpu must name clients out of {', '.join(_GATES)}, not {', '.join(unknown)}")
    for client in clients:
        importlib.import_module(client)
    installation = Installation()
    for module, name, value in list(_bindings()):
        installation.rebind(module, name, value)
    for client in clients:
        _GATES[client](installation)
    _installations.append(installation)
    return installation


def uninstall() -> None:
    """Takes back what all calls of `install` have changed."""
    while _installations:
        _installations.pop().end()


def _bindings() -> Iterator[tuple[ModuleType, str, Any]]:
    """Yields (module, name, ours) wherever a loaded module holds something of torch's wrapper."""
    ours = {id(old): new for old, new in replacements().values()}
    # Not in torch's own runtime, nor in FSDP2, nor in this package.
    kept = (f"{torch_fsdp.__name__}._", f"{api.__name__.partition('.')[0]}.")
    for module_name, module in list(sys.modules.items()):
        if isinstance(module, ModuleType) and not module_name.startswith(kept):
            for name, value in list(vars(module).items()):
                if id(value) in ours:
                    yield module, name, ours[id(value)]
    if vars(torch_state_dict)[_STATE_OF] is not _state_of:
        yield torch_state_dict, _STATE_OF, _state_of
        hybrid = {ShardingStrategy.HYBRID_SHARD, ShardingStrategy._HYBRID_SHARD_ZERO2}
        yield torch_state_dict, "HYBRID_SHARDING_STRATEGIES", hybrid


_STATE_OF = "_get_module_fsdp_state_if_fully_sharded_module"


def _state_of(module: nn.Module) -> nn.Module | None:
    return module if isinstance(module, FullyShardedDataParallel) else None


# Clients' gates on a host without accelerators.


def _open_accelerate(installation: Installation) -> None:
    state = importlib.import_module("accelerate.state")
    original = state.PartialState._prepare_backend

    @functools.wraps(original)
    def prepare(self: Any, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        backend, kind = original(self, *args, **kwargs)
        if kind is not state.DistributedType.NO or "LOCAL_RANK" not in os.environ:
            return backend, kind
        return "gloo", state.DistributedType.MULTI_GPU  # what the plugin makes FSDP of

    installation.set_environment("ACCELERATE_TORCH_DEVICE", "cpu")
    installation.rebind(state.PartialState, "_prepare_backend", prepare)


def _open_lightning(trainer: str, fabric: str, installation: Installation) -> None:
    connectors = importlib.import_module(f"{trainer}.trainer.connectors.accelerator_connector")
    strategy = importlib.import_module(f"{trainer}.strategies").FSDPStrategy
    _let_pass(connectors._AcceleratorConnector, strategy, installation)
    strategy = importlib.import_module(f"{fabric}.strategies").FSDPStrategy
    _let_pass(importlib.import_module(f"{fabric}.connector")._Connector, strategy, installation)


def _let_pass(connector: Any, strategy: type, installation: Installation) -> None:
    """Lets a connector of Lightning accept the strategy for FSDP on CPUs."""
    original = connector._check_strategy_and_fallback

    @functools.wraps(original)
    def check(self: Any) -> None:
        chosen = self._strategy_flag
        fsdp = type(chosen) is strategy or (isinstance(chosen, str) and chosen.startswith("fsdp"))
        if not (fsdp and self._accelerator_flag == "cpu"):
            original(self)

    installation.rebind(connector, "_check_strategy_and_fallback", check)


_GATES: dict[str, Callable[[Installation], None]] = {
    "accelerate": _open_accelerate,
    "lightning": functools.partial(_open_lightning, "lightning.pytorch", "lightning.fabric"),
    "pytorch_lightning": functools.partial(_open_lightning, "pytorch_lightning", "lightning_fabric"),
}


def main(arguments: list[str] | None = None) -> None:
    """Runs a script in which the names of torch's wrapper stand for those of fsdp_wrap."""
    parser = argparse.ArgumentParser(prog="python -m fsdp_wrap.compat", description=main.__doc__)
    accept = "let this client accept FSDP on a host without accelerators; may be repeated"
    parser.add_argument("--cpu", action="append", default=[], choices=list(_GATES), help=accept)
    parser.add_argument("script", help="a file of Python code")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="what the script gets")
    given = parser.parse_args(arguments)
    install(given.cpu)
    sys.argv = [given.script, *given.arguments]
    sys.path[0] = os.path.dirname(os.path.abspath(given.script))
    runpy.run_path(given.script, run_name="__main__")


if __name__ == "__main__":
    importlib.import_module("fsdp_wrap.compat").main()  # not this copy of the module, which nobody else finds
