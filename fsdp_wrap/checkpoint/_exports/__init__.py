"""Exports of full weights.

Lives here: who writes which file, and how the files appear, on disk and in stores. May import: `_core`,
`_state`, and of `checkpoint` places, layouts and the format. Must never know: checkpoints of steps.
"""

from fsdp_wrap.checkpoint._exports.export import export_safetensors

__all__ = ["export_safetensors"]
