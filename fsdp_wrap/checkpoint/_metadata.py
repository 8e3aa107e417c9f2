"""Reading `.metadata` without running what it may bring: only what DCP writes there is unpickled."""

from __future__ import annotations

import collections
import pathlib
import pickle
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import Metadata

from fsdp_wrap._torch_private import StorageInfo, get_layout

__all__ = ["METADATA", "read_metadata"]

METADATA = ".metadata"

_PATHS = ("PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath", "Path", "PurePath")
_ADMITTED: dict[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): get_layout,
    ("collections", "OrderedDict"): collections.OrderedDict,
    (filesystem.__name__, "_StorageInfo"): StorageInfo,
    **{
        (metadata.__name__, name): getattr(metadata, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    },
    # Where it was written; of another system too, and from newer versions of Python.
    **{(module, name): pathlib.PurePosixPath for module in ("pathlib", "pathlib._local") for name in _PATHS},
}


def read_metadata(folder: Path) -> Metadata:
    """Reads what `torch.distributed.checkpoint` knows of the folder's content.

    Raises:
        RuntimeError: If it holds anything that DCP does not write there, which is not run; or if it names
            files outside of the folder.
    """
    with open(folder / METADATA, "rb") as file:
        found = _Unpickler(file, folder / METADATA).load()
    if not isinstance(found, Metadata):
        raise RuntimeError(f"{folder / METADATA} holds no metadata of a checkpoint")
    for place in (found.storage_data or {}).values():
        name = place.relative_path
        if not isinstance(name, str) or Path(name).name != name:
            raise RuntimeError(f"{folder / METADATA} names a file outside of the folder: {name!r}")
    return found


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: IO[bytes], path: Path) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        """Returns a class or function that DCP's metadata are made of."""
        admitted = _ADMITTED.get((module, name))
        if admitted is not None:
            return admitted
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        raise RuntimeError(
            f"{self._path} asks for {module}.{name}, which torch.distributed.checkpoint does not write "
            "there, and nothing of it was run: do not trust this folder"
        )
