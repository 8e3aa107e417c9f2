"""Makes the names of torch's `fully_shard` stand for ours, for `compat`."""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any

from torch import nn

from fsdp_wrap._fully_shard_state import state_of
from fsdp_wrap._installation import Installation
from fsdp_wrap._torch_private import get_module_state, torch_fully_shard
from fsdp_wrap.fully_shard import fully_shard

__all__ = ["adapt_fully_shard", "fully_shard_names"]

_TORCHS = {name: getattr(torch_fully_shard, name) for name in torch_fully_shard.__all__}
"""What the public names of torch's FSDP2 stand for before any installation."""

_IMPORTERS = ("torch.distributed._composable.fsdp", "torch.distributed._composable.replicate_with_fsdp")
"""Small modules of torch that name FSDP2's things, loaded first so that they get torch's back at the end."""

_LATER = (
    "torch.distributed.pipelining.schedules",
    "torch.distributed.pipelining.stage",
    "torch.distributed._tools.fsdp2_mem_tracker",
)
"""Large ones, which are adapted when they are imported."""

_BY_CLASS = (f"{torch_fully_shard.__name__}._", _IMPORTERS[1], *_LATER)
"""How modules of torch begin that hold its `FSDPModule` only to ask whether something is one.

They keep it: ours are instances of it, too, as are the modules of torch's `replicate`.
"""


def fully_shard_names() -> dict[str, tuple[Any, Any]]:
    """Returns (torch's, ours) for every public name of torch's FSDP2 that we have."""
    ours = vars(sys.modules["fsdp_wrap"])  # by now all of it
    return {name: (old, ours[name]) for name, old in _TORCHS.items() if name in ours}


def adapt_fully_shard(installation: Installation) -> None:
    """Makes the names of torch's FSDP2 resolve to ours, in all loaded modules and for later imports.

    Modules that our `fully_shard` has sharded are instances of torch's `FSDPModule` meanwhile, whoever holds
    that class, and torch's functions that look for a module's state find theirs.
    """
    for name in _IMPORTERS:
        importlib.import_module(name)
    names = fully_shard_names()
    torchs, ours = names.pop("FSDPModule")
    installation.replace([*names.values(), (get_module_state, _state_of)], kept=("fsdp_wrap.",))
    installation.replace([(torchs, ours)], kept=("fsdp_wrap.", *_BY_CLASS))
    for name in _LATER:
        installation.when_imported(name, _adapt_importer)
    if torchs not in ours.__bases__:
        installation.at_end(functools.partial(setattr, ours, "__bases__", ours.__bases__))
        ours.__bases__ = (*ours.__bases__, torchs)  # last: whatever we define or inherit goes before
        installation.at_end(functools.partial(_set_attributes, dict(vars(fully_shard))))
        _set_attributes({**vars(fully_shard), "state": _contracted_state_of})


def _set_attributes(attributes: dict[str, Any]) -> None:
    """Gives our `fully_shard` these attributes, and no others."""
    vars(fully_shard).clear()
    vars(fully_shard).update(attributes)


def _adapt_importer(installation: Installation, module: Any) -> None:
    """Adapts a module of torch that has perhaps been imported just now, and got our names."""
    for name, (old, new) in fully_shard_names().items():
        if name in vars(module):
            setattr(module, name, old)
            if name != "FSDPModule":
                installation.rebind(module, name, new)


def _state_of(module: nn.Module) -> Any:
    """Returns what one of torch's composable ways, or our `fully_shard`, knows of a module; else None."""
    return state_of(module) or get_module_state(module)


def _contracted_state_of(module: nn.Module) -> Any:
    """Returns the same, as `fully_shard.state`."""
    return state_of(module) or _TORCHS["fully_shard"].state(module)
