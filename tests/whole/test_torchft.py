"""Replica groups by torchft itself: one is killed, the other goes on, and the killed one heals.

Slow, and needs the extra `elastic`; test_replica_groups.py has what needs neither.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from bed import ranks
from bed.paths import ROOT
from fronts import full_state
from fsdp_wrap.replica_groups import join_replica_groups
from replica_managers import Manager, sharded
from resuming import net, train
from state_nets import adamw, assert_close

sys.path.insert(0, str(ROOT))  # benchmarks are not installed

from benchmarks.group_kills import Group, lighthouse, told, wait_for

pytest.importorskip("torchft")
pytestmark = pytest.mark.slow

FLAGS = "--layers 1 --width 16 --context 16 --global-batch 8 --timeout 20"

each_api = pytest.mark.parametrize("front", ["orig", "composable"])


def started(number: int, folder: Path, *flags: str) -> Group:
    script = [str(ROOT / "examples" / "replicas.py"), "--group", str(number), *FLAGS.split(), *flags]
    cores = sorted(os.sched_getaffinity(0))
    return Group([sys.executable, *script], 2, folder / f"group{number}.log", cores)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    for number in range(40):
        (folder / f"{number}.txt").write_text(f"{number} little words that one can learn by heart, " * 20)
    return folder


@pytest.mark.parametrize("front", ["fully_shard", "wrapper"])
def test_a_group_that_was_killed_heals_while_the_other_goes_on(front, tmp_path, text, monkeypatch):
    flags = ("--front", front, "--steps", "100000", "--data", str(text))
    with lighthouse(join_ms=200, heartbeat_ms=1000) as address, contextlib.ExitStack() as stack:
        monkeypatch.setenv("TORCHFT_LIGHTHOUSE", address)
        living = started(0, tmp_path, *flags)
        stack.callback(living.stop)
        assert wait_for(living, 1, 1)  # the group that comes first begins at the first step
        dying = started(1, tmp_path, *flags)
        stack.callback(dying.stop)
        assert wait_for(dying, 0, least_groups=2)
        time.sleep(0.5)
        dying.stop()
        last = told(dying)[-1]["step"]
        assert wait_for(living, last + 20, 1)
        dying.log.unlink()
        dying.start()
        first = wait_for(dying, 0, least_groups=2)
        assert first and wait_for(dying, first["step"] + 10, 1)
    lived, healed = told(living), told(dying)
    steps = [line["step"] for line in lived]
    assert steps == list(range(1, steps[-1] + 1))  # none is lost, none is taken twice
    assert {line["groups"] for line in lived} == {1, 2}
    assert healed[0]["step"] > last + 20  # it did not begin anew
    sums = {line["step"]: line["checksum"] for line in lived}
    common = [line for line in healed if line["step"] in sums and line["groups"] == 2]
    assert len(common) >= 9
    assert all(line["checksum"] == sums[line["step"]] for line in common)


class Plain:
    """Two groups that train apart, and what they have on average after every second step."""

    def __init__(self) -> None:
        self.groups = [net() for _ in range(2)]
        self._optimizers = [adamw(each) for each in self.groups]

    def means(self) -> Iterator[dict[str, torch.Tensor]]:
        for start in (0, 2):
            for group, (model, optimizer) in enumerate(zip(self.groups, self._optimizers)):
                train(model, optimizer, group, 2, range(start, start + 2))
            states = [model.state_dict() for model in self.groups]
            yield {name: torch.stack([state[name] for state in states]).mean(0) for name in states[0]}

    def load(self, state: dict[str, torch.Tensor]) -> None:
        for model in self.groups:
            model.load_state_dict(state)


@each_api
@ranks(4)
def test_groups_that_trained_apart_meet_by_local_sgd_and_by_diloco(rank, world_size, front):
    """The first averages their shards, the second steps by what they have moved."""
    from torchft.local_sgd import DiLoCo, LocalSGD

    models = []
    for way in (LocalSGD, DiLoCo):
        manager = Manager()
        model = sharded(front, net(), rank)
        optimizer = adamw(model)
        outer = torch.optim.SGD(model.parameters(), 0.7, momentum=0.9, nesterov=True)
        join_replica_groups(manager, model, optimizer, average_gradients=False)
        given = [model, optimizer] if way is LocalSGD else [[model], optimizer, outer]
        with way(manager, *given, sync_every=2):
            train(model, optimizer, rank, world_size, range(4))
        models.append(model)

    plain = Plain()
    for mean in plain.means():
        plain.load(mean)
    assert_close(full_state(models[0]), mean)

    plain, whole = Plain(), net()
    outer = torch.optim.SGD(whole.parameters(), 0.7, momentum=0.9, nesterov=True)
    for mean in plain.means():
        for name, param in whole.named_parameters():
            param.grad = param.detach() - mean[name]
        outer.step()
        plain.load(whole.state_dict())
    assert_close(full_state(models[1]), whole.state_dict())
