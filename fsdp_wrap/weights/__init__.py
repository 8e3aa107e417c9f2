"""Weights of a model in training, for whoever else wants them: an inference engine, say.

`weight_source` gives full tensors, under the names that an engine has for them. `weight_changes` gives the
elements that changed. A `WeightSender` sends either through a channel, a `WeightFolder` writes them to files.
"""

from fsdp_wrap.weights._changes import Change, Changes, WeightChanges, apply_changes, checksum, weight_changes
from fsdp_wrap.weights._channels import Channel, GlooChannel, PeerLost, SharedMemoryChannel
from fsdp_wrap.weights._folder import WeightFolder, stored
from fsdp_wrap.weights._source import WeightMeta, WeightSource, weight_source
from fsdp_wrap.weights._updates import Update, WeightSender, received

__all__ = [
    "Change",
    "Changes",
    "Channel",
    "GlooChannel",
    "PeerLost",
    "SharedMemoryChannel",
    "Update",
    "WeightChanges",
    "WeightFolder",
    "WeightMeta",
    "WeightSender",
    "WeightSource",
    "apply_changes",
    "checksum",
    "received",
    "stored",
    "weight_changes",
    "weight_source",
]
