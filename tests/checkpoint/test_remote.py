"""Steps in object stores: the promises that hold on disk, where nothing can be renamed or locked.

`memory://` is a store of one process; all ranks see the one in `buckets.py`.
"""

import io
import os
import pickle
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import fsspec  # type: ignore[import-untyped]
import pytest
import torch
import torch.distributed as dist
from torch import nn

from bed import ranks, run_isolated
from buckets import bucket_in, impatient, kill_at, objects_in, requests
from fronts import full_state
from fsdp_wrap import checkpoint
from fsdp_wrap.checkpoint import DamagedCheckpoint
from fsdp_wrap.checkpoint._places import remote, store
from fsdp_wrap.checkpoint._places.remote import RemotePath
from resuming import Counter, net, other, per_block_of, told_alike, train, trained
from state_nets import adamw, assert_equal

DATA = [".metadata", "__0_0.distcp", "manifest.json"]
KINDS = ["memory", "bucket", "file", "local"]


@pytest.fixture(autouse=True)
def fast() -> Iterator[None]:
    with impatient():
        yield
    fsspec.filesystem("memory").store.clear()


def place_of_kind(kind: str, folder: Path) -> str:
    return "memory://runs/lm" if kind == "memory" else f"{kind}://{folder}"


def saved_twice(place: Any) -> dict[str, torch.Tensor]:
    """Saves two steps of another model each; returns the state of the second one."""
    model = net()
    checkpoint.save(place, model, step=1)
    checkpoint.save(place, other(model), step=2)
    return {name: value.clone() for name, value in model.state_dict().items()}


def names_of(steps: dict[int, list[str]]) -> list[str]:
    return sorted(f"step_{step:08d}/{file}" for step, files in steps.items() for file in files)


# One process.


@pytest.mark.parametrize("kind", KINDS)
def test_steps_are_saved_replaced_kept_and_loaded_by_url(kind, tmp_path):
    place = place_of_kind(kind, tmp_path / "runs")
    assert checkpoint.latest(place) is None
    model, optimizer = trained(2)
    for step in (1, 2, 3):
        folder = checkpoint.save(place, model, optimizer, {"data": Counter(step)}, step=step, keep_last=2)
        assert folder == checkpoint.latest(place)
    assert (
        checkpoint.save(place, other(model), optimizer, {"data": Counter(9)}, step=3) != folder
        or "mem" not in kind
    )
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    assert objects_in(place) == names_of({2: DATA, 3: DATA})

    fresh, data = net(), Counter(0)
    moments = adamw(fresh)
    loaded = checkpoint.load(place, fresh, moments, {"data": data})
    assert (loaded.step, loaded.folder, data.at) == (3, checkpoint.latest(place), 9)
    assert_equal(fresh.state_dict(), expected)
    for running, its in ((fresh, moments), (model, optimizer)):
        train(running, its, 0, 1, range(2, 3))
    assert_equal(fresh.state_dict(), model.state_dict())
    assert checkpoint.load(str(loaded.folder), fresh).step == 3
    with pytest.raises(ValueError, match="there is no step 1 in .*; it holds steps 3, 2"):
        checkpoint.load(place, fresh, step=1)
    pending = checkpoint.async_save(place, model, optimizer)
    assert pending.result() == checkpoint.latest(place)
    assert checkpoint.load(place, net()).step == 4


def test_places_are_paths_that_pickle_with_their_configuration():
    path = RemotePath("memory://runs/lm/")
    assert str(path) == "memory://runs/lm" and repr(path) == "RemotePath('memory://runs/lm')"
    assert path.parent / "lm" == path == pickle.loads(pickle.dumps(path)) and path.name == "lm"
    assert len({path, path.parent / "lm", path.parent}) == 2
    assert path.parent.parent == path.parent, "a bucket is its own"
    assert not path.exists() and not path.is_dir()
    with pytest.raises(FileNotFoundError, match="memory://runs/lm"):
        path.read_bytes()
    saved = checkpoint.save(path, net())
    assert isinstance(saved, RemotePath) and checkpoint.latest(path) == saved
    with mock.patch.dict(fsspec.config.conf, {"memory": {"secret": "a word"}}):
        told = pickle.dumps(path)
        assert b"a word" in told, "the process that writes reaches the store in the same way"
    with mock.patch.dict(fsspec.config.conf):
        pickle.loads(told)
        assert fsspec.config.conf["memory"] == {"secret": "a word"}


@pytest.mark.parametrize("kind", KINDS)
def test_large_states_are_saved_in_the_background(kind, tmp_path):
    """With this many tensors another process writes, unless it would see other memory."""
    place = place_of_kind(kind, tmp_path)
    model, again = (
        nn.ParameterList([torch.full((2,), value), *(torch.ones(1) for _ in range(999))])
        for value in (7.0, 0.0)
    )
    assert checkpoint.async_save(place, model).result() == checkpoint.latest(place)
    checkpoint.load(place, again)
    assert torch.equal(again[0], model[0])


def test_urls_are_never_taken_for_relative_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = net()
    for url in (
        "nothing://bucket/run",
        "simplecache::memory://run",
        "s3:/bucket/run",
        Path("gs://bucket/run"),
    ):
        for call in (checkpoint.latest, lambda place: checkpoint.save(place, model), checkpoint.InMemory):
            with pytest.raises(ValueError, match="://"):
                call(url)
        with pytest.raises(ValueError, match="://"):
            checkpoint.load(url, model)
    url = "memory://bucket/run"
    with pytest.raises(ValueError, match=f"takes folders on disk, and {url} is in a store"):
        checkpoint.InMemory(url)
    assert list(tmp_path.iterdir()) == []
    checkpoint.save("a:/b", model)  # which is nobody's protocol
    assert (tmp_path / "a:" / "b" / "step_00000001").is_dir()


CURES = {
    "s3://b/r": r"fsdp-wrap\[storage\]",
    "gs://b/r": "gcsfs",
    "hf://buckets/b/r": "huggingface_hub",
    "hf://datasets/b/r": "huggingface_hub",
}


@pytest.mark.parametrize("missing, cure", CURES.items())
def test_a_missing_package_is_named_with_its_cure_before_anything_changes(missing, cure, monkeypatch):
    for package, kind in (("s3fs", "s3"), ("gcsfs", "gs"), ("huggingface_hub", "hf")):
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, kind, raising=False)
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for call in (checkpoint.latest, lambda place: checkpoint.save(place, model), RemotePath):
        with pytest.raises(ImportError, match=f"{missing} needs a package .*pip install '{cure}'"):
            call(missing)
    with pytest.raises(ImportError, match=cure):
        checkpoint.load(missing, model)
    assert_equal(model.state_dict(), before)


# Whole or not there.


def killed_save(rank: int, world_size: int, place: str, number: int) -> list[str]:
    with impatient(), requests(kill_at(number)) as asked:
        checkpoint.save(place, other(other(net())), step=3, keep_last=1)
    return asked


def test_a_save_that_is_killed_before_any_request_leaves_whole_steps(tmp_path):
    """The next save clears up; what `latest` takes loads, with the values of the save that it names."""
    number, ends = 0, []
    while True:
        number += 1
        place = bucket_in(tmp_path / str(number))
        second = saved_twice(place)
        pid = os.fork()
        if pid == 0:
            with mock.patch.object(store._Claim, "_renew"):  # which asks when it likes
                try:
                    killed_save(0, 1, place, number)
                finally:
                    os._exit(0)
        died = os.waitpid(pid, 0)[1] != 0
        model = net()
        step = checkpoint.load(place, model).step
        ends.append(step)
        expected = other(other(net())).state_dict() if step == 3 else second
        assert_equal(model.state_dict(), expected)
        checkpoint.save(place, model, step=4)
        steps = {1, 2, 4} if step == 2 else {int(name[5:13]) for name in objects_in(place)}
        assert objects_in(place) == names_of(dict.fromkeys(steps, DATA)), number
        if not died:
            break
    assert ends == sorted(ends) and set(ends) == {2, 3} and number > 20, ends


@pytest.mark.parametrize("failing", [TimeoutError("slow"), OSError(5, "500"), RuntimeError("of a client")])
def test_each_request_may_fail_now_and_then(failing, tmp_path):
    model = net()
    for every in (2, 3):
        place = bucket_in(tmp_path / str(every))

        def ask(count: int, name: str, every: int = every) -> None:
            if count % every == 0:
                raise failing

        with requests(ask) as asked:
            checkpoint.save(place, model, step=1), checkpoint.save(place, model, step=2, keep_last=1)
            checkpoint.load(place, other(model))
        assert_equal(model.state_dict(), net().state_dict())
        assert len(asked) > 60 and objects_in(place) == names_of({2: DATA})


def test_what_fails_for_good_is_told_with_its_url_and_nothing_appears(tmp_path):
    place = bucket_in(tmp_path)
    state = saved_twice(place)
    for part in ("__0_0.distcp", ".metadata", ".manifest.json.draft", "manifest.json"):

        def ask(count: int, name: str, part: str = part) -> None:
            if name.startswith("pipe_file") and name.endswith(part):
                raise OSError(f"no {part}")

        with requests(ask), pytest.raises((RuntimeError, OSError), match=rf"bucket://.*no {part}"):
            checkpoint.save(place, net())
        assert objects_in(place) == names_of({1: DATA, 2: DATA})
    with requests(lambda count, name: (_ for _ in ()).throw(PermissionError("denied"))):
        with pytest.raises(ValueError, match=f"{place} cannot be written to .*denied"):
            checkpoint.save(place, net())
    model = other(net())
    checkpoint.load(place, model)
    assert_equal(model.state_dict(), state)


def test_a_manifest_whose_answer_is_lost_counts(tmp_path):
    place = bucket_in(tmp_path)

    def write_and_fail(path: RemotePath, data: bytes) -> None:
        written(path, data)
        if path.name == "manifest.json":
            raise OSError("no answer")

    written = RemotePath.write_bytes
    with mock.patch.object(RemotePath, "write_bytes", write_and_fail):
        folder = checkpoint.save(place, net())
    assert checkpoint.latest(place) == folder


@pytest.mark.parametrize("kind", ["memory", "bucket"])
def test_damage_is_named_and_nothing_is_loaded(kind, tmp_path):
    place = place_of_kind(kind, tmp_path)
    name, value = next(iter(saved_twice(place).items()))
    folder: Any = checkpoint.latest(place)
    model = net()
    data = (folder / "__0_0.distcp").read_bytes()
    at = data.index(value.numpy().tobytes())
    (folder / "__0_0.distcp").write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    told = rf"(?s)__0_0.distcp bytes \d+ to \d+ are not as written \(model\.{name}\).*load .*step_00000001"
    with pytest.raises(DamagedCheckpoint, match=told):
        checkpoint.load(place, model)
    (folder / "__0_0.distcp").write_bytes(data[:-1])
    with pytest.warns(UserWarning, match="passing over .*step_00000002.* has .* bytes"):
        assert checkpoint.load(place, model).step == 1
    (folder / "__0_0.distcp").unlink()
    with pytest.raises(DamagedCheckpoint, match="__0_0.distcp is missing"):
        checkpoint.load(folder, model)
    (folder / "manifest.json").unlink()
    with pytest.raises(ValueError, match="there is no step 2"):
        checkpoint.load(place, model, step=2)


def test_steps_copied_there_from_a_disk_are_steps(tmp_path):
    saved_twice(tmp_path / "disk")
    files = fsspec.filesystem("memory")
    files.put(str(tmp_path / "disk" / "step_00000002"), "/runs/step_00000002", recursive=True)
    files.pipe("/runs/step_00000007/of_another_program", b"1")
    assert str(checkpoint.latest("memory://runs")) == "memory://runs/step_00000002"
    model = net()
    checkpoint.load("memory://runs", model)
    checkpoint.save("memory://runs", model, step=2), checkpoint.save("memory://runs", model, step=7)
    assert objects_in("memory://runs") == names_of({2: DATA, 7: [*DATA, "of_another_program"]})


def test_names_of_saves_are_in_the_order_of_the_saves():
    name = ""
    for _ in range(300):
        there = [name, "step_00000007", "step_000000071.0009abcdef", "step_100000000.00ff000000"]
        name, earlier = store._new_name(7, there), name
        assert name > earlier and store.Store.names.fullmatch(name)
    assert name.startswith("step_00000007.012c")
    assert store._new_name(10**7, there).startswith("step_10000000.0001")


# One run at a time.


def test_a_place_where_another_run_saves_is_refused_until_it_has_ended_or_died(tmp_path):
    place = bucket_in(tmp_path)
    saves, goes_on = threading.Event(), threading.Event()
    written = remote._Upload.close

    def close_later(upload: Any) -> None:
        saves.set()
        goes_on.wait(20)
        written(upload)

    by_thread = mock.patch("fsdp_wrap.checkpoint._saving.in_process", SimpleNamespace(filled=None))
    with by_thread, mock.patch.object(remote._Upload, "close", close_later):
        pending = checkpoint.async_save(place, net())
        assert saves.wait(20)
        with mock.patch("fsdp_wrap.checkpoint._saving.wait_for_pending"):
            with pytest.raises(
                RuntimeError, match=rf"another save .* in {place}, by process {os.getpid()} on host"
            ):
                checkpoint.save(place, net())
        goes_on.set()
        pending.result()
    (RemotePath(place) / ".saving").write_bytes(b"process 1 on host a\nword\n\n1")  # of a run that was killed
    checkpoint.save(place, net())
    assert objects_in(place) == names_of({1: DATA, 2: DATA})


def test_a_save_whose_place_was_taken_gives_up(tmp_path):
    place = bucket_in(tmp_path)
    saved_twice(place)
    shown = store.Store.show

    def show_late(self: store.Store, *given: Any) -> Any:
        (self.path / ".saving").write_bytes(b"process 1 on host a\nword\n\n1")
        return shown(self, *given)

    with mock.patch.object(store.Store, "show", show_late):
        with pytest.raises(
            RuntimeError, match="another save .* by process 1 on host a, and this one was given up"
        ):
            checkpoint.save(place, net())
    assert checkpoint.latest(place).name.startswith("step_00000002")
    assert objects_in(place) == [".saving", *names_of({1: DATA, 2: DATA})]


# Parts.


class Parts(io.BytesIO):
    """A file in a store that notes the sizes of what is written, and whether it was completed."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.ends: list[str] = []

    def write(self, data: Any) -> int:
        self.sizes.append(len(data))
        return len(data)

    def close(self) -> None:
        self.ends.append("complete")

    def discard(self) -> None:
        self.ends.append("discarded")


def test_objects_are_sent_in_parts_and_appear_when_all_are_there():
    path, file = RemotePath("memory://run/object"), Parts()
    data = memoryview(bytes(100 << 20))
    with mock.patch.object(RemotePath, "begun", lambda *_: file):
        with path.open("xb") as out:
            assert out.write(data) == len(data) == out.tell()
            out.write(b"rest")
        assert sum(file.sizes) == len(data) + 4 and max(file.sizes) <= 16 << 20 and file.ends == ["complete"]
        with pytest.raises(KeyError), path.open("xb") as out:
            out.write(data)
            raise KeyError
        assert file.ends == ["complete", "discarded"]
        out = path.open("xb")
        out.write(data)
        del out
        assert file.ends == ["complete", "discarded", "discarded"]
    with pytest.raises(KeyError), path.open("xb") as out:
        out.write(b"a few")
        raise KeyError
    assert not path.exists()


# Several ranks.


@ranks(3)
def test_any_number_of_ranks_loads_what_two_have_saved(rank, world_size, tmp_path):
    place = bucket_in(tmp_path)
    pair, alone = dist.new_group([0, 1]), [dist.new_group([member]) for member in range(world_size)][rank]
    plain, reference = trained(2)
    with impatient():
        if rank < 2:
            model = per_block_of(net(), process_group=pair, use_orig_params=True)
            optimizer = adamw(model)
            train(model, optimizer, rank, 2, range(2))
            folder = checkpoint.save(
                place, model, optimizer, {"data": Counter(5)}, step=2, process_group=pair
            )
            assert folder.name.startswith("step_00000002.")
            pending = checkpoint.async_save(place, model, optimizer, step=3, process_group=pair)
            assert pending.result() == checkpoint.latest(place)
        dist.barrier()
        for group, size in ((alone, 1), (dist.group.WORLD, 3)):
            again = per_block_of(net(), process_group=group, use_orig_params=True)
            moments = adamw(again)
            assert checkpoint.load(place, again, moments, process_group=group).step == 3
            train(again, moments, rank if size == 3 else 0, size, range(2, 4))
            if size == 1:
                train(plain, reference, 0, 1, range(2, 4))
            for name, value in full_state(again).items():
                torch.testing.assert_close(value, plain.state_dict()[name])
    if rank == 0:
        assert objects_in(place) == names_of(dict.fromkeys((2, 3), sorted([*DATA, "__1_0.distcp"])))


@ranks(2)
def test_memory_is_of_one_process_and_refused_for_several(rank, world_size, tmp_path):
    with pytest.raises(
        ValueError, match="all ranks must save in one folder, but .*memory://r.* not seen by rank 1"
    ) as error:
        checkpoint.save("memory://r", per_block_of(net()))
    told_alike(error)
    assert checkpoint.latest("memory://r") is None
    if rank == 0:
        checkpoint.save(
            "memory://r", net(), process_group=dist.new_group([0], use_local_synchronization=True)
        )
    dist.barrier()
    with pytest.raises(ValueError, match="all ranks must see the same checkpoint, .*rank 1 finds none"):
        checkpoint.load("memory://r", net())


@ranks(2)
def test_a_rank_that_fails_fails_all_and_no_object_is_left(rank, world_size, tmp_path):
    place = bucket_in(tmp_path)

    def ask(count: int, name: str) -> None:
        if name.endswith("__1_0.distcp"):
            raise OSError("no way")

    with impatient():
        checkpoint.save(place, per_block_of(net()), step=1)
        before = objects_in(place)
        with (
            requests(ask),
            pytest.raises(RuntimeError, match="saving step 2 .* rank 1: OSError: .*no way") as error,
        ):
            checkpoint.save(place, per_block_of(net()))
        told_alike(error)
        dist.barrier()
        assert objects_in(place) == before


def dying(rank: int, world_size: int, place: str, victim: int, request: str) -> None:
    model = per_block_of(net())
    with impatient():
        checkpoint.save(place, model, step=1)
        with requests(kill_at(request) if rank == victim else lambda *_: None):
            checkpoint.save(place, model, step=2)


PHASES = [
    *((0, f"pipe_file {name}") for name in (".probe", ".saving", "__0_0.distcp", ".metadata.tmp")),
    *((0, f"pipe_file {name}") for name in (".manifest.json.draft", "manifest.json")),
    *((1, "bytes .saving"), (1, "pipe_file __1_0.distcp")),
]


@pytest.mark.left_over(4)
@pytest.mark.parametrize("victim, request_", PHASES)
def test_a_rank_that_dies_in_any_phase_of_a_save_leaves_what_was(victim, request_, tmp_path):
    place = bucket_in(tmp_path)
    outcomes = run_isolated(dying, place, victim, request_, world_size=2)
    assert outcomes[victim].kind == "died", outcomes
    assert outcomes[1 - victim].kind == "failed" and f"rank {victim} died" in str(outcomes[1 - victim])
    model = net()
    assert checkpoint.load(place, model).step == 1
    checkpoint.save(place, model, step=2)
    assert objects_in(place) == names_of({1: sorted([*DATA, "__1_0.distcp"]), 2: DATA})
