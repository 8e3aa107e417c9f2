"""Weights from trainers to a receiver through a folder."""

from __future__ import annotations

import copy
import errno
import itertools
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from bed import ranks
from bed.patience import NEVER
from fronts import each_front, full_state, shard
from fsdp_wrap import fully_shard, weight_changes, weight_source
from fsdp_wrap.checkpoint import _safetensors
from fsdp_wrap.weights import Changes, Update, WeightFolder, stored
from sent_weights import POLICY, net, step


def follow(updates: Iterator[Update]) -> list[dict[str, torch.Tensor]]:
    state: dict[str, torch.Tensor] = {}
    states = []
    for update in updates:
        if update.whole and not state:
            state = {meta.name: torch.empty(meta.shape, dtype=meta.dtype) for meta in update.metadata}
        update.apply(state)
        states.append(copy.deepcopy(state))
    return states


@each_front
@ranks(2)
def test_a_receiver_has_what_the_trainers_have(rank, world_size, front):
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor() as pool:
        receiver = pool.submit(follow, stored(place, timeout=NEVER)) if rank == 0 else None
        folder = WeightFolder(place if rank == 0 else None)
        model, expected = shard(front, net(), POLICY), []
        folder.send(weight_source(model))
        expected.append(full_state(model))
        changes = weight_changes(model)
        for _ in range(2):
            step(model)
            changed = changes.collect()
            if rank == 0:
                folder.send_changes(changed)
            expected.append(copy.deepcopy(full_state(model)))
        folder.send(weight_source(model, dtype=torch.float32))
        expected.append(copy.deepcopy(full_state(model)))
        folder.close()
        if receiver is None:
            return
        states = receiver.result(NEVER)  # which may have begun at the last whole version
        assert folder.version == 4 and states
        for state, wanted in zip(reversed(states), reversed(expected)):
            assert [*state] == [*wanted]
            assert all(torch.equal(state[name], value) for name, value in wanted.items())


def test_what_is_not_wanted_is_passed_over(tmp_path):
    with pytest.raises(RuntimeError, match="no version 1 has appeared"):
        next(stored(tmp_path, timeout=0.1))
    model, folder = net(), WeightFolder(tmp_path)
    names = [name for name, _ in model.named_parameters()]
    for _ in range(3):
        folder.send(weight_source(model))
    folder.send_changes(Changes())
    folder.close()
    received = [
        (update.version, [name for (name, _), _ in zip(update, range(update.version))])
        for update in stored(tmp_path, timeout=NEVER)
    ]
    assert received[-2:] == [(3, names[:3]), (4, [])]


def test_an_update_that_does_not_fit_writes_nothing(tmp_path):
    folder = WeightFolder(tmp_path)
    folder.send(weight_source(nn.Linear(2, 3)))
    update = next(stored(tmp_path))
    state = {"weight": torch.zeros(3, 2), "bias": torch.zeros(2)}
    with pytest.raises(ValueError, match=r"'bias' comes as torch.float32, \(3,\), and here it is"):
        update.apply(state)
    assert not state["weight"].any()
    with pytest.raises(ValueError, match="version 1 is whole"):
        update.changes()


def corrupt(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("kind", ["whole", "changes"])
def test_one_flipped_bit_is_not_applied(tmp_path, kind):
    model, state = nn.Linear(2, 3), {"weight": torch.zeros(3, 2), "bias": torch.zeros(3)}
    folder, changes = WeightFolder(tmp_path), weight_changes(model)
    folder.send(weight_source(model))
    if kind == "changes":
        with torch.no_grad():
            model.weight.add_(1)
        folder.send_changes(changes.collect(checksums=False))
    for file, place in itertools.product(("model.safetensors", "update.json", "manifest.json"), (9, -2)):
        corrupt(tmp_path / f"version-{folder.version:08}" / file, place)
        with pytest.raises(RuntimeError, match=f"version-{folder.version:08} is damaged: .*{file}"):
            for update in stored(tmp_path, after=folder.version - 1):
                update.apply(state)
        assert not state["weight"].any() and not state["bias"].any()
        corrupt(tmp_path / f"version-{folder.version:08}" / file, place)


def no_space(out: Any, *_: Any) -> None:
    out.write(b"some")
    raise OSError(errno.ENOSPC, "No space left on device")


full_disk = partial(mock.patch.object, _safetensors, "_write_tensors", no_space)


@ranks(2)
def test_a_full_disk_leaves_no_hole_and_nothing_on_the_disk(rank, world_size):
    with tempfile.TemporaryDirectory() as place:
        model = shard("orig", net(), POLICY)
        folder = WeightFolder(place if rank == 0 else None)
        folder.send(weight_source(model))
        changes = weight_changes(model)
        with full_disk(), pytest.raises(RuntimeError, match="No space left on device"):
            folder.send(weight_source(model))
        assert rank or sorted(os.listdir(place)) == ["version-00000001"]
        step(model)
        changed = changes.collect()
        if rank == 0:
            with pytest.raises(RuntimeError, match="send all weights"):
                folder.send_changes(changed)
        folder.send(weight_source(model))
        with full_disk(), pytest.raises(RuntimeError, match="No space left") if not rank else nullcontext():
            step(model)
            folder.send_changes(changes.collect())
        folder.send(weight_source(model))
        assert folder.version == 3, "on every rank"
        folder.close()
        assert rank or [update.version for update in stored(place, after=1)] == [3]


@ranks(2)
def test_what_the_first_rank_cannot_write_is_told_to_all(rank, world_size):
    """Neither a value that no file holds nor a path that is no folder leaves the other ranks waiting."""
    model = nn.Linear(4, 2, dtype=torch.complex128)
    fully_shard(model)
    with tempfile.TemporaryDirectory() as place:
        refused = "safetensors cannot hold weight, which is of torch.complex128"
        with pytest.raises(ValueError, match=refused):
            WeightFolder(place if rank == 0 else None).send(weight_source(model))
        sealed = os.path.join(place, "file")
        if rank == 0:
            Path(sealed).touch()
        with pytest.raises(RuntimeError, match="WeightFolder.send.. failed on the first rank: NotADir"):
            WeightFolder(sealed if rank == 0 else None).send(weight_source(fully_shard(nn.Linear(2, 2))))


def test_old_versions_go_when_a_whole_one_is_there(tmp_path):
    model, folder = nn.Linear(2, 2), WeightFolder(tmp_path, keep_last=2)
    reader = stored(tmp_path, timeout=NEVER)
    folder.send(weight_source(model))
    late = next(reader)
    for _ in range(2):
        folder.send_changes(Changes())
        folder.send(weight_source(model))
    assert sorted(os.listdir(tmp_path)) == [f"version-0000000{number}" for number in (3, 4, 5)]
    assert len(dict(late)) == 2, "what a reader has begun stays readable"
    assert [next(reader).version] == [5], "the second is gone, so it goes on with the last whole one"
    WeightFolder(tmp_path, keep_last=None).send(weight_source(model))
    assert len(os.listdir(tmp_path)) == 4
    with pytest.raises(ValueError, match="keep_last must be at least 1"):
        WeightFolder(tmp_path, keep_last=0)


def test_a_folder_goes_on_where_an_earlier_run_ended(tmp_path):
    for value in (1.0, 2.0):
        folder, model = WeightFolder(tmp_path), nn.Linear(2, 2)
        with torch.no_grad():
            model.weight.fill_(value)
        folder.send(weight_source(model))
        folder.close()
    assert [path.name for path in sorted(tmp_path.glob("v*"))] == ["version-00000001", "version-00000002"]
    updates = [*stored(tmp_path)]
    assert [update.version for update in updates] == [2], "the last whole one has all"
    assert dict(updates[0])["weight"].mean() == 2
    assert [*stored(tmp_path, after=2)] == []
