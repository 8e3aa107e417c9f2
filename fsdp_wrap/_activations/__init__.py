"""Activations in host memory between forward and backward.

Lives here: `offload_activations`, and storages that leave the device and come back.
May import: `_core`, `_comm`, `_params`, `_runtime`.
Must never know: which front-end made a unit.
"""

from fsdp_wrap._activations.offload import ActivationOffload, offload_activations

__all__ = ["ActivationOffload", "offload_activations"]
