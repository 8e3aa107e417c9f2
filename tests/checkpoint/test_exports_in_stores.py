"""Exports to object stores, where nothing can be renamed, and imports from there by ranges."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load, load_file
from torch import nn

from bed import ranks, run_isolated
from buckets import bucket_in, impatient, objects_in, requests
from fsdp_wrap import fully_shard
from fsdp_wrap.checkpoint import export_safetensors, import_safetensors
from fsdp_wrap.checkpoint._places.remote import RemotePath
from state_nets import assert_equal

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
SHARD = re.compile(r"model-\d{5}-of-\d{5}\.[0-9a-f]{8}\.safetensors")


@pytest.fixture(autouse=True)
def fast() -> Iterator[None]:
    with impatient():
        yield
    fsspec.filesystem("memory").store.clear()


def net(seed: int, sharded: bool = False) -> nn.Sequential:
    torch.manual_seed(seed)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))
    if sharded:
        for layer in model:
            fully_shard(layer)
    return model


def loaded(place: str | Path, sharded: bool = False) -> dict[str, torch.Tensor]:
    model = net(99, sharded)
    assert import_safetensors(model, place, budget="1KB") == ([], [])
    values: dict[str, Any] = model.state_dict()
    return {name: value.full_tensor() if sharded else value for name, value in values.items()}


@pytest.mark.parametrize("kind", ["file", "local"])
def test_urls_of_folders_are_the_folders(kind, tmp_path):
    """Their exports are those of disks: files are renamed, and have the names of the Hub."""
    place = f"{kind}://{tmp_path}/weights/net"
    for seed in (1, 2):
        model = net(seed)
        files = export_safetensors(model, place, max_shard_size="2KB")
        assert files == sorted(
            f"model-{n:05}-of-{len(files):05}.safetensors" for n in range(1, len(files) + 1)
        )
        assert sorted(os.listdir(tmp_path / "weights" / "net")) == sorted([*files, INDEX])
        assert_equal(loaded(place), model.state_dict())
        assert_equal(loaded(tmp_path / "weights" / "net"), model.state_dict())


@pytest.mark.parametrize("kind", ["memory", "bucket"])
def test_an_export_replaces_another_by_its_index(kind, tmp_path):
    place = "memory://weights/net" if kind == "memory" else bucket_in(tmp_path / "weights")
    about = tmp_path / "config.json"
    about.write_text('{"of": "net"}')
    for seed, most in enumerate(("5GB", "2KB", "3KB", "5GB", "2KB")):
        model = net(seed)
        files = export_safetensors(model, place, max_shard_size=most, files=[about])
        assert_equal(loaded(place), model.state_dict())
        single = most == "5GB"
        assert files == [SINGLE] if single else len(files) > 1 and all(map(SHARD.fullmatch, files))
        assert objects_in(place) == sorted([*files, "config.json", *([] if single else [INDEX])])
        assert (RemotePath(place) / "config.json").read_bytes() == about.read_bytes()
    tensors = {name for file in files for name in load((RemotePath(place) / file).read_bytes())}
    assert tensors == {*model.state_dict()}  # as the safetensors library reads them


@ranks(2)
def test_ranks_write_what_they_keep_and_read_what_they_hold(rank, world_size, tmp_path):
    place, model = bucket_in(tmp_path / "net"), net(1, sharded=True)
    wanted = net(1).state_dict()
    with requests(lambda count, name: None) as asked:
        files = export_safetensors(model, place, max_shard_size="2KB")
    written = [name for name in asked if name.startswith("pipe_file") and "of" in name]
    of_ranks: list[list[str]] = [[], []]
    dist.all_gather_object(of_ranks, written)
    assert len(of_ranks[0]) + len(of_ranks[1]) == len(files) and all(of_ranks)
    assert_equal(loaded(place, sharded=True), wanted)
    fetched = 0
    read_range = RemotePath.read_range

    def counted(path: RemotePath, start: int, stop: int) -> bytes:
        nonlocal fetched
        data = read_range(path, start, stop)
        fetched += len(data)
        return data

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RemotePath, "read_range", counted)
        loaded(place, sharded=True)
    whole = sum(value.nbytes for value in wanted.values())
    headers = sum(512 for _ in files)
    assert whole / 2 <= fetched <= whole / 2 + headers
    before = objects_in(place)
    dist.barrier()
    with (
        requests(lambda count, name: _refuse(name, rank)),
        pytest.raises(RuntimeError, match="failed on rank 1"),
    ):
        export_safetensors(net(2, sharded=True), place, max_shard_size="2KB")
    dist.barrier()
    assert objects_in(place) == before
    assert_equal(loaded(place), wanted)


def _refuse(name: str, rank: int) -> None:
    if rank == 1 and name.startswith("pipe_file"):
        raise OSError("the store is full")


def export_until_killed(rank: int, world_size: int, folder: str, victim: int, number: int) -> None:
    def kill(count: int, name: str) -> None:
        if (rank, count) == (victim, number):
            os.kill(os.getpid(), signal.SIGKILL)

    with impatient(), requests(kill):
        export_safetensors(net(2, sharded=True), bucket_in(Path(folder)), max_shard_size="2KB")


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_export_leaves_the_earlier_one_or_the_new_one(tmp_path, victim):
    whole = {seed: net(seed).state_dict() for seed in (1, 2)}
    came = set()
    for number in range(1, 40, 3):
        folder = tmp_path / str(number)
        export_safetensors(net(1), bucket_in(folder), max_shard_size="2KB")
        outcomes = run_isolated(
            export_until_killed, str(folder), victim, number, world_size=2, timeout=120, backend="gloo"
        )
        there = loaded(bucket_in(folder))
        same = [
            seed for seed, values in whole.items() if all(torch.equal(there[n], v) for n, v in values.items())
        ]
        assert len(same) == 1, number
        came.update(same)
        export_safetensors(net(1), bucket_in(folder), max_shard_size="2KB")  # which cleans up
        assert len(objects_in(bucket_in(folder))) == 1 + len({*_named(folder)})
        if all(outcome.kind == "passed" for outcome in outcomes):
            break
    assert came == {1, 2}


def _named(folder: Path) -> Iterator[str]:
    for path in folder.glob("*.safetensors"):
        if load_file(path):
            yield path.name


def test_what_is_damaged_in_a_store_is_named_and_nothing_is_loaded(tmp_path):
    place = bucket_in(tmp_path)
    export_safetensors(net(1), place)
    path = tmp_path / SINGLE
    data = path.read_bytes()
    for wrong, told in ((data[:4], "is damaged"), (b"\xff" * 64, "a header of"), (data[:-4], "ends before")):
        path.write_bytes(wrong)
        with pytest.raises(RuntimeError, match=f"{SINGLE} is damaged.*{told.removeprefix('is damaged')}"):
            import_safetensors(net(2), place)
    path.unlink()
    with pytest.raises(FileNotFoundError, match=f"neither {SINGLE} nor {INDEX} is in bucket://"):
        import_safetensors(net(2), place)


def test_tensors_of_several_dtypes_are_sent_in_the_order_of_the_file():
    model = net(1)
    for place, dtype in enumerate((torch.uint8, torch.float64, torch.int16, torch.bfloat16)):
        model.register_buffer(f"buffer{place}", torch.ones(3).to(dtype))
    model[0].half()
    export_safetensors(model, "memory://mixed")
    read = load(RemotePath("memory://mixed/model.safetensors").read_bytes())
    state = model.state_dict()
    assert_equal({name: read[name] for name in state}, state)
