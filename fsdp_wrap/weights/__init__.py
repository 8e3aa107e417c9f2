"""Weights of a model in training, for whoever else wants them: an inference engine, say.

`weight_source` gives full tensors, under the names that an engine has for them. `weight_changes` gives the
elements that changed.
"""

from fsdp_wrap.weights._changes import Change, Changes, WeightChanges, apply_changes, checksum, weight_changes
from fsdp_wrap.weights._source import WeightMeta, WeightSource, weight_source

__all__ = [
    "Change",
    "Changes",
    "WeightChanges",
    "WeightMeta",
    "WeightSource",
    "apply_changes",
    "checksum",
    "weight_changes",
    "weight_source",
]
