"""Checkpoints are not lost: unshared folders, two runs at once, full disks, foreign folders, failed loads."""

from __future__ import annotations

import copy
import itertools
import json
import os
import pickle
import resource
import signal
import socket
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
from torch.distributed.fsdp import fully_shard as torchs_fully_shard
from torch.serialization import _get_layout

from bed import ranks, run_isolated
from fronts import either_front, shard
from fsdp_wrap import FullyShardedDataParallel as FSDP
from fsdp_wrap import ShardingStrategy, checkpoint, distributed_state_dict
from fsdp_wrap.checkpoint import _command as command
from fsdp_wrap.checkpoint import _convert
from fsdp_wrap.checkpoint._manifest import read_metadata
from fsdp_wrap.checkpoint._places import folder as folders
from fsdp_wrap.checkpoint._sources import open_source
from fsdp_wrap.checkpoint._storage import CheckedWriter, KnownReader
from fsdp_wrap.weights import WeightFolder, weight_source
from resuming import names_in, told_alike
from state_nets import assert_equal


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
    optimizer.step()


SAVES: dict[str, Callable[..., Path]] = {
    "save": checkpoint.save,
    "async_save": lambda *args, **options: checkpoint.async_save(*args, **options).result(),
}


@ranks(3)
def test_a_folder_that_a_rank_does_not_see_is_refused_before_anything_is_written(
    rank, world_size, tmp_path, monkeypatch
):
    model, host = layers(), socket.gethostname()
    shared, own = tmp_path / "shared", tmp_path / f"of{rank}"
    own.mkdir()
    kept = checkpoint.save(shared, model)
    (own / "runs").mkdir()  # also where a folder of that name is there
    for save in SAVES.values():
        with monkeypatch.context() as patch, pytest.raises(ValueError) as refused:
            patch.chdir(shared.parent if rank != 1 else own)
            save("shared", model, keep_last=1)
        text = told_alike(refused)
        assert f"what rank 0 (in {shared} on host {host}) makes there is not seen by " in text
        assert f"by rank 1 (in {tmp_path}/of1/shared on host {host}). Nothing was written" in text
        assert "rank 2" not in text
        everyone = r"not seen by rank 1 \(.*\), rank 2 \(.*/of2/runs on host"
        with monkeypatch.context() as patch, pytest.raises(ValueError, match=everyone):
            patch.chdir(own)
            save("runs", model, keep_last=1)
        dist.barrier()
        assert names_in(shared) == [kept.name] and not names_in(own / "runs")

    if rank == 0:
        (tmp_path / "link").symlink_to(shared)
    dist.barrier()
    own = Path("shared") if rank else tmp_path / "link"  # the same folder, by another name
    with monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        folder = own.absolute() / "step_00000002"
        assert checkpoint.save(own, model) == folder == checkpoint.load(own, model).folder


@ranks(2)
def test_a_step_whose_files_have_not_all_arrived_is_not_published(rank, world_size, tmp_path, monkeypatch):
    model = shard("orig", layers())
    kept = checkpoint.save(tmp_path, model)
    write = CheckedWriter.write_data
    spoil: Any
    for spoil, lack in ((Path.unlink, "is missing"), (lambda file: os.truncate(file, 7), "has 7 of ")):

        def lose(self: CheckedWriter, *args: Any, spoil: Any = spoil) -> Any:
            written = write(self, *args)
            if rank == 1:
                spoil(Path(self.path) / "__1_0.distcp")
            return written

        with monkeypatch.context() as patch, pytest.raises(RuntimeError) as refused:
            patch.setattr(CheckedWriter, "write_data", lose)
            checkpoint.save(tmp_path, model, keep_last=1)
        text = told_alike(refused)
        assert f"sees that __1_0.distcp {lack}" in text
        assert f"written by rank 1 (in {tmp_path} on host {socket.gethostname()})" in text
        assert names_in(tmp_path) == [kept.name]


@ranks(3)
def test_a_rank_that_cannot_read_is_named_on_all_and_nothing_has_changed(rank, world_size, tmp_path):
    model = layers()
    checkpoint.save(tmp_path, model)
    with torch.no_grad():
        model[0].weight.zero_()
    before = copy.deepcopy(model.state_dict())
    unread = mock.patch.object(KnownReader, "put", side_effect=OSError(5, "Input/output error"))
    with pytest.raises(RuntimeError) as failed, unread if rank == 1 else nullcontext():
        checkpoint.load(tmp_path, model)
    assert told_alike(failed) == (
        f"rank 1: reading {tmp_path}/step_00000001 failed: OSError: [Errno 5] Input/output error"
    )
    assert_equal(model.state_dict(), before)


@ranks(3)
def test_loading_what_not_all_ranks_see_names_ranks_and_paths(rank, world_size, tmp_path):
    model = layers()
    checkpoint.save(tmp_path / "shared", model)
    before = copy.deepcopy(model.state_dict())
    nowhere = tmp_path / ("shared" if rank != 1 else "elsewhere")
    with pytest.raises(ValueError) as refused:
        checkpoint.load(nowhere, model)
    host = socket.gethostname()
    text = told_alike(refused)
    assert f"rank 0 finds one (in {tmp_path}/shared/step_00000001 on host {host})" in text
    assert f"and rank 1 finds none (in {tmp_path}/elsewhere/step_00000001 on host {host})" in text

    forbidden = mock.patch.object(Path, "read_bytes", side_effect=PermissionError(13, "Permission denied"))
    with pytest.raises(ValueError) as refused, forbidden if rank == 1 else nullcontext():
        checkpoint.load(tmp_path / "shared", model)
    assert "and rank 1 cannot read it: [Errno 13] Permission denied (in " in told_alike(refused)

    own = tmp_path / f"of{rank}"  # what each host has of a step that was written to disks of their own
    step_folder = own / "step_00000001"
    step_folder.mkdir(parents=True)
    for name in ("manifest.json", ".metadata", f"__{rank}_0.distcp"):
        (step_folder / name).write_bytes((tmp_path / "shared" / "step_00000001" / name).read_bytes())
    with pytest.raises((ValueError, RuntimeError)) as failed:
        checkpoint.load(step_folder, model)
    where = f"rank 0 (in {tmp_path}/of0/step_00000001 on host {host}), rank 2"
    assert f"__1_0.distcp is missing where {where}" in told_alike(failed)
    (own / "step_00000001" / "manifest.json").write_text("another" if rank == 2 else "{}")
    with pytest.raises(ValueError, match=r"and rank 2 finds another one \(in .*/of2/step_00000001"):
        checkpoint.load(step_folder, model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@ranks(3)
def test_whoever_holds_all_of_the_model_may_save(rank, world_size, tmp_path):
    pair = dist.new_group([0, 1])
    sharded: list[Any] = [
        shard("orig", layers()),
        shard("composable", layers()),
        torchs_fully_shard(layers()),
    ]
    replicated = shard("orig", layers(), sharding_strategy=ShardingStrategy.NO_SHARD)
    if rank < 2:
        lacking = r"process_group has the ranks 0, 1, but '0.weight' is sharded over 0, 1, 2: the parts of 2"
        for model, save in itertools.product(sharded, SAVES.values()):
            with pytest.raises(ValueError, match=lacking):
                save(tmp_path / "runs", model, process_group=pair)
        assert not (tmp_path / "runs").exists()
        for model in (layers(), shard("orig", layers(), process_group=pair), replicated):
            checkpoint.save(tmp_path, model, process_group=pair)
    dist.barrier()
    assert names_in(tmp_path) == ["step_00000001", "step_00000002", "step_00000003"]


class Synced:
    """Notes which files and folders were synced, and what became visible by a rename, in order."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.inodes: set[int] = set()
        self.awaited: dict[int, str] = {}
        self.shown: list[str] = []
        patch.setattr(os, "fsync", partial(self._sync, os.fsync))
        for name in ("rename", "replace"):
            patch.setattr(os, name, partial(self._rename, getattr(os, name)))

    def _sync(self, sync: Callable[[int], None], file: int) -> None:
        sync(file)
        self.inodes.add(os.fstat(file).st_ino)
        self.awaited.pop(os.fstat(file).st_ino, None)

    def _rename(self, rename: Callable[[Path, Path], None], source: Path, target: Path) -> None:
        if not Path(target).name.startswith("."):
            within = [Path(source), *Path(source).rglob("*")]
            assert not [path for path in within if path.stat().st_ino not in self.inodes], "not on disk yet"
            self.shown.append(Path(target).name)
            self.awaited[Path(target).parent.stat().st_ino] = str(target)
        rename(source, target)


@ranks(1)
def test_what_appears_is_on_disk(rank, world_size, tmp_path, monkeypatch):
    """Files and their folder are synced before a rename shows them, the folder around them after it."""
    model = shard("composable", layers())
    with monkeypatch.context() as patch:
        synced = Synced(patch)
        run = tmp_path / "new" / "run"
        for number in (1, 1, 2):
            checkpoint.save(run, model, step=number, keep_last=1)
            assert not synced.awaited
        made = {path.stat().st_ino for path in (run, run.parent, tmp_path)}
        assert made <= synced.inodes  # else the folder could go, with all that is in it
        _convert.step_to_torch_file(run, tmp_path / "file.pt")
        _convert.export(open_source(run), tmp_path / "files", max_shard_size=100)
        sent = WeightFolder(tmp_path / "weights")
        sent.send(weight_source(model))
        assert not synced.awaited
    steps = [shown for number in (1, 1, 2) for shown in ("manifest.json", f"step_{number:08d}")]
    assert [name for name in synced.shown if "model" not in name] == [*steps, "file.pt", "version-00000001"]
    assert "model.safetensors.index.json" in synced.shown


@ranks(2)
def test_a_second_run_is_told_and_disturbs_nothing(rank, world_size, tmp_path, monkeypatch):
    alone = [dist.new_group([member]) for member in range(world_size)][rank]
    model = layers()
    write = CheckedWriter.write_data

    def meanwhile(self: CheckedWriter, *args: Any) -> Any:
        written = write(self, *args)
        (tmp_path / "written").touch()
        while not (tmp_path / "told").exists():
            time.sleep(0.01)
        return written

    if rank == 0:
        with monkeypatch.context() as patch:
            patch.setattr(CheckedWriter, "write_data", meanwhile)
            checkpoint.async_save(tmp_path / "runs", model, step=4, process_group=alone).result()
    else:
        while not (tmp_path / "written").exists():
            time.sleep(0.01)
        refused = r"another save is going on in .*/runs, by process \d+ on host "
        for save, number in itertools.product(SAVES.values(), (4, 5, None)):
            with pytest.raises(RuntimeError, match=refused):
                save(tmp_path / "runs", model, step=number, process_group=alone)
        (tmp_path / "told").touch()
    dist.barrier()
    assert names_in(tmp_path / "runs") == ["step_00000004"]
    assert checkpoint.load(tmp_path / "runs", model).step == 4
    if rank == 1:
        (tmp_path / "runs" / ".saving").write_text("a process that was killed")
        checkpoint.save(tmp_path / "runs", model, process_group=alone)
        assert names_in(tmp_path / "runs") == ["step_00000004", "step_00000005"]


def test_threads_of_one_process_are_told_apart(tmp_path, monkeypatch):
    write = CheckedWriter.write_data

    def meanwhile(self: CheckedWriter, *args: Any) -> Any:
        monkeypatch.undo()
        with pytest.raises(RuntimeError, match="another save is going on in .*, by this very process"):
            checkpoint.save(tmp_path, layers())
        return write(self, *args)

    monkeypatch.setattr(CheckedWriter, "write_data", meanwhile)
    checkpoint.save(tmp_path, layers())
    assert names_in(tmp_path) == ["step_00000001"]


def test_wrong_arguments_are_refused_before_anything_is_written(tmp_path):
    kept = checkpoint.save(tmp_path, layers())
    model = layers()
    shared = {"model": model, "optim": [torch.optim.SGD(model.parameters()) for _ in range(2)]}
    given: Any
    save: Any
    for given, error, message in [
        ({"step": True}, TypeError, "step must be a whole number or None, not bool"),
        ({"keep_last": "2"}, TypeError, "keep_last must be a whole number or None, not str"),
        ({"keep_last": 0}, ValueError, "keep_last must be at least 1, not 0"),
        ({"step": -1}, ValueError, "step must be at least 0, not -1"),
        ({"extra": [1]}, TypeError, r"extra must map names to values, and is \[1\]"),
        ({"extra": {1: 2}}, TypeError, r"extra must map names to values, and is \{1: 2\}"),
        ({"optim": [3]}, TypeError, "optim must be one or several optimizers, not int"),
        ({"model": 3}, TypeError, "model must be a module, not int"),
        (shared, ValueError, r"in two optimizers \(SGD and SGD\).*\(rank 0\)"),
    ]:
        for save in (checkpoint.save, checkpoint.async_save):
            with pytest.raises(error, match=message):
                save(tmp_path, **{"model": layers(), **given})
    assert names_in(tmp_path) == [kept.name]


def test_an_old_step_that_cannot_be_removed_is_told_and_the_new_one_is_there(tmp_path, monkeypatch):
    checkpoint.save(tmp_path, layers())

    def refuse(path: Path) -> None:
        raise PermissionError(f"{path} stays")

    monkeypatch.setattr(folders.shutil, "rmtree", refuse)
    model = layers()
    with pytest.warns(
        UserWarning, match="an old checkpoint in .* could not be removed: .*step_00000001.* stays"
    ):
        checkpoint.save(tmp_path, model, keep_last=1)
    assert names_in(tmp_path) == [".step_00000001.deleted", "step_00000002"]
    again = layers()
    checkpoint.load(tmp_path, again)
    assert_equal(again.state_dict(), model.state_dict())
    monkeypatch.undo()
    checkpoint.save(tmp_path, model, keep_last=1)
    assert names_in(tmp_path) == ["step_00000003"]


def save_and_die(rank: int, world_size: int, path: Path, how: str, victim: int) -> str:
    """One rank is killed while it writes; returns what another one is told."""
    model = shard("orig", layers())
    step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    checkpoint.save(path, model)
    if rank == victim:
        writer: Any = CheckedWriter
        writer.write_data = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(RuntimeError) as failed:
        SAVES[how](path, model)
    return str(failed.value)


@pytest.mark.parametrize(("how", "victim"), [("save", 0), ("async_save", 1)])
def test_a_rank_that_dies_is_named_and_leaves_nothing(tmp_path, how, victim):
    outcomes = run_isolated(save_and_die, tmp_path, how, victim, world_size=3)
    for rank, outcome in enumerate(outcomes):
        assert outcome.kind == ("died" if rank == victim else "passed"), outcome
        if rank != victim:
            assert outcome.value.startswith(f"checkpoint.{how} failed, since "), outcome.value
            assert f"rank {victim} died" in outcome.value.splitlines()[0]
            assert f"rank {victim} (dead): in or after" in outcome.value
    assert names_in(tmp_path) == ["step_00000001"]


@pytest.mark.parametrize("most", [0, 100_000])  # with 0 even the claim of the folder cannot be written
def test_a_file_that_may_not_grow_says_so(tmp_path, most):
    large = nn.Linear(300, 300)
    checkpoint.save(tmp_path / "run", large)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
    try:
        with pytest.raises(RuntimeError, match=r"OSError: \[Errno 27\] File too large: '.*partial'"):
            checkpoint.save(tmp_path / "new", large)
        with pytest.raises(OSError, match=r"\[Errno 27\] File too large: '.*\.file\.pt\.partial'"):
            _convert.step_to_torch_file(tmp_path / "run", tmp_path / "file.pt")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert names_in(tmp_path) == ["new", "run"] and not names_in(tmp_path / "new")


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
@either_front
@ranks(2)
def test_a_parameter_has_one_state(rank, world_size, front, tmp_path):
    """Two optimizers with it, or one with it twice, are refused before anything changes or is written."""
    model = shard(front, layers())
    first, *others = model.parameters()
    one, other = torch.optim.AdamW(model.parameters()), torch.optim.SGD([first], lr=0.1)
    twice = torch.optim.SGD([first, *others, first], lr=0.1)
    before = copy.deepcopy(one.state_dict())
    checkpoint.save(tmp_path, model, one)
    nothing: Any = {"state": {}, "param_groups": []}
    for given, message in (
        ([one, other], r"parameter '.*' .*is in two optimizers \(AdamW and SGD\).*one optimizer"),
        (twice, r"parameter '0\.weight'.* occurs twice .*pass it once"),
    ):
        for refused in (
            lambda given=given: distributed_state_dict.get_optimizer_state_dict(model, given),
            lambda given=given: distributed_state_dict.get_state_dict(model, given),
            lambda given=given: distributed_state_dict.set_optimizer_state_dict(model, given, nothing),
            lambda given=given: checkpoint.save(tmp_path, model, given),
            lambda given=given: checkpoint.load(tmp_path, model, given),
        ):
            with pytest.raises(ValueError, match=message):
                refused()
    for function in (FSDP.optim_state_dict, FSDP.sharded_optim_state_dict) if front == "orig" else ():
        with pytest.raises(ValueError, match="occurs twice .*pass it once"):
            function(model, twice)
    assert one.state_dict() == before
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]


class Payload:
    """Runs something when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)

    def __deepcopy__(self, memo: object) -> Payload:
        return self


def forged(folder: Path, metadata: object) -> None:
    """Puts other metadata, or other bytes, into a step folder, whose manifest knows of it."""
    data = metadata if isinstance(metadata, bytes) else pickle.dumps(metadata)
    (folder / ".metadata").write_bytes(data)
    content = json.loads((folder / "manifest.json").read_text())
    content["files"][".metadata"] = [[0, len(data), zlib.crc32(data)]]
    del content["crc"]
    content["crc"] = zlib.crc32(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
    (folder / "manifest.json").write_text(json.dumps(content))


def readers(folder: Path, out: Path) -> dict[str, Callable[[], object]]:
    def run(name: str, *more: str) -> Callable[[], object]:
        options = command.parser().parse_args([name, str(folder), *more])
        return lambda: options.run(options)

    return {
        "load": lambda: checkpoint.load(folder, layers()),
        "inspect": run("inspect"),
        "inspect --verify": run("inspect", "--verify"),
        "convert": run("convert", str(out / "file.pt")),
        "export": run("export", str(out / "files")),
    }


def test_metadata_change_nothing_that_others_use(tmp_path):
    """Pickle's opcodes that change what they find, on classes, functions and members of enums."""
    of_torch = b"ctorch.distributed.checkpoint.metadata\n"
    named = (
        of_torch + b"ChunkStorageMetadata\n",
        of_torch + b"_MEM_FORMAT_ENCODING\n",
        b"ctorch.serialization\n_get_layout\n",
        b"ccollections\nOrderedDict\n",
        b"ctorch\nfloat32\n",
        b"cpathlib\nPurePosixPath\n",
    )
    changes = (
        b"N(Vhidden\nNd\x86b",
        b"(N(Vhidden\nNdtb",
        b"(Vhidden\nNdb",
        b"Vhidden\nNs",
        b"Na",
        b"(NNe",
        b"(N\x90",
    )
    for thing in named:
        for change in changes:
            (tmp_path / ".metadata").write_bytes(thing + change + b".")
            with pytest.raises(RuntimeError, match=r"\.metadata holds no metadata"):
                read_metadata(tmp_path)
    member = of_torch + b"_MEM_FORMAT_ENCODING\n(K\x00tR"
    (tmp_path / ".metadata").write_bytes(member + b"(Vhidden\nNdb.")
    with pytest.raises(RuntimeError, match=r"\.metadata holds no metadata"):
        read_metadata(tmp_path)
    admitted = (ChunkStorageMetadata, _get_layout, OrderedDict, PurePosixPath, metadata._MEM_FORMAT_ENCODING)
    assert not any(hasattr(value, "hidden") for value in (*admitted, *metadata._MEM_FORMAT_ENCODING))


def test_chunks_that_do_not_tile_a_tensor_are_refused(tmp_path, capsys):
    folder = checkpoint.save(tmp_path, layers())
    genuine = pickle.loads((folder / ".metadata").read_bytes())
    for boxes in (
        [],
        [((0, 0), (3, 4))],
        [((0, 0), (2, 4)), ((1, 0), (2, 4))],
        [((0, 0), (2, 4)), ((1, 0), (2, 4)), ((3, 0), (1, 4))],
        [((0, 0), (4, 5))],
        [((0, 0), (4, 2)), ((0, 1), (4, 2))],
        [((0,), (16,))],
        [((-1, 0), (4, 4))],
        [((0, 0), (2, 4)), ((3, 0), (2, 4))],
    ):
        broken = copy.deepcopy(genuine)
        broken.state_dict_metadata["model.0.weight"].chunks = [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)) for offsets, sizes in boxes
        ]
        forged(folder, broken)
        for refused in (
            lambda: checkpoint.load(tmp_path, layers()),
            lambda: _convert.step_to_torch_file(folder, tmp_path / "out"),
            lambda: _convert.export(open_source(folder), tmp_path / "exported"),
        ):
            with pytest.raises(RuntimeError, match=r"cuts 'model\.0\.weight', of shape \(4, 4\)"):
                refused()


def test_a_payload_in_the_metadata_is_refused_and_not_run(tmp_path):
    folder = checkpoint.save(tmp_path / "run", layers())
    genuine = pickle.loads((folder / ".metadata").read_bytes())
    genuine.planner_data["x"] = Payload(tmp_path / "ran")
    forged(folder, genuine)
    for read in readers(folder, tmp_path).values():
        with pytest.raises(RuntimeError, match=r"\.metadata asks for (builtins.getattr|pathlib.*), which"):
            read()
    genuine.planner_data.pop("x")
    index, place = next(iter(genuine.storage_data.items()))
    genuine.storage_data[index] = type(place)("../other/file", place.offset, place.length)
    forged(folder, genuine)
    for read in readers(folder, tmp_path).values():
        with pytest.raises(RuntimeError, match="names a file outside of the folder: '../other/file'"):
            read()
    # What a module of torch holds beside its own classes: modules, functions, classes of others, parts.
    for name in ("torch", "dataclass", "Sequence", "os.system", "Metadata.__init__", "TensorProperties.x"):
        forged(folder, f"ctorch.distributed.checkpoint.metadata\n{name}\n.".encode())
        with pytest.raises(RuntimeError, match=rf"\.metadata asks for .*\.metadata\.{name}, which"):
            read_metadata(folder)

    for content in ({"not": "metadata"}, b"", b"none", b"ctorch.distributed.checkpoint.metadata\n"):
        forged(folder, content)
        for read in readers(folder, tmp_path).values():
            with pytest.raises(RuntimeError, match=r"\.metadata holds no metadata of a checkpoint"):
                read()
    assert names_in(tmp_path) == ["run"]


class Odd(nn.Linear):
    def get_extra_state(self) -> object:
        return Payload(Path(os.environ["PAYLOAD"]))

    def set_extra_state(self, state: object) -> None:
        pass


@dataclass
class Settings:
    depth: int


def test_a_payload_in_the_data_is_refused_and_not_run(tmp_path, monkeypatch):
    monkeypatch.setenv("PAYLOAD", str(tmp_path / "ran"))
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    checkpoint.save(tmp_path / "extra", model, optimizer, {"bad": Payload(tmp_path / "ran")})
    optimizer.param_groups[0]["bad"] = Payload(tmp_path / "ran")
    checkpoint.save(tmp_path / "optim", model, optimizer)
    checkpoint.save(tmp_path / "model", Odd(4, 4))
    before = copy.deepcopy(model.state_dict())
    step(model, torch.optim.SGD(model.parameters(), lr=1.0))
    changed = copy.deepcopy(model.state_dict())
    for name, what, loaded in [
        ("extra", r"extra\['bad'\]", (model, optimizer)),
        ("optim", r"'optim.param_groups.0.bad'|'optim.param_groups'", (model, optimizer)),
        ("model", "'model._extra_state'", (Odd(4, 4),)),
    ]:
        refused = rf"({what}) is no plain value: it asks for .*, and nothing of that"
        with pytest.raises(RuntimeError, match=refused):
            checkpoint.load(tmp_path / name, *loaded)  # type: ignore[arg-type]
    assert names_in(tmp_path) == ["extra", "model", "optim"]
    assert_equal(model.state_dict(), changed)
    checkpoint.load(tmp_path / "extra", model, optimizer, trusted=True)
    assert (tmp_path / "ran").exists()
    assert_equal(model.state_dict(), before)

    checkpoint.save(tmp_path / "settings", model, extra={"settings": Settings(3)})
    with pytest.raises(RuntimeError, match=r"asks for .*\.Settings"):
        checkpoint.load(tmp_path / "settings", model)
    with torch.serialization.safe_globals([Settings]):
        assert checkpoint.load(tmp_path / "settings", model)["settings"] == Settings(3)
