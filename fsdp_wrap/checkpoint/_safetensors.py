"""Full weights in safetensors files, in shards with an index as Hugging Face's libraries write and read them.

A file is a header (8 bytes of length, JSON) and the tensors' bytes, so it is written as the parameters stream
by, and read by the slices that a rank needs.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import re
import sys
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import torch
import torch.distributed as dist
from torch import nn
from tqdm import tqdm  # type: ignore[import-untyped]

from fsdp_wrap._core import (
    StateDictType,
    is_castable,
    listed,
    nbytes_of,
    own_folder,
    sync_folder,
    tells_keywords,
)
from fsdp_wrap._core.torch_private import IncompatibleKeys
from fsdp_wrap._params import boxes_of
from fsdp_wrap._state import (
    ReadsOnAccess,
    Targets,
    param_aliases,
    settled_units,
)
from fsdp_wrap.checkpoint._hub import (
    Described,
    HubLayout,
    block_in,
    dequantised,
    fill_buffers,
    give_memory,
    has_scales,
    refuse_meta_buffers,
)
from fsdp_wrap.checkpoint._manifest import crc_of, durable, tile
from fsdp_wrap.checkpoint._places.remote import RemotePath
from fsdp_wrap.checkpoint._places.steps import path_at
from fsdp_wrap.distributed_state_dict import by_own_names

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ASIDE = ".export_safetensors."
"""How the names of folders begin in which files are written before they are all there."""
_SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
_MOST_HEADER = 10**8
"""Bytes of the longest header that safetensors reads."""
_OF_RANK = re.compile(r"shard-\d{5,}-model-\d{5,}-of-\d{5,}\.safetensors")
"""Files of DCP's `HuggingFaceStorageWriter(save_distributed=True)`: each holds one rank's parts."""
_ABOUT, _PLACES = "__metadata__", "DCP_SHARDING_INFO"
"""What in a header is no tensor, and where DCP notes there at which offsets the file's parts lie."""

_NAMES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}

PATIENCE = 2.0
"""Seconds until a bar appears on standard error; what is done before shows none."""

Named = tuple[str, torch.Tensor]

# writing


def write_safetensors(
    directory: str | os.PathLike[str],
    described: Described,
    values: Iterable[Named],
    *,
    max_shard_size: int | str = "5GB",
) -> list[str]:
    """Writes tensors as `export_safetensors` does, in one process; returns the names of the files."""
    refuse_unwritable(described)
    plan = planned([described], nbytes_of(max_shard_size, "max_shard_size"))
    folder = Path(directory)
    own_folder(folder)
    with TemporaryDirectory(prefix=ASIDE, dir=folder) as aside:
        write_files(Path(aside), plan, iter(values))
        install(Path(aside), folder, plan)
    return [*plan]


def refuse_unwritable(described: Described) -> None:
    """Refuses tensors that safetensors cannot hold."""
    for name, (_, dtype) in described.items():
        if name == _ABOUT or name.encode(errors="replace").decode() != name:
            raise ValueError(f"safetensors cannot hold a tensor with the name {name!r}: rename it before")
        if dtype not in _NAMES:
            raise ValueError(f"safetensors cannot hold {name}, which is of {dtype}: cast it before")


def planned(groups: Iterable[Described], most: int, tag: str = "") -> dict[str, Described]:
    """Returns the tensors of each file, in order, of at most so many bytes a file; names have the tag.

    A group of tensors is in one file, or in files of its own.
    """
    parts: list[dict[str, Any]] = [{}]
    filled = 0
    for group in groups:
        whole = sum(nbytes(*about) for about in group.values())
        if parts[-1] and filled + whole > most:
            parts.append({})
            filled = 0
        for name, (shape, dtype) in group.items():
            size = nbytes(shape, dtype)
            if parts[-1] and filled + size > most:
                parts.append({})
                filled = 0
            parts[-1][name] = torch.Size(shape), dtype
            filled += size
        if whole > most:  # and shares its last file with no other
            filled = whole
    count = len(parts)
    names = [f"model-{number:05}-of-{count:05}{tag}.safetensors" for number in range(1, count + 1)]
    return dict(zip(names if count > 1 else [SINGLE], parts))


def nbytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Returns the bytes of a tensor."""
    return math.prod(shape) * dtype.itemsize


def write_files(folder: Path, plan: Mapping[str, Described], values: Iterator[Named]) -> None:
    """Writes files into a folder.

    Raises:
        ValueError: If the values are not those of the plan, in its order.
    """
    for file, tensors in plan.items():
        with durable(folder / file) as out:
            _write_tensors(out, tensors, values)


def require_written(folder: Path, plan: Mapping[str, Described], sums: Mapping[str, int]) -> None:
    """Reads files back, and raises a RuntimeError if a tensor's bytes do not have their CRC-32."""
    for file, tensors in plan.items():
        _, starts = _header(tensors)
        for name, about in tensors.items():
            if crc_of(folder / file, starts[name], nbytes(*about)) != sums[name]:
                raise RuntimeError(f"{file} does not hold what was written of {name}: check the disk")


def bytes_of(value: torch.Tensor) -> Any:
    """Returns the bytes of a contiguous tensor in host memory, without a copy."""
    return (ctypes.c_char * value.nbytes).from_address(value.data_ptr()) if value.nbytes else b""


def _write_tensors(out: BinaryIO, tensors: Described, values: Iterator[Named]) -> None:
    header, starts = _header(tensors)
    out.write(header)
    for expected, (shape, dtype) in tensors.items():
        name, value = next(values, ("nothing", torch.empty(0)))
        if (name, value.shape, value.dtype) != (expected, shape, dtype):
            raise ValueError(f"expected {expected} of {shape} and {dtype}, got {name} of {value.shape}")
        if value.layout is not torch.strided:
            raise ValueError(f"safetensors cannot hold {name}, which is sparse: make it dense before")
        value = value.detach().cpu().contiguous()
        if out.tell() != starts[name]:
            out.seek(starts[name])
        out.write(bytes_of(value))
        del value


def _header(tensors: Described) -> tuple[bytes, dict[str, int]]:
    """Returns a file's header and each tensor's offset."""
    entries: dict[str, Any] = {_ABOUT: {"format": "pt"}}
    starts, stop = {}, 0
    for name, (shape, dtype) in _in_order(tensors).items():
        starts[name], stop = stop, stop + nbytes(shape, dtype)
        span = [starts[name], stop]
        entries[name] = {"dtype": _NAMES[dtype], "shape": list(shape), "data_offsets": span}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    begin = len(text).to_bytes(8, "little") + text
    return begin, {name: len(begin) + start for name, start in starts.items()}


def _in_order(tensors: Described) -> Described:
    """Returns tensors in the order of their bytes: as given if that aligns them, else large dtypes first."""
    begin = 0
    for shape, dtype in tensors.values():
        if begin % dtype.itemsize:
            return dict(sorted(tensors.items(), key=lambda item: -item[1][1].itemsize))
        begin += nbytes(shape, dtype)
    return tensors


def index_of(plan: Mapping[str, Described]) -> bytes:
    """Returns the content of an index."""
    total = sum(nbytes(*described) for tensors in plan.values() for described in tensors.values())
    weight_map = {name: file for file, tensors in plan.items() for name in tensors}
    content = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()


def install(aside: Path, directory: Path, plan: Mapping[str, Described]) -> None:
    """Lets new files take the place of old ones, so that at no time old and new ones look like one export."""
    if len(plan) > 1:
        with durable(aside / INDEX) as out:
            out.write(index_of(plan))
    new = sorted(path.name for path in aside.iterdir())  # the index last
    stale = {path.name for path in directory.iterdir() if _SHARD.fullmatch(path.name)}
    if INDEX in new:
        (directory / INDEX).unlink(missing_ok=True)
        (directory / SINGLE).unlink(missing_ok=True)  # which readers would prefer to the index
    for name in new:
        (aside / name).replace(directory / name)
    for name in (stale | {INDEX}) - set(new):
        (directory / name).unlink(missing_ok=True)
    sync_folder(directory)


# reading


@tells_keywords()
def import_safetensors(
    module: nn.Module,
    directory: str | os.PathLike[str],
    *,
    strict: bool = True,
    budget: int | str = "256MiB",
    initialize: Sequence[str] = (),
    seed: int = 0,
) -> IncompatibleKeys:
    """Loads `model.safetensors`, or the files of `model.safetensors.index.json`; nothing is communicated.

    Every rank reads what it holds of each tensor and no more, unless modules load in ways of their own. Names
    of tied parameters that the files lack are taken from another name of the same parameter. Floating-point
    values are cast to the parameter's dtype. Parameters on the meta device get memory first, on the device of
    their unit, once the files are known to fit.

    A model of transformers is loaded from files as they lie on the Hub: names and shapes are converted as its
    `from_pretrained` does, experts one by one into fused ones, mxfp4 weights into numbers. Buffers that no
    file holds are computed. This needs transformers 5 where the layouts differ. fp8 weights with scales of
    blocks become numbers for any model.

    Args:
        module: Wrapped, with wrapped modules in it, or plain.
        directory: With files as `export_safetensors` or Hugging Face's libraries write them; a path, or the
            URL of a place in a store, of which each rank reads the ranges that it holds.
        strict: Whether names must match exactly.
        budget: The most bytes to read and convert at a time beside the shard, or text like "1GB". What
            cannot be converted in part, such as one weight cut into three, takes its whole size.
        initialize: Names of parameters of a model of transformers that the files may lack, such as those of a
            new head. They get the values that its class gives to new ones, on all ranks the same. Each rank
            makes the whole parameters of one module at a time.
        seed: By which these values are drawn; a module's own are drawn by its name, too.

    Returns:
        Missing and unexpected keys, as `torch.nn.Module.load_state_dict`.

    Raises:
        FileNotFoundError: Naming the file that is missing.
        RuntimeError: Inside a forward, backward or `summon_full_params`; if a file is damaged; if names,
            shapes or dtypes do not fit. Nothing is loaded then.
        TypeError: If `initialize` is no list of names, or `seed` no int.
        ValueError: If `budget` is no positive size, the files are quantised in another way, or `initialize`
            names no parameter of the model, or one that its class leaves alone.
    """
    settled_units(module, "import_safetensors()")
    most, folder = nbytes_of(budget, "budget"), path_at(directory)
    targets, layout = Targets(module), HubLayout.of(module)
    _check_initialize(initialize, seed, layout)
    given, buffers = read_safetensors(folder), dict[str, torch.Tensor]()
    if has_scales(given):
        given = dequantised(given, targets.tensors, block_in(folder))
    if layout is not None:
        buffers = layout.buffers()
        dtypes = {name: tensor.dtype for name, tensor in targets.tensors.items()}
        given = layout.as_parameters(given, dtypes, folder, most // 2)
    given = _with_aliases(module, given)
    if layout is not None:
        lacking = [name for name in initialize if name not in given]
        given = _with_aliases(module, given | layout.initialised(lacking, seed))
    given = by_own_names(module, given)
    cure = "" if layout is None else layout.cure_for(name for name in targets.tensors if name not in given)
    sure = targets.check(given, strict, StateDictType.FULL_STATE_DICT, cure)
    targets.refuse([*_other_kinds(targets.tensors, given, cure), *refuse_meta_buffers(module, buffers)])
    if give_memory(module):
        targets = Targets(module)
    total = sum(tensor.nbytes for tensor in targets.tensors.values())
    with _bar(total) as bar, torch.device("cpu"):  # whatever device the user has made the default
        loaded = (sure or not strict) and targets.load(
            given, strict=False, at_once=most // 4, progress=bar.update
        )
    fill_buffers(module, buffers)
    if loaded:
        return IncompatibleKeys(*targets.other_names(given))
    # Tensors instead of what reads them: modules with ways of their own may do anything.
    whole = {name: value.whole() for name, value in given.items()}
    result: IncompatibleKeys = module.load_state_dict(whole, strict)
    return result


def _bar(total: int) -> Any:
    """Returns a bar of bytes, which the first rank shows at a terminal if it takes long."""
    first = not dist.is_initialized() or dist.get_rank() == 0
    how = {"unit": "B", "unit_scale": True, "leave": False, "file": sys.stderr}
    return tqdm(total=total, desc="weights", delay=PATIENCE, disable=None if first else True, **how)


def _check_initialize(initialize: Sequence[str], seed: int, layout: HubLayout | None) -> None:
    if isinstance(initialize, str) or not all(isinstance(name, str) for name in initialize):
        raise TypeError(f"initialize must be a list of names of parameters, not {initialize!r}")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be an int, not {seed!r}")
    if layout is not None:
        layout.refuse_unknown(initialize)
    elif initialize:
        raise ValueError(
            "initialize= is for models of transformers 5, whose classes say how: initialise others before, "
            "and pass strict=False"
        )


def _with_aliases(module: nn.Module, given: Mapping[str, ReadsOnAccess]) -> dict[str, ReadsOnAccess]:
    """Returns tensors, with those of tied parameters under all of their names."""
    result = dict(given)
    for names in ((first, *others) for first, others in param_aliases(module).items()):
        source = next((given[name] for name in names if name in given), None)
        result |= {name: source for name in names if name not in given and source is not None}
    return result


def _other_kinds(
    own: Mapping[str, torch.Tensor], given: Mapping[str, ReadsOnAccess], cure: str
) -> Iterator[str]:
    for name, tensor in own.items():
        if tensor.is_meta and name not in given:
            yield f"'{name}' is on the meta device, and the files have no values for it. {cure}".rstrip()
        dtype = given[name].dtype if name in given else tensor.dtype
        if dtype != tensor.dtype and not (is_castable(tensor.dtype) and is_castable(dtype)):
            yield f"dtype mismatch for {name}: the file has {dtype}, the model {tensor.dtype}."


def read_safetensors(directory: str | os.PathLike[str]) -> dict[str, ReadsOnAccess]:
    """Opens the files that `export_safetensors`, Hugging Face's libraries or DCP wrote."""
    folder = path_at(directory)
    if folder.is_file():
        if _OF_RANK.fullmatch(folder.name):
            raise ValueError(f"{folder} holds one rank's part of a model: name its folder, which has all")
        return _open(folder)
    if (folder / SINGLE).exists():
        return _open(folder / SINGLE)
    path = folder / INDEX
    if not path.exists():
        if of_ranks := _of_ranks(folder):
            return _joined(of_ranks)
        raise FileNotFoundError(f"neither {SINGLE} nor {INDEX} is in {folder}")
    try:
        weight_map: dict[str, str] = dict(json.loads(path.read_bytes())["weight_map"])
        if wrong := [file for file in weight_map.values() if not isinstance(file, str)]:
            raise TypeError(f"{wrong[0]!r} is no name of a file")
    except (ValueError, KeyError, TypeError) as error:
        raise RuntimeError(f"{path} is damaged: {error!r}") from error
    tensors: dict[str, ReadsOnAccess] = {}
    for name in dict.fromkeys(weight_map.values()):
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise RuntimeError(
                f"{path} names {name!r}, which is not in its folder: get the export from its maker"
            )
        tensors |= _open(folder / name)
    lost = [f"{name} (in {file})" for name, file in weight_map.items() if name not in tensors]
    if lost:
        raise RuntimeError(f"the files in {folder} do not hold what {INDEX} says: {', '.join(lost)}")
    return {name: tensors[name] for name in weight_map}


def is_folder_of_tensors(folder: Path) -> bool:
    """Whether `read_safetensors` reads a folder."""
    return any((folder / name).exists() for name in (SINGLE, INDEX)) or bool(_of_ranks(folder))


def _of_ranks(folder: Path) -> list[Path]:
    paths = folder.iterdir() if folder.is_dir() else ()
    return sorted(path for path in paths if _OF_RANK.fullmatch(path.name))


def _joined(paths: Sequence[Path]) -> dict[str, ReadsOnAccess]:
    """Opens files that hold one rank's parts each."""
    parts: dict[str, list[_Part]] = {}
    for path in paths:
        file = _file(path)
        try:
            places = json.loads((file.metadata() or {})[_PLACES])
            for name in file.keys():
                offsets = tuple(map(int, places[name]["saved_offsets"]))
                parts.setdefault(name, []).append((offsets, _stored(file, name)))
        except (ValueError, KeyError, TypeError) as error:
            raise RuntimeError(f"{path} does not say where its parts lie: {error!r}") from error
    whole = {name: _WholeOfFiles(pieces) for name, pieces in parts.items()}
    if torn := [name for name, value in whole.items() if not value.is_whole]:
        raise RuntimeError(
            f"the files in {paths[0].parent} leave out parts of {listed(torn)}, or hold some twice: "
            "copy the files of all ranks"
        )
    return dict(whole)


def _open(path: Path) -> dict[str, ReadsOnAccess]:
    file = _file(path)
    return {name: _stored(file, name) for name in file.keys()}


def _stored(file: Any, name: str) -> _StoredTensor:
    return _RemoteTensor(file, name) if isinstance(file, _RemoteFile) else _Stored(file, name)


def _file(path: Path) -> Any:
    if isinstance(path, RemotePath):
        return _RemoteFile(path)
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError(
            "reading safetensors files needs the safetensors package: pip install safetensors"
        ) from error
    if not path.exists():
        raise FileNotFoundError(f"{path} is missing, which {INDEX} names: copy all files of the index")
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise RuntimeError(f"{path} is damaged: {error}") from error


class _RemoteFile:
    """A file in a store, of which the header was read."""

    def __init__(self, path: RemotePath) -> None:
        try:
            size = int.from_bytes(path.read_range(0, 8), "little")
            if not 0 < size <= _MOST_HEADER:
                raise ValueError(f"a header of {size} bytes")
            header: dict[str, Any] = json.loads(path.read_range(8, 8 + size))
        except FileNotFoundError as error:
            raise FileNotFoundError(f"{path} is missing: copy all files of the index") from error
        except ValueError as error:
            raise RuntimeError(f"{path} is damaged: {error}") from error
        self.path, self.begin = path, 8 + size
        self._about: dict[str, str] | None = header.pop(_ABOUT, None)
        self.entries = header

    def keys(self) -> list[str]:
        """Returns the names of the tensors."""
        return [*self.entries]

    def metadata(self) -> dict[str, str] | None:
        """Returns what is no tensor."""
        return self._about


class _StoredTensor(ReadsOnAccess):
    """A tensor in a file."""

    def _describe(self, name: str, shape: Sequence[int], dtype: str) -> None:
        if dtype not in _DTYPES:
            raise RuntimeError(f"{name} is stored as {dtype}, which torch does not have")
        self.shape, self.dtype = torch.Size(shape), _DTYPES[dtype]

    @abstractmethod
    def part(self, slices: tuple[slice, ...]) -> torch.Tensor:
        """Returns a rectangular part."""


class _RemoteTensor(_StoredTensor):
    """A tensor in a store, of which ranges are read."""

    def __init__(self, file: _RemoteFile, name: str) -> None:
        entry = file.entries[name]
        self._describe(name, entry["shape"], entry["dtype"])
        self._path, self._begin = file.path, file.begin + entry["data_offsets"][0]

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Returns elements of the flattened tensor, 1-D."""
        if start == stop:
            return torch.empty(0, dtype=self.dtype)
        size, begin = self.dtype.itemsize, self._begin
        data = self._path.read_range(begin + start * size, begin + stop * size)
        if len(data) != (stop - start) * size:
            raise RuntimeError(f"{self._path} is damaged: it ends before what its header says")
        return torch.frombuffer(bytearray(data), dtype=self.dtype)

    def part(self, slices: tuple[slice, ...]) -> torch.Tensor:
        """Returns a rectangular part."""
        return self.whole()[slices]


class _Stored(_StoredTensor):
    """A tensor in a file on disk."""

    def __init__(self, file: Any, name: str) -> None:
        described = file.get_slice(name)
        self._file, self._name = file, name
        self._describe(name, described.get_shape(), described.get_dtype())

    def read(self, start: int, stop: int) -> torch.Tensor:
        if (start, stop) == (0, self.shape.numel()):
            whole: torch.Tensor = self._file.get_tensor(self._name)
            return whole.view(-1)
        described = self._file.get_slice(self._name)
        boxes = boxes_of(tuple(self.shape), start, stop)
        parts = [
            described[tuple(slice(first, first + size) for first, size in zip(box.offsets, box.sizes))]
            for box in boxes
        ]
        flat: list[torch.Tensor] = [part.reshape(-1) for part in parts]
        if len(flat) == 1:  # which needs no copy
            return flat[0]
        return torch.cat(flat) if flat else torch.empty(0, dtype=self.dtype)

    def part(self, slices: tuple[slice, ...]) -> torch.Tensor:
        """Returns a rectangular part."""
        part: torch.Tensor = self._file.get_slice(self._name)[slices] if slices else self.whole()
        return part


_Part = tuple[tuple[int, ...], _StoredTensor]
"""A part of a tensor, with its offsets."""


class _WholeOfFiles(ReadsOnAccess):
    """A tensor of which several files hold parts."""

    def __init__(self, parts: Sequence[_Part]) -> None:
        self._parts, self.dtype = parts, parts[0][1].dtype
        ends = ([at + size for at, size in zip(offsets, part.shape)] for offsets, part in parts)
        self.shape = torch.Size(map(max, zip(*ends)))

    @property
    def is_whole(self) -> bool:
        """Whether the parts have one dtype, and each element is in one of them."""
        boxes = [(offsets, tuple(part.shape)) for offsets, part in self._parts]
        return {part.dtype for _, part in self._parts} == {self.dtype} and tile(boxes, self.shape)

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Returns elements of the flattened tensor, 1-D."""
        elements = torch.empty(stop - start, dtype=self.dtype)
        for box in boxes_of(tuple(self.shape), start, stop):
            out = elements[box.first - start :][: box.numel].view(box.sizes)
            for offsets, part in self._parts:
                first = [*map(max, box.offsets, offsets)]
                last = [min(a + b, c + d) for a, b, c, d in zip(box.offsets, box.sizes, offsets, part.shape)]
                if all(begin < end for begin, end in zip(first, last)):
                    own, its = (
                        tuple(slice(begin - at, end - at) for begin, end, at in zip(first, last, place))
                        for place in (box.offsets, offsets)
                    )
                    out[own] = part.part(its)
        return elements
