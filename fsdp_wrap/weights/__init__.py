"""Weights of a model in training for other programs, such as an inference engine.

`weight_source` gives full tensors under an engine's names. `weight_changes` gives the elements that changed.
`WeightFolder` writes either to files.
"""

from fsdp_wrap.weights._changes import Change, Changes, WeightChanges, apply_changes, checksum, weight_changes
from fsdp_wrap.weights._folder import Update, WeightFolder, stored
from fsdp_wrap.weights._source import WeightMeta, WeightSource, weight_source

__all__ = [
    "Change",
    "Changes",
    "Update",
    "WeightChanges",
    "WeightFolder",
    "WeightMeta",
    "WeightSource",
    "apply_changes",
    "checksum",
    "stored",
    "weight_changes",
    "weight_source",
]
