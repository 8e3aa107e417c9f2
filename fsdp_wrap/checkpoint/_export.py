"""Exports of full weights as safetensors files, which all ranks write."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from fsdp_wrap._core import ceil_div, nbytes_of, own_folder, refuse_unusable, tells_keywords, warn_caller
from fsdp_wrap._state import FirstRank, FullParams, Keepers, used
from fsdp_wrap.checkpoint._hub import Described, HubLayout, Stored
from fsdp_wrap.checkpoint._places.steps import disk_path
from fsdp_wrap.checkpoint._safetensors import (
    ASIDE,
    Named,
    install,
    nbytes,
    planned,
    refuse_unwritable,
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

    Args:
        module: Wrapped, with wrapped modules in it, or plain.
        directory: Made if it does not exist. Ranks of hosts that see another disk than the first rank write
            nothing.
        max_shard_size: The most bytes of tensors in one file, such as `"5GB"` or `"500MiB"`; a larger tensor
            has a file of its own. Files are smaller where ranks would have none.
        dtype: Cast floating-point parameters to this; None for the master dtype.
        budget: The budget of `iter_full_params`.
        files: Paths of files to copy beside them, such as `config.json` and those of the tokenizer; the first
            rank's count.
        max_shard_bytes: The former name of `max_shard_size`, which goes in the next release.

    Returns:
        The names of the files with tensors, on every rank.

    Raises:
        RuntimeError: Inside a forward, backward or `summon_full_params`; on every rank, if one could not
            write, or a file does not hold what was written.
        TypeError: If an argument has the wrong type, or a full parameter is of a tensor subclass.
        ValueError: If `max_shard_size` or `budget` is no positive size, safetensors has no such dtype, a path
            in `files` is no file, or the first rank cannot write to the directory.
    """
    if max_shard_bytes is not None:
        warn_caller("max_shard_bytes is called max_shard_size now: pass that", DeprecationWarning)
        max_shard_size = max_shard_bytes
    path = disk_path(directory, _DOING)
    params = FullParams(module, _DOING, dtype=dtype, buffers=True, numbers=True)
    params.refuse_subclasses(_DOING)
    described, layout = params.described(), HubLayout.of(module)
    refuse_unwritable(described)
    if layout is None:
        stored = [Stored.renamed(name, name, about) for name, about in described.items()]
    else:
        stored = layout.as_stored(described)
    most, first = nbytes_of(max_shard_size, "max_shard_size"), FirstRank(module)
    copies = [Path(file) for file in files]
    if (unusable := first.object(_unusable(path, copies) if first.is_here else None)) is not None:
        raise ValueError(unusable)
    aside = first.object(_made(path) if first.is_here else None)
    if isinstance(aside, Exception):
        raise aside
    try:
        return _exported(params, stored, most, budget, first, path, aside, copies)
    finally:
        if aside is not None and first.is_here:
            shutil.rmtree(aside, ignore_errors=True)


def _exported(
    params: FullParams,
    stored: Sequence[Stored],
    most: int,
    budget: int | None,
    first: FirstRank,
    path: Path,
    aside: Path | None,
    copies: Sequence[Path],
) -> list[str]:
    """Writes the files into a folder aside, and installs them if all ranks could."""
    here = dist.get_rank() if dist.is_initialized() else 0
    folder = Path() if aside is None else aside  # none where another rank writes what no unit has
    sees = first.from_all((here, aside is not None and aside.is_dir()))
    writers = sorted({rank for rank, may in sees if may}) or [0]
    total = sum(nbytes(*about) for part in stored for about in part.described.values())
    most = min(most, max(_LEAST, ceil_div(total, len(writers))))
    plan = planned((part.described for part in stored), most)
    owners = _owners(stored, plan, writers, total)
    own = {file: tensors for file, tensors in plan.items() if owners[next(iter(tensors))] == here}
    keepers = Keepers({param: owners[next(iter(part.described))] for part in stored for param in part.params})
    stream = params.stream(budget=budget, offload_to_cpu=True, keepers=keepers)
    mine = [part for part in stored if owners[next(iter(part.described))] == here]
    _, failure = used(stream, lambda values: write_files(folder, own, _converted(mine, values)))
    _tell(first, here, failure)
    failure = None
    if first.is_here:
        try:
            for file in copies:
                shutil.copyfile(file, folder / file.name)
            install(folder, path, plan)
            shutil.rmtree(folder)
        except Exception as error:
            failure = error
    _tell(first, here, failure)
    return [*plan]


def _owners(
    stored: Sequence[Stored], plan: Mapping[str, Described], writers: Sequence[int], total: int
) -> dict[str, int]:
    """Returns the rank that writes each tensor: of a file one, and of what is made of a parameter one."""
    by_file, filled = {}, 0
    for file, tensors in plan.items():
        by_file[file] = writers[min(len(writers) * filled // max(1, total), len(writers) - 1)]
        filled += sum(nbytes(*about) for about in tensors.values())
    file_of = {name: file for file, tensors in plan.items() for name in tensors}
    for part in stored:
        first, *others = part.described
        by_file |= {file_of[name]: by_file[file_of[first]] for name in others}
    return {name: by_file[file] for name, file in file_of.items()}


def _converted(stored: Sequence[Stored], values: Iterator[Named]) -> Iterator[Named]:
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


def _unusable(directory: Path, copies: Sequence[Path]) -> str | None:
    """Returns why files cannot be written or copied; None if they can."""
    lacking = [str(file) for file in copies if not file.is_file()]
    if lacking:
        return f"{', '.join(lacking)} in `files` is no file: give paths of files"
    try:
        refuse_unusable(directory.absolute())
    except ValueError as error:
        return str(error)
    return None


def _made(directory: Path) -> Path | RuntimeError:
    """Makes the folder in which files are written, and removes what a killed export has left."""
    try:
        own_folder(directory)
        for left in directory.glob(f"{ASIDE}*"):
            shutil.rmtree(left, ignore_errors=True)
        return Path(tempfile.mkdtemp(prefix=ASIDE, dir=directory.absolute()))
    except OSError as error:
        return RuntimeError(f"{_DOING} failed on the first rank: {type(error).__name__}: {error}")


def _tell(first: FirstRank, here: int, failure: Exception | None) -> None:
    """Raises what has failed on any rank; collective."""
    told = None if failure is None else f"{type(failure).__name__}: {failure}"
    failed = sorted((rank, why) for rank, why in first.from_all((here, told)) if why is not None)
    if failed:
        rank, why = failed[0]
        where = "the first rank" if rank == 0 else f"rank {rank}"
        raise RuntimeError(f"{_DOING} failed on {where}: {why}") from failure
