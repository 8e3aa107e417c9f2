"""Checkpoints as step folders that appear whole or not at all, over `torch.distributed.checkpoint`."""

from fsdp_wrap.checkpoint._exports import export_safetensors
from fsdp_wrap.checkpoint._in_memory import InMemory
from fsdp_wrap.checkpoint._loading import Loaded, load
from fsdp_wrap.checkpoint._manifest import DamagedCheckpoint
from fsdp_wrap.checkpoint._places.steps import latest
from fsdp_wrap.checkpoint._safetensors import import_safetensors
from fsdp_wrap.checkpoint._saving import PendingSave, RegularSaves, async_save, save

__all__ = [
    "DamagedCheckpoint",
    "InMemory",
    "Loaded",
    "PendingSave",
    "RegularSaves",
    "async_save",
    "export_safetensors",
    "import_safetensors",
    "latest",
    "load",
    "save",
]
