"""Adapts accelerate, Lightning and peft beyond the names of torch's wrapper."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

from torch import nn

from fsdp_wrap._core import StateDictType
from fsdp_wrap.compat.installation import Installation
from fsdp_wrap.fully_sharded_data_parallel import FullyShardedDataParallel, clean_names

__all__ = ["adapt_clients"]


def adapt_clients(installation: Installation, cpu: bool) -> None:
    """Adapts clients now or when they are imported; with `cpu` they accept a host without accelerators.

    Args:
        installation: Takes the changes back at its end.
        cpu: Whether to adapt them to such a host.
    """
    for module, adapt in {**_ADAPTATIONS, **(_GATES if cpu else {})}.items():
        installation.when_imported(module, adapt)


def _adapt_saving(installation: Installation, save_and_load: Any) -> None:
    """Shows peft the names of state dicts: it strips one prefix at most, and would miss nested wrappers."""
    functions = [getattr(save_and_load, f"{verb}_peft_model_state_dict") for verb in ("get", "set")]
    installation.replace([(function, clean_names()(function)) for function in functions])


def _adapt_loading(installation: Installation, tuners_utils: Any) -> None:
    """Lets peft read a model's names on all ranks, also where only the first gets a full state dict."""
    tuner = tuners_utils.BaseTuner
    if not hasattr(tuner, "_remap_adapter_state_dict_for_load"):  # older: it reads no names while it loads
        return
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
        settled = kind is not state.DistributedType.NO or "LOCAL_RANK" not in os.environ
        # Of several GPUs the plugin makes FSDP.
        return (backend, kind) if settled else ("gloo", state.DistributedType.MULTI_GPU)

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

_ADAPTATIONS: dict[str, Callable[[Installation, Any], None]] = {
    "peft.utils.save_and_load": _adapt_saving,
    "peft.tuners.tuners_utils": _adapt_loading,
}
_GATES: dict[str, Callable[[Installation, Any], None]] = {
    "accelerate.state": _open_accelerate,
    "lightning.pytorch.trainer.connectors.accelerator_connector": _open_trainer,
    "pytorch_lightning.trainer.connectors.accelerator_connector": _open_trainer,
    "lightning.fabric.connector": _open_fabric,
    "lightning_fabric.connector": _open_fabric,
}
"""Where clients refuse FSDP on a host without accelerators."""
