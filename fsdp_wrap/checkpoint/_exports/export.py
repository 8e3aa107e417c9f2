"""Exports of full weights as safetensors files, which all ranks write."""

from __future__ import annotations

import json
import os
import zlib
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fsdp_wrap._core import ceil_div, nbytes_of, tells_keywords, warn_caller
from fsdp_wrap._state import FirstRank, FullParams, Keepers, check_budget, used
from fsdp_wrap.checkpoint._exports.destinations import Destination, destination_at, why_not
from fsdp_wrap.checkpoint._hub import FP8, Described, HubLayout, StoredParams, in_blocks, weights_in
from fsdp_wrap.checkpoint._places.steps import path_at
from fsdp_wrap.checkpoint._safetensors import (
    Named,
    bytes_of,
    nbytes,
    planned,
    refuse_unwritable,
    require_written,
    write_files,
)

_LEAST = 2**20
"""Bytes below which a model is not split so that each rank has a file."""
_DOING = "export_safetensors()"


@tells_keywords()
def export_safetensors(
    module: nn.Module,
    directory: str | os.PathLike[str],
    *,
    max_shard_size: int | str = "5GB",
    dtype: torch.dtype | None = None,
    budget: int | None = None,
    files: Sequence[str | os.PathLike[str]] = (),
    max_shard_bytes: int | str | None = None,
) -> list[str]:
    """Writes the full parameters and persistent buffers as safetensors files; collective.

    Every rank that sees the directory writes files of its own: `model-00001-of-0000N.safetensors` and so on
    with `model.safetensors.index.json`, or one `model.safetensors` of a small model. Each parameter goes to
    the rank that writes it. No rank holds more than `budget` bytes of them at a time. Tied parameters are
    written once, under the first of their names. Each file is read back and compared by checksums. An earlier
    export in the directory is replaced once all of the new files are complete. Extra state of modules, which
    is no tensor, is left out. 4-bit weights of bitsandbytes are written as the numbers that their codes mean.

    A model of transformers (version 5) is written as it lies on the Hub: fused experts one by one, under the
    names that its `save_pretrained` gives. All else has the names of the unwrapped module.

    With `dtype=torch.float8_e4m3fn`, weights of linear layers and experts are written as DeepSeek's are on
    the Hub: in fp8, with a float32 multiplier for each block of 128 x 128 under `<name>_scale_inv`. What has
    no whole blocks keeps the master dtype, as do norms, embeddings, heads, routers, biases and buffers.

    Args:
        module: Wrapped, with wrapped modules in it, or plain.
        directory: A folder, made if it does not exist, or the URL of a place in a store, as for `save`. Ranks
            of hosts that see another disk than the first rank write nothing. In a store names of several
            files have a random word, and the index is written last.
        max_shard_size: The most bytes of tensors in one file, such as `"5GB"` or `"500MiB"`; a larger tensor
            has a file of its own. Files are smaller where ranks would have none.
        dtype: Cast floating-point parameters to this; None for the master dtype; fp8 as above.
        budget: The budget of `iter_full_params`.
        files: Paths of files to copy beside them, such as `config.json` and those of the tokenizer; the first
            rank's count. The copy of `config.json` gets the `quantization_config` of fp8 weights. That of a
            model of transformers loses one which other files had.
        max_shard_bytes: The former name of `max_shard_size`, which goes in the next release.

    Returns:
        The names of the files with tensors, on every rank.

    Raises:
        RuntimeError: Inside a forward, backward or `summon_full_params`; on every rank, if one could not
            write, or a file does not hold what was written.
        TypeError: If an argument has the wrong type, or a full parameter is of a tensor subclass.
        ValueError: If `max_shard_size` or `budget` is no positive size, safetensors has no such dtype, no
            weight has blocks for fp8, `dtype` is another one of 8 bits, a path in `files` is no file, or the
            first rank cannot write to the directory.
    """
    if max_shard_bytes is not None:
        warn_caller("max_shard_bytes is called max_shard_size now: pass that", DeprecationWarning)
        max_shard_size = max_shard_bytes
    check_budget(budget)
    path = path_at(directory)
    if dtype is not FP8 and isinstance(dtype, torch.dtype) and dtype.itemsize == 1:
        raise ValueError(f"dtype={dtype} is no dtype of files on the Hub: pass {FP8}, which gets scales")
    params = FullParams(module, _DOING, dtype=None if dtype is FP8 else dtype, buffers=True, numbers=True)
    params.refuse_subclasses(_DOING)
    described = params.described()
    refuse_unwritable(described)
    layout = HubLayout.of(module)
    stored, quantisation = _stored(module, layout, described, dtype)
    most, first = nbytes_of(max_shard_size, "max_shard_size"), FirstRank(module)
    copies = [Path(file) for file in files]
    beside = _contents(copies, quantisation, layout is not None or quantisation is not None)
    if (unusable := first.object(why_not(path, copies) if first.is_here else None)) is not None:
        raise ValueError(unusable)
    own, failure = _made(path) if first.is_here else (None, None)
    _tell(first, failure)
    destination = first.object(own)
    try:
        plan = _FilePlan.of(stored, most, destination, _writers(first, destination))
        params.choose({param: described[param][1] for part, _ in plan.stored for param in part.params})
        stream = params.stream(
            budget=budget, offload_to_cpu=True, keepers=plan.keepers, alike={"dtype": dtype}
        )
        _, failure = used(stream, partial(plan.write, destination))
        _tell(first, failure)
        _tell(first, None if own is None else _finished(own, plan, beside))
    finally:
        if own is not None:
            own.leave()
    return [*plan.files]


def _stored(
    module: nn.Module, layout: HubLayout | None, described: Described, dtype: torch.dtype | None
) -> tuple[list[StoredParams], dict[str, Any] | None]:
    """Returns the tensors that files will hold, and the configuration of their quantisation."""
    if layout is None:
        stored = [StoredParams.renamed(name, name, about) for name, about in described.items()]
    else:
        stored = layout.as_stored(described)
    if dtype is not FP8:
        return stored, None
    if layout is not None:
        return in_blocks(stored, *layout.weights_for_fp8())
    weights = [*weights_in(module, lambda path: False).items()]
    return in_blocks(stored, dict(weights[:-1]))  # the last one is a head, as a rule


def _contents(
    files: Sequence[Path], quantisation: dict[str, Any] | None, describes: bool
) -> Iterator[tuple[str, bytes]]:
    """Yields names and contents of files; if it `describes`, `config.json` gets the quantisation."""
    for file in files:
        content = file.read_bytes()
        if describes and file.name == "config.json":
            content = _config_of(content, quantisation)
        yield file.name, content


def _config_of(config: bytes, quantisation: dict[str, Any] | None) -> bytes:
    """Returns a configuration with another quantisation."""
    about: dict[str, Any] = json.loads(config)
    if about.get("quantization_config") == quantisation:
        return config
    about.pop("quantization_config", None)
    if quantisation is not None:
        about["quantization_config"] = quantisation
    return (json.dumps(about, indent=2, sort_keys=True) + "\n").encode()


@dataclass(frozen=True)
class _FilePlan:
    """Which rank writes which files.

    Attributes:
        files: The tensors of each file.
        writers: The rank that writes each file.
        stored: What each parameter, or several, become, with the rank that writes it.
    """

    files: Mapping[str, Described]
    writers: Mapping[str, int]
    stored: Sequence[tuple[StoredParams, int]]

    @classmethod
    def of(
        cls, stored: Sequence[StoredParams], most: int, destination: Destination | None, ranks: Sequence[int]
    ) -> _FilePlan:
        """Shares out tensors to ranks, in order: what is made of a parameter to one."""
        total = sum(nbytes(*about) for part in stored for about in part.described.values())
        most = min(most, max(_LEAST, ceil_div(total, len(ranks))))
        tag = "" if destination is None else destination.tag
        files = planned((part.described for part in stored), most, tag)
        writers, filled = {}, 0
        for file, tensors in files.items():
            size = sum(nbytes(*about) for about in tensors.values())
            middle = filled + size // 2
            writers[file] = ranks[min(len(ranks) * middle // max(1, total), len(ranks) - 1)]
            filled += size
        file_of = {name: file for file, tensors in files.items() for name in tensors}
        for part in stored:
            first, *others = part.described
            writers |= {file_of[name]: writers[file_of[first]] for name in others}
        # In a file large elements come first, for alignment; what is sent to a store is written in order.
        size_of = {name: _element_size(part) for part in stored for name in part.described}
        files = {
            file: dict(sorted(tensors.items(), key=lambda item: -size_of[item[0]]))
            for file, tensors in files.items()
        }
        place_of = {name: place for place, name in enumerate(chain(*files.values()))}
        ordered = sorted(stored, key=lambda part: place_of[next(iter(part.described))])
        return cls(files, writers, [(part, writers[file_of[next(iter(part.described))]]) for part in ordered])

    @property
    def keepers(self) -> Keepers:
        """The ranks that receive the parameters."""
        return Keepers({param: rank for part, rank in self.stored for param in part.params})

    def write(self, destination: Destination | None, values: Iterator[Named]) -> None:
        """Writes this rank's files, if it has any, and reads them back."""
        here = _here()
        files = {file: tensors for file, tensors in self.files.items() if self.writers[file] == here}
        if files and destination is not None:
            stored, sums = [part for part, rank in self.stored if rank == here], dict[str, int]()
            write_files(destination.folder, files, _summed(_converted(stored, values), sums))
            require_written(destination.folder, files, sums)


def _element_size(part: StoredParams) -> int:
    return max(dtype.itemsize for _, dtype in part.described.values())


def _here() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _writers(first: FirstRank, destination: Destination | None) -> list[int]:
    """Returns the ranks that can write; the first one, if units do not say which ranks there are."""
    sees = first.from_all((_here(), destination is not None and destination.is_seen))
    return sorted({rank for rank, may in sees if may}) or [0]


def _finished(
    destination: Destination, plan: _FilePlan, beside: Iterator[tuple[str, bytes]]
) -> Exception | None:
    """Lets the files appear; returns what went wrong."""
    try:
        destination.finish(plan.files, beside)
    except Exception as error:
        return error
    return None


def _converted(stored: Sequence[StoredParams], values: Iterator[Named]) -> Iterator[Named]:
    """Yields what this rank writes, of the parameters that it keeps."""
    waiting: dict[str, torch.Tensor] = {}
    coming = deque(stored)
    for param, value in values:
        if not value.is_meta:  # as those that others keep are
            waiting[param] = value
        del value
        while coming and waiting.keys() >= {*coming[0].params}:
            part = coming.popleft()
            made = part.make({param: waiting.pop(param) for param in part.params})
            for name in part.described:
                yield name, made.pop(name)


def _summed(values: Iterator[Named], sums: dict[str, int]) -> Iterator[Named]:
    """Yields tensors, and notes the CRC-32 of their bytes."""
    for name, value in values:
        value = value.detach().cpu().contiguous()
        sums[name] = zlib.crc32(bytes_of(value))
        yield name, value
        del value


def _made(path: Path) -> tuple[Destination | None, Exception | None]:
    """Returns where files are written, or what went wrong."""
    try:
        return destination_at(path), None
    except OSError as error:
        return None, error


def _tell(first: FirstRank, failure: Exception | None) -> None:
    """Raises what has failed on any rank; collective."""
    told = None if failure is None else f"{type(failure).__name__}: {failure}"
    failed = sorted((rank, why) for rank, why in first.from_all((_here(), told)) if why is not None)
    if failed:
        rank, why = failed[0]
        where = "the first rank" if rank == 0 else f"rank {rank}"
        raise RuntimeError(f"{_DOING} failed on {where}: {why}") from failure
