"""Loads from a store read each byte once, and once a host where they have a cache folder."""

import errno
import fcntl
import os
import signal
import threading
import tracemalloc
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from bed import ranks, run_isolated
from buckets import bucket_in, impatient
from fronts import full_state
from fsdp_wrap import checkpoint
from fsdp_wrap.checkpoint import DamagedCheckpoint
from fsdp_wrap.checkpoint._manifest import Manifest
from fsdp_wrap.checkpoint._places import cache as cache_module
from fsdp_wrap.checkpoint._places.cache import CachedFiles
from fsdp_wrap.checkpoint._places.remote import RemotePath
from models import gather_objects
from resuming import Counter, net, other, per_block_of, told_alike, train, trained
from state_nets import adamw, assert_equal

SLACK = 2 << 20  # bytes that are read ahead and not used


@pytest.fixture(autouse=True)
def fast() -> Iterator[None]:
    with impatient():
        yield


@contextmanager
def read_from_store() -> Iterator[list[tuple[str, int]]]:
    """Yields the files from which this process reads meanwhile, each with how many bytes of it."""
    log: list[tuple[str, int]] = []
    read_range = RemotePath.read_range

    def logged(path: RemotePath, start: int, stop: int) -> bytes:
        data = read_range(path, start, stop)
        log.append((path.name, len(data)))
        return data

    with mock.patch.object(RemotePath, "read_range", logged):
        yield log


def bytes_of(log: list[tuple[str, int]]) -> dict[str, int]:
    return {name: sum(size for of, size in log if of == name) for name, _ in log}


def on_disk(place: str) -> Path:
    """Returns the folder of the newest step behind a URL of a bucket."""
    return Path(str(checkpoint.latest(place)).removeprefix("bucket://"))


def sizes_in(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir() if path.name != "manifest.json"}


def flip(file: Path, at: int) -> None:
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def copies_in(cache: Path) -> dict[str, list[str]]:
    """Returns the files of each step in a cache, by the step's name without words of its own."""
    return {
        step.name[:13]: sorted(path.name for path in step.iterdir() if not path.name.endswith(".lock"))
        for place in cache.iterdir()
        if place.is_dir()
        for step in place.iterdir()
    }


def copy_of(cache: Path, name: str = "__0_0.distcp") -> Path:
    (path,) = cache.glob(f"*/*/{name}")
    return path


COPIES = [".metadata", "__0_0.distcp"]


# Without a cache.


def test_a_load_reads_each_byte_once(tmp_path):
    place = bucket_in(tmp_path)
    model = nn.Sequential(nn.Linear(1024, 3072, bias=False), nn.Linear(7, 5), nn.Linear(3072, 512))
    checkpoint.save(place, model, adamw(model), {"data": Counter(3)})
    again = nn.Sequential(nn.Linear(1024, 3072, bias=False), nn.Linear(7, 5), nn.Linear(3072, 512))
    sizes = sizes_in(on_disk(place))
    assert sum(sizes.values()) > 16 << 20
    for optimizer in (adamw(again), None):
        with read_from_store() as log:
            checkpoint.load(place, again, optimizer)
        assert_equal(again.state_dict(), model.state_dict())
        assert bytes_of(log).keys() == sizes.keys(), "what the model does not need is verified, too"
        assert all(sizes[name] <= size <= sizes[name] + SLACK for name, size in bytes_of(log).items())
        assert max(size for _, size in log) <= 8 << 20


@pytest.mark.parametrize("cached", [False, True])
def test_a_load_holds_a_few_megabytes_beside_the_tensors(cached, tmp_path):
    place = bucket_in(tmp_path / "store")
    model, again = (nn.Linear(4096, 3072, bias=False) for _ in range(2))  # of 48 MiB
    checkpoint.save(place, model)
    tracemalloc.start()  # which counts no memory of tensors
    try:
        checkpoint.load(place, again, **({"cache": tmp_path / "cache"} if cached else {}))
        assert tracemalloc.get_traced_memory()[1] < 20 << 20
    finally:
        tracemalloc.stop()
    assert torch.equal(again.weight, model.weight)


@pytest.mark.parametrize("cached", [False, True])
def test_any_changed_byte_raises_before_the_model_changes(cached, tmp_path):
    """A byte of a tensor, of what `torch.save` writes around it, of what is not loaded, of the metadata."""
    place = bucket_in(tmp_path / "store")
    how = {"cache": tmp_path / "cache"} if cached else {}
    model, optimizer = trained(1)
    folder = on_disk(place) if checkpoint.save(place, model, optimizer, {"data": Counter(3)}) else Path()
    fresh = other(net())
    before = {name: value.clone() for name, value in fresh.state_dict().items()}
    manifest = Manifest.read(folder)
    for name, ranges in manifest.files.items():
        for offset, length, _ in ranges[:: max(1, len(ranges) // 6)]:
            for at in (offset, offset + length // 2, offset + length - 1):
                flip(folder / name, at)
                with pytest.raises(DamagedCheckpoint, match=rf"(?s){name} .*not as written"):
                    checkpoint.load(place, fresh, **how)
                assert_equal(fresh.state_dict(), before)
                flip(folder / name, at)
    checkpoint.load(place, fresh, **how)
    assert_equal(fresh.state_dict(), model.state_dict())


@ranks(2, 3)
def test_damage_that_one_rank_meets_is_told_by_all(rank, world_size, tmp_path):
    place = bucket_in(tmp_path)
    model = per_block_of(net(), use_orig_params=True)
    with impatient():
        checkpoint.save(place, model, adamw(model), {"data": Counter(rank)})
        if rank == 0:
            folder = on_disk(place)
            flip(folder / "__1_0.distcp", (folder / "__1_0.distcp").stat().st_size // 2)
        dist.barrier()
        before = {name: value.clone() for name, value in full_state(other(model)).items()}
        with pytest.raises(DamagedCheckpoint, match=r"__1_0.distcp bytes \d+ to \d+ are not as") as error:
            checkpoint.load(place, model)
        told_alike(error)
        assert_equal(full_state(model), before)


# With a cache.


def test_a_second_load_reads_the_copies_of_the_first(tmp_path):
    place, cache = bucket_in(tmp_path / "store"), tmp_path / "cache"
    model, optimizer = trained(1)
    checkpoint.save(place, model, optimizer, {"data": Counter(3)})
    sizes = sizes_in(on_disk(place))
    for expected in (sizes, {}):
        fresh, data = other(net()), Counter(0)
        moments = adamw(fresh)
        with read_from_store() as log:
            checkpoint.load(place, fresh, moments, {"data": data}, cache=str(cache))
        assert bytes_of(log) == expected and data.at == 3
        assert_equal(fresh.state_dict(), model.state_dict())
        assert copies_in(cache) == {"step_00000001": COPIES}
    for running, its in ((fresh, moments), (model, optimizer)):
        train(running, its, 0, 1, range(1, 3))
    assert_equal(fresh.state_dict(), model.state_dict())
    assert {path.name: path.read_bytes() for path in on_disk(place).iterdir() if path.name in COPIES} == {
        name: copy_of(cache, name).read_bytes() for name in COPIES
    }


@pytest.mark.parametrize("damage", ["changed", "shorter", "gone", "partial", "a folder"])
def test_damaged_copies_are_made_anew(damage, tmp_path):
    place, cache = bucket_in(tmp_path / "store"), tmp_path / "cache"
    model = net()
    checkpoint.save(place, model)
    checkpoint.load(place, other(net()), cache=cache)
    sound = copy_of(cache).read_bytes()
    for name in COPIES:
        copy = copy_of(cache, name)
        if damage == "changed":
            flip(copy, copy.stat().st_size // 2)
        elif damage == "shorter":
            os.truncate(copy, 100)
        else:
            copy.unlink()
        if damage == "partial":
            copy.with_name(f".{name}.partial").write_bytes(b"of a process that was killed")
    fresh = other(net())
    if damage == "a folder":
        copy_of(cache, ".__0_0.distcp.lock").with_name("__0_0.distcp").mkdir()
        with pytest.warns(UserWarning, match=f"{cache} takes no copy of bucket://.*__0_0.distcp"):
            checkpoint.load(place, fresh, cache=cache)
    else:
        checkpoint.load(place, fresh, cache=cache)
        assert copy_of(cache).read_bytes() == sound
        assert copies_in(cache) == {"step_00000001": COPIES}
    assert_equal(fresh.state_dict(), model.state_dict())


def test_no_copy_of_a_damaged_file_is_kept(tmp_path):
    place, cache = bucket_in(tmp_path / "store"), tmp_path / "cache"
    checkpoint.save(place, net())
    flip(on_disk(place) / "__0_0.distcp", 1000)
    with pytest.raises(DamagedCheckpoint, match=r"bucket://.* is damaged"):
        checkpoint.load(place, net(), cache=cache)
    assert copies_in(cache) == {"step_00000001": [".metadata"]}


def test_a_cache_holds_one_step_of_each_place(tmp_path):
    """Unless another load uses it at that moment, or the step that is loaded is damaged."""
    place, second, cache = bucket_in(tmp_path / "a"), bucket_in(tmp_path / "b"), tmp_path / "cache"
    for step in (1, 2, 3):
        checkpoint.save(place, net(), step=step)
    checkpoint.save(second, net(), step=7)
    load = [
        lambda at=at, step=step: checkpoint.load(at, net(), step=step, cache=cache)
        for at, step in ((place, 1), (second, 7), (place, 2))
    ]
    load[0](), load[1](), load[2]()
    assert copies_in(cache) == {"step_00000002": COPIES, "step_00000007": COPIES}
    folder: Any = checkpoint.latest(place)
    elsewhere = CachedFiles(folder, Manifest.read(folder), cache)
    load[0]()
    assert set(copies_in(cache)) == {"step_00000001", "step_00000002", "step_00000003", "step_00000007"}
    elsewhere.close(is_loaded=False)
    flip(on_disk(place) / "__0_0.distcp", 1000)
    with pytest.raises(DamagedCheckpoint):
        checkpoint.load(place, net(), cache=cache)
    assert "step_00000002" in copies_in(cache)
    load[2]()
    assert set(copies_in(cache)) == {"step_00000002", "step_00000007"}


def test_a_step_that_was_saved_again_is_another_one(tmp_path):
    place, cache = bucket_in(tmp_path / "store"), tmp_path / "cache"
    for model in (net(), other(net())):
        checkpoint.save(place, model, step=1)
        fresh = net()
        checkpoint.load(place, fresh, cache=cache)
        assert_equal(fresh.state_dict(), model.state_dict())
    assert len([*cache.glob("*/step_00000001*")]) == 1


@pytest.mark.parametrize("failing", ["open", "write_all", "replace"])
def test_a_disk_that_refuses_copies_costs_reading_again_and_no_more(failing, tmp_path):
    place, cache = bucket_in(tmp_path / "store"), tmp_path / "cache"
    model, fresh = net(), other(net())
    checkpoint.save(place, model)
    full = OSError(errno.ENOSPC, "No space left on device")
    how = {
        "open": (Path, "open"),
        "write_all": (cache_module, "_write_all"),
        "replace": (Path, "replace"),
    }[failing]
    real = getattr(*how)

    def refuse(*given: Any, **options: Any) -> Any:
        if failing == "open" and not str(given[0]).endswith(".partial"):
            return real(*given, **options)
        raise full

    with mock.patch.object(*how, refuse):
        with pytest.warns(UserWarning, match=f"{cache} takes no copy of .*No space left.* store") as told:
            checkpoint.load(place, fresh, cache=cache)
    assert sum("takes no copy" in str(warning.message) for warning in told) == 1
    assert_equal(fresh.state_dict(), model.state_dict())
    assert copies_in(cache) == {"step_00000001": []}


def test_folders_that_cannot_be_a_cache_are_refused_before_anything_changes(tmp_path):
    place = bucket_in(tmp_path / "store")
    checkpoint.save(place, net())
    fresh = other(net())
    before = {name: value.clone() for name, value in fresh.state_dict().items()}
    with pytest.raises(ValueError, match="cache= takes folders on disk, and memory://cache is in a store"):
        checkpoint.load(place, fresh, cache="memory://cache")
    unlockable = mock.patch.object(fcntl, "flock", side_effect=OSError(errno.ENOLCK, "No locks available"))
    with unlockable, pytest.raises(ValueError, match=f"{tmp_path / 'c'} takes no file locks .*own disk"):
        checkpoint.load(place, fresh, cache=tmp_path / "c")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises((ValueError, RuntimeError, OSError), match="file"):
        checkpoint.load(place, fresh, cache=tmp_path / "file")
    assert_equal(fresh.state_dict(), before)


def test_no_file_outside_of_the_step_is_read_or_copied(tmp_path):
    place, cache = bucket_in(tmp_path / "store"), tmp_path / "cache"
    folder = on_disk(place) if checkpoint.save(place, net()) else Path()
    (tmp_path / "store" / "planted").write_bytes(b"abc")
    manifest = Manifest.read(folder)
    manifest.files["../planted"] = [[0, 3, zlib.crc32(b"abc")]]
    (folder / "manifest.json").unlink()
    manifest.write(folder)
    for named in (folder, f"bucket://{folder}"):
        with pytest.raises(DamagedCheckpoint, match="outside of the folder: '../planted'; do not trust this"):
            checkpoint.load(named, net(), cache=cache)
    assert not cache.exists()


def test_steps_on_disk_need_no_cache(tmp_path):
    checkpoint.save(tmp_path / "runs", net())
    for place in (tmp_path / "runs", f"file://{tmp_path}/runs"):
        checkpoint.load(place, net(), cache=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@ranks(3)
def test_ranks_of_a_host_read_each_file_once_together(rank, world_size, tmp_path):
    """All ranks load together; then each loads alone, all at the same time, as several jobs would."""
    place = bucket_in(tmp_path / "store")
    alone = [dist.new_group([member]) for member in range(world_size)][rank]
    model = per_block_of(net(), use_orig_params=True)
    with impatient():
        checkpoint.save(place, model, adamw(model), {"data": Counter(rank)})
        expected = full_state(model)
        sizes = sizes_in(on_disk(place))
        assert len(sizes) == 4
        for group, cache in ((dist.group.WORLD, "of_all"), (alone, "of_each")):
            again = per_block_of(other(net()), process_group=group, use_orig_params=True)
            dist.barrier()
            with read_from_store() as log:
                checkpoint.load(place, again, adamw(again), process_group=group, cache=tmp_path / cache)
            logs = gather_objects(log)
            assert bytes_of([entry for of_rank in logs for entry in of_rank]) == sizes
            assert_equal(full_state(again), expected)
            assert copies_in(tmp_path / cache) == {"step_00000001": sorted(sizes)}


def killed_load(rank: int, world_size: int, place: str, cache: Path) -> None:
    written = cache_module._write_all

    def write_half(out: Any, data: memoryview) -> None:
        if ".distcp" in out.name:
            written(out, data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        written(out, data)

    with mock.patch.object(cache_module, "_write_all", write_half):
        checkpoint.load(place, net(), cache=cache)


def test_a_load_that_is_killed_while_it_copies_leaves_nothing_in_the_way(tmp_path):
    place, cache = bucket_in(tmp_path / "store"), tmp_path / "cache"
    model, fresh = net(), other(net())
    checkpoint.save(place, model)
    assert run_isolated(killed_load, place, cache, world_size=1)[0].kind == "died"
    assert copies_in(cache) == {"step_00000001": [".__0_0.distcp.partial", ".metadata"]}
    checkpoint.load(place, fresh, cache=cache)
    assert_equal(fresh.state_dict(), model.state_dict())
    assert copies_in(cache) == {"step_00000001": COPIES}


def test_a_copy_that_another_process_makes_is_waited_for(tmp_path):
    place, cache = bucket_in(tmp_path / "store"), tmp_path / "cache"
    model, fresh = net(), other(net())
    checkpoint.save(place, model)
    folder: Any = checkpoint.latest(place)
    elsewhere = CachedFiles(folder, Manifest.read(folder), cache)
    with elsewhere._one_at_a_time("__0_0.distcp"):
        loading = threading.Thread(target=checkpoint.load, args=(place, fresh), kwargs={"cache": cache})
        with read_from_store() as log:
            loading.start()
            loading.join(0.3)
            assert loading.is_alive() and "__0_0.distcp" not in bytes_of(log)
            elsewhere._copied("__0_0.distcp")
    with read_from_store() as log:
        loading.join()
    elsewhere.close(is_loaded=True)
    assert log == []
    assert_equal(fresh.state_dict(), model.state_dict())
