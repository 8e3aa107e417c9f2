"""The look-up of attributes of sharded modules, which tells what replaces a method of the wrapper.

`torch.compile` follows this file, and no other of the package: compiled forwards look parameters up by it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

_OF_THE_WRAPPER = {
    "no_sync": "call set_requires_gradient_sync(False) before the first backwards, and True before the last",
    "clip_grad_norm_": "call fsdp_wrap.clip_grad_norm_(model, max_norm)",
    "grad_norms": "call fsdp_wrap.grad_norms(model)",
    "summon_full_params": "call FullyShardedDataParallel.summon_full_params(model), also for this model",
    "iter_full_params": "call fsdp_wrap.iter_full_params(model)",
    "register_comm_hook": "call fsdp_wrap.comm_hooks.register_comm_hook(model, state, hook)",
    "state_dict_type": "get_model_state_dict(model, options=...) chooses the kind",
    "set_state_dict_type": "get_model_state_dict(model, options=...) chooses the kind",
    "optim_state_dict": "call get_optimizer_state_dict(model, optimizer)",
    "module": "the model itself is the module, which fully_shard changes in place",
}
"""What replaces methods of the wrapper, which fully_shard's modules do not have."""
_STAYING = (
    "it is gone since 0.2. Full parameters stay until backward with SHARD_GRAD_OP, or fully_shard's "
    "reshard_after_forward=False; with its set_reshard_after_backward(False) too, frozen units stay for good"
)
GONE = {"keep_unsharded_bytes": _STAYING, "set_keep_unsharded_bytes": _STAYING}
"""What replaces arguments and methods of the last release."""
_PLACES = ("_parameters", "_modules", "_buffers")
"""Where a module holds attributes that `__getattr__` finds."""


def telling(find: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    """Returns a class's look-up of attributes, which also tells what replaces a method of the wrapper.

    It takes as many calls as that of `torch.nn.Module`: forwards look parameters up by it.
    """
    places = _PLACES if find is nn.Module.__getattr__ else ()

    def __getattr__(self: nn.Module, name: str) -> Any:
        own = self.__dict__
        for place in places:
            if place in own and name in own[place]:
                return own[place][name]
        try:
            return find(self, name)
        except AttributeError as error:
            if name in GONE:
                raise AttributeError(f"{error}: {GONE[name]}", name=name, obj=self) from None
            if name not in _OF_THE_WRAPPER:
                raise
            raise AttributeError(
                f"{error}, which is FullyShardedDataParallel's: {_OF_THE_WRAPPER[name]}", name=name, obj=self
            ) from None

    return __getattr__
