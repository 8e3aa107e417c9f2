"""Weights from trainers to a receiver: over gloo, through shared memory, through a folder."""

from __future__ import annotations

import copy
import errno
import itertools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from bed import ranks
from bed.paths import ROOT
from bed.patience import NEVER
from bed.ports import free_port
from fronts import full_state, shard
from fsdp_wrap import fully_shard, weight_changes, weight_source
from fsdp_wrap.checkpoint import _safetensors
from fsdp_wrap.weights import (
    Changes,
    GlooChannel,
    PeerLost,
    SharedMemoryChannel,
    Update,
    WeightFolder,
    WeightSender,
    received,
    stored,
)
from sent_weights import POLICY, net, step

WAYS = ["gloo", "memory", "folder"]
BUCKET = 100  # bytes, so that tensors are cut


class Way:
    """Both ends of a way, in one process."""

    def __init__(self, way: str, place: str) -> None:
        self._way, self._place = way, place
        self._port = free_port()

    def channel(self, receives: bool, timeout: float = NEVER) -> Any:
        if self._way == "gloo":
            address = f"localhost:{self._port}"
            return GlooChannel(address, receives=receives, timeout=timeout, bucket=BUCKET)
        path = os.path.join(self._place, "socket")
        return SharedMemoryChannel(path, receives=receives, timeout=timeout, bucket=BUCKET)

    def sender(self) -> Any:
        if self._way == "folder":
            return WeightFolder(self._place)
        return WeightSender(self.channel(receives=False))

    def updates(self) -> Iterator[Update]:
        if self._way == "folder":
            return stored(self._place, timeout=NEVER)
        return received(self.channel(receives=True))


def follow(way: Way) -> list[dict[str, torch.Tensor]]:
    """Returns what a receiver has after each update."""
    state: dict[str, torch.Tensor] = {}
    found = []
    for update in way.updates():
        if update.whole and not state:
            state = {each.name: torch.empty(each.shape, dtype=each.dtype) for each in update.metadata}
        update.apply(state)
        found.append(copy.deepcopy(state))
    return found


@pytest.mark.parametrize(("way", "front"), [("gloo", "flat"), ("memory", "composable"), ("folder", "orig")])
@ranks(2)
def test_a_receiver_has_what_the_trainers_have(rank, world_size, way, front):
    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor() as pool:
        ways = Way(way, place)
        receiver = pool.submit(follow, ways) if rank == 0 else None
        sender = ways.sender() if rank == 0 else WeightSender(None)
        model, expected = shard(front, net(), POLICY), []
        sender.send(weight_source(model))
        expected.append(full_state(model))
        changes = weight_changes(model)
        for _ in range(2):
            step(model)
            found = changes.collect()
            if rank == 0:
                sender.send_changes(found)
            expected.append(copy.deepcopy(full_state(model)))
        sender.send(weight_source(model, dtype=torch.float32))
        expected.append(copy.deepcopy(full_state(model)))
        sender.close()
        if receiver is None:
            return
        states = receiver.result(NEVER)
        assert sender.version == 4 and (len(states) == 4 or way == "folder")  # which may be read from its end
        for state, wanted in zip(reversed(states), reversed(expected)):
            assert [*state] == [*wanted]
            assert all(torch.equal(state[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("way", WAYS)
def test_what_is_not_wanted_is_passed_over(way, tmp_path):
    model, ways = net(), Way(way, str(tmp_path))
    names = [name for name, _ in model.named_parameters()]

    def look() -> list[tuple[int, list[str]]]:
        return [
            (update.version, [name for (name, _), _ in zip(update, range(update.version))])
            for update in ways.updates()
        ]

    with ThreadPoolExecutor() as pool:
        receiver = None if way == "folder" else pool.submit(look)
        sender = ways.sender()
        for _ in range(3):
            sender.send(weight_source(model))
        sender.send_changes(Changes())
        sender.close()
        found = look() if receiver is None else receiver.result(NEVER)
    assert found[-2:] == [(3, names[:3]), (4, [])]


# A receiver that is slow, or gone.

RECEIVER = """
import sys, time
from fsdp_wrap.weights import GlooChannel, SharedMemoryChannel, received
way, where = sys.argv[1:]
print("up", flush=True)
channel = (GlooChannel if way == "gloo" else SharedMemoryChannel)(where, receives=True)
update = next(received(channel))
next(iter(update))
print("begun", flush=True)
time.sleep(600)
"""


@contextmanager
def stuck(way: str, folder: Path, timeout: float) -> Iterator[tuple[WeightSender, subprocess.Popen[str]]]:
    """A channel to a process that takes the beginning of an update and nothing more."""
    where = f"localhost:{free_port()}" if way == "gloo" else str(folder / "socket")
    kind = GlooChannel if way == "gloo" else SharedMemoryChannel
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", RECEIVER, way, where]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "up\n"
            yield WeightSender(kind(where, receives=False, timeout=timeout, bucket=BUCKET)), process
        finally:
            process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["gloo", "memory"])
def test_training_goes_on_without_a_receiver_that_is_slow_or_died(way, tmp_path):
    source = weight_source(nn.Linear(100, 100))
    with stuck(way, tmp_path, 3.0) as (sender, _):
        with pytest.raises(PeerLost, match="receiver did not take what was sent within 3 s"):
            sender.send(source)
        with pytest.raises(PeerLost, match="the channel to the receiver is closed"):
            sender.send_changes(Changes())
        sender.close()
    with stuck(way, tmp_path, NEVER) as (sender, process), ThreadPoolExecutor() as pool:

        def kill() -> str:
            said: str = process.stdout.readline()
            process.send_signal(signal.SIGKILL)
            return said

        killed = pool.submit(kill)
        with pytest.raises(PeerLost, match="receiver has ended, or cannot be reached any more"):
            sender.send(source)
        assert killed.result() == "begun\n"


@pytest.mark.parametrize("way", ["gloo", "memory"])
def test_a_receiver_is_told_that_the_sender_ended(way, tmp_path):
    with ThreadPoolExecutor() as pool:
        ways = Way(way, str(tmp_path))
        receiver = pool.submit(follow, ways)
        channel = ways.channel(receives=False)
        WeightSender(channel).send(weight_source(nn.Linear(2, 2)))
        channel.close()
        with pytest.raises(PeerLost, match="sender has ended"):
            receiver.result(NEVER)


def test_nobody_comes(tmp_path):
    path = tmp_path / "socket"
    for receives, peer in ((False, "receiver"), (True, "sender")):
        with pytest.raises(PeerLost, match=f"the {peer} did not come within 0.2 s"):
            SharedMemoryChannel(path, receives=receives, timeout=0.2)
    with pytest.raises(PeerLost, match="sender"):
        GlooChannel(f"localhost:{free_port()}", receives=True, timeout=1.0)
    with pytest.raises(ValueError, match="address must be 'host:port'"):
        GlooChannel("nowhere", receives=True)
    with pytest.raises(RuntimeError, match="no version 1 has appeared"):
        next(stored(tmp_path, timeout=0.1))


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
    """Flips one bit of a file; once more makes it good."""
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
        found = changes.collect()
        if rank == 0:
            with pytest.raises(RuntimeError, match="send all weights"):
                folder.send_changes(found)
        folder.send(weight_source(model))
        with full_disk(), pytest.raises(RuntimeError, match="No space left") if not rank else nullcontext():
            step(model)
            folder.send_changes(changes.collect())
        folder.send(weight_source(model))
        assert folder.version == 3, "on every rank"
        folder.close()
        assert rank or [update.version for update in stored(place, after=1)] == [3]


@pytest.mark.parametrize("way", WAYS)
@ranks(2)
def test_what_the_first_rank_cannot_send_is_told_to_all(rank, world_size, way):
    """Neither what the way does not take, nor what ends it, leaves the other ranks standing."""
    model = nn.Linear(4, 2, dtype=torch.complex128)
    fully_shard(model)
    with tempfile.TemporaryDirectory() as place:
        if way == "folder":
            refused = "safetensors cannot hold weight, which is of torch.complex128"
            with pytest.raises(ValueError, match=refused):
                WeightFolder(place if rank == 0 else None).send(weight_source(model))
            sealed = os.path.join(place, "file")
            if rank == 0:
                Path(sealed).touch()
            with pytest.raises(RuntimeError, match="WeightFolder.send.. failed on the first rank: NotADir"):
                WeightFolder(sealed if rank == 0 else None).send(weight_source(fully_shard(nn.Linear(2, 2))))
            return
        with ThreadPoolExecutor() as pool:
            ways = Way(way, place)
            ended = pool.submit(lambda: ways.channel(receives=True).close()) if rank == 0 else None
            sender = WeightSender(ways.channel(receives=False) if rank == 0 else None)
            if ended is not None:
                ended.result(20)
            with pytest.raises(PeerLost, match="receiver has ended"):
                sender.send(weight_source(model))
    with pytest.raises(RuntimeError, match="the first rank sends, and has no channel"):
        WeightSender(None).send(weight_source(model))


def test_old_versions_go_when_a_whole_one_is_there(tmp_path):
    model, folder = nn.Linear(2, 2), WeightFolder(tmp_path, keep_last=2)
    reader = stored(tmp_path, timeout=5.0)
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


def listening() -> set[str]:
    """Returns the addresses, as the kernel writes them, on which this process listens."""
    own = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    lines = [line.split() for file in ("tcp", "tcp6") for line in open(f"/proc/self/net/{file}")]
    return {each[1].split(":")[0] for each in lines if each[3] == "0A" and f"socket:[{each[9]}]" in own}


def test_a_channel_listens_where_it_was_told_to():
    before, address = listening(), f"127.0.0.1:{free_port()}"
    with ThreadPoolExecutor() as pool:
        receiver = pool.submit(GlooChannel, address, receives=True, timeout=20.0)
        sender = GlooChannel(address, receives=False, timeout=20.0)
        receiver.result(20)
        assert listening() - before <= {"0100007F"}
        with pytest.raises(OSError, match="in use"):
            GlooChannel(address, receives=False, timeout=1.0)
        sender.close()


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
